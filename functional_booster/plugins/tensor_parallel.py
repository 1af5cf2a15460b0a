"""A data-parallel layout of what each rank of a tensor-parallel group has: leaves are cut first, then laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.precision import Policy
from functional_booster.sharding.mesh import Mesh
from functional_booster.sharding.tensor import cut_of

Tree = tree.Tree


def layout(data: Callable[[Tree, Tree, Mesh], Layout], abstract: Tree, labels: Tree, mesh: Mesh, axis: str) -> Layout:
    """The layout ``data(abstract, labels, mesh)`` of local leaves, as one of global leaves that ``axis`` cuts.

    A leaf whose label is None is kept whole, and cut where it is used. Raises ValueError, naming the leaf, for a spec
    that ``axis`` cannot cut by.
    """
    names, structure = tree.names(abstract), tree.structure(abstract)
    infos, marks = tree.leaves(abstract), tree.flatten_up_to(structure, labels)
    cuts = []
    for name, info in zip(names, infos, strict=True):
        try:
            cuts.append(cut_of(info, axis, mesh))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    stored = [None if mark is None else cut for cut, mark in zip(cuts, marks, strict=True)]
    if not any(cuts):
        return data(abstract, labels, mesh)
    local = [
        info if cut is None else replace(info, shape=cut.shape_of(info.shape))
        for info, cut in zip(infos, stored, strict=True)
    ]
    apart = [None if mark is None else (cut is not None, mark) for cut, mark in zip(stored, marks, strict=True)]
    planned = data(tree.unflatten(structure, local), tree.unflatten(structure, apart), mesh)
    slots = tuple(
        replace(slot, shape=info.shape, cut=cut) for slot, info, cut in zip(planned.slots, infos, cuts, strict=True)
    )
    over = {slot.bucket for slot, cut in zip(planned.slots, stored, strict=True) if cut is not None}
    split = tuple(
        (bucket, (axis, *axes) if bucket in over else axes)
        for bucket, axes in planned.axes.items()
        if axes or bucket in over
    )
    return replace(planned, slots=slots, split=split)


def inside(fn: Callable[[Flat, Policy], Flat], values: Flat, policy: Policy) -> Flat:
    """``fn`` of what one rank along the axis of cuts has, as if that were all there is."""
    result: Any = fn(Flat(values.buffers, values.layout.local), policy)
    return Flat(result.buffers, values.layout)
