"""Writing weights in Hugging Face's form: files of whole tensors, each by one rank, published in one moment.

A tensor is gathered, and written, before the next one is; in the background, all of this rank's are gathered first.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functional_booster.sharding import shards
from functional_booster.sharding.mesh import Mesh

from . import publishing, watchdog
from .checkpoint import Saving, background, snapshots
from .checkpoint.folders import hidden
from .checkpoint.meetings import Meetings
from .checkpoint.tensor_files import as_bytes, head
from .hf_entries import Entry
from .hf_gathering import Ranks, gathered

Around = Callable[[], contextlib.AbstractContextManager[None]]


def write(
    target: publishing.Target,
    entries: Sequence[Entry],
    mesh: Mesh,
    device: torch.device,
    what: str,
    *,
    use_async: bool = False,
) -> Saving | None:
    """Write the entries; on processes, each must call this, and where it fails on one, all raise.

    A rank holds one tensor, and one leaf beside it. With ``use_async`` it returns once the tensors of this rank's files
    are in the host's memory (which is kept for the next such save), and gives a handle on the writing.

    Raises FileExistsError where the folder is a file, or another process is writing there, OSError where it cannot be
    written, ValueError where finite numbers would be infinite in the file. What was there before is whole then. An
    earlier save's error that nobody has heard is raised first.
    """
    alone = not mesh.across

    def together() -> contextlib.AbstractContextManager[None]:
        return watchdog.all_or_none(what, alone=alone)

    def guarded() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if alone else watchdog.guard(what)

    with together():
        background.settle()
    files = _files(entries, target.limit)
    with guarded():
        drawn = torch.tensor(secrets.randbits(63), dtype=torch.int64, device=device)
        token = f"{int(shards.of_the_first(drawn, mesh)):016x}"
        ranks = Ranks.of(mesh, device)
    shares = _shares(files, len(ranks.places))
    work = [[entry for number in share for entry in files[number]] for share in shares]
    job = _Job(target, files, token, shares[ranks.rank], first=ranks.rank == 0)
    if not use_async:
        _save(job, gathered(work, ranks, device), together, guarded)
        return None
    tensors: list[torch.Tensor] = []
    failure = None
    with guarded(), snapshots.copies.renewed() as copies:
        try:
            tensors += gathered(work, ranks, device, lambda shape, dtype: copies.empty(shape, dtype, device))
        except ValueError as error:
            failure = error
    with together():
        if failure is not None:
            raise failure
    if alone:
        return background.start(str(target.place), lambda: _save(job, iter(tensors)))
    meetings = Meetings(what)

    def in_the_background() -> None:
        with contextlib.closing(meetings):
            _save(job, iter(tensors), meetings)

    return background.start(str(target.place), in_the_background)


@dataclass(frozen=True)
class _Job:
    """A save: all its ``files``, of which this rank writes those of the numbers ``mine``, and the first publishes."""

    target: publishing.Target
    files: list[list[Entry]]
    token: str
    mine: list[int]
    first: bool

    @property
    def fresh(self) -> dict[str, str]:
        """{name of a file: what it is called until it is published}."""
        return {name: hidden(name, self.token) for name in self.target.names(len(self.files))}


def _save(
    job: _Job,
    tensors: Iterator[torch.Tensor],
    together: Around = contextlib.nullcontext,
    guarded: Around = contextlib.nullcontext,
) -> None:
    """Write this rank's files, of the tensors as they come, and publish all. Ranks meet in contexts ``together()``;
    what goes on between them while ``tensors`` come is in one of ``guarded()``."""
    target, held = job.target, False
    with contextlib.ExitStack() as stack:
        with together():
            if job.first:
                held = publishing.prepared(target, stack)
        try:
            with guarded():
                failure = _write_files(job, tensors)
            with together():
                if failure is not None:
                    raise failure
            with together():
                if job.first:
                    publishing.publish(target, job.fresh, _index(target, job.files))
                    publishing.clean(target, list(job.fresh), None if held else job.token)
        except BaseException as error:
            if job.first:
                publishing.forget(target, job.token)
            if isinstance(error, OSError) and not isinstance(error, FileExistsError):
                told = f"{target.place} could not be written ({error}); what was there before is whole"
                raise OSError(told) from error
            raise


def _write_files(job: _Job, tensors: Iterator[torch.Tensor]) -> Exception | None:
    """What went wrong, or None. One that cannot write keeps no other one waiting: it takes part in what they gather."""
    metadata = {"format": "pt"}
    if len(job.files) == 1:
        metadata |= {name: json.dumps(value) for name, value in job.target.metadata.items()}
    names = list(job.fresh.values())
    failure: Exception | None = None
    try:
        for number in job.mine:
            entries = job.files[number]
            before, _ = head({entry.names[0]: (entry.dtype, entry.shape) for entry in entries}, metadata)
            with job.target.place.create(names[number]) as stream:
                stream.write(before)
                for _ in entries:
                    stream.write(as_bytes(next(tensors)))
    except (OSError, TypeError) as error:
        failure = error
    try:
        for _ in tensors:
            pass
    except ValueError as error:
        failure = failure or error
    return failure


def _files(entries: Sequence[Entry], limit: int | None) -> list[list[Entry]]:
    """The entries of each file, ``limit`` bytes at most or one tensor; the widest dtypes first, for alignment."""
    files: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if limit is not None and files[-1] and filled + entry.nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += entry.nbytes
    return [sorted(file, key=lambda entry: -entry.dtype.itemsize) for file in files]


def _shares(files: Sequence[Sequence[Entry]], ranks: int) -> list[list[int]]:
    """The numbers of the files that each rank writes: in turn the one takes one that has the fewest bytes to write."""
    sizes, shares = [0] * ranks, [[] for _ in range(ranks)]
    for number, file in enumerate(files):
        rank = sizes.index(min(sizes))
        shares[rank].append(number)
        sizes[rank] += sum(entry.nbytes for entry in file)
    return shares


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
