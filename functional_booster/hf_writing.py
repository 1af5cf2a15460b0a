"""Writing weights in Hugging Face's form: files of whole tensors, each by one rank, published in one moment.

Round by round each rank gathers a leaf of its own files, so that all write at once; ``publishing`` makes them seen.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from functional_booster.sharding import shards
from functional_booster.sharding.mesh import Mesh

from . import leaf_store, publishing, watchdog
from .checkpoint.folders import sync
from .leaf_store import Entry, Leaf, Ranks
from .models.hf import Source


def write(target: publishing.Target, entries: Sequence[Entry], mesh: Mesh, device: torch.device, what: str) -> None:
    """Write the entries; on processes, each must call this, and where it fails on one, all raise.

    A rank holds the tensors of one file, ``limit`` bytes or one tensor, and one leaf beside them. Raises
    FileExistsError where the directory is a file, or another process is writing there, OSError where it cannot be
    written. What was there before is whole then.
    """
    files = _files(entries, target.limit)
    first, alone = not any(mesh.place), not mesh.across
    with watchdog.guard(what) if mesh.across else contextlib.nullcontext():
        drawn = torch.tensor(secrets.randbits(63), dtype=torch.int64, device=device)
        token = f"{int(shards.of_the_first(drawn, mesh)):016x}"
    fresh = {name: f".{token}.{name}" for name in target.names(len(files))}
    made = held = False
    with contextlib.ExitStack() as stack:
        with watchdog.all_or_none(what, alone=alone):
            if first:
                made, held = publishing.prepared(target, stack)
        try:
            with watchdog.guard(what) if mesh.across else contextlib.nullcontext():
                failure = _write_files(target, files, fresh, Ranks.of(mesh, device), device)
            with watchdog.all_or_none(what, alone=alone):
                if failure is not None:
                    raise failure
            with watchdog.all_or_none(what, alone=alone):
                if first:
                    publishing.publish(target, fresh, _index(target, files), token)
                    publishing.clean(target, list(fresh), token if not held else None)
        except BaseException as error:
            if first:
                publishing.forget(target, token, made)
            if isinstance(error, (OSError, SafetensorError)):
                raise OSError(
                    f"{target.directory} could not be written ({error}); what was there before is whole"
                ) from error
            raise


def _files(entries: Sequence[Entry], limit: int | None) -> list[list[Entry]]:
    """The entries of each file, in order, ``limit`` bytes at most or one tensor."""
    files: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if limit is not None and files[-1] and filled + entry.nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += entry.nbytes
    return files


def _writers(files: Sequence[Sequence[Entry]], ranks: int) -> list[int]:
    """The rank that writes each file: in turn the one that has the fewest bytes to write."""
    bytes_of, writers = [0] * ranks, []
    for file in files:
        writers.append(bytes_of.index(min(bytes_of)))
        bytes_of[writers[-1]] += sum(entry.nbytes for entry in file)
    return writers


def _write_files(
    target: publishing.Target, files: list[list[Entry]], fresh: Mapping[str, str], ranks: Ranks, device: torch.device
) -> Exception | None:
    """Write the files that are this rank's, while it takes part in those of the others; what went wrong, or None.

    Round by round each writer gathers one leaf, so that all write at once, and one that cannot write keeps no other
    one waiting.
    """
    writers = _writers(files, len(ranks.places))
    metadata = {"format": "pt"}
    if len(files) == 1:
        metadata |= {name: json.dumps(value) for name, value in target.metadata.items()}
    mine = [name for name, writer in zip(fresh.values(), writers, strict=True) if writer == ranks.rank]
    work = [
        list(_steps([file for file, writer in zip(files, writers, strict=True) if writer == rank]))
        for rank in range(len(ranks.places))
    ]
    failure: Exception | None = None
    tensors: dict[str, torch.Tensor] = {}
    paths = iter(target.directory / name for name in mine)
    for round_ in zip_longest(*work):
        step = round_[ranks.rank]
        into = None if step is None else _room(tensors, step)
        wanted = {rank: step.leaf for rank, step in enumerate(round_) if step is not None and step.leaf is not None}
        leaf_store.gather(wanted, into, ranks, device)
        if step is None:
            continue
        if into is not None:
            _place(tensors, step, into)
        if step.closes:
            path = next(paths)
            try:
                if failure is None:
                    _save(path, tensors, metadata)
            except Exception as error:
                failure = error
            tensors = {}
    return failure


@dataclass(frozen=True)
class _Step:
    """One leaf on its way into a file; an entry without leaves has none. ``closes``: it is the last of the file."""

    entry: Entry | None
    source: Source | None
    leaf: Leaf | None
    closes: bool


def _steps(files: list[list[Entry]]) -> Iterator[_Step]:
    for file in files:
        parts = [(entry, source, leaf) for entry in file for source, leaf in entry.parts]
        for number, (entry, source, leaf) in enumerate(parts, 1):
            yield _Step(entry, source, leaf, number == len(parts))
        if not parts:
            yield _Step(None, None, None, True)


def _room(tensors: dict[str, torch.Tensor], step: _Step) -> torch.Tensor | None:
    """Memory for the step's leaf, (N,): in its place in the tensor of the file where it lies there as it is."""
    if step.entry is None or step.source is None or step.leaf is None:
        return None
    entry, leaf = step.entry, step.leaf
    if entry.names[0] not in tensors:
        tensors[entry.names[0]] = torch.empty(entry.shape, dtype=entry.dtype)
    place = step.source.read(tensors[entry.names[0]])
    if place.is_contiguous() and place.dtype == leaf.dtype:
        return place.view(-1)
    return torch.empty(leaf.size, dtype=leaf.dtype)


def _place(tensors: dict[str, torch.Tensor], step: _Step, value: torch.Tensor) -> None:
    """Bring the leaf to its place, unless it was gathered there."""
    assert step.entry is not None and step.source is not None and step.leaf is not None
    stored = tensors[step.entry.names[0]]
    place = step.source.read(stored)
    if value.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr():
        place.copy_(value.view(step.leaf.shape))


def _save(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)  # as the umask says; safetensors writes for the owner alone
    save_file(tensors, file, metadata)
    file.chmod(mode)
    sync(file)


def _index(target: publishing.Target, files: list[list[Entry]]) -> dict[str, Any] | None:
    """The content of the index; None where one file holds all."""
    if len(files) == 1:
        return None
    total = sum(entry.nbytes for file in files for entry in file)
    homes = zip(target.names(len(files)), files, strict=True)
    return {
        "metadata": {"total_size": total, **target.metadata},
        "weight_map": {entry.names[0]: name for name, file in homes for entry in file},
    }
