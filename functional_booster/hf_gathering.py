"""Whole tensors, brought together one at a time from the ranks that have pieces of them.

Round by round each rank gathers a leaf of its own files, so that all write at once. On a virtual mesh all pieces are in
this process; on a real one they travel to the rank that asks for the leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from functional_booster.sharding.mesh import Mesh

from .checkpoint import conversions, leaves
from .checkpoint.leaves import Leaf
from .hf_entries import Entry
from .models.hf import Source

Empty = Callable[..., torch.Tensor]  # (shape, dtype=)


@dataclass(frozen=True)
class Ranks:
    """The processes of a mesh: the place of each, by rank; ``rank`` is this one's. One rank where there is no other."""

    places: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, mesh: Mesh, device: torch.device) -> Ranks:
        """On processes, each must call it."""
        if not mesh.across:
            return cls((mesh.place,), 0)
        mine = torch.tensor(mesh.place, dtype=torch.int64, device=device)
        places = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(places, mine)
        return cls(tuple(tuple(place.tolist()) for place in places), dist.get_rank())


def gathered(
    work: Sequence[Sequence[Entry]], ranks: Ranks, device: torch.device, empty: Empty | None = None
) -> Iterator[torch.Tensor]:
    """The tensors of this rank's entries, in order, in the host's memory; ``work`` are those of each rank.

    On processes, each takes part until its iterator ends. What travels does so on ``device``; ``empty`` gives memory
    for a tensor. Raises ValueError, once all is gathered, where finite numbers would be infinite in the file.
    """
    make = torch.empty if empty is None else empty
    lossy: list[str] = []
    current: torch.Tensor | None = None
    for round_ in zip_longest(*(list(_steps(entries)) for entries in work)):
        step, into = round_[ranks.rank], None
        if step is not None:
            if current is None:
                current = make(step.entry.shape, dtype=step.entry.dtype)
            into = _room(current, step)
        wanted = {rank: each.leaf for rank, each in enumerate(round_) if each is not None}
        _gather(wanted, into, ranks, device)
        if step is None or current is None or into is None:
            continue
        if into.untyped_storage().data_ptr() != current.untyped_storage().data_ptr():
            if conversions.overflow(into, current.dtype):
                lossy.append(f"{step.entry.names[0]}: {conversions.beyond(current.dtype)}")
            step.source.read(current).copy_(into.view(step.leaf.shape))
        if step.closes:
            yield current
            current = None
    if lossy:
        raise ValueError("\n  ".join(["the weights do not fit the dtype:", *sorted(set(lossy))]))


@dataclass(frozen=True)
class _Step:
    """One leaf on its way into a tensor; ``closes``: it is the last of the tensor."""

    entry: Entry
    source: Source
    leaf: Leaf
    closes: bool


def _steps(entries: Sequence[Entry]) -> Iterator[_Step]:
    for entry in entries:
        for number, (source, leaf) in enumerate(entry.parts, 1):
            yield _Step(entry, source, leaf, number == len(entry.parts))


def _room(tensor: torch.Tensor, step: _Step) -> torch.Tensor:
    """Memory for the step's leaf, (N,): in its place in the tensor where it lies there as it is."""
    place = step.source.read(tensor)
    if place.is_contiguous() and place.dtype == step.leaf.dtype:
        return place.view(-1)
    return torch.empty(step.leaf.size, dtype=step.leaf.dtype)


def _gather(wanted: Mapping[int, Leaf], into: torch.Tensor | None, ranks: Ranks, device: torch.device) -> None:
    """Bring ``wanted``, a leaf for each rank that asks for one, together, each on its rank alone, in ``into`` (N,)."""
    by_place = {place: rank for rank, place in enumerate(ranks.places)}
    operations, arrivals = [], []
    for writer, leaf in wanted.items():
        for piece in leaves.pieces(leaf):
            owner = by_place[_owner(leaf, ranks.places[writer], piece.place)]
            if writer == ranks.rank:
                assert into is not None
                target = into[piece.start : piece.stop]
                if owner == writer:
                    target.copy_(leaves.read(leaf, piece))
                else:
                    there = target if target.device == device else torch.empty_like(target, device=device)
                    operations.append(dist.P2POp(dist.irecv, there, owner))
                    arrivals.append((target, there))
            elif owner == ranks.rank:
                operations.append(dist.P2POp(dist.isend, leaves.read(leaf, piece).to(device).contiguous(), writer))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for target, there in arrivals:
        if target is not there:
            target.copy_(there)


def _owner(leaf: Leaf, place: tuple[int, ...], along: tuple[int, ...]) -> tuple[int, ...]:
    """The place nearest to another that has a piece; on a virtual mesh there is one process."""
    if leaf.mesh.virtual or not along:
        return place
    changed = dict(zip(leaf.axes, along, strict=True))
    return tuple(changed.get(axis, index) for axis, index in zip(leaf.mesh.names, place, strict=True))
