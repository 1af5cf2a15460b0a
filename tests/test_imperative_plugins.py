"""Under every plugin, on a virtual mesh, the imperative loop takes the steps of plain PyTorch on the global batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import functional_booster as fb
from functional_booster import plugins

EXACT = {"rtol": 1e-10, "atol": 1e-12}
ROWS = 16
PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": plugins.TorchDDPPlugin,
    "zero1": plugins.LowLevelZeroPlugin,
    "zero2": lambda: plugins.LowLevelZeroPlugin(stage=2, extra_dp_size=2),
    "zero1-offload": lambda: plugins.LowLevelZeroPlugin(cpu_offload=True),
    "fsdp": plugins.TorchFSDPPlugin,
    "fsdp-ignored": lambda: plugins.TorchFSDPPlugin(ignored_modules=["first"]),
    "gemini": plugins.GeminiPlugin,
    "gemini-half": lambda: plugins.GeminiPlugin(shard_param_frac=0.5),
}


class Net(nn.Module):
    """Batch statistics, a tied, a frozen, an unused, a sometimes used weight, odd sizes, one number, some indices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, bias=False)
        self.norm = nn.BatchNorm1d(5, momentum=0.3)
        self.middle = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.middle.weight
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.order = nn.Parameter(torch.tensor([4, 2, 0, 1, 3]), requires_grad=False)

    def forward(self, x: torch.Tensor, more: bool = False) -> torch.Tensor:
        x = self.norm(self.first(x))[:, self.order]
        if more:
            x = x + self.sometimes(x)
        return self.scale * self.tied(torch.tanh(self.middle(self.frozen(x)))).sum(-1)


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(-1).cos()


def adamw(module: Net) -> torch.optim.Optimizer:
    """Two groups; ``scale`` is in none."""
    rest = [p for n, p in module.named_parameters() if not n.startswith(("first", "norm", "scale"))]
    own = {"params": [*module.first.parameters(), *module.norm.parameters()], "lr": 0.02, "weight_decay": 0.3}
    return torch.optim.AdamW([own, {"params": rest}], lr=0.05, weight_decay=0.1)


def sgd(module: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, dampening=0.2, nesterov=False, weight_decay=0.1)


class Twins:
    """The same training twice: in plain PyTorch, and boosted."""

    def __init__(
        self, plugin: Any, mesh: Any, optimizer: Callable[[Any], torch.optim.Optimizer], make: Callable[[], Any] = make
    ) -> None:
        self.plain, module = make(), make()
        self.plain_optimizer, made = optimizer(self.plain), optimizer(module)
        self.plain_schedule, schedule = (
            torch.optim.lr_scheduler.CosineAnnealingLR(each, 6) for each in (self.plain_optimizer, made)
        )
        self.booster = fb.Booster(device="cpu", mixed_precision="fp32", plugin=plugin, mesh=mesh)
        self.model, self.optimizer, _, _, self.schedule = self.booster.boost(module, made, lr_scheduler=schedule)

    def backward(self, x: torch.Tensor, y: torch.Tensor, more: bool = False) -> None:
        losses = [F.mse_loss(model(x, more), y) for model in (self.plain, self.model)]
        torch.testing.assert_close(losses[1], losses[0], **EXACT)
        losses[0].backward()
        self.booster.backward(losses[1], self.optimizer)

    def members(self) -> list[nn.Parameter]:
        return [p for group in self.plain_optimizer.param_groups for p in group["params"]]

    def clip(self, limit: float) -> None:
        norm = nn.utils.clip_grad_norm_(self.members(), limit)
        torch.testing.assert_close(self.optimizer.get_grad_norm(), norm, **EXACT)
        torch.testing.assert_close(self.optimizer.clip_grad_by_norm(limit), norm, **EXACT)

    def step(self) -> None:
        for optimizer in (self.plain_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in (self.plain_schedule, self.schedule):
            schedule.step()

    def assert_same(self) -> None:
        assert self.schedule.get_last_lr() == self.plain_schedule.get_last_lr()
        ours = self.model.state_dict()
        assert list(ours) == list(self.plain.state_dict())
        for name, value in self.plain.state_dict().items():
            torch.testing.assert_close(ours[name], value, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("plugin", "ranks"), [*((plugin, 4) for plugin in PLUGINS), ("zero1", 8)])
def test_steps_on_a_virtual_mesh_are_those_of_plain_pytorch(plugin: str, ranks: int) -> None:
    """Groups, a schedule, clipping, accumulation with and without no_sync, batch statistics over all ranks."""
    twins = Twins(PLUGINS[plugin](), fb.virtual_mesh(ranks), adamw if ranks < 8 else sgd)
    for step in range(4):
        if step % 2:
            with twins.booster.no_sync(twins.model, twins.optimizer):
                twins.backward(*batch(100 + step))
        if step == 2:
            twins.backward(*batch(200 + step))
        twins.backward(*batch(step), more=step == 2)
        if step != 1:
            twins.clip(0.3)
        twins.step()
    twins.assert_same()


OF_WHOLE_LEAVES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lamb": lambda module: fb.optimizers.Lamb(module.parameters(), lr=0.02, weight_decay=0.1),
    "fused-lamb": lambda module: fb.optimizers.FusedLAMB(module.parameters(), lr=0.02),
    "lars": lambda module: fb.optimizers.Lars(module.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1, eeta=0.1),
    "came": lambda module: fb.optimizers.CAME(module.parameters(), lr=0.02, weight_decay=0.1),
    "adafactor": lambda module: fb.optimizers.Adafactor(module.parameters(), lr=0.02, relative_step=False),
}  # not Muon, which works in bfloat16: its rounding is that of the products of one matrix, or of several


@pytest.mark.parametrize("plugin", ["zero1", "fsdp", "gemini"])
@pytest.mark.parametrize("optimizer", OF_WHOLE_LEAVES)
def test_optimizers_that_look_at_whole_leaves_see_them_whatever_the_layout(optimizer: str, plugin: str) -> None:
    twins = Twins(PLUGINS[plugin](), fb.virtual_mesh(4), OF_WHOLE_LEAVES[optimizer])
    for step in range(3):
        twins.backward(*batch(step), more=step == 1)
        twins.clip(0.3)
        twins.step()
    twins.assert_same()


@pytest.mark.parametrize("plugin", ["ddp", "gemini"])
def test_one_process_is_a_mesh_too(plugin: str) -> None:
    twins = Twins(PLUGINS[plugin](), None, adamw)
    for step in range(3):
        twins.backward(*batch(step), more=step == 1)
        twins.clip(0.3)
        twins.step()
    twins.assert_same()


@pytest.mark.parametrize("mesh", [None, fb.virtual_mesh(2)])
def test_max_norm_of_a_plugin(mesh: Any) -> None:
    """It clips where the loop does not."""
    twins = Twins(plugins.LowLevelZeroPlugin(max_norm=0.2), mesh, sgd)
    for step in range(3):
        twins.backward(*batch(step))
        nn.utils.clip_grad_norm_(twins.members(), 0.2 if step else 0.1)
        if step == 0:
            twins.optimizer.clip_grad_by_norm(0.1)
        twins.step()
    twins.assert_same()


class WithCopies(plugins.TorchDDPPlugin):
    """Half of the ranks are along an axis that does not split the batch."""

    def axes(self, ranks: int) -> dict[str, int]:
        return {"dp": ranks // 2, "copy": 2}


def test_ranks_with_the_same_rows_count_them_once() -> None:
    """The correction of the running variance tells how many rows there were."""
    twins = Twins(WithCopies(), fb.virtual_mesh(4), adamw)
    for step in range(3):
        twins.backward(*batch(step))
        twins.step()
    twins.assert_same()


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "copies"])
def test_batch_statistics_of_the_functional_step(plugin: str) -> None:
    """Those of the whole batch: of images, with weights and without, in a moving and a cumulative average."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 3, 2),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.BatchNorm1d(4, affine=False, momentum=None),
    ).double()
    model, tx, x = fb.functionalize(module.train()), fb.optim.sgd(0.1), torch.randn(8, 2, 3, 3, dtype=torch.float64)

    def loss_fn(params: Any, batch: Any, buffers: Any) -> Any:
        out, buffers = model.apply(params, batch["x"], train=True, buffers=buffers, mutable=True)
        weights = torch.arange(4, dtype=torch.float64)
        return (out * weights).pow(3).sum(), len(out), {"buffers": buffers}

    results = []
    make = {**PLUGINS, "copies": WithCopies}[plugin]
    for booster in (fb.Booster("cpu"), fb.Booster("cpu", "fp32", plugin=make(), mesh=fb.virtual_mesh(4))):
        state = booster.init(model, tx, key=fb.random.key(0))
        for _ in range(3):
            state, metrics = booster.train_step(loss_fn, tx, jit=False)(state, {"x": x})
        results.append((booster.full_params(state), state.buffers, metrics["loss"]))
    for one, two in zip(*map(fb.tree.leaves, results), strict=True):
        torch.testing.assert_close(one, two, **EXACT)


SPLITTING = ("ddp", "zero1", "fsdp", "gemini-half")  # one for each way to hold and to gather


@pytest.mark.parametrize("plugin", SPLITTING)
def test_freezing_and_thawing_on_the_way(plugin: str) -> None:
    twins = Twins(PLUGINS[plugin](), fb.virtual_mesh(2), adamw)
    for step in range(6):
        for model in (twins.plain, twins.model):
            named = dict(model.named_parameters())
            named["frozen.weight"].requires_grad_(step >= 2)
            named["norm.bias"].requires_grad_(step % 4 != 0)
        twins.backward(*batch(step))
        twins.step()
    twins.assert_same()
    names = twins.optimizer.state_dict()["state"]
    assert any(name.startswith("frozen.weight") for name in names)
    assert not any(name.startswith("frozen.bias") for name in names)


@pytest.mark.parametrize("plugin", SPLITTING)
def test_what_was_not_synchronized_is_when_it_is_needed(plugin: str) -> None:
    """A bare ``loss.backward()`` before a clipping, a step, a forgetting; gradients that stay, as zeros."""
    twins = Twins(PLUGINS[plugin](), fb.virtual_mesh(2), adamw)

    def bare(step: int) -> None:
        for model in (twins.plain, twins.model):
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()

    bare(0)
    twins.clip(0.3)
    bare(1)
    twins.step()
    bare(2)
    bare(3)
    twins.step()
    bare(4)
    for forgetful in (twins.plain, twins.model):
        forgetful.zero_grad()
    assert twins.optimizer.get_grad_norm() == 0
    twins.step()
    bare(5)
    for forgetful in (twins.plain_optimizer, twins.optimizer):
        forgetful.zero_grad(set_to_none=False)
    twins.step()  # zeros are gradients: moments and weights decay
    twins.backward(*batch(6))
    twins.step()
    twins.assert_same()


@pytest.mark.parametrize("plugin", SPLITTING)
def test_backward_with_respect_to_some(plugin: str) -> None:
    twins = Twins(PLUGINS[plugin](), fb.virtual_mesh(2), adamw)
    x, y = batch(0)
    F.mse_loss(twins.plain(x), y).backward(inputs=[twins.plain.first.weight])
    loss = F.mse_loss(twins.model(x), y)
    twins.optimizer.backward(loss, inputs=dict(twins.model.named_parameters())["first.weight"])
    assert [name for name, parameter in twins.model.named_parameters() if parameter.grad is not None] == [
        "first.weight"
    ]
    twins.clip(0.1)
    twins.step()
    twins.assert_same()


@pytest.mark.parametrize("plugin", SPLITTING)
def test_weights_written_by_hand(plugin: str) -> None:
    """Between a backward and the step: the gradients stay; a backward of before the last step is an error."""
    twins = Twins(PLUGINS[plugin](), fb.virtual_mesh(2), adamw)
    late = twins.model(batch(9)[0]).sum()
    twins.backward(*batch(0))
    with torch.no_grad():
        for model in (twins.plain, twins.model):
            dict(model.named_parameters())["middle.weight"].mul_(0.5)
    twins.plain(batch(9)[0])
    twins.backward(*batch(1))
    twins.step()
    with pytest.raises(RuntimeError, match=r"before the last step|modified by an inplace operation"):
        late.backward()
    twins.backward(*batch(2))
    twins.step()
    assert torch.equal(
        *(dict(each.named_parameters())["scale"].detach() for each in (twins.plain, twins.model.unwrap()))
    )


@pytest.mark.parametrize(("plugin", "ranks"), [("ddp", 2), ("zero1", 2), ("fsdp", 8), ("gemini-half", 2)])
def test_runs_go_on_under_another_plugin(plugin: str, ranks: int) -> None:
    """State dicts are whole, in the module's own names; so are the moments of a torch optimizer that has begun."""
    twins = Twins(PLUGINS[plugin](), fb.virtual_mesh(ranks), adamw)
    for step in range(2):
        twins.backward(*batch(step), more=step == 1)
        twins.step()
    module = copy.deepcopy(twins.plain)
    begun = adamw(module)
    begun.load_state_dict(twins.plain_optimizer.state_dict())
    alone = fb.Booster(device="cpu")
    other = make(1)
    loops = [
        (twins.booster, *twins.booster.boost(module, begun)[:2]),  # from the torch optimizer's moments
        (alone, *alone.boost(other, adamw(other))[:2]),
    ]
    _, model, optimizer = loops[1]
    model.load_state_dict(twins.model.state_dict())
    optimizer.load_state_dict(twins.optimizer.state_dict())
    saved = model.state_dict(), optimizer.state_dict()
    back = Twins(PLUGINS[plugin](), fb.virtual_mesh(ranks), adamw)
    back.model.load_state_dict(saved[0])
    back.optimizer.load_state_dict(saved[1])
    loops.append((back.booster, back.model, back.optimizer))
    twins.backward(*batch(2))
    for each in (twins.plain_optimizer, twins.optimizer):
        each.step()
    for booster, model, optimizer in loops:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, now in zip(optimizer.param_groups, twins.optimizer.param_groups, strict=True):
            group["lr"] = now["lr"]
        assert len(rates) == 2
        x, y = batch(2)
        booster.backward(F.mse_loss(model(x), y), optimizer)
        optimizer.step()
        twins.model = model
        twins.assert_same()


def test_state_dicts_that_do_not_fit() -> None:
    twins = Twins(plugins.TorchFSDPPlugin(), fb.virtual_mesh(8), adamw)
    twins.backward(*batch(0))
    twins.step()
    state, weights = twins.optimizer.state_dict(), twins.model.state_dict()
    names = [name for name in state["state"] if name.endswith("mu")]
    wrong = {**state["state"], names[0]: torch.zeros(64), "x.0.mu": torch.zeros(1)}
    del wrong[names[1]]
    with pytest.raises(ValueError, match="does not fit") as caught:
        twins.optimizer.load_state_dict({**state, "state": wrong})
    for part in (f"{names[0]}: shape (64,), expected", f"{names[1]}: missing", "x.0.mu: unexpected"):
        assert part in str(caught.value)
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        twins.model.load_state_dict({**weights, "first.weight": torch.zeros(2)})
    twins.assert_same()


def test_the_module_gets_the_whole_weights() -> None:
    twins = Twins(plugins.TorchFSDPPlugin(), fb.virtual_mesh(8), adamw)
    parts = dict(twins.model.named_parameters())
    assert parts["scale"].shape == (1, 8, 64)  # padded to a cache line
    assert parts["order"].shape == (5,)
    twins.backward(*batch(0))
    twins.step()
    module = twins.model.unwrap()
    assert module.tied.weight is module.middle.weight
    for name, value in twins.plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, **EXACT)


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_a_hugging_face_model_trains_by_its_own_loss(plugin: str) -> None:
    """Its output keeps its type; the loss is the mean over ranks, logits are those of the batch."""

    def gpt2() -> Any:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=23, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        config._attn_implementation = "eager"
        return transformers.GPT2LMHeadModel(config).double().train()

    twins = Twins(PLUGINS[plugin](), fb.virtual_mesh(2), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), gpt2)
    tokens = torch.randint(0, 23, (4, 8), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(8)[None]}
    for _ in range(2):
        outputs = [model(**inputs) for model in (twins.plain, twins.model)]
        assert type(outputs[1]).__name__ == "CausalLMOutputWithCrossAttentions"
        torch.testing.assert_close(outputs[1].loss, outputs[0].loss, rtol=1e-6, atol=0)  # it sums in float32
        torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-7, atol=1e-9)
        outputs[0].loss.backward()
        twins.booster.backward(outputs[1].loss, twins.optimizer)
        twins.step()
    for name, value in twins.plain.state_dict().items():
        torch.testing.assert_close(twins.model.state_dict()[name], value, rtol=1e-7, atol=1e-9)


def test_dropout_is_that_of_the_functional_step() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    mesh, x = fb.virtual_mesh(4), torch.randn(8, 4, dtype=torch.float64)
    booster = fb.Booster(device="cpu", mixed_precision="fp32", plugin=plugins.LowLevelZeroPlugin(), mesh=mesh)
    boosted, *_ = booster.boost(module, key=fb.random.key(3))
    model = fb.functionalize(module)

    def loss_fn(params: Any, batch: Any, key: Any) -> torch.Tensor:
        return model.apply(params, batch["x"], key=key, train=True).square().mean()

    state = booster.init(model, fb.optim.sgd(0.1), key=fb.random.key(3))
    for _ in range(2):
        _, metrics = booster.train_step(loss_fn, fb.optim.sgd(0.1), jit=False, donate=False)(state, {"x": x})
        state = state.replace(position=state.position + 1)
        torch.testing.assert_close(boosted(x).square().mean(), metrics["loss"], **EXACT)
    rows = torch.ones(8, 4, dtype=torch.float64)
    assert len({tuple(row) for row in boosted(rows).tolist()}) > 4  # no two ranks drop the same


def test_bf16_computes_low_from_float32_masters() -> None:
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).bfloat16()
    made = torch.optim.AdamW(module.parameters(), lr=1e-3)
    booster = fb.Booster(
        device="cpu", mixed_precision="bf16", plugin=plugins.TorchFSDPPlugin(), mesh=fb.virtual_mesh(2)
    )
    model, optimizer, *_ = booster.boost(module, made)
    first = model.state_dict()
    for _ in range(3):
        output = model(torch.randn(16, 3))
        assert output.dtype == torch.float32
        booster.backward(output.square().mean(), optimizer)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert model.state_dict()["0.weight"].dtype == torch.float32
    assert not torch.equal(model.state_dict()["0.weight"], first["0.weight"])
    assert model.unwrap()[0].weight.dtype == torch.bfloat16


def test_outputs_of_ranks_are_joined() -> None:
    class Various(nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> dict[str, Any]:
            return {"rows": (x * scale, [x.sum(-1)]), "mean": x.mean(), "rows seen": torch.tensor(len(x)), name: None}

    booster = fb.Booster(
        device="cpu", mixed_precision="fp32", plugin=plugins.TorchFSDPPlugin(), mesh=fb.virtual_mesh(dp=2, fsdp=2)
    )
    model, *_ = booster.boost(Various())
    x = torch.randn(8, 3)
    outputs = model(x, torch.tensor(2.0), name="name")
    assert torch.equal(outputs["rows"][0], 2 * x)
    assert torch.equal(outputs["rows"][1][0], x.sum(-1))
    torch.testing.assert_close(outputs["mean"], x.mean())
    assert outputs["rows seen"] == 8
    assert outputs["name"] is None
    with pytest.raises(ValueError, match="7 rows cannot be split over 4 data-parallel ranks"):
        model(torch.randn(7, 3), torch.tensor(2.0), "name")
    with pytest.raises(ValueError, match=r"the arguments have \[4, 8\] rows"):
        model(x, torch.ones(4, 3), "name")


def test_no_sync_asks_for_a_handle() -> None:
    booster = fb.Booster(device="cpu")
    for given in ((), (nn.Linear(1, 1),)):
        with pytest.raises(TypeError, match="boost returned"), booster.no_sync(*given):
            pass
