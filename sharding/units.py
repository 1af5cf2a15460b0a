"""Units: which leaves travel together. A block's leaves are needed at one time, so they share a buffer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

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


def prefix(name: str, patterns: Collection[str]) -> str | None:
    """The longest prefix of a leaf's name that one of the patterns matches, entry by entry; None where none does.

    ``h.*`` matches ``h.3`` of ``h.3.attn.weight``, and ``h.*.attn`` matches ``h.3.attn`` (shell patterns: ``*``, ``?``,
    ``[...]``).
    """
    path = name.split(".")
    depths = [
        len(entries)
        for entries in (pattern.split(".") for pattern in patterns)
        if len(entries) <= len(path) and all(map(fnmatchcase, path, entries))
    ]
    return ".".join(path[: max(depths)]) if depths else None


def check_patterns(argument: str, patterns: Collection[str], abstract: Tree) -> None:
    """Raise ValueError, with what there is, for patterns (as for ``prefix``) that match no leaf.

    Of a partition, leaves of the other part count as well.
    """
    names = tree.names(abstract, lambda node: node is None)
    if unmatched := [pattern for pattern in patterns if all(prefix(name, (pattern,)) is None for name in names)]:
        some = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        raise ValueError(f"{argument}: {', '.join(map(repr, unmatched))} matches no name of the parameter tree: {some}")


def merged(units: Sequence[str], sizes: Sequence[int], least: int) -> list[str]:
    """Each leaf's unit, neighbours joined until a unit has ``least`` bytes; units stay whole.

    ``units`` and ``sizes`` (bytes) are in the order of the leaves. A joined unit bears the name of its first.
    """
    homes: dict[str, str] = {}
    home, filled = "", least
    for unit, weight in weights(units, sizes).items():
        if filled >= least:
            home, filled = unit, 0
        homes[unit] = home
        filled += weight
    return [homes[unit] for unit in units]


def packed(units: Sequence[str], sizes: Sequence[int], most: int) -> list[str]:
    """Each leaf's unit, neighbours joined while they hold ``most`` elements at most; units stay whole.

    Like ``merged``, which has a lower bound. A unit that is larger by itself is joined with none.
    """
    homes: dict[str, str] = {}
    home, filled = "", most
    for unit, weight in weights(units, sizes).items():
        if not homes or filled + weight > most:
            home, filled = unit, 0
        homes[unit] = home
        filled += weight
    return [homes[unit] for unit in units]


def layout(
    abstract: Tree,
    labels: Tree,
    join: Callable[[Sequence[str], Sequence[int]], Sequence[str]],
    mesh: Mesh | None = None,
    split: tuple[str, ...] = (),
    *,
    unit: Callable[[str], str] = unit_of,
    whole: Collection[str] = (),
) -> flat.Layout:
    """The flat layout whose buckets are units, joined by ``join(units, bytes of each leaf)``, split over mesh axes.

    ``labels`` as for ``flat.plan``: what bears different labels shares no bucket, and a leaf that bears None is kept as
    it is, whole on every rank. So are, in buckets of their own, the leaves under ``whole`` (patterns as for
    ``prefix``). ``unit`` says to which unit the leaf of a name belongs.
    """
    named = tree.named_leaves(abstract)
    marks = tree.flatten_up_to(tree.structure(abstract), labels)
    joined = join([unit(name) for name in named], [info.nbytes for info in named.values()])
    apart = [prefix(name, whole) is not None for name in named]
    finer = [None if key[-1] is None else key for key in zip(joined, apart, marks, strict=True)]
    multiple = 1 if mesh is None else mesh.extent(split)
    planned = flat.plan(abstract, tree.unflatten(tree.structure(abstract), finer), multiple)
    held = {name for name, kept in zip(named, apart, strict=True) if kept}
    cut = [name for name, (slot, *_) in planned.buckets.items() if slot.offset is not None and slot.name not in held]
    return replace(planned, split=tuple((bucket, split) for bucket in cut) if split else ())


def on_host(layout: flat.Layout, buckets: Collection[str]) -> flat.Layout:
    """The layout whose flat buckets of these names live in the host's memory."""
    flats = (name for name, slots in layout.buckets.items() if slots[0].offset is not None)
    return replace(layout, host=tuple(name for name in flats if name in buckets))


def weights(units: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """{unit: bytes of its leaves}, in the order of the units' first leaves."""
    weights: dict[str, int] = {}
    for unit, size in zip(units, sizes, strict=True):
        weights[unit] = weights.get(unit, 0) + size
    return weights
