"""Units: which leaves travel together. A block's leaves are needed at one time, so they share a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from functional_booster.kernels import flat, tree

from .mesh import Mesh

Tree = tree.Tree


def unit_of(name: str) -> str:
    """The block that a leaf belongs to: its name up to the first number, ``h.3`` of ``h.3.attn.q.weight``.

    Outside of blocks, the module or node that holds it: ``wte`` of ``wte.weight``; the leaf itself at the top.
    """
    path = name.split(".")
    for depth, entry in enumerate(path):
        if entry.isdigit():
            return ".".join(path[: depth + 1])
    return ".".join(path[:-1]) or name


def merged(units: Sequence[str], sizes: Sequence[int], least: int) -> list[str]:
    """Each leaf's unit, neighbours joined until a unit has ``least`` bytes; units stay whole.

    ``units`` and ``sizes`` (bytes) are in the order of the leaves. A joined unit bears the name of its first.
    """
    weights: dict[str, int] = {}
    for unit, size in zip(units, sizes, strict=True):
        weights[unit] = weights.get(unit, 0) + size
    homes: dict[str, str] = {}
    home, filled = "", least
    for unit, weight in weights.items():
        if filled >= least:
            home, filled = unit, 0
        homes[unit] = home
        filled += weight
    return [homes[unit] for unit in units]


def layout(
    abstract: Tree, labels: Tree, least: int, mesh: Mesh | None = None, split: tuple[str, ...] = ()
) -> flat.Layout:
    """The flat layout whose buckets are units of at least ``least`` bytes, split over the mesh axes ``split``.

    ``labels`` as for ``flat.plan``: what bears different labels shares no bucket, and a leaf that bears None is kept as
    it is, whole on every rank.
    """
    named = tree.named_leaves(abstract)
    sizes = [info.nbytes for info in named.values()]
    marks = tree.flatten_up_to(tree.structure(abstract), labels)
    joined = merged([unit_of(name) for name in named], sizes, least)
    both = [None if mark is None else (unit, mark) for unit, mark in zip(joined, marks, strict=True)]
    multiple = 1 if mesh is None else mesh.extent(split)
    planned = flat.plan(abstract, tree.unflatten(tree.structure(abstract), both), multiple)
    flats = [name for name, slots in planned.buckets.items() if slots[0].offset is not None]
    return replace(planned, split=tuple((name, split) for name in flats) if split else ())
