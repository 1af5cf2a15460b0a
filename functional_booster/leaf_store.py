"""Leaves where they lie: one leaf of a flat tree over a mesh, read whole or written piece by piece, without the others.

A bucket that mesh axes split is a row of parts, one a rank; a leaf is a range of it, and so one piece of each of a few
parts. On a virtual mesh all pieces are in this process; on a real one they travel to the rank that asks for the leaf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from functional_booster.kernels.flat import Flat
from functional_booster.sharding import shards
from functional_booster.sharding.mesh import Mesh

from .models.hf import Source


@dataclass(frozen=True)
class Leaf:
    """A leaf of ``shape`` in ``buffer``: as it is (offset None), or a range of a flat bucket that begins at ``offset``.

    ``axes`` are the mesh axes that split the bucket; ``stacked``: the mesh's dims stand in front of the buffer's.
    """

    shape: tuple[int, ...]
    buffer: torch.Tensor
    mesh: Mesh
    stacked: bool = False
    offset: int | None = None
    axes: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """As it is stored."""
        return self.buffer.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a leaf, from ``at`` on in the part of the ranks at ``place`` along its axes."""

    place: tuple[int, ...]
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint and the leaves that it is made of; ``names``: that it is given, then others it may have.

    ``shape`` and ``dtype`` are those of the file.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Source, Leaf], ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def leaves(flat: Flat, mesh: Mesh) -> dict[str, Leaf]:
    """{name: leaf} of a Flat between steps, without those that are None."""
    found = {}
    for slot in flat.layout.slots:
        buffer = flat.buffers[slot.bucket]
        if buffer is not None:
            axes = flat.layout.axes[slot.bucket]
            split = axes if axes and not shards.is_whole(flat, slot.bucket) else ()
            found[slot.name] = Leaf(slot.shape, buffer, mesh, mesh.virtual, slot.offset, split)
    return found


def pieces(leaf: Leaf) -> list[Piece]:
    """The pieces of a leaf, in order."""
    if leaf.size == 0:
        return []
    if leaf.offset is None:
        return [Piece((), 0, leaf.size, 0)]
    length, end = leaf.buffer.shape[-1], leaf.offset + leaf.size
    sizes = [leaf.mesh.extent(axis) for axis in leaf.axes]
    found = []
    for number in range(leaf.offset // length, (end - 1) // length + 1):
        first, last = max(leaf.offset, number * length), min(end, (number + 1) * length)
        place = _unraveled(number, sizes)
        found.append(Piece(place, first - leaf.offset, last - leaf.offset, first - number * length))
    return found


def held(leaf: Leaf) -> list[Piece]:
    """The pieces that this process has."""
    mine = _along(leaf, leaf.mesh.place)
    return [piece for piece in pieces(leaf) if leaf.mesh.virtual or piece.place == mine]


def read(leaf: Leaf, piece: Piece) -> torch.Tensor:
    """A piece that this process has, (stop - start,): a view where it can be."""
    buffer = leaf.buffer.detach()
    if leaf.stacked:
        at = dict(zip(leaf.axes, piece.place, strict=True))
        buffer = buffer[tuple(at.get(axis, 0) for axis in leaf.mesh.names)]
    return buffer.reshape(-1)[piece.at : piece.at + piece.stop - piece.start]


def write(leaf: Leaf, piece: Piece, value: torch.Tensor) -> None:
    """Copy elements (stop - start of them, in any shape) to each rank in this process that has this piece."""
    with torch.no_grad():
        if leaf.offset is None:
            leaf.buffer.detach().copy_(value.reshape(leaf.shape))
            return
        at = dict(zip(leaf.axes, piece.place, strict=True))
        lead = tuple(at.get(axis, slice(None)) for axis in leaf.mesh.names) if leaf.stacked else ()
        part = leaf.buffer.detach()[(*lead, ..., slice(piece.at, piece.at + piece.stop - piece.start))]
        part.copy_(value.reshape(-1))


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


def gather(wanted: Mapping[int, Leaf], into: torch.Tensor | None, ranks: Ranks, device: torch.device) -> None:
    """Bring ``wanted``, a leaf for each rank that asks for one, together, each on its rank alone, in ``into`` (N,).

    Each process calls this with the same ``wanted``, a rank that asks for nothing with None. What travels, pieces of
    these leaves, does so on ``device``.
    """
    by_place = {place: rank for rank, place in enumerate(ranks.places)}
    operations, arrivals = [], []
    for writer, leaf in wanted.items():
        for piece in pieces(leaf):
            owner = by_place[_replaced(leaf, ranks.places[writer], piece.place)]
            if writer == ranks.rank:
                assert into is not None
                target = into[piece.start : piece.stop]
                if owner == writer:
                    target.copy_(read(leaf, piece))
                else:
                    there = target if target.device == device else torch.empty_like(target, device=device)
                    operations.append(dist.P2POp(dist.irecv, there, owner))
                    arrivals.append((target, there))
            elif owner == ranks.rank:
                operations.append(dist.P2POp(dist.isend, read(leaf, piece).to(device).contiguous(), writer))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for target, there in arrivals:
        if target is not there:
            target.copy_(there)


def _along(leaf: Leaf, place: tuple[int, ...]) -> tuple[int, ...]:
    """The indices of a place along the axes that split the leaf."""
    return tuple(place[leaf.mesh.names.index(axis)] for axis in leaf.axes) if place else ()


def _replaced(leaf: Leaf, place: tuple[int, ...], along: tuple[int, ...]) -> tuple[int, ...]:
    """The place with other indices along the axes that split the leaf; on a virtual mesh there is one process."""
    if leaf.mesh.virtual or not along:
        return place
    changed = dict(zip(leaf.axes, along, strict=True))
    return tuple(changed.get(axis, index) for axis, index in zip(leaf.mesh.names, place, strict=True))


def _unraveled(number: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """The indices of a number, the last one varying fastest."""
    place = []
    for size in reversed(list(sizes)):
        place.append(number % size)
        number //= size
    return tuple(reversed(place))
