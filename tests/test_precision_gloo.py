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
    "zero2": fb.LowLevelZeroPlugin(stage=2, initial_scale=2.0**8, hysteresis=1),
    "fsdp": fb.TorchFSDPPlugin(fp8_communication=True),
    "gemini": fb.GeminiPlugin(initial_scale=2.0**8, hysteresis=1, use_fp8=True),
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
    rank, ranks = dist.get_rank(), dist.get_world_size()
    real = trained(fb.Booster("cpu", precision, PLUGINS[name]), (rank, ranks))
    virtual = trained(fb.Booster("cpu", precision, PLUGINS[name], fb.virtual_mesh(ranks)), (0, 1))
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
