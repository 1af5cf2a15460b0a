"""Flat trees: leaves that are treated alike, side by side in one buffer.

An optimizer that works element by element need not see 150 tensors where one will do. A ``Layout`` says which leaf lies
where; a ``Flat`` holds the buffers and stands for the tree. ``ravel`` and ``unravel`` go between the two; ``unravel``
gives views (its transpose is a concatenation), so that a gradient with respect to a Flat is a Flat.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from . import tree

Tree = tree.Tree
ALIGNMENT = 64  # elements: every leaf starts on a cache line, and 16-byte vector loads are legal in every dtype


@dataclass(frozen=True)
class Slot:
    """Where one leaf lies: in ``bucket`` at ``offset`` (elements), or as it is, alone in the bucket (offset None)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bucket: str
    offset: int | None

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
    def kept_names(self) -> frozenset[str]:
        """The names of the leaves in kept buckets."""
        return frozenset(slot.name for bucket in self.kept for slot in self.buckets[bucket])

    def size(self, bucket: str) -> int:
        """Elements of a whole bucket, padding included."""
        last = self.buckets[bucket][-1]
        return last.size if last.offset is None else _rounded(last.offset + last.size, ALIGNMENT * self.multiple)

    def sections(self, bucket: str) -> list[int]:
        """The lengths that cut a flat bucket: leaf, padding, leaf, padding..."""
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
    leaves = tree.flatten_up_to(layout.structure, values)
    by_name = {slot.name: leaf for slot, leaf in zip(layout.slots, leaves, strict=True)}
    for slot in layout.slots:
        if (leaf := by_name[slot.name]) is not None and tuple(leaf.shape) != slot.shape:
            raise ValueError(f"{slot.name}: shape {tuple(leaf.shape)}, expected {slot.shape}")
    return Flat({bucket: _joined(layout, bucket, by_name) for bucket in layout.buckets}, layout)


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

    Forward: split; transpose: concatenate, zeros where a leaf was not used.
    """
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
