"""Saves in the background: the state is free at once, no error is lost, none is given up; numbered checkpoints."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from processes import RankError, run_on_ranks

import functional_booster as fb
from functional_booster import checkpoint, hooks, testing
from functional_booster.checkpoint import Retention, background, data_files, saving
from functional_booster.donation import DonatedError
from functional_booster.rank_failure import RankFailure

PROBLEM = testing.small(8)
BOOSTER = fb.Booster(device="cpu")


def batch(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) if leaf.is_floating_point() else leaf
            for name, leaf in PROBLEM.batch.items()}  # fmt: skip


def stepper(booster: fb.Booster = BOOSTER) -> Callable[[Any, Any], Any]:
    return booster.train_step(PROBLEM.loss_fn, PROBLEM.tx, jit=False)


def fresh(booster: fb.Booster = BOOSTER, seed: int = 0) -> fb.TrainState:
    return booster.init(PROBLEM.model, PROBLEM.tx, key=fb.random.key(seed))


def copied(state: fb.TrainState) -> dict[str, torch.Tensor]:
    return {name: leaf.clone() for name, leaf in checkpoint.named_tensors(state).items()}


def equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Generator[threading.Event]:
    """Nothing is written before it is set."""
    opened, write = threading.Event(), saving.data_files.write

    def waiting(*args: Any) -> Any:
        assert opened.wait(30)
        return write(*args)

    monkeypatch.setattr(saving.data_files, "write", waiting)
    yield opened
    opened.set()
    background.settle()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for the next save."""

    def fails(*args: Any) -> Any:
        monkeypatch.undo()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.data_files, "write", fails)


def test_the_state_may_be_donated_at_once(gate: threading.Event, tmp_path: Path) -> None:
    """Its memory is written over, as by the step that takes it, before anything is on the disk."""
    step, state = stepper(), fresh()
    state, _ = step(state, batch())
    before = copied(state)
    one = checkpoint.save_async(tmp_path / "one", state)
    for leaf in fb.tree.leaves(state):
        leaf.fill_(7)
    old, (state, _) = state, step(state, batch(1))
    assert not one.done() and not (tmp_path / "one" / checkpoint.MANIFEST).exists()
    with pytest.raises(TimeoutError, match=r"one is still being written after 0.01 s"):
        one.result(0.01)
    gate.set()
    one.result()
    assert one.done()
    assert equal(checkpoint.read_tensors(tmp_path / "one"), before)
    with pytest.raises(DonatedError):
        checkpoint.save_async(tmp_path / "one", old)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own elsewhere")
def test_the_writing_gives_way_to_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    def noting(chunk: Any) -> int:
        seen.add(nice())
        return crc32(chunk)

    before, seen, crc32 = nice(), set[int](), data_files.crc32
    monkeypatch.setattr(data_files, "crc32", noting)
    checkpoint.save(tmp_path / "now", fresh())
    assert seen == {before}
    seen.clear()
    checkpoint.save_async(tmp_path / "later", fresh()).result()
    assert seen == {max(before, 10)} and nice() == before


def test_one_save_at_a_time_in_the_same_memory(gate: threading.Event, tmp_path: Path) -> None:
    states, written = [fresh(seed=seed) for seed in range(3)], []
    expected = [copied(state) for state in states]
    write = saving.data_files.write

    def noting(place: Any, name: str, taken: Any) -> Any:
        written.append({piece.values.data_ptr() for piece in taken.pieces})
        return write(place, name, taken)

    saving.data_files.write = noting  # the gate's patch is undone, and this with it
    checkpoint.save_async(tmp_path / "0", states[0])
    second = threading.Thread(target=checkpoint.save_async, args=(tmp_path / "1", states[1]))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.set()
    second.join()
    checkpoint.save(tmp_path / "2", states[2])
    assert (tmp_path / "1" / checkpoint.MANIFEST).exists()  # a save waits for the one before
    assert all(equal(checkpoint.read_tensors(tmp_path / str(n)), expected[n]) for n in range(3))
    assert written[0] == written[1] and not written[0] & written[2]


def again(path: Path, state: fb.TrainState) -> None:
    checkpoint.save_async(path, state).result()


@pytest.mark.parametrize(
    "call",
    [
        lambda path, state: checkpoint.save(path, state),
        lambda path, state: checkpoint.save_async(path, state),
        lambda path, state: checkpoint.load(path, state, "cpu"),
    ],
    ids=["save", "save_async", "load"],
)
def test_an_error_that_nobody_heard_is_raised_by_the_next_call(
    call: Callable[..., Any], full: None, tmp_path: Path
) -> None:
    state = fresh()
    checkpoint.save_async(tmp_path / "lost", state)
    with pytest.raises(OSError, match=r"lost could not be written .*No space left on device"):
        call(tmp_path / "other", state)
    again(tmp_path / "other", state)  # once is enough
    call(tmp_path / "other", state)
    background.settle()  # no other test's patches are met


def test_an_error_that_result_has_raised_is_heard(full: None, tmp_path: Path) -> None:
    state = fresh()
    old = copied(state)
    failed = checkpoint.save_async(tmp_path / "it", state)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left on device"):
            failed.result()
    assert failed.done() and not (tmp_path / "it").exists()
    checkpoint.save(tmp_path / "it", state)
    assert equal(checkpoint.read_tensors(tmp_path / "it"), old)


EXIT = """
import sys, threading
import functional_booster as fb
from functional_booster import checkpoint, testing
from functional_booster.checkpoint import saving

problem = testing.small(8)
state = fb.Booster(device="cpu").init(problem.model, problem.tx, key=fb.random.key(0))
write = saving.data_files.write

def late(*args):
    threading.main_thread().join()  # which is when the interpreter begins to exit
    if sys.argv[2] == "full":
        raise OSError(28, "No space left on device")
    return write(*args)

saving.data_files.write = late
checkpoint.save_async(sys.argv[1], state)
print("main is over")
"""


def test_exit_waits_and_tells_errors(tmp_path: Path) -> None:
    command, threads = [sys.executable, "-c", EXIT], os.environ | {"OMP_NUM_THREADS": "1"}
    well, full = (
        subprocess.Popen(
            [*command, str(tmp_path / disk), disk],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=threads,
        )
        for disk in ("well", "full")
    )
    assert well.communicate(timeout=60) == ("main is over\n", "") and well.returncode == 0
    assert equal(checkpoint.read_tensors(tmp_path / "well"), copied(fresh()))
    said, errors = full.communicate(timeout=60)
    assert said == "main is over\n" and full.returncode == 1
    assert re.search(r"OSError: the checkpoint .*full could not be written .*No space left on device", errors)
    assert not (tmp_path / "full").exists()


# --- processes


def booster_of_ranks() -> fb.Booster:
    return fb.Booster(device="cpu", mixed_precision="fp32", plugin=fb.TorchFSDPPlugin())


def rows(seed: int) -> Any:
    """This rank's rows of the batch."""
    each = 8 // dist.get_world_size()
    return {name: leaf[dist.get_rank() * each :][:each].clone() for name, leaf in batch(seed).items()}


def save_and_train(folder: str) -> tuple[bool, int, str, int]:
    """Two saves with steps between, the second one failing on rank 1, and one after."""
    booster = booster_of_ranks()
    step, state = stepper(booster), fresh(booster)
    state, _ = step(state, rows(0))
    before = copied(state)
    first = checkpoint.save_async(f"{folder}/one", state)
    for seed in range(3):
        state, _ = step(state, rows(seed))
    first.result()
    whole = equal(checkpoint.read_tensors(f"{folder}/one"), before)
    number = len(checkpoint.read_manifest(f"{folder}/one")["files"])
    write = saving.data_files.write

    def fails(place: Any, name: str, taken: Any) -> Any:
        if taken.rank == 1:
            raise OSError(28, "No space left on device")
        return write(place, name, taken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.data_files, "write", fails)
        second = checkpoint.save_async(f"{folder}/one", state)
        for seed in range(3):
            state, _ = step(state, rows(seed))
        message = ""
        try:
            second.result(30)
        except (OSError, RankFailure) as error:
            message = f"{type(error).__name__}: {error}"
    dist.barrier()
    left = len(list(Path(f"{folder}/one").iterdir()))
    whole = whole and equal(checkpoint.read_tensors(f"{folder}/one"), before)
    dist.barrier()
    checkpoint.save_async(f"{folder}/one", state).result()
    after = copied(state)
    return whole and equal(checkpoint.read_tensors(f"{folder}/one"), after), number, message, left


def save_and_die(folder: str) -> None:
    booster = booster_of_ranks()
    state = fresh(booster)
    write = saving.data_files.write

    def dies(place: Any, name: str, taken: Any) -> Any:
        if taken.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(place, name, taken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.data_files, "write", dies)
        checkpoint.save_async(f"{folder}/one", state).result(30)


@pytest.mark.xdist_group("ranks")
def test_processes_train_while_they_save_and_fail_together(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, save_and_train, str(tmp_path))
    assert first[0] and second[0]
    assert first[1] == second[1] == 2
    assert first[2].startswith("RankFailure: rank 1 failed in save at step 4: OSError")
    assert second[2].startswith("OSError: the checkpoint")
    assert first[3] == second[3] == 3  # the manifest and two files, and nothing of the save that failed


@pytest.mark.xdist_group("ranks")
def test_the_death_of_one_ends_the_save_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 died"):
        run_on_ranks(2, save_and_die, str(tmp_path), timeout=60)
    assert not (tmp_path / "one" / checkpoint.MANIFEST).exists()


# --- numbered checkpoints

METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats(-5, 5) | st.just(math.nan), max_size=2)


@given(
    st.dictionaries(st.integers(0, 60), METRICS, max_size=12),
    st.builds(
        Retention,
        last=st.integers(1, 4),
        every=st.none() | st.integers(1, 9),
        best=st.integers(0, 3),
        metric=st.sampled_from(["loss", "accuracy"]),
        higher=st.booleans(),
    ),
)
def test_what_is_kept(saved: dict[int, dict[str, float]], keep: Retention) -> None:
    stay = checkpoint.kept(saved, keep)
    assert stay <= saved.keys()
    newest = sorted(saved, reverse=True)
    assert all(step in stay for step in newest[: keep.last])
    assert all((step in stay) or step % keep.every for step in saved if keep.every is not None)
    values = {s: m[keep.metric] for s, m in saved.items() if not math.isnan(m.get(keep.metric, math.nan))}

    def better(step: int) -> int:
        """How many are better."""
        return sum(v > values[step] if keep.higher else v < values[step] for v in values.values())

    others = {step for step in stay if step not in newest[: keep.last] and (keep.every is None or step % keep.every)}
    assert all(better(step) < keep.best for step in others)
    assert len(others) <= keep.best
    for step, value in values.items():
        equals = sum(v == value and s > step for s, v in values.items())
        assert step in stay or better(step) + equals >= keep.best
    assert checkpoint.kept({step: saved[step] for step in stay}, keep) == stay  # nothing more goes


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": 0}, {"best": -1}])
def test_a_retention_that_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Retention(**wrong)


@pytest.mark.parametrize("where", ["local", "memory"])
def test_pruning(where: str, tmp_path: Path) -> None:
    root = str(tmp_path / "run") if where == "local" else f"memory://{tmp_path.name}"
    state = fresh()
    assert checkpoint.latest(root) is None and checkpoint.prune(root, Retention()) == []
    for step in range(1, 7):
        checkpoint.save(checkpoint.numbered(root, step), state, metrics={"loss": abs(step - 2)})
    assert checkpoint.latest(root) == f"{root}/step-6"
    assert checkpoint.complete(root)[5] == {"loss": 3.0}
    assert checkpoint.prune(root, Retention(last=1, every=4, best=2)) == [1, 5]
    assert sorted(checkpoint.complete(root)) == [2, 3, 4, 6]
    assert checkpoint.prune(root, Retention(last=1, every=4, best=2)) == []
    checkpoint.remove(f"{root}/step-4")
    assert sorted(checkpoint.complete(root)) == [2, 3, 6]
    with pytest.raises(FileNotFoundError):
        checkpoint.remove(f"{root}/step-4")


def test_what_is_not_whole_is_no_checkpoint(tmp_path: Path) -> None:
    """A removal that was cut short, a file that is too short, a save that has not ended, other people's files."""
    state = fresh()
    for step in range(1, 5):
        checkpoint.save(tmp_path / f"step-{step}", state)
    (tmp_path / "step-1" / checkpoint.MANIFEST).unlink()
    (tmp_path / "step-2" / "notes.txt").write_text("mine")
    (data,) = (tmp_path / "step-4").glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-9" / data.name).write_bytes(b"half")
    (tmp_path / "step-07").mkdir()
    assert checkpoint.latest(tmp_path) == f"{tmp_path}/step-3"
    assert checkpoint.prune(tmp_path, Retention()) == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-07", "step-2", "step-3", "step-4", "step-9"]
    assert [path.name for path in (tmp_path / "step-2").iterdir()] == ["notes.txt"]


def test_a_removal_takes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "step-1", fresh())
    asked, unlink, fsync = [], os.unlink, os.fsync

    def unlinking(path: Any, **options: Any) -> None:
        asked.append(Path(path).name)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", unlinking)
    monkeypatch.setattr(os, "fsync", lambda handle: (asked.append("fsync"), fsync(handle))[1])
    checkpoint.remove(tmp_path / "step-1")
    assert asked[:2] == [checkpoint.MANIFEST, "fsync"] and asked[2].endswith(".safetensors")
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.save_async], ids=["save", "save_async"])
def test_the_hook_keeps_what_it_is_told(save: Callable[..., Any], tmp_path: Path) -> None:
    def measure(state: fb.TrainState) -> dict[str, torch.Tensor]:
        return {"distance": (state.step - 3).abs()}

    hook = hooks.Checkpoint(
        save, tmp_path / "step-{step}", every=1, keep=Retention(last=2, best=1, metric="distance"), measure=measure
    )
    state = fb.fit(stepper(), fresh(), batch, steps=7, hooks=[hook])
    assert checkpoint.complete(tmp_path) == {3: {"distance": 0.0}, 6: {"distance": 3.0}, 7: {"distance": 4.0}}
    assert len(list(tmp_path.iterdir())) == 3
    assert equal(checkpoint.read_tensors(checkpoint.latest(tmp_path) or ""), copied(state))
    assert json.loads((tmp_path / "step-7" / checkpoint.MANIFEST).read_text())["step"] == 7


def test_a_hook_that_keeps_some_numbers_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path: .*expected '<root>/step-{step}'"):
        hooks.Checkpoint(checkpoint.save, tmp_path / "it", every=1, keep=Retention())
