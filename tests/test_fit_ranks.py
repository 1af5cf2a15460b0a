"""fit over a mesh: positions, hooks and stops are those of all ranks together; what fails on one is an error on all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import RankError, run_on_ranks

import functional_booster as fb
from functional_booster.hooks import Checkpoint, StopTraining, every, stop, stop_on_nan
from functional_booster.rank_failure import RankFailure

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes

ROWS = 4  # of a global batch


def model() -> fb.Model:
    return fb.functionalize(torch.nn.Linear(3, 2, dtype=torch.float64))


def data(position: int) -> torch.Tensor:
    """The global batch."""
    return fb.random.normal(fb.random.fold_in(fb.random.key(0), position), (ROWS, 3)).double()


def mine(position: int) -> torch.Tensor:
    return data(position).chunk(dist.get_world_size())[dist.get_rank()]


def run(plugin: Any, mesh: Any, batches: Any, hooks: Any = (), steps: int = 6, params: Any = None) -> Any:
    pure, tx = model(), fb.optim.adamw(0.1)
    booster = fb.Booster(device="cpu", mixed_precision="fp32", plugin=plugin, mesh=mesh)
    if params is None:
        params = {"weight": torch.ones(2, 3, dtype=torch.float64), "bias": torch.zeros(2, dtype=torch.float64)}
    state = booster.init(pure, tx, key=fb.random.key(1), params=params)
    step = booster.train_step(lambda params, batch: (pure.apply(params, batch) ** 2).mean(), tx, jit=False)
    return fb.fit(step, state, batches, steps=steps, hooks=hooks)


def whole(state: Any) -> dict[str, torch.Tensor]:
    return fb.Booster(device="cpu").full_params(state)


def close(got: Any, expected: Any) -> None:
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), got, expected)


@pytest.mark.parametrize("plugin", [fb.TorchDDPPlugin(), fb.LowLevelZeroPlugin(), fb.TorchFSDPPlugin()])
def test_a_virtual_mesh_counts_one_position_and_stops_and_goes_on(plugin: Any, tmp_path: Path) -> None:
    saved: list[int] = []
    hooks = [
        every(3, stop),
        every(1, stop_on_nan),
        Checkpoint(lambda _, state: saved.append(int(state.position)), tmp_path, 2),
    ]
    half = run(plugin, fb.virtual_mesh(2), data, hooks)
    assert half.position.dim() == 0 and int(half.position) == 3
    assert saved == [2, 3]
    straight, alone = run(plugin, fb.virtual_mesh(2), data), run(None, None, data)
    close(whole(straight), whole(alone))
    assert int(straight.position) == int(alone.position) == 6


NAN = {"weight": torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, torch.nan]], dtype=torch.float64),
       "bias": torch.zeros(2, dtype=torch.float64)}  # fmt: skip
MESSAGE = "step 1: params.weight: 1 NaN and 0 infinite of 6 elements"


def check_nan(mesh: Any) -> str:
    """A step that is not finite changes nothing, so that the leaf stays what it was."""
    with pytest.raises(FloatingPointError) as caught:
        run(fb.TorchFSDPPlugin(), mesh, data if mesh else mine, [stop_on_nan], params=NAN)
    return str(caught.value)


def test_a_nan_in_the_part_of_one_rank_is_named_on_all() -> None:
    assert check_nan(fb.virtual_mesh(2)) == MESSAGE
    assert run_on_ranks(2, check_nan, None) == [MESSAGE] * 2


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def end() -> None:
    raise StopTraining


def stopped(act: Callable[[], None], folder: str) -> tuple[int, Any]:
    """Where rank 1 alone wants to stop, after step 2."""

    def hook(n: int, state: Any, metrics: Any) -> None:
        if dist.get_rank() == 1 and n == 2:
            act()

    booster = fb.Booster(device="cpu", mixed_precision="fp32", plugin=fb.TorchFSDPPlugin())
    state = run(fb.TorchFSDPPlugin(), None, mine, [hook, Checkpoint(booster.save, folder, 100)])
    return int(state.position), whole(state)


@pytest.mark.parametrize("act", [interrupt, end])
def test_what_stops_one_rank_stops_all_after_the_same_step(act: Callable[[], None], tmp_path: Path) -> None:
    ends = run_on_ranks(2, stopped, act, str(tmp_path / "state"))
    assert [position for position, _ in ends] == [2, 2]
    alone = run(None, None, data, [every(2, stop)])
    for _, params in ends:
        close(params, whole(alone))
    booster = fb.Booster(device="cpu")
    restored = booster.load(tmp_path / "state", like=alone)
    close(restored.params, alone.params)


def test_equal_numbers_of_batches_end_the_training_on_all() -> None:
    assert run_on_ranks(2, positions, [3, 3]) == [3, 3]


def positions(batches: list[int]) -> int:
    return int(run(fb.TorchDDPPlugin(), None, [mine(n) for n in range(batches[dist.get_rank()])]).position)


def failing(n: int) -> torch.Tensor:
    if dist.get_rank() == 1 and n == 2:
        raise ValueError("no such batch")
    return mine(n)


def closing(folder: str) -> None:
    def save(path: str, state: Any) -> None:
        raise AssertionError("the ranks have no common state to save")

    run(fb.TorchDDPPlugin(), None, failing, [Checkpoint(save, folder, 100)])


def test_an_error_of_one_rank_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such batch"):
        run_on_ranks(2, closing, str(tmp_path))


def test_a_rank_that_runs_out_of_batches_is_an_error_that_names_it() -> None:
    with pytest.raises((RankFailure, RankError)) as caught:
        run_on_ranks(2, positions, [3, 2])
    message = "the ranks part ways: rank 1 is in end of training at step 2, but rank 0 is in train step 3"
    assert message in str(caught.value)
    assert "unequal numbers of batches" in str(caught.value)
