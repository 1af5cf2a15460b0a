"""Every plugin on processes: its steps are those of one device, jitted or not; checkpoints go between any of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_on_ranks

import functional_booster as fb
from functional_booster import checkpoint, testing
from functional_booster.plugins import GeminiPlugin
from functional_booster.rank_failure import RankFailure

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes

STEPS = 2
PLUGINS: dict[str, Callable[[int], Any]] = {  # of a number of ranks
    "ddp": lambda ranks: fb.TorchDDPPlugin(bucket_cap_mb=0.0002),
    "zero1": lambda ranks: fb.LowLevelZeroPlugin(stage=1),
    "zero2": lambda ranks: fb.LowLevelZeroPlugin(stage=2, extra_dp_size=ranks // 2),
    "fsdp": lambda ranks: fb.TorchFSDPPlugin(),
    "gemini": lambda ranks: GeminiPlugin(),
}


def booster_of(name: str) -> fb.Booster:
    if name == "none":
        return fb.Booster(device="cpu")
    return fb.Booster(device="cpu", mixed_precision="fp32", plugin=PLUGINS[name](dist.get_world_size()))


def mine(batch: Any) -> Any:
    """This process's rows of the global batch."""
    return fb.tree.map(lambda leaf: leaf.chunk(dist.get_world_size())[dist.get_rank()], batch)


def train(booster: fb.Booster, problem: testing.Problem, batch: Any, accumulate: int, *, jit: bool = False) -> Any:
    """(state, the metrics of each step)."""
    state = booster.init(problem.model, problem.tx, key=problem.key)
    step = booster.train_step(problem.loss_fn, problem.tx, accumulate=accumulate, max_norm=problem.max_norm, jit=jit)
    history = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        history.append(metrics)
    return state, history


def close(got: Any, expected: Any) -> None:
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), got, expected)


def same(got: Any, expected: Any) -> None:
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), got, expected)


def trained(name: str, accumulate: int, jit: bool) -> Any:
    problem = testing.small(8)
    with testing.traced():
        state, metrics = train(booster_of(name), problem, mine(problem.batch), accumulate, jit=jit)
    return checkpoint.named_tensors(state), metrics


@functools.cache
def trained_alone(accumulate: int) -> Any:
    problem = testing.small(8)
    state, metrics = train(booster_of("none"), problem, problem.batch, accumulate)
    assert all(float(each["grad_norm"]) > (problem.max_norm or 0) for each in metrics)  # clipping bites
    return checkpoint.named_tensors(state), metrics


@pytest.mark.parametrize(
    ("name", "ranks", "accumulate", "jit"),
    [*((name, 2, 2, True) for name in PLUGINS), ("zero2", 4, 1, False), ("gemini", 4, 1, False)],
)
def test_steps_equal_one_device(name: str, ranks: int, accumulate: int, jit: bool) -> None:
    """State and metrics of every rank, with dropout, clipping, AdamW, and unequal numbers of labels on the ranks."""
    for found in run_on_ranks(ranks, trained, name, accumulate, jit):
        close(found, trained_alone(ranks * accumulate))


def laws_hold(name: str) -> None:
    testing.virtual_equals_real(PLUGINS[name](dist.get_world_size()), None, testing.small(8), accumulate=2)


def test_virtual_ranks_equal_processes() -> None:
    run_on_ranks(2, laws_hold, "fsdp")


UNEVEN = ((1, 1), (3, 2))  # rows, microbatches: a rank has no rows, or none in one of its microbatches


def laws_hold_for_uneven_batches(name: str) -> None:
    for rows, accumulate in UNEVEN:
        plugin = PLUGINS[name](dist.get_world_size())
        testing.virtual_equals_real(plugin, None, testing.small(rows, seed=1), accumulate=accumulate)


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in PLUGINS), ("zero2", 4)])
def test_uneven_batches_equal_those_of_virtual_ranks(name: str, ranks: int) -> None:
    """Jitted and eager, with dropout: a rank without rows takes part, and counts nothing."""
    run_on_ranks(ranks, laws_hold_for_uneven_batches, name)


class ReadsItsRankElsewhere(fb.TorchDDPPlugin):
    def sync(self, grads: Any, policy: Any) -> Any:
        return super().sync(fb.tree.map(lambda buffer: buffer * (1 + dist.get_rank()), grads), policy)


def law_is_broken() -> str:
    try:
        testing.virtual_equals_real(ReadsItsRankElsewhere(), None, testing.small(8))
    except AssertionError as error:
        return str(error)
    return ""


def test_a_plugin_that_reads_its_rank_elsewhere_is_found() -> None:
    for message in run_on_ranks(2, law_is_broken):
        assert "'virtual == real' does not hold for ReadsItsRankElsewhere" in message
        assert "grad_norm" in message


def save(name: str, folder: str) -> dict[str, torch.Tensor]:
    booster, problem = booster_of(name), testing.small(8)
    state, _ = train(booster, problem, mine(problem.batch), 1)
    booster.save(f"{folder}/state", state)
    assert Path(f"{folder}/state/{checkpoint.MANIFEST}").is_file()  # on every rank: all return once it is written
    same(booster.load(f"{folder}/state", like=state).storage.buffers, state.storage.buffers)
    return checkpoint.named_tensors(state)


def load(names: Sequence[str], folder: str) -> list[dict[str, torch.Tensor]]:
    problem, boosters = testing.small(8), [booster_of(name) for name in names]
    states = [each.load(f"{folder}/state", like=each.abstract(problem.model, problem.tx)) for each in boosters]
    return [checkpoint.named_tensors(state) for state in states]


@pytest.mark.parametrize(
    ("writer", "before", "readers", "after"),
    [("fsdp", 4, ("zero1", "ddp"), 2), ("gemini", 2, ("zero2", "fsdp"), 4), ("ddp", 2, ("gemini",), 2)],
)
def test_saved_by_some_ranks_and_loaded_by_others(
    writer: str, before: int, readers: tuple[str, ...], after: int, tmp_path: Path
) -> None:
    saved, *others = run_on_ranks(before, save, writer, str(tmp_path))
    alone, problem = fb.Booster(device="cpu"), testing.small(8)
    loaded = alone.load(tmp_path / "state", like=alone.abstract(problem.model, problem.tx))
    for found in itertools.chain(others, *run_on_ranks(after, load, readers, str(tmp_path))):
        same(found, saved)
    same(checkpoint.named_tensors(loaded), saved)


def save_where_nobody_can(folder: str) -> tuple[str, str, bool]:
    booster, problem = booster_of("fsdp"), testing.small(8)
    state, _ = train(booster, problem, mine(problem.batch), 1)
    try:
        booster.save(folder, state)
    except (OSError, RankFailure) as error:
        state, _ = train(booster, problem, mine(problem.batch), 1)  # the ranks are still in step
        return type(error).__name__, str(error), int(state.step) == STEPS
    return "", "", False


def test_a_save_that_fails_raises_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    first, second = run_on_ranks(2, save_where_nobody_can, str(tmp_path))
    assert first[0] == "FileExistsError" and second[0] == "RankFailure"
    assert "rank 0 failed in save at step 2" in second[1]
    for _, message, went_on in (first, second):
        assert "holds other files (notes.txt)" in message
        assert went_on


def load_what_one_cannot_find(folder: str) -> str:
    booster, problem = booster_of("ddp"), testing.small(8)
    path = f"{folder}/state" if dist.get_rank() == 0 else f"{folder}/elsewhere"
    state, _ = train(booster, problem, mine(problem.batch), 1)
    booster.save(f"{folder}/state", state)
    try:
        booster.load(path, like=booster.abstract(problem.model, problem.tx))
    except (FileNotFoundError, RankFailure) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_load_that_fails_on_one_rank_raises_on_every_rank(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, load_what_one_cannot_find, str(tmp_path))
    assert first.startswith("RankFailure: rank 1 failed in load")
    assert second.startswith("FileNotFoundError") and "is no checkpoint" in first


def compiled_equals_eager() -> None:
    plugin = fb.TorchFSDPPlugin()
    testing.virtual_equals_real(plugin, None, testing.small(4, tx=fb.optim.sgd(0.1)), compiled=True)


@pytest.mark.compiler
def test_compiled_on_processes() -> None:
    run_on_ranks(2, compiled_equals_eager, timeout=280)


def initialized_apart() -> Any:
    """The parameters, the buffers and the key of a state, from a module and a key that differ by rank."""
    torch.manual_seed(dist.get_rank())
    norm = torch.nn.BatchNorm1d(5)
    norm.running_mean = torch.full((5,), dist.get_rank() + 1.0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), norm)
    booster, model = booster_of("fsdp"), fb.functionalize(module)
    state = booster.init(model, fb.optim.sgd(0.1), key=fb.random.key(dist.get_rank()))
    return model.init(), booster.full_params(state), state.buffers, state.key


def test_processes_start_from_what_the_first_has() -> None:
    (own, *first), (_, *second) = run_on_ranks(2, initialized_apart)
    same(first[0], own)
    same(second, first)
    assert first[1]["1.running_mean"].tolist() == [1.0] * 5
