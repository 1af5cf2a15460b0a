"""Checkpoints by processes: each writes and reads its own share; one's failure or death is that of all, and loses
nothing."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import RankError, run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import functional_booster as fb
from functional_booster import checkpoint, testing
from functional_booster.checkpoint import saving
from functional_booster.plugins import GeminiPlugin
from functional_booster.rank_failure import RankFailure

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes

PLUGINS = {
    "none": lambda ranks: None,
    "ddp": lambda ranks: fb.TorchDDPPlugin(bucket_cap_mb=0.0002),
    "zero1": lambda ranks: fb.LowLevelZeroPlugin(stage=1),
    "zero2": lambda ranks: fb.LowLevelZeroPlugin(stage=2, extra_dp_size=ranks // 2),
    "fsdp": lambda ranks: fb.TorchFSDPPlugin(),
    "gemini": lambda ranks: GeminiPlugin(),
}


def booster_of(name: str) -> fb.Booster:
    return fb.Booster(device="cpu", mixed_precision="fp32", plugin=PLUGINS[name](dist.get_world_size()))


def values(seed: int) -> tuple[fb.Booster, fb.TrainState]:
    """A state on one device, in which every element of the trained leaves is one of its own."""
    alone, problem = fb.Booster(device="cpu"), testing.small(8)
    generator = torch.Generator().manual_seed(seed)
    state = alone.init(problem.model, problem.tx, key=fb.random.key(seed))

    def other(leaf: torch.Tensor) -> torch.Tensor:
        return torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype) if leaf.is_floating_point() else leaf

    drawn = fb.tree.map(other, (state.storage, state.frozen, state.opt_state))
    return alone, state.replace(**dict(zip(("storage", "frozen", "opt_state"), drawn, strict=True)))


def equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def like(booster: fb.Booster) -> fb.TrainState:
    problem = testing.small(8)
    return booster.abstract(problem.model, problem.tx)


class Collectives(TorchDispatchMode):
    """The collectives that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def save(name: str, folder: str) -> list[str]:
    """Save on these ranks what one device has saved; returns the collectives that it took."""
    booster = booster_of(name)
    with Collectives() as collectives:
        state = booster.load(f"{folder}/alone", like=like(booster))
        booster.save(f"{folder}/ranks", state)
    with Collectives() as control:
        booster.full_params(state)
    assert bool(control.seen) == (name not in ("none", "ddp"))
    assert Path(f"{folder}/ranks/{checkpoint.MANIFEST}").is_file()  # on every rank: all return once it is written
    return collectives.seen


def load(names: Sequence[str], folder: str) -> list[dict[str, torch.Tensor]]:
    boosters = [booster_of(name) for name in names]
    return [checkpoint.named_tensors(each.load(f"{folder}/ranks", like=like(each))) for each in boosters]


@pytest.mark.parametrize(
    ("writer", "before", "readers", "after"),
    [
        ("fsdp", 4, ("zero1", "ddp"), 2),
        ("zero2", 4, ("none",), 1),
        ("gemini", 2, ("zero2", "fsdp"), 4),
        ("none", 1, ("fsdp", "gemini"), 4),
        ("ddp", 2, ("gemini", "ddp"), 2),
    ],
)
def test_saved_by_some_processes_and_loaded_by_others(
    writer: str, before: int, readers: tuple[str, ...], after: int, tmp_path: Path
) -> None:
    """Bitwise, without a collective; every process writes a file, and nothing is written twice."""
    alone, state = values(0)
    alone.save(tmp_path / "alone", state)
    assert run_on_ranks(before, save, writer, str(tmp_path)) == [[]] * before
    expected = checkpoint.named_tensors(state)
    for found in run_on_ranks(after, load, readers, str(tmp_path)):
        assert all(equal(each, expected) for each in found)
    manifest = checkpoint.read_manifest(tmp_path / "ranks")
    names = [file["name"] for file in manifest["files"]]
    assert len(names) == before
    assert {path.name for path in (tmp_path / "ranks").iterdir()} == {checkpoint.MANIFEST, *names}
    written = {number for leaf in manifest["leaves"].values() for number in (each["file"] for each in leaf["pieces"])}
    assert written == set(range(before))
    for name, leaf in manifest["leaves"].items():
        spans = [tuple(piece["range"]) for piece in leaf["pieces"]]
        assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])][: len(spans)]
        assert sum(end - start for start, end in spans) == expected[name].numel()


def save_where_one_cannot(folder: str) -> tuple[str, str, int]:
    booster = booster_of("fsdp")
    state = booster.load(f"{folder}/alone", like=like(booster))
    write = saving.data_files.write

    def full(place: Any, name: str, taken: Any) -> Any:
        if taken.rank == 1:
            (place.path / name).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(place, name, taken)

    kind = message = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.data_files, "write", full)
        try:
            booster.save(f"{folder}/ranks", state)
        except (OSError, RankFailure) as error:
            kind, message = type(error).__name__, str(error)
    dist.barrier()
    left = len(list(Path(f"{folder}/ranks").iterdir()))
    dist.barrier()
    booster.save(f"{folder}/again", state)  # the ranks are still in step
    return kind, message, left


def test_a_full_disk_of_one_is_an_error_of_all(tmp_path: Path) -> None:
    alone, old = values(0)
    _, new = values(1)
    alone.save(tmp_path / "ranks", old)
    alone.save(tmp_path / "alone", new)
    ends = run_on_ranks(3, save_where_one_cannot, str(tmp_path))
    assert [kind for kind, *_ in ends] == ["RankFailure", "OSError", "RankFailure"]
    for _, message, left in ends:
        assert f"the checkpoint {tmp_path}/ranks could not be written" in message
        assert "No space left on device" in message and "what was there before is whole" in message
        assert left == 2
    assert "rank 1 failed in save at step 0: OSError" in ends[0][1]
    assert equal(checkpoint.read_tensors(tmp_path / "ranks"), checkpoint.named_tensors(old))
    assert equal(checkpoint.read_tensors(tmp_path / "again"), checkpoint.named_tensors(new))


def load_what_is_damaged(folder: str) -> str:
    booster = booster_of("fsdp")
    try:
        booster.load(f"{folder}/ranks", like=like(booster))
    except (ValueError, RankFailure) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_damage_that_one_meets_is_an_error_of_all(tmp_path: Path) -> None:
    """A bit in the last elements of a leaf that is cut: the others do not read it."""
    alone, state = values(0)
    alone.save(tmp_path / "alone", state)
    run_on_ranks(2, save, "fsdp", str(tmp_path))
    manifest = checkpoint.read_manifest(tmp_path / "ranks")
    pieces = [
        piece
        for name, leaf in manifest["leaves"].items()
        for piece in leaf["pieces"]
        if piece["file"] == 1 and name.startswith("opt_state.0.mu")
    ]
    data = tmp_path / "ranks" / manifest["files"][1]["name"]
    raw = bytearray(data.read_bytes())
    raw[pieces[-1]["offset"]] ^= 1
    data.write_bytes(raw)
    first, second = run_on_ranks(2, load_what_is_damaged, str(tmp_path))
    assert first.startswith("RankFailure: rank 1 failed in load: ValueError")
    assert second.startswith("ValueError")
    assert all("is damaged: its checksum does not match" in message for message in (first, second))


def save_and_die(folder: str, rank: int, stage: str) -> None:
    booster = booster_of("zero1")
    state = booster.load(f"{folder}/alone", like=like(booster))

    def dies(*args: Any) -> Any:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    write = getattr(saving.data_files if stage == "write" else saving, stage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.data_files if stage == "write" else saving, stage, dies)
        booster.save(f"{folder}/ranks", state)


@pytest.mark.parametrize(("rank", "stage"), [(1, "write"), (0, "_publish")])
def test_the_death_of_one_loses_nothing(rank: int, stage: str, tmp_path: Path) -> None:
    alone, old = values(0)
    _, new = values(1)
    alone.save(tmp_path / "ranks", old)
    alone.save(tmp_path / "alone", new)
    with pytest.raises(RankError, match=rf"rank {rank} of 2 died"):
        run_on_ranks(2, save_and_die, str(tmp_path), rank, stage)
    assert equal(checkpoint.read_tensors(tmp_path / "ranks"), checkpoint.named_tensors(old))
    assert len(list((tmp_path / "ranks").iterdir())) > 2  # what the dead leave behind
    alone.save(tmp_path / "ranks", new)
    assert equal(checkpoint.read_tensors(tmp_path / "ranks"), checkpoint.named_tensors(new))
    assert len(list((tmp_path / "ranks").iterdir())) == 2
