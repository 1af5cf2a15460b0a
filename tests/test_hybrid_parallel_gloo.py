"""HybridParallelPlugin on processes: its steps are those of one device, traced or not, and so are its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_on_ranks
from test_hybrid_parallel import TX, batch, hybrid, model, on_one_device, weights

import functional_booster as fb
from functional_booster import testing
from functional_booster.kernels import tree
from functional_booster.plugins.dataloaders import share

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp_size": 2}),
    "tp2, split_gather": (2, {"tp_size": 2, "mode": "split_gather"}),
    "dp2 x tp2, zero 1": (4, {"tp_size": 2, "zero_stage": 1}),
    "tp2 x dp2, zero 3": (4, {"tp_size": 2, "zero_stage": 3, "dp_outside": False}),
    "sp2 x tp2": (4, {"tp_size": 2, "sp_size": 2, "mode": "all_to_all", "zero_stage": 2}),
}


def booster_of(options: dict[str, Any]) -> fb.Booster:
    return fb.Booster("cpu", "fp32", plugin=hybrid(**options))


def trained(kind: str, options: dict[str, Any], jit: bool, path: Path) -> Any:
    """What two steps of this process make, and what is read again after a checkpoint."""
    booster = booster_of(options)
    which, readers = share(booster.mesh, booster.plan.plugin.data_axes)
    rows = tree.map(lambda leaf: leaf.chunk(readers)[which], batch())
    state = booster.init(model(kind), TX, key=fb.random.key(0), params=weights(kind))
    with testing.traced():
        step = booster.train_step(model(kind).loss, TX, max_norm=0.3, jit=jit)
        for _ in range(2):
            state, metrics = step(state, rows)
    booster.save(path, state)
    again = booster.load(path, like=booster.abstract(model(kind), TX))
    assert all(map(torch.equal, tree.leaves(again.storage), tree.leaves(state.storage)))
    return tree.named_leaves(booster.full_params(state)), metrics, dist.get_rank()


@pytest.mark.parametrize("name", LAYOUTS)
def test_processes_are_one_device(name: str, tmp_path: Path) -> None:
    ranks, options = LAYOUTS[name]
    kind = "llama" if name.startswith("tp2") else "gpt2" if name.startswith("dp2") else "gpt2-even"
    answers = run_on_ranks(ranks, trained, kind, options, ranks == 2, tmp_path / "saved")
    apart = ranks // (options.get("tp_size", 1) * options.get("sp_size", 1))
    alone, expected = on_one_device(kind, True, apart)
    for params, metrics, _ in answers:
        for key, value in metrics.items():
            torch.testing.assert_close(value, expected[f"{key} 1"], rtol=1e-9, atol=1e-11, msg=key)
        for key, leaf in tree.named_leaves(alone.params).items():
            torch.testing.assert_close(params[key], leaf, rtol=1e-8, atol=1e-10, msg=key)
    one = fb.Booster("cpu")
    loaded = one.load(tmp_path / "saved", like=one.abstract(model(kind), TX))
    for key, leaf in tree.named_leaves(loaded.params).items():
        torch.testing.assert_close(answers[0][0][key], leaf, rtol=0, atol=0)
