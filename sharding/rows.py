"""Batches over the data axes: dim 0 of every leaf is the batch's rows, and each data rank has its share of them.

Any number of rows is shared out over any number of ranks, and a rank's rows over its microbatches. Ranks work together,
so that one whose share is empty works too: on a copy of rows that others have, which counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from functional_booster.kernels import tree

from .mesh import Mesh, Replicated

Tree = tree.Tree


@dataclass(frozen=True, eq=False)
class StandIn:
    """What a process hands to a step where the global batch has no row for it: some row of that batch, in ``batch``.

    A step computes with it as the other ranks do with theirs, and counts nothing of it. Nothing else may take it for a
    batch: looking into it raises. To move it to a device, as any batch: ``fb.tree.map``.
    """

    batch: Tree

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(_NO_ROWS)

    __getitem__ = __iter__ = __len__ = _refuse

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {_NO_ROWS}")


_NO_ROWS = (
    "this rank has no row in this global batch, but a StandIn, which only a step can count as nothing: give it to "
    "a train_step or an eval_step as it is (fb.tree.map moves it to a device), or set drop_last=True"
)

tree.register(StandIn, ("batch",))


@dataclass(frozen=True)
class Microbatch:
    """Microbatch number ``index`` of each rank, as ``spmd`` takes it.

    ``counts``: 0-d bool on each rank, False where it lacks these rows and others stand in for them. None: all count. It
    is a value, never a constant of a graph: of what is known to be zero, a compiler might leave out the collectives.
    """

    index: int
    batch: Tree
    counts: torch.Tensor | None = None


def rows_of(batch: Tree) -> int:
    """The number of rows: the size of dim 0 of the first leaf that has one; 1 where none has."""
    return next((leaf.shape[0] for leaf in tree.leaves(batch) if leaf.dim()), 1)


def portion(rows: range, parts: int, which: int) -> range:
    """Part number ``which`` of ``parts``: consecutive rows, equally many in each, or one more in the first ones."""
    each, more = divmod(len(rows), parts)
    start = which * each + min(which, more)
    return rows[start : start + each + (which < more)]


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

    def cut(leaf: torch.Tensor) -> torch.Tensor | Replicated:
        return _placed(leaf.unflatten(0, (ranks, -1)), mesh, axes) if leaf.dim() else Replicated(leaf)

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


def share_out(batch: Tree, mesh: Mesh, axes: tuple[str, ...], number: int = 1) -> list[Microbatch]:
    """The microbatches, ``number`` a rank, of a batch of any number of rows: no row is left out, none counts twice.

    Shares are ``portion``s: of the global batch over the data ranks (on a real mesh each process hands in its own,
    or a ``StandIn``), and of a rank's rows over its microbatches. Processes go through each microbatch, the empty ones
    too. Virtual ranks that differ by a row take turns: a Microbatch for each size. Raises ValueError for a StandIn
    where there are no other processes, which would have the rows.
    """
    if isinstance(batch, StandIn):
        if not mesh.across:
            raise ValueError("batch: a StandIn, which is for a process beside others that have rows")
        return [Microbatch(index, batch.batch, _flags(False, batch)) for index in range(number)]
    rows, ranks = range(rows_of(batch)), mesh.extent(axes) if mesh.virtual else 1
    if len(rows) % (ranks * number) == 0:
        cut = microbatches(split_rows(batch, mesh, axes), number, len(mesh.axes) if mesh.virtual else 0)
        return [Microbatch(index, part) for index, part in enumerate(cut)]
    if not mesh.virtual:
        return _of_process(batch, [portion(rows, number, index) for index in range(number)], mesh.across)
    of_ranks = [portion(rows, ranks, rank) for rank in range(ranks)]
    shared = []
    for index in range(number):
        slots = [portion(own, number, index) for own in of_ranks]
        for size in sorted({len(slot) for slot in slots} - {0}, reverse=True):
            counts = [len(slot) == size for slot in slots]
            # What stands in is another rank's whole microbatch, which is finite if the batch is.
            chosen = [slot if own else slots[counts.index(True)] for slot, own in zip(slots, counts, strict=True)]
            flags = _placed(_flags(counts, batch), mesh, axes) if len(rows) % ranks else None
            shared.append(Microbatch(index, _of_virtual_ranks(batch, chosen, mesh, axes), flags))
    return shared


def _of_process(batch: Tree, slots: Sequence[range], across: bool) -> list[Microbatch]:
    def take(slot: range) -> Tree:
        return tree.map(lambda leaf: leaf[slot.start : slot.stop] if leaf.dim() else leaf, batch)

    if not across:
        return [Microbatch(index, take(slot)) for index, slot in enumerate(slots) if slot]
    stands_in = _flags(False, batch)
    return [Microbatch(index, take(slot or slots[0]), None if slot else stands_in) for index, slot in enumerate(slots)]


def _of_virtual_ranks(batch: Tree, slots: Sequence[range], mesh: Mesh, axes: tuple[str, ...]) -> Tree:
    """Each data rank's slot of the rows, all of one size, as ``spmd`` takes them."""

    def take(leaf: torch.Tensor) -> torch.Tensor | Replicated:
        if not leaf.dim():
            return Replicated(leaf)
        return _placed(leaf[torch.tensor([list(slot) for slot in slots], device=leaf.device)], mesh, axes)

    return tree.map(take, batch)


def _placed(leaf: torch.Tensor, mesh: Mesh, axes: tuple[str, ...]) -> torch.Tensor:
    """(ranks along ``axes``, ...) -> (*mesh.shape, ...): what each rank of a virtual mesh has."""
    sizes = tuple(size if name in axes else 1 for name, size in mesh.axes)
    return leaf.unflatten(0, sizes).expand(*mesh.shape, *leaf.shape[1:])


def _flags(values: bool | list[bool], batch: Tree) -> torch.Tensor:
    return torch.tensor(values, device=tree.leaves(batch)[0].device)
