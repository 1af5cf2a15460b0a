"""The imperative loop takes the steps that the same loop in plain PyTorch takes."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import functional_booster as fb
from functional_booster.imperative import BoostedModel, BoostedOptimizer, BoostedScheduler

EXACT = {"rtol": 1e-11, "atol": 1e-12}
torch_schedulers = torch.optim.lr_scheduler


class Net(nn.Module):
    """Batch statistics, a tied, a frozen, an unused, a sometimes used weight, and a group for each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4, momentum=0.3)
        self.middle = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.middle.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, more: bool = False) -> torch.Tensor:
        x = self.norm(self.first(x))
        if more:
            x = x + self.sometimes(x)
        return self.scale * self.tied(torch.tanh(self.middle(self.frozen(x)))).sum(-1)


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def groups(module: Net) -> list[dict[str, Any]]:
    """Two param groups of different options; ``scale`` is in none."""
    rest = [p for n, p in module.named_parameters() if not n.startswith(("first", "norm", "scale"))]
    return [
        {"params": [*module.first.parameters(), *module.norm.parameters()], "lr": 0.02, "weight_decay": 0.3},
        {"params": rest},
    ]


def batch(step: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(-1).cos()


class Loop(NamedTuple):
    """A training loop's handles: plain ones, or boosted ones."""

    model: Any
    optimizer: Any
    scheduler: Any
    backward: Callable[[torch.Tensor], None]
    clip_norm: Callable[[float], torch.Tensor]
    clip_value: Callable[[float], None]
    module: Callable[[], nn.Module]  # the module with the present weights


MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


def plain(module: Any, optimizer: MakeOptimizer, scheduler: MakeScheduler | None = None) -> Loop:
    made = optimizer(module)
    members = [parameter for group in made.param_groups for parameter in group["params"]]
    return Loop(
        module,
        made,
        scheduler(made) if scheduler else None,
        torch.Tensor.backward,
        lambda limit: nn.utils.clip_grad_norm_(members, limit),
        lambda limit: nn.utils.clip_grad_value_(members, limit) if any(p.grad is not None for p in members) else None,
        lambda: module,
    )


def boosted(module: Any, optimizer: MakeOptimizer, scheduler: MakeScheduler | None = None) -> Loop:
    made = optimizer(module)
    booster = fb.Booster(device="cpu")
    model, handle, _, _, schedule = booster.boost(module, made, lr_scheduler=scheduler(made) if scheduler else None)
    return Loop(
        model,
        handle,
        schedule,
        lambda loss: booster.backward(loss, handle),
        handle.clip_grad_by_norm,
        handle.clip_grad_by_value,
        model.unwrap,
    )


def pair(
    optimizer: MakeOptimizer, scheduler: MakeScheduler | None = None, make: Callable[[], Any] = make
) -> list[Loop]:
    return [plain(make(), optimizer, scheduler), boosted(make(), optimizer, scheduler)]


def train(loop: Loop, step: int, *, more: bool = False, clip: float | None = None, backwards: int = 1) -> torch.Tensor:
    """One ordinary step; returns the last loss."""
    loss = torch.tensor(0.0)
    for part in range(backwards):
        x, y = batch(100 * part + step)
        loss = F.mse_loss(loop.model(x, more), y)
        loop.backward(loss)
    if clip is not None:
        loop.clip_norm(clip)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    if loop.scheduler is not None:
        loop.scheduler.step()
    return loss.detach()


def assert_same(loops: list[Loop]) -> None:
    """Weights, buffers, and learning rates."""
    first, second = (loop.module().state_dict() for loop in loops)
    assert list(first) == list(second)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
    rates = [[float(group["lr"]) for group in loop.optimizer.param_groups] for loop in loops if loop.optimizer]
    assert rates[0] == rates[-1]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(groups(m), lr=0.05),
    "sgd-momentum": lambda m: torch.optim.SGD(groups(m), lr=0.05, momentum=0.9, dampening=0.4, weight_decay=0.1),
    "sgd-nesterov": lambda m: torch.optim.SGD(groups(m), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(groups(m), lr=0.05, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=0.05, weight_decay=0.2),
    "adamw-amsgrad": lambda m: torch.optim.AdamW(groups(m), lr=0.05, amsgrad=True, maximize=True),
}
SCHEDULERS: dict[str, MakeScheduler | None] = {
    "none": None,
    "step": lambda o: torch_schedulers.StepLR(o, 3, gamma=0.5),
    "one-cycle": lambda o: torch_schedulers.OneCycleLR(o, 0.05, total_steps=12, cycle_momentum="betas" in o.defaults),
    "cosine": lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=8),
    "sequential": lambda o: torch_schedulers.SequentialLR(
        o, [torch_schedulers.LinearLR(o, 0.1, total_iters=4), torch_schedulers.ExponentialLR(o, 0.9)], [4]
    ),
    "fb-cosine-warmup": lambda o: fb.lr_scheduler.CosineAnnealingWarmupLR(o, 10, warmup_steps=3),
    "fb-one-cycle": lambda o: (
        fb.lr_scheduler.OneCycleLR(o, 12) if "betas" in o.defaults else fb.lr_scheduler.LinearWarmupLR(o, 12, 3)
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_steps_are_those_of_plain_pytorch(optimizer: str, schedule: str) -> None:
    """Param groups, batch statistics, tied, frozen and unused weights, one used in some steps, clipping, a schedule."""
    loops = pair(OPTIMIZERS[optimizer], SCHEDULERS[schedule])
    for step in range(10):
        losses = [train(loop, step, more=step % 3 == 1, clip=0.5 if step % 2 else None) for loop in loops]
        torch.testing.assert_close(losses[1], losses[0], **EXACT)
        assert_same(loops)


actions = st.sampled_from(
    ["forward", "backward", "backward more", "step", "zero", "zero to 0", "clip norm", "clip value", "eval", "train"]
)


@settings(deadline=None, max_examples=40)
@given(optimizer=st.sampled_from(sorted(OPTIMIZERS)), program=st.lists(actions, max_size=25))
def test_any_order_of_calls_is_that_of_plain_pytorch(optimizer: str, program: list[str]) -> None:
    """Steps before any backward, accumulation, forwards whose loss is not used, evaluation in between."""
    loops = pair(OPTIMIZERS[optimizer])
    for number, action in enumerate([*program, "backward", "step"]):
        results = [act(loop, action, number) for loop in loops]
        if results[0] is not None:
            torch.testing.assert_close(results[1], results[0], **EXACT)
    assert_same(loops)


def act(loop: Loop, action: str, number: int) -> torch.Tensor | None:
    x, y = batch(number)
    if action == "forward":
        return loop.model(x).detach()
    if action.startswith("backward"):
        loop.backward(F.mse_loss(loop.model(x, action == "backward more"), y))
    elif action == "step":
        loop.optimizer.step()
    elif action.startswith("zero"):
        loop.optimizer.zero_grad(set_to_none=action == "zero")
    elif action == "clip norm":
        return loop.clip_norm(0.3).to(torch.float64)
    elif action == "clip value":
        loop.clip_value(0.05)
    else:
        loop.model.train(action == "train")
    return None


def test_a_step_before_any_backward_does_nothing() -> None:
    loop = boosted(make(), OPTIMIZERS["adamw"], SCHEDULERS["step"])
    before = loop.model.state_dict(), loop.optimizer.state_dict()
    loop.optimizer.step()
    assert not loop.optimizer.skipped
    assert equal(before, (loop.model.state_dict(), loop.optimizer.state_dict()))
    loop.scheduler.step()


def equal(one: Any, other: Any) -> bool:
    leaves = fb.tree.leaves(one), fb.tree.leaves(other)
    return fb.tree.structure(one) == fb.tree.structure(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*leaves, strict=True)
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_taken_before_boost_count(optimizer: str) -> None:
    """Moments and counts go over, parameter by parameter: some were reached in every step, some in one, some never."""
    twins = [plain(make(), OPTIMIZERS[optimizer]) for _ in range(2)]
    for loop in twins:
        train(loop, 0)
        train(loop, 1, more=True)
        train(loop, 2)
    module, made = twins[1].model, twins[1].optimizer
    loops = [twins[0], boosted(module, lambda _: made)]
    for step in range(3, 9):
        for loop in loops:
            train(loop, step, more=step > 4)
        assert_same(loops)


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adamw"])
def test_freezing_and_thawing_on_the_way(optimizer: str) -> None:
    loops = pair(OPTIMIZERS[optimizer])
    for step in range(9):
        for loop in loops:
            named = dict(loop.model.named_parameters())
            named["frozen.weight"].requires_grad_(step >= 3)
            named["norm.bias"].requires_grad_(step % 4 != 0)
            train(loop, step)
        assert_same(loops)
    names = set(loops[1].optimizer.state_dict()["state"])
    assert any(name.startswith("frozen.weight") for name in names)
    assert not any(name.startswith("frozen.bias") for name in names)


def test_frozen_batch_statistics_stay_frozen() -> None:
    """Whether the mode is set before boost, or in every epoch on the boosted model, or on the module itself."""

    def freeze(model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()

    def frozen() -> Net:
        module = make().train()
        freeze(module)
        return module

    for loops in (pair(OPTIMIZERS["adamw"], make=frozen), pair(OPTIMIZERS["adamw"])):
        for step in range(4):
            for loop in loops:
                if step >= 2:
                    loop.model.train()
                    freeze(loop.model if step == 2 else loop.module())
                train(loop, step)
            assert_same(loops)
    module = frozen()
    before = module.state_dict()["norm.running_mean"].clone()
    loop = boosted(module, OPTIMIZERS["sgd"])
    train(loop, 0)
    assert torch.equal(dict(loop.model.named_buffers())["norm.running_mean"], before)


def test_modes_are_the_modules() -> None:
    model, *_ = fb.Booster(device="cpu").boost(make().eval())
    assert not model.training
    x, _ = batch(0)
    first = model(x)
    assert torch.equal(model(x), first)
    model.train()
    assert model.training
    assert model.module.norm.training
    assert not torch.equal(model(x), first)
    model.eval()
    assert not torch.equal(model(x), first)  # the statistics have moved on


def test_dropout_follows_the_key_and_the_mode() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    x = torch.ones(64, 8)
    one, again, other = (
        fb.Booster(device="cpu").boost(module.train(), key=fb.random.key(seed))[0] for seed in (0, 0, 1)
    )
    first = one(x)
    assert torch.equal(first, again(x))
    assert not torch.equal(first, other(x))
    assert not torch.equal(first, one(x))  # each forward draws anew
    assert torch.equal(one.eval()(x), x)
    one.module[0].train()  # Monte Carlo dropout: the rest in evaluation
    assert not torch.equal(one(x), x)


def test_what_boost_returns() -> None:
    booster, module, loader = fb.Booster(device="cpu"), make(), [1, 2]
    assert booster.boost(module)[1:] == (None, None, None, None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch_schedulers.StepLR(optimizer, 1)
    model, handle, criterion, dataloader, scheduler = booster.boost(module, optimizer, F.mse_loss, loader, schedule)
    assert isinstance(model, BoostedModel)
    assert isinstance(handle, BoostedOptimizer)
    assert isinstance(scheduler, BoostedScheduler)
    assert criterion is F.mse_loss
    assert dataloader is loader
    assert model.unwrap() is module
    assert handle.unwrap() is optimizer
    assert scheduler.get_last_lr() == [0.1]
    assert copy.copy(scheduler).get_last_lr() == [0.1]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert [name for name, _ in model.named_buffers("b")] == [f"b.{name}" for name, _ in module.named_buffers()]
    assert all(
        ours is not own and ours.requires_grad == own.requires_grad and torch.equal(ours, own)
        for ours, own in zip(model.parameters(), module.parameters(), strict=True)
    )


def test_without_an_optimizer_gradients_are_autograds() -> None:
    model, *_ = fb.Booster(device="cpu").boost(make())
    module = make()
    x, y = batch(0)
    for each in (model, module):
        F.mse_loss(each(x), y).backward()
    for (name, ours), own in zip(model.named_parameters(), module.parameters(), strict=True):
        assert (ours.grad is None) == (own.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, own.grad, **EXACT)
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_the_module_is_lent_until_unwrap() -> None:
    module, twin = make(), plain(make(), OPTIMIZERS["adamw"])
    before = copy.deepcopy(module.state_dict())
    loop = boosted(module, OPTIMIZERS["adamw"])
    for step in range(3):
        train(loop, step)
        train(twin, step)
    assert equal(dict(module.state_dict()), dict(before))
    assert loop.model.unwrap() is module
    for name, value in twin.model.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, **EXACT)
    assert module.tied.weight is module.middle.weight


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_is_never_stopped(optimizer: str) -> None:
    """A fresh run that loads the three state dicts goes on bitwise; what they hold does not change on the way."""
    scheduler = SCHEDULERS["one-cycle"]
    straight = boosted(make(), OPTIMIZERS[optimizer], scheduler)
    for step in range(4):
        train(straight, step, more=step == 1)
    saved = [handle.state_dict() for handle in (straight.model, straight.optimizer, straight.scheduler)]
    kept = copy.deepcopy(saved)
    for step in range(4, 8):
        train(straight, step, more=step == 5)
    resumed = boosted(make(), OPTIMIZERS[optimizer], scheduler)
    train(resumed, 77)  # what was there before the load is gone
    for handle, state in zip((resumed.model, resumed.optimizer, resumed.scheduler), saved, strict=True):
        handle.load_state_dict(state)
    for step in range(4, 8):
        train(resumed, step, more=step == 5)
    assert equal(saved[:2], kept[:2])
    assert equal(dict(straight.model.state_dict()), dict(resumed.model.state_dict()))
    assert equal(straight.optimizer.state_dict(), resumed.optimizer.state_dict())


def test_one_state_serves_two_runs() -> None:
    """Loading copies: a run that goes on does not change the state that it was loaded from, nor the other run."""
    first = boosted(make(), OPTIMIZERS["adamw"])
    train(first, 0)
    model, optimizer = first.model.state_dict(), first.optimizer.state_dict()
    runs = [boosted(make(), OPTIMIZERS["adamw"]) for _ in range(2)]
    for run in runs:
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)
        train(run, 1)
    assert equal(runs[0].optimizer.state_dict(), runs[1].optimizer.state_dict())
    assert equal(optimizer, first.optimizer.state_dict())


def test_state_dicts_that_do_not_fit() -> None:
    loop = boosted(make(), OPTIMIZERS["adamw"])
    state, weights = loop.optimizer.state_dict(), loop.model.state_dict()
    names = list(state["state"])
    wrong = {name: value for name, value in state["state"].items() if name != names[0]}
    wrong[names[1]], wrong["x.0.mu"] = torch.zeros(7, 7), torch.zeros(1)
    with pytest.raises(ValueError, match="does not fit") as caught:
        loop.optimizer.load_state_dict({"state": wrong, "param_groups": state["param_groups"][:1]})
    for part in (
        f"{names[0]}: missing",
        f"{names[1]}: shape (7, 7)",
        "x.0.mu: unexpected",
        "param_groups: 1, expected 2",
    ):
        assert part in str(caught.value)
    other = copy.deepcopy(state)
    other["param_groups"][1]["maximize"] = True
    with pytest.raises(ValueError, match="expected those it was converted with"):
        loop.optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match="expected what state_dict"):
        loop.optimizer.load_state_dict({"exp_avg": 1})
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*first\.weight.*Unexpected key.*wrong"):
        loop.model.load_state_dict(
            {"wrong": torch.zeros(1)} | {k: v for k, v in weights.items() if k != "first.weight"}
        )
    assert equal((state, dict(weights)), (loop.optimizer.state_dict(), dict(loop.model.state_dict())))
    train(loop, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_with_gradients_that_are_not_finite_is_skipped(bad: float) -> None:
    loops = pair(OPTIMIZERS["adamw"], SCHEDULERS["step"])
    for step in range(8):
        if step in (0, 2, 5):
            before = loops[1].model.state_dict(), loops[1].optimizer.state_dict()
            rates = loops[1].scheduler.get_last_lr()
            dict(loops[1].model.named_parameters())["first.weight"].grad = torch.full((4, 3), bad, dtype=torch.float64)
            loops[1].optimizer.step()
            loops[1].scheduler.step()
            loops[1].optimizer.zero_grad()
            assert loops[1].optimizer.skipped
            assert equal(before, (loops[1].model.state_dict(), loops[1].optimizer.state_dict()))
            assert loops[1].scheduler.get_last_lr() == rates
        for loop in loops:
            train(loop, step)
        assert not loops[1].optimizer.skipped
        assert_same(loops)


def grads_of(loop: Loop) -> list[torch.Tensor]:
    """Of the optimizer's parameters: ``scale`` is none."""
    return [p.grad for n, p in loop.model.named_parameters() if p.grad is not None and n != "scale"]


def test_norms_and_clipping() -> None:
    loops = pair(OPTIMIZERS["sgd"])
    x, y = batch(0)
    for loop in loops:
        loop.backward(F.mse_loss(loop.model(x), y))
    optimizer = loops[1].optimizer
    norm = nn.utils.get_total_norm(grads_of(loops[0]))
    torch.testing.assert_close(optimizer.get_grad_norm(), norm, **EXACT)
    torch.testing.assert_close(optimizer.clip_grad_by_norm(0.01), norm, **EXACT)
    torch.testing.assert_close(optimizer.get_grad_norm(), norm, **EXACT)  # that of before the clipping
    clipped = nn.utils.get_total_norm(grads_of(loops[1]))
    torch.testing.assert_close(clipped, torch.tensor(0.01, dtype=torch.float64), rtol=1e-3, atol=0)
    optimizer.zero_grad()
    assert optimizer.get_grad_norm() == 0
    loops[1].backward(loops[1].model(x).sum() * math.inf)
    with pytest.raises(RuntimeError, match="the gradients' norm is nan"):
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)
    for call, message in (
        (lambda: optimizer.clip_grad_by_norm(0.0), "max_norm: 0.0, expected a positive"),
        (lambda: optimizer.clip_grad_by_norm(1.0, 1.0), "norm_type: 1.0, expected 2.0"),
        (lambda: optimizer.get_grad_norm(math.inf), "norm_type: inf, expected 2.0"),
        (lambda: optimizer.clip_grad_by_value(-1.0), "clip_value: -1.0, expected a positive"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_closure() -> None:
    loops = pair(OPTIMIZERS["sgd-momentum"])

    def closure(loop: Loop, step: int) -> torch.Tensor:
        loop.optimizer.zero_grad()
        x, y = batch(step)
        loss = F.mse_loss(loop.model(x), y)
        loop.backward(loss)
        return loss

    for step in range(3):
        with torch.no_grad():  # torch turns gradients on for the closure
            losses = [loop.optimizer.step(functools.partial(closure, loop, step)) for loop in loops]
        torch.testing.assert_close(losses[1], losses[0], **EXACT)
        assert_same(loops)
    assert loops[1].optimizer.step() is None


def test_no_sync_is_accumulation() -> None:
    booster = fb.Booster(device="cpu")
    loops = pair(OPTIMIZERS["adamw"])
    for step in range(3):
        with booster.no_sync(loops[1].model, loops[1].optimizer):
            for part in range(2):
                x, y = batch(10 * step + part)
                for loop in loops:
                    loop.backward(F.mse_loss(loop.model(x), y))
        for loop in loops:
            train(loop, step)
        assert_same(loops)


def test_several_forwards_in_one_loss() -> None:
    loops = pair(OPTIMIZERS["adam"])
    for step in range(4):
        for loop in loops:
            (x, y), (z, _) = batch(step), batch(50 + step)
            with torch.no_grad():
                loop.model(z)  # moves the batch statistics
            loop.backward(F.mse_loss(loop.model(x) + loop.model(z, more=True), y))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.model.eval()
            with torch.inference_mode():
                loop.model(z)
            loop.model.train()
        assert_same(loops)


def test_a_schedule_that_watches_the_loss() -> None:
    loops = pair(OPTIMIZERS["sgd"], lambda o: torch_schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5))
    for step in range(5):
        for loop in loops:
            train(loop._replace(scheduler=None), step)
            loop.scheduler.step(1.0)
        assert_same(loops)
    assert loops[1].optimizer.param_groups[1]["lr"] < 0.05


def test_bf16_computes_low_from_float32_masters() -> None:
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    seen: list[torch.dtype] = []
    module[2].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    made = torch.optim.AdamW(module.parameters(), lr=1e-3)
    booster = fb.Booster(device="cpu", mixed_precision="bf16")
    model, optimizer, *_ = booster.boost(module.bfloat16(), made)
    x = torch.randn(16, 3)
    first = model.state_dict()
    for _ in range(3):
        output = model(x)
        assert output.dtype == torch.float32
        booster.backward(output.square().mean(), optimizer)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [torch.bfloat16] * 3
    assert model.state_dict()["0.weight"].dtype == torch.float32
    assert not torch.equal(model.state_dict()["0.weight"], first["0.weight"])
    assert model.unwrap()[0].weight.dtype == torch.bfloat16
    saved = model.state_dict()
    again, *_ = booster.boost(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).bfloat16())
    again.load_state_dict(saved)  # masters, not rounded on the way through the module
    assert equal(dict(again.state_dict()), dict(saved))
    assert not torch.equal(saved["0.weight"], saved["0.weight"].bfloat16().float())


def test_a_hugging_face_model_trains_by_its_own_loss() -> None:
    def gpt2() -> Any:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=23, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        config._attn_implementation = "eager"
        return transformers.GPT2LMHeadModel(config).double().train()

    tokens = torch.randint(0, 23, (3, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[0, 5:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    loops = pair(
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), lambda o: torch_schedulers.StepLR(o, 2, 0.5), gpt2
    )
    losses = []
    for _ in range(5):
        for loop in loops:
            loss = loop.model(**inputs).loss
            losses.append(loss.item())
            loop.backward(loss)
            loop.clip_norm(1.0)
            loop.optimizer.step()
            loop.scheduler.step()
            loop.optimizer.zero_grad()
    assert losses[::2] == pytest.approx(losses[1::2], rel=1e-9)
    assert losses[-1] < losses[0] - 0.1
    first, second = (loop.module().state_dict() for loop in loops)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-7, atol=1e-9)
    assert loops[1].model.unwrap().lm_head.weight is loops[1].model.unwrap().transformer.wte.weight


def test_what_boost_refuses() -> None:
    booster, module = fb.Booster(device="cpu"), make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch_schedulers.StepLR(torch.optim.SGD(make().parameters(), lr=0.1), 1)
    model, handle, *_ = booster.boost(module, optimizer)
    bad: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: booster.boost("model"), TypeError, "model: str, expected an nn.Module"),  # type: ignore[arg-type]
        (lambda: booster.boost(Net), TypeError, "model: type, expected an nn.Module"),  # type: ignore[arg-type]
        (lambda: booster.boost(model), ValueError, "boosted already"),
        (lambda: booster.boost(module, handle), TypeError, "optimizer: BoostedOptimizer, expected a torch.optim"),
        (lambda: booster.boost(module, fb.optim.sgd(0.1)), TypeError, "optimizer: GradientTransformation, expected"),  # type: ignore[arg-type]
        (
            lambda: booster.boost(module, torch.optim.LBFGS(module.parameters())),
            TypeError,
            "LBFGS, expected one of",
        ),
        (
            lambda: booster.boost(make(), optimizer),
            ValueError,
            r"\['params'\]\[0\], of shape \(\), is no parameter of the model",
        ),
        (lambda: booster.boost(module, optimizer, lr_scheduler=schedule), ValueError, "lr_scheduler: it belongs to"),
        (lambda: booster.boost(module, lr_scheduler=schedule), ValueError, "lr_scheduler: .* no optimizer was given"),
        (
            lambda: booster.boost(module, optimizer, lr_scheduler=0.1),
            TypeError,
            "lr_scheduler: float, expected a torch",
        ),
        (lambda: booster.backward(torch.ones(2), handle), TypeError, r"loss: shape \(2,\), expected a 0-d tensor"),
        (lambda: booster.backward(1.0, handle), TypeError, "loss: float, expected a 0-d tensor"),  # type: ignore[arg-type]
        (lambda: booster.backward(torch.ones(()), optimizer), TypeError, "optimizer: SGD, expected the one that boost"),  # type: ignore[arg-type]
        (lambda: model.half(), RuntimeError, r"scale: torch.float64 on cpu cannot become torch.float16"),
        (lambda: model.to("meta"), RuntimeError, "cannot become torch.float64 on meta"),
    ]
    for call, error, message in bad:
        with pytest.raises(error, match=message):
            call()
    assert model.to("cpu") is model
