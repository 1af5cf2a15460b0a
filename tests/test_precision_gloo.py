"""Mixed precision on processes: what virtual ranks compute, and one decision about a step that overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_on_ranks

import functional_booster as fb
from functional_booster.precision import precision_of

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes

PLUGINS = {
    "ddp": fb.TorchDDPPlugin(fp8_communication=True),
    "zero2": fb.LowLevelZeroPlugin(stage=2),
    "fsdp": fb.TorchFSDPPlugin(fp8_communication=True),
    "gemini": fb.GeminiPlugin(use_fp8=True),
}
SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}


def trained(booster: fb.Booster, share: tuple[int, int]) -> list[dict[str, float]]:
    """The metrics of each step, on one of so many shares of the batch."""
    model, tx = fb.models.gpt2(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), fb.optim.adamw(3e-3)
    tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
    state = booster.init(model, tx, key=fb.random.key(0))
    step, (index, shares), history = booster.train_step(model.loss, tx, max_norm=1.0, jit=False), share, []
    for _ in range(4):
        state, metrics = step(state, {"input_ids": tokens.chunk(shares)[index]})
        history.append({name: value.item() for name, value in metrics.items()})
    return history


def on_a_process(name: str, precision: str) -> Any:
    rank, ranks, own = dist.get_rank(), dist.get_world_size(), precision_of(precision)
    chosen = fb.MixedPrecision(own.policy, own.scaling and fb.DynamicScaling(2.0**8), own.fp8)
    real = trained(fb.Booster("cpu", chosen, PLUGINS[name]), (rank, ranks))
    virtual = trained(fb.Booster("cpu", chosen, PLUGINS[name], fb.virtual_mesh(ranks)), (0, 1))
    return real, virtual


@pytest.mark.parametrize(
    ("name", "precision"), [("ddp", "fp8"), ("zero2", "fp16"), ("fsdp", "fp8"), ("fsdp", "fp16"), ("gemini", "fp16")]
)
def test_processes_compute_what_virtual_ranks_do(name: str, precision: str) -> None:
    """To half precision's rounding, since products over a batch of ranks are added up in another order; AdamW makes
    more of it in what follows the first step."""
    (first, virtual), (second, _) = run_on_ranks(2, on_a_process, name, precision)
    assert first == second
    assert first[0] == pytest.approx(virtual[0], rel=3e-3)
    for got, expected in zip(first, virtual, strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert first[-1]["loss"] < first[0]["loss"]
    assert all(metrics["skipped"] == 0 for metrics in first)


def overflowing(name: str) -> list[Any]:
    """Infinities in the rows of the last rank, at some steps."""
    scaling = fb.DynamicScaling(2.0**8, growth_interval=1, hysteresis=1)
    booster = fb.Booster("cpu", fb.MixedPrecision(precision_of("fp16").policy, scaling), PLUGINS[name])
    model = fb.functionalize(torch.nn.Linear(3, 2))
    tx = fb.optim.adamw(1e-2)

    def loss(params: Any, batch: Any) -> Any:
        return fb.losses.mse(model.apply(params, batch["x"]), batch["y"])

    state, found = booster.init(model, tx, key=fb.random.key(0)), []
    step = booster.train_step(loss, tx, jit=False, donate=False)
    for finite in (True, False, False, True):
        x = torch.ones(2, 3)
        if not finite and dist.get_rank() == dist.get_world_size() - 1:
            x[0, 0] = float("inf")
        new, metrics = step(state, {"x": x, "y": torch.zeros(2, 2)})
        kept = fb.tree.leaves(fb.tree.map(torch.equal, (new.storage, new.opt_state), (state.storage, state.opt_state)))
        found.append((metrics["skipped"].item(), metrics["loss_scale"].item(), new.step.item(), all(kept)))
        state = new
    return found


@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp"])
def test_an_overflow_of_one_rank_is_one_of_all(name: str) -> None:
    expected = [(0.0, 256.0, 1, False), (1.0, 512.0, 1, True), (1.0, 256.0, 1, True), (0.0, 128.0, 2, False)]
    assert run_on_ranks(2, overflowing, name) == [expected] * 2


def imperative(name: str, precision: str) -> list[Any]:
    """(loss, norm, skipped, scale) of each step of a loop, with infinities in the rows of the last rank at some."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    own = precision_of(precision)
    scaling = own.scaling and fb.DynamicScaling(2.0**8, growth_interval=1, hysteresis=1)
    booster = fb.Booster("cpu", fb.MixedPrecision(own.policy, scaling, keep=("0.bias",)), PLUGINS[name])
    model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), 0.1))
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).chunk(dist.get_world_size())[dist.get_rank()]
    found = []
    for finite in (True, False, True):
        inputs = x.clone()
        if not finite and dist.get_rank() == dist.get_world_size() - 1:
            inputs[0] = float("inf")
        loss = torch.nn.functional.mse_loss(model(inputs), x.sum(1, keepdim=True))
        booster.backward(loss, optimizer)
        norm = optimizer.get_grad_norm().item()
        optimizer.step()
        optimizer.zero_grad()
        found.append((norm if finite else 0.0, int(optimizer.skipped), optimizer.loss_scale.item()))
    return found


@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp"])
def test_the_imperative_loop(name: str) -> None:
    """A scaled loop, and one in bfloat16, is that in float32 to rounding; an overflow of one rank is one of all."""
    plain = run_on_ranks(2, imperative, name, "fp32")[0]
    for precision, scales in {"fp16": [512.0, 256.0, 512.0], "bf16": [1.0] * 3}.items():
        first, second = run_on_ranks(2, imperative, name, precision)
        assert first == second
        assert [scale for *_, scale in first] == scales
        assert [skipped for _, skipped, _ in first] == [0, 1, 0]
        norms = [norm for norm, *_ in first]
        assert norms == pytest.approx([norm for norm, *_ in plain], rel=0.03)
