"""Flat trees: leaves that are treated alike, side by side in one buffer.

An optimizer that works element by element need not see 150 tensors where one will do. A ``Layout`` says which leaf lies
where; a ``Flat`` holds the buffers and stands for the tree. ``ravel`` and ``unravel`` go between the two; ``unravel``
gives views (its transpose is a concatenation), so that a gradient with respect to a Flat is a Flat.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from . import tree

Tree = tree.Tree
ALIGNMENT = 64  # elements: every leaf starts on a cache line, and 16-byte vector loads are legal in every dtype


@dataclass(frozen=True)
class Cut:
    """How a mesh axis cuts a leaf: each of its ``ranks`` computes with ``part`` of dim ``dim``, padded with zeros."""

    dim: int
    axis: str
    ranks: int
    part: int

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a rank's part of a leaf of ``shape``."""
        return (*shape[: self.dim], self.part, *shape[self.dim + 1 :])

    def length(self, shape: tuple[int, ...], rank: int) -> int:
        """How much of a rank's part is no padding."""
        return max(0, min(self.part, shape[self.dim] - rank * self.part))


@dataclass(frozen=True)
class Slot:
    """Where one leaf lies: in ``bucket`` at ``offset`` (elements), or as it is, alone in the bucket (offset None).

    ``cut``: how a mesh axis cuts the leaf where it is used, and in the bucket too if that axis splits the bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bucket: str
    offset: int | None
    cut: Cut | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@tree.hash_once
@dataclass(frozen=True)
class Layout:
    """Which leaf lies where: a static, hashable value. ``slots`` are in the order of the tree's leaves.

    A flat bucket's length is a whole number of ``multiple`` aligned parts. ``split`` names the mesh axes that split the
    buffers of some buckets, so that each rank holds one part; a Flat of whole buffers has the same layout. ``host``
    names the buckets that live in the host's memory between steps, wherever the others do; it is ``provisional`` where
    a step is still to show how many there must be. ``kept`` names those that are computed with in the dtype that they
    are stored in, whatever the policy.

    A bucket of cut leaves, the axis of whose cuts is the first that splits it, holds what one rank along that axis has
    of each leaf, then what the next has, and so on; offsets count within one rank's. ``local`` is the layout of those.
    """

    structure: tree.Structure
    slots: tuple[Slot, ...]
    multiple: int = 1
    split: tuple[tuple[str, tuple[str, ...]], ...] = ()
    host: tuple[str, ...] = ()
    provisional: bool = False
    kept: tuple[str, ...] = ()

    @cached_property
    def buckets(self) -> dict[str, tuple[Slot, ...]]:
        """The slots of each bucket, by offset."""
        grouped: dict[str, list[Slot]] = {}
        for slot in self.slots:
            grouped.setdefault(slot.bucket, []).append(slot)
        return {name: tuple(slots) for name, slots in sorted(grouped.items())}

    @cached_property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes that split each bucket; none for those that every rank holds whole."""
        return {**dict.fromkeys(self.buckets, ()), **dict(self.split)}

    @cached_property
    def cuts(self) -> dict[str, Cut]:
        """For each bucket of cut leaves, the cut of one of them: they have axis and ranks in common."""
        firsts = ((bucket, slots[0].cut) for bucket, slots in self.buckets.items())
        return {bucket: cut for bucket, cut in firsts if cut is not None and cut.axis in self.axes[bucket]}

    @cached_property
    def local(self) -> Layout:
        """The layout of what one rank along the axes of cuts has, in which its parts of leaves are the leaves."""
        if not self.cuts:
            return self
        slots = tuple(
            replace(slot, shape=slot.cut.shape_of(slot.shape), cut=None)
            if slot.cut is not None and slot.bucket in self.cuts
            else slot
            for slot in self.slots
        )
        split = tuple((bucket, axes[1:] if bucket in self.cuts else axes) for bucket, axes in self.split)
        return replace(self, slots=slots, split=split)

    @cached_property
    def kept_names(self) -> frozenset[str]:
        """The names of the leaves in kept buckets."""
        return frozenset(slot.name for bucket in self.kept for slot in self.buckets[bucket])

    def size(self, bucket: str) -> int:
        """Elements of a whole bucket, padding included."""
        if bucket in self.cuts:
            return self.cuts[bucket].ranks * self.local.size(bucket)
        last = self.buckets[bucket][-1]
        return last.size if last.offset is None else _rounded(last.offset + last.size, ALIGNMENT * self.multiple)

    def sections(self, bucket: str) -> list[int]:
        """The lengths that cut a flat bucket: leaf, padding, leaf, padding...

        Raises ValueError for a bucket of cut leaves, in which no leaf lies in one piece.
        """
        if bucket in self.cuts:
            raise ValueError(
                f"{self.buckets[bucket][0].name} and others are cut over {self.cuts[bucket].axis!r}: an optimizer that "
                "works leaf by leaf cannot update them; expected one that is elementwise, such as fb.optim.adamw"
            )
        slots = self.buckets[bucket]
        ends = [*(slot.offset for slot in slots[1:]), self.size(bucket)]
        return [
            length
            for slot, end in zip(slots, ends, strict=True)
            for length in (slot.size, end - slot.offset - slot.size)  # type: ignore[operator]  # a flat bucket's
        ]


@dataclass(frozen=True)
class Flat:
    """The tree of ``layout``, held as {bucket: tensor}: flat buffers (N,), or leaves kept in their own shape.

    A pytree node whose leaves are the buffers. Leading dims that every buffer shares (an ensemble) are legal. As with
    any tree, the leaves may be other values of a bucket (``spread``).
    """

    buffers: dict[str, Any]
    layout: Layout


tree.register(Flat, ("buffers",), ("layout",))


def plan(abstract: Tree, labels: Tree, multiple: int = 1) -> Layout:
    """The layout that joins leaves of equal label and dtype, in order; a leaf whose label is None is kept as it is.

    ``abstract`` has leaves with ``shape`` and ``dtype``; ``labels`` has its structure and hashable leaves or None.
    Raises ValueError where two leaves have one name: buckets and errors go by names.
    """
    named, structure = tree.named_leaves(abstract), tree.structure(abstract)
    marks = tree.flatten_up_to(structure, labels)
    numbers: dict[Hashable, int] = {}
    ends: dict[str, int] = {}
    slots = []
    for (name, leaf), label in zip(named.items(), marks, strict=True):
        shape, dtype = tuple(leaf.shape), leaf.dtype
        if label is None:
            slots.append(Slot(name, shape, dtype, f"leaf:{name}", None))
            continue
        kind = str(dtype).removeprefix("torch.")
        bucket = f"{kind}:{numbers.setdefault((label, dtype), len(numbers))}"
        slots.append(Slot(name, shape, dtype, bucket, ends.get(bucket, 0)))
        ends[bucket] = ends.get(bucket, 0) + _rounded(math.prod(shape), ALIGNMENT)
    return Layout(structure, tuple(slots), multiple)


def ravel(values: Tree, layout: Layout) -> Flat:
    """Copy the leaves into their places; padding is zero. A bucket whose leaves are all None is None.

    Raises ValueError where a leaf's shape is not the slot's.
    """
    if layout.cuts:
        return _raveled_parts(values, layout)
    leaves = tree.flatten_up_to(layout.structure, values)
    by_name = {slot.name: leaf for slot, leaf in zip(layout.slots, leaves, strict=True)}
    for slot in layout.slots:
        if (leaf := by_name[slot.name]) is not None and tuple(leaf.shape) != slot.shape:
            raise ValueError(f"{slot.name}: shape {tuple(leaf.shape)}, expected {slot.shape}")
    return Flat({bucket: _joined(layout, bucket, by_name) for bucket in layout.buckets}, layout)


def _raveled_parts(values: Tree, layout: Layout) -> Flat:
    """``ravel`` of a layout that has cuts: rank by rank."""
    leaves = tree.flatten_up_to(layout.structure, values)
    ranks = max(cut.ranks for cut in layout.cuts.values())

    def of(rank: int) -> Flat:
        parts = [
            leaf if leaf is None or slot.cut is None or slot.bucket not in layout.cuts else part(leaf, slot.cut, rank)
            for slot, leaf in zip(layout.slots, leaves, strict=True)
        ]
        return ravel(tree.unflatten(layout.structure, parts), layout.local)

    each = [of(rank).buffers for rank in range(ranks)]
    buffers = {
        bucket: torch.cat([own[bucket] for own in each]) if bucket in layout.cuts and first is not None else first
        for bucket, first in each[0].items()
    }
    return Flat(buffers, layout)


def part(leaf: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """What a rank has of a whole leaf, zeros behind its end."""
    length = cut.length(tuple(leaf.shape), rank)
    own = leaf.narrow(cut.dim, min(rank * cut.part, leaf.shape[cut.dim]), length)
    if length == cut.part:
        return own
    missing = own.new_zeros(*own.shape[: cut.dim], cut.part - length, *own.shape[cut.dim + 1 :])
    return torch.cat([own, missing], cut.dim)


def _unraveled_parts(flat: Flat) -> Tree:
    """``unravel`` of whole buffers of a layout that has cuts: rank by rank."""
    layout = flat.layout
    ranks = max(cut.ranks for cut in layout.cuts.values())
    each = {
        bucket: buffer.chunk(ranks, -1) if bucket in layout.cuts and buffer is not None else (buffer,) * ranks
        for bucket, buffer in flat.buffers.items()
    }
    parts = [
        tree.flatten_up_to(layout.structure, unravel(Flat({name: of[rank] for name, of in each.items()}, layout.local)))
        for rank in range(ranks)
    ]

    def whole(place: int, slot: Slot) -> torch.Tensor | None:
        first = parts[0][place]
        if first is None or slot.cut is None or slot.bucket not in layout.cuts:
            return first
        dim = slot.cut.dim - len(slot.shape)  # leading dims may stand in front
        return torch.cat([own[place] for own in parts], dim).narrow(dim, 0, slot.shape[slot.cut.dim])

    return tree.unflatten(layout.structure, [whole(place, slot) for place, slot in enumerate(layout.slots)])


def _joined(layout: Layout, bucket: str, by_name: dict[str, Any]) -> torch.Tensor | None:
    slots = layout.buckets[bucket]
    given = [by_name[slot.name] for slot in slots]
    if all(leaf is None for leaf in given):
        return None
    if any(leaf is None for leaf in given):
        raise ValueError(f"some leaves of the bucket {bucket!r} are None and some are not")
    if slots[0].offset is None:
        return given[0].clone()
    pieces = []
    for leaf, padding in zip(given, layout.sections(bucket)[1::2], strict=True):
        pieces.append(leaf.reshape(-1))
        if padding:
            pieces.append(leaf.new_zeros(padding))
    return torch.cat(pieces)


def unravel(flat: Flat) -> Tree:
    """The tree, as views of the buffers, None for a bucket that is None.

    Forward: split; transpose: concatenate, zeros where a leaf was not used. Of buffers that hold what one rank has of
    cut leaves, these parts are the leaves.
    """
    if flat.layout.cuts:
        if is_local(flat):
            return unravel(Flat(flat.buffers, flat.layout.local))
        return _unraveled_parts(flat)
    by_name: dict[str, torch.Tensor | None] = {}
    for bucket, slots in flat.layout.buckets.items():
        buffer = flat.buffers[bucket]
        if buffer is None or slots[0].offset is None:
            by_name.update((slot.name, buffer) for slot in slots)
            continue
        lead = tuple(buffer.shape[:-1])
        pieces = torch.split(buffer, flat.layout.sections(bucket), dim=-1)
        for slot, piece in zip(slots, pieces[::2], strict=True):
            by_name[slot.name] = piece.reshape(lead + slot.shape)
    return tree.unflatten(flat.layout.structure, [by_name[slot.name] for slot in flat.layout.slots])


def is_local(flat: Flat) -> bool:
    """Whether buffers of cut leaves hold what one rank along the axis of the cuts has."""
    lengths = ((bucket, flat.buffers[bucket]) for bucket in flat.layout.cuts)
    return any(buffer is not None and buffer.shape[-1] == flat.layout.local.size(bucket) for bucket, buffer in lengths)


def spread(values: Tree, params: Tree) -> Tree:
    """What holds for each leaf of the tree that ``params`` stands for, brought to the structure of ``params``.

    For a plain tree that is ``values`` itself (a tree of its structure); for a Flat it is a Flat with one value a
    bucket. Raises ValueError, naming two leaves, where the leaves of one bucket do not agree.
    """
    if not isinstance(params, Flat):
        return values
    chosen: dict[str, tuple[str, Hashable]] = {}
    for slot, value in zip(params.layout.slots, tree.flatten_up_to(params.layout.structure, values), strict=True):
        name, other = chosen.setdefault(slot.bucket, (slot.name, value))
        if other != value:
            raise ValueError(
                f"{slot.name} has {value!r} and {name} has {other!r}, but both lie in bucket {slot.bucket!r}"
            )
    return Flat({bucket: chosen[bucket][1] for bucket in params.buffers}, params.layout)


def stands_for(params: Tree) -> Tree:
    """The tree that masks and labels are written for: ``params``, or a Flat's slots (name, shape, dtype) as a tree."""
    return tree.unflatten(params.layout.structure, params.layout.slots) if isinstance(params, Flat) else params


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
