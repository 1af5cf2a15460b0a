"""Batches over the data axes: dim 0 of every leaf is the batch's rows, and each data rank has its share of them."""

from __future__ import annotations

import torch

from functional_booster.kernels import tree

from .mesh import Mesh, Replicated

Tree = tree.Tree


def rows_of(batch: Tree) -> int:
    """The number of rows: the size of dim 0 of the first leaf that has one; 1 where none has."""
    return next((leaf.shape[0] for leaf in tree.leaves(batch) if leaf.dim()), 1)


def split_rows(batch: Tree, mesh: Mesh, axes: tuple[str, ...]) -> Tree:
    """A batch as ``spmd`` takes it: on a virtual mesh, the global batch cut along dim 0 over ``axes``; 0-d leaves go to
    each rank. On a real mesh each process hands in its own part, which stays.

    Raises ValueError where the ranks do not divide the rows.
    """
    if not mesh.virtual or not mesh.axes:
        return batch
    ranks, rows = mesh.extent(axes), rows_of(batch)
    if rows % ranks:
        raise ValueError(f"batch: {rows} rows cannot be split over {ranks} data-parallel ranks ({mesh})")
    sizes = tuple(size if name in axes else 1 for name, size in mesh.axes)

    def cut(leaf: torch.Tensor) -> torch.Tensor | Replicated:
        if not leaf.dim():
            return Replicated(leaf)
        return leaf.view(*sizes, rows // ranks, *leaf.shape[1:]).expand(*mesh.shape, -1, *leaf.shape[1:])

    return tree.map(cut, batch)


def microbatches(batch: Tree, number: int, lead: int = 0) -> list[Tree]:
    """The batch cut along its rows, dim ``lead`` of its leaves, into ``number`` equal parts; 0-d leaves go to each.

    Raises ValueError where ``number`` does not divide the rows.
    """
    if number == 1:
        return [batch]
    leaves = tree.leaves(batch)
    rows = next((leaf.shape[lead] for leaf in leaves if leaf.dim() > lead), 1)
    if rows % number:
        of_a_rank = " of a rank" if lead else ""
        raise ValueError(f"batch: {rows} rows{of_a_rank} cannot be split into accumulate={number} equal microbatches")
    size = rows // number
    return [
        tree.map(lambda leaf, first=first: leaf if leaf.dim() <= lead else leaf.narrow(lead, first, size), batch)
        for first in range(0, rows, size)
    ]
