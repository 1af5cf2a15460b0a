"""Loads that race with saves into the same path: never an error, always one of the checkpoints, whole."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_on_ranks

import functional_booster as fb
from functional_booster import checkpoint
from functional_booster.checkpoint import manifest

MODEL = fb.functionalize(torch.nn.Linear(64, 64))
TX = fb.optim.adamw(0.1)


def state_of(value: int, booster: fb.Booster | None = None) -> fb.TrainState:
    """A state whose every element is ``value``."""
    state = (booster or fb.Booster("cpu")).init(MODEL, TX, key=fb.random.key(0))
    return fb.tree.map(lambda leaf: torch.full_like(leaf, value), state)


def values(tensors: Any) -> set[float]:
    return {float(value) for leaf in fb.tree.leaves(tensors) for value in leaf.unique()}


def keep_saving(path: str, stop: Any, started: Any) -> None:
    torch.set_num_threads(1)
    value = 0
    while not stop.is_set():
        value += 1
        checkpoint.save(path, state_of(value))
        started.set()


@pytest.mark.parametrize(
    "read",
    [
        lambda path: checkpoint.named_tensors(checkpoint.load(path, state_of(0), "cpu")),
        lambda path: checkpoint.read_tensors(path),
    ],
    ids=["load", "read_tensors"],
)
def test_a_process_loads_while_another_keeps_saving(read: Callable[[str], Any], tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    stop, started = context.Event(), context.Event()
    writer = context.Process(target=keep_saving, args=(str(tmp_path / "it"), stop, started))
    writer.start()
    try:
        assert started.wait(60)
        seen = [values(read(str(tmp_path / "it"))) for _ in range(60)]
    finally:
        stop.set()
        writer.join(60)
    assert writer.exitcode == 0
    assert all(len(each) == 1 for each in seen)
    order = [value for each in seen for value in each]
    assert order == sorted(order) and order[0] < order[-1]


@pytest.mark.parametrize("url", ["", "memory://"])
def test_what_is_replaced_between_manifest_and_data_is_read_anew(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, saves = f"{url}{tmp_path}/it", manifest.read, 0
    checkpoint.save(path, state_of(1))

    def then_replaced(place: Any) -> Any:
        nonlocal saves
        content = real(place)
        if threading.current_thread() is threading.main_thread() and saves < 3:
            saves += 1
            with monkeypatch.context() as patch:
                patch.setattr(manifest, "read", real)
                checkpoint.save(path, state_of(1 + saves))
        return content

    like = state_of(0)
    monkeypatch.setattr(manifest, "read", then_replaced)
    assert values(checkpoint.load(path, like, "cpu")) == {4.0}
    assert saves == 3


def load_while_one_saves(folder: str) -> tuple[set[float], int]:
    """The first rank replaces the checkpoint once the second one has read the manifest of the old one."""
    booster = fb.Booster("cpu", "fp32", fb.TorchFSDPPlugin())
    like, real, reads = state_of(0, booster), manifest.read, 0
    alone = fb.Booster("cpu")

    def read(place: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads > 1:
            return real(place)
        if dist.get_rank() == 1:
            content = real(place)
            dist.barrier()
            dist.barrier()
            return content
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manifest, "read", real)
            checkpoint.save(folder, state_of(2, alone))
        dist.barrier()
        return real(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "read", read)
        state = checkpoint.load(folder, like, "cpu")
    return values(checkpoint.named_tensors(state)), reads


@pytest.mark.xdist_group("ranks")
def test_processes_load_the_same_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "it", state_of(1))
    assert run_on_ranks(2, load_while_one_saves, str(tmp_path / "it")) == [({2.0}, 2), ({2.0}, 2)]


def test_the_latest_is_found_while_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files go between the reading of its manifest and the look at them."""
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step-{step}", state_of(step))
    real, saves = manifest.read, 0

    def then_replaced(place: Any) -> Any:
        nonlocal saves
        content = real(place)
        if str(place).endswith("step-2") and saves < 3:
            saves += 1
            with monkeypatch.context() as patch:
                patch.setattr(manifest, "read", real)
                checkpoint.save(str(place), state_of(2))
        return content

    monkeypatch.setattr(manifest, "read", then_replaced)
    assert checkpoint.latest(tmp_path) == f"{tmp_path}/step-2"
    assert saves == 3
    (tmp_path / "step-2" / next(file for file in os.listdir(tmp_path / "step-2") if file != "manifest.json")).unlink()
    assert checkpoint.latest(tmp_path) == f"{tmp_path}/step-1"
