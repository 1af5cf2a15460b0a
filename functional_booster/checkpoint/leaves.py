"""Leaves where they lie: which elements of which leaf a process has, in which of its tensors.

Leaves have the model's names and shapes, whatever the layout: ``params.h.0.attn.q.weight``, ``opt_state.0.mu...``. A
bucket that mesh axes split is a row of parts, one a rank; a leaf is a range of it, and so one piece of each of a few
parts. Everything that knows how states are laid out over ranks is here; saving and loading, in any form, are copies
between pieces and ranges of the leaves' elements.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from functional_booster.kernels import flat, tree
from functional_booster.sharding.mesh import Mesh
from functional_booster.state import TrainState

_STACKED = ("storage", "frozen", "opt_state")  # with the dims of a virtual mesh in front
_PARAMS = ("storage", "frozen")


@dataclass(frozen=True)
class Leaf:
    """A leaf of ``shape`` in ``buffer``: as it is (offset None), or a range of a flat bucket that begins at ``offset``.

    Of a leaf with a ``cut`` each rank along its axis, the first of ``axes``, has a part in a range of its own, in
    buckets that follow one another, each of ``each`` elements. ``axes`` are the mesh axes that split the bucket;
    ``stacked``: the mesh's dims stand in front of the buffer's, which is an ArrayInfo in an abstract state.
    """

    shape: tuple[int, ...]
    buffer: Any
    mesh: Mesh
    stacked: bool = False
    offset: int | None = None
    axes: tuple[str, ...] = ()
    cut: flat.Cut | None = None
    each: int = 0

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


def of_state(state: TrainState) -> dict[str, Leaf]:
    """{name: leaf} of a state, sorted by name. Raises ValueError where two leaves have one name."""
    found: dict[str, Leaf] = {}
    nodes, names = tree.leaves(state, is_leaf=is_flat), tree.names(state, is_leaf=is_flat)
    for name, node in zip(names, nodes, strict=True):
        for path, leaf in _of_node(name, node, state.plan.mesh).items():
            if path in found:
                raise ValueError(f"two leaves of the state have the name {path!r}")
            found[path] = leaf
    return dict(sorted(found.items()))


def of_flat(values: flat.Flat, mesh: Mesh) -> dict[str, Leaf]:
    """{name: leaf} of a Flat between steps, without those that are None."""
    found = {}
    for slot in values.layout.slots:
        buffer = values.buffers[slot.bucket]
        if buffer is not None:
            axes = () if slot.offset is None else _axes(values, slot.bucket, mesh)
            cut = values.layout.cuts.get(slot.bucket) and slot.cut
            each = values.layout.local.size(slot.bucket) if cut else 0
            found[slot.name] = Leaf(slot.shape, buffer, mesh, mesh.virtual, slot.offset, axes, cut, each)
    return found


def padding(state: TrainState) -> list[Leaf]:
    """What no leaf has of the state's flat buckets, which is zero, as if these were leaves."""
    found = []
    for node in tree.leaves(state, is_leaf=is_flat):
        for bucket, slots in node.layout.buckets.items() if is_flat(node) else ():
            buffer = node.buffers[bucket]
            if buffer is None or slots[0].offset is None:
                continue
            axes, mesh = _axes(node, bucket, state.plan.mesh), state.plan.mesh
            if bucket in node.layout.cuts:
                own = of_flat(flat.Flat({**dict.fromkeys(node.buffers), bucket: buffer}, node.layout), mesh)
                found += [Leaf((hi - lo,), buffer, mesh, mesh.virtual, lo, axes) for lo, hi in _gaps(own.values())]
                continue
            ends = [0, *((slot.offset or 0) + slot.size for slot in slots)]
            starts = [*(slot.offset or 0 for slot in slots), node.layout.size(bucket)]
            gaps = ((end, start) for end, start in zip(ends, starts, strict=True) if end < start)
            found += (Leaf((start - end,), buffer, mesh, mesh.virtual, end, axes) for end, start in gaps)
    return found


def pieces(leaf: Leaf) -> list[Piece]:
    """The pieces of a leaf, in order."""
    if leaf.size == 0:
        return []
    if leaf.offset is None:
        return [Piece((), 0, leaf.size, 0)]
    length = leaf.buffer.shape[-1]
    sizes = [leaf.mesh.extent(axis) for axis in leaf.axes]
    found = []
    for start, at, size in _runs(leaf):
        for number in range(at // length, (at + size - 1) // length + 1):
            first, last = max(at, number * length), min(at + size, (number + 1) * length)
            place = _unraveled(number, sizes)
            found.append(Piece(place, start + first - at, start + last - at, first - number * length))
    return found if leaf.cut is None else sorted(found, key=lambda piece: piece.start)


def _runs(leaf: Leaf) -> Iterator[tuple[int, int, int]]:
    """(first element of the leaf, its place in the whole bucket, how many lie there side by side)."""
    assert leaf.offset is not None
    if leaf.cut is None:
        yield 0, leaf.offset, leaf.size
        return
    cut, size = leaf.cut, leaf.shape[leaf.cut.dim]
    outer, inner = math.prod(leaf.shape[: cut.dim]), math.prod(leaf.shape[cut.dim + 1 :])
    for rank in range(cut.ranks):
        if length := cut.length(leaf.shape, rank):
            begin = leaf.offset + rank * leaf.each
            for row in range(outer):
                start = (row * size + rank * cut.part) * inner
                yield start, begin + row * cut.part * inner, length * inner


def _gaps(found: Iterable[Leaf]) -> Iterator[tuple[int, int]]:
    """(begin, end) of what no leaf has of the whole bucket that all of them are in."""
    leaves = list(found)
    runs = sorted((at, at + size) for leaf in leaves if leaf.size for _, at, size in _runs(leaf))
    end = 0
    for first, last in (*runs, (leaves[0].each * (leaves[0].cut.ranks if leaves[0].cut else 1), 0)):
        if end < first:
            yield end, first
        end = max(end, last)


def held(leaf: Leaf) -> list[Piece]:
    """The pieces that this process has."""
    mine = along(leaf, leaf.mesh.place)
    return [piece for piece in pieces(leaf) if leaf.mesh.virtual or piece.place == mine]


def copies(leaf: Leaf, piece: Piece) -> Iterator[torch.Tensor]:
    """A piece that this process has, in each of its ranks that has it: views, (stop - start,), or of the leaf's shape
    where it is as it is."""
    buffer, mesh = leaf.buffer.detach(), leaf.mesh
    at = dict(zip(leaf.axes, piece.place, strict=True)) if leaf.offset is not None else {}
    dims = [[at[axis]] if axis in at else range(mesh.extent(axis)) for axis in mesh.names] if leaf.stacked else []
    for place in itertools.product(*dims):
        own = functools.reduce(lambda stacked, index: stacked.select(0, index), place, buffer)
        yield own if leaf.offset is None else own.narrow(0, piece.at, piece.stop - piece.start)


def read(leaf: Leaf, piece: Piece) -> torch.Tensor:
    """A piece that this process has, (stop - start,): a view where it can be."""
    return next(copies(leaf, piece)).reshape(-1)


@torch.no_grad()
def write(leaf: Leaf, piece: Piece, value: torch.Tensor) -> None:
    """Copy elements (stop - start of them, in any shape) to each rank in this process that has this piece."""
    for copy in copies(leaf, piece):
        copy.copy_(value.reshape(copy.shape))


def to_write(found: Mapping[str, Leaf], mesh: Mesh, grain: int) -> list[tuple[str, Piece]]:
    """(leaf, piece) of what this process writes, so that all processes write everything once.

    Ranks that hold the same cut it, in pieces of about ``grain`` bytes, into even shares. No communication: each finds
    its own share. A process that holds the values of all ranks writes all.
    """
    lines: dict[tuple[str, ...], list[tuple[str, Piece]]] = {}
    for name, leaf in found.items():
        lines.setdefault(leaf.axes, []).extend((name, piece) for piece in held(leaf))
    if not mesh.across:
        return list(itertools.chain.from_iterable(lines.values()))
    chosen: list[tuple[str, Piece]] = []
    for axes, line in lines.items():
        others = tuple(name for name in mesh.names if name not in axes)
        replica, replicas = index_of(mesh, mesh.place, others), mesh.extent(others)
        total = sum((piece.stop - piece.start) * found[name].dtype.itemsize for name, piece in line)
        passed = 0
        for name, piece in line:
            size, width = piece.stop - piece.start, found[name].dtype.itemsize
            step = max(1, grain // width) if replicas > 1 else size
            mine = [lo for lo in range(0, size, step) if (passed + lo * width) * replicas // total == replica]
            if mine:  # shares are runs of a line
                lo, hi = mine[0], min(mine[-1] + step, size)
                share = replace(piece, start=piece.start + lo, stop=piece.start + hi, at=piece.at + lo)
                chosen.append((name, share))
            passed += size * width
    return chosen


def along(leaf: Leaf, place: tuple[int, ...]) -> tuple[int, ...]:
    """The indices of a place of the mesh along the axes that split the leaf."""
    return tuple(place[leaf.mesh.names.index(axis)] for axis in leaf.axes) if place else ()


def index_of(mesh: Mesh, place: tuple[int, ...], axes: Sequence[str]) -> int:
    """A rank's number along axes, the last one varying fastest."""
    sizes, at = dict(mesh.axes), dict(zip(mesh.names, place, strict=True))
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def is_flat(node: Any) -> bool:
    """Whether a node of a state is a Flat."""
    return isinstance(node, flat.Flat)


def _of_node(name: str, node: Any, mesh: Mesh) -> dict[str, Leaf]:
    field, _, _ = name.partition(".")
    if is_flat(node):
        prefix = "params" if field in _PARAMS else name
        return {f"{prefix}.{path}" if path else prefix: leaf for path, leaf in of_flat(node, mesh).items()}
    stacked = mesh.virtual and field in _STACKED
    shape = tuple(node.shape)[len(mesh.axes) if stacked else 0 :]
    return {name: Leaf(shape, node, mesh, stacked)}


def _axes(values: flat.Flat, bucket: str, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes that split a flat buffer, none where it is whole."""
    length, size = values.buffers[bucket].shape[-1], values.layout.size(bucket)
    axes = () if length == size else values.layout.axes[bucket]
    if length * mesh.extent(axes) != size:
        raise ValueError(f"a rank has {length} elements of bucket {bucket!r}, expected {size}, or its share")
    return axes


def _unraveled(number: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """The indices of a number, the last one varying fastest."""
    place = []
    for size in reversed(list(sizes)):
        place.append(number % size)
        number //= size
    return tuple(reversed(place))
