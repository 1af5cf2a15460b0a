"""What a process holds of a state: which elements of which leaf lie where in which of its tensors.

Leaves have the model's names and shapes, whatever the layout: ``params.h.0.attn.q.weight``, ``opt_state.0.mu...``.
Everything that knows how states are laid out over ranks is here; saving and loading are copies between what is held and
ranges of the leaves' elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from functional_booster.kernels import flat, tree
from functional_booster.sharding.mesh import Mesh
from functional_booster.state import TrainState

_STACKED = ("storage", "frozen", "opt_state")  # with the dims of a virtual mesh in front
_PARAMS = ("storage", "frozen")


@dataclass(frozen=True)
class Extent:
    """Elements ``start`` to ``start + size`` of a leaf, flattened, which lie at ``at`` of a tensor, flattened."""

    leaf: str
    start: int
    size: int
    at: int


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor; ``replicas`` ranks hold the same, of which it is number ``replica``."""

    extents: tuple[Extent, ...]
    replica: int
    replicas: int


@dataclass(frozen=True)
class Holding:
    """A tensor of a state. ``leaves``: the whole shapes of all that its bucket holds, on whichever ranks; ``axes``:
    those that split it; ``host``: whether it lives in the host's memory; ``parts``: one, or those of all virtual ranks.
    """

    leaves: dict[str, tuple[int, ...]]
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...]
    host: bool
    parts: tuple[Part, ...]


def holdings(state: TrainState) -> list[Holding]:
    """One for each tensor (or ArrayInfo) of the state, in the order of ``tree.leaves(state)``.

    Raises ValueError where two leaves have one name.
    """
    nodes, names = tree.leaves(state, is_leaf=_is_flat), tree.names(state, is_leaf=_is_flat)
    found = [each for name, node in zip(names, nodes, strict=True) for each in _of_node(name, node, state.plan.mesh)]
    seen: set[str] = set()
    for name in itertools.chain.from_iterable(holding.leaves for holding in found):
        if name in seen:
            raise ValueError(f"two leaves of the state have the name {name!r}")
        seen.add(name)
    return found


def leaves(held: Sequence[Holding]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """{name: (whole shape, dtype)} of a state's leaves, sorted by name."""
    named = {name: (shape, holding.dtype) for holding in held for name, shape in holding.leaves.items()}
    return dict(sorted(named.items()))


def to_write(held: Sequence[Holding], mesh: Mesh, grain: int) -> list[tuple[int, Extent]]:
    """(number of the holding, extent) of what this process writes, so that all processes write everything once.

    Ranks that hold the same cut it, in pieces of about ``grain`` bytes, into even shares. No communication: each finds
    its own share. A process that holds the values of all ranks writes all.
    """
    lines: dict[tuple[str, ...], list[tuple[int, Extent, int, int]]] = {}
    for number, holding in enumerate(held):
        for part in holding.parts:
            replica, replicas = (part.replica, part.replicas) if mesh.across else (0, 1)
            if mesh.across or part.replica == 0:
                line = lines.setdefault(holding.axes, [])
                line += ((number, extent, replica, replicas) for extent in part.extents)
    chosen: list[tuple[int, Extent]] = []
    for line in lines.values():
        total = sum(extent.size * held[number].dtype.itemsize for number, extent, *_ in line)
        passed = 0
        for number, extent, replica, replicas in line:
            width = held[number].dtype.itemsize
            step = max(1, grain // width) if replicas > 1 else extent.size
            starts = range(0, extent.size, step)
            mine = [lo for lo in starts if (passed + lo * width) * replicas // total == replica]
            if mine:  # shares are runs of a line
                end = min(mine[-1] + step, extent.size)
                share = replace(extent, start=extent.start + mine[0], size=end - mine[0], at=extent.at + mine[0])
                chosen.append((number, share))
            passed += extent.size * width
    return chosen


@dataclass(frozen=True)
class _Ranks:
    """Those whose values a tensor holds: at these places of the mesh, stacked in its first ``lead`` dims."""

    mesh: Mesh
    places: tuple[tuple[int, ...], ...]
    lead: int


def _of_node(name: str, node: Any, mesh: Mesh) -> Iterator[Holding]:
    field, _, _ = name.partition(".")
    if mesh.virtual and field in _STACKED:
        ranks = _Ranks(mesh, tuple(itertools.product(*map(range, mesh.shape))), len(mesh.axes))
    else:
        ranks = _Ranks(mesh, (mesh.place or (0,) * len(mesh.axes),), 0)
    if not _is_flat(node):
        yield _whole(name, node, False, ranks)
        return
    prefix = "params" if field in _PARAMS else name
    for bucket, buffer in sorted(node.buffers.items()):
        if buffer is None:
            continue
        (slot, *_), host = node.layout.buckets[bucket], bucket in node.layout.host
        if slot.offset is None:
            yield _whole(_joined(prefix, slot.name), buffer, host, ranks)
        else:
            yield _bucket(prefix, node.layout, bucket, buffer, host, ranks)


def _whole(name: str, leaf: Any, host: bool, ranks: _Ranks) -> Holding:
    """A leaf that every rank has as it is."""
    shape = tuple(leaf.shape)
    size = math.prod(shape[ranks.lead :])
    parts = (
        Part((Extent(name, 0, size, number * size),) if size else (), *_replica(ranks.mesh, place, ()))
        for number, place in enumerate(ranks.places)
    )
    return Holding({name: shape[ranks.lead :]}, shape, leaf.dtype, (), host, tuple(parts))


def _bucket(prefix: str, layout: flat.Layout, bucket: str, buffer: Any, host: bool, ranks: _Ranks) -> Holding:
    """A flat buffer, whole or a rank's part of it."""
    mesh, size, shape = ranks.mesh, layout.size(bucket), tuple(buffer.shape)
    length = math.prod(shape[ranks.lead :])
    axes = () if length == size else layout.axes[bucket]
    if length * mesh.extent(axes) != size:
        raise ValueError(f"{prefix}: a rank has {length} elements of bucket {bucket!r}, expected {size}, or its share")
    names = {slot: _joined(prefix, slot.name) for slot in layout.buckets[bucket]}
    parts = []
    for number, place in enumerate(ranks.places):
        begin = index_of(mesh, place, axes) * length
        extents = [
            Extent(name, lo - at, hi - lo, number * length + lo - begin)
            for slot, name in names.items()
            if (lo := max(at := slot.offset or 0, begin)) < (hi := min(at + slot.size, begin + length))
        ]
        parts.append(Part(tuple(extents), *_replica(mesh, place, axes)))
    shapes = {name: slot.shape for slot, name in names.items()}
    return Holding(shapes, shape, buffer.dtype, axes, host, tuple(parts))


def index_of(mesh: Mesh, place: tuple[int, ...], axes: Sequence[str]) -> int:
    """A rank's number along axes, the last one varying fastest."""
    sizes, at = dict(mesh.axes), dict(zip(mesh.names, place, strict=True))
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def _replica(mesh: Mesh, place: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, int]:
    rest = tuple(name for name in mesh.names if name not in axes)
    return index_of(mesh, place, rest), mesh.extent(rest)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if name else prefix


def _is_flat(node: Any) -> bool:
    return isinstance(node, flat.Flat)
