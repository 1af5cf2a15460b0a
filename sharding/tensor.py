"""Tensor parallelism: which part of a leaf a rank computes with, and how lookups and logits go over split tables.

The rules of Megatron-LM (Shoeybi et al. 2019, section 3) for leaves whose spec names an axis: a rank's local leaf is a
slice along one dim, in whole grains (heads), padded with zeros where the ranks do not divide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Cut, Layout

from .abstract import ArrayInfo
from .collectives import axis_index, axis_size, enter, leave, pmax
from .environment import current
from .mesh import Mesh
from .partition import part_of
from .spec import P

Tree = tree.Tree


def cut_of(info: ArrayInfo, axis: str, mesh: Mesh) -> Cut | None:
    """How ``axis`` cuts a leaf; None where its spec does not name the axis, one rank is all there is, or the ranks do
    not divide the grains of a leaf that is then replicated.

    Raises ValueError for a spec that splits the dim by other axes as well, or a dim that is no whole number of grains.
    """
    dims = [dim for dim, entry in enumerate(info.spec) if entry == axis or (isinstance(entry, tuple) and axis in entry)]
    ranks = mesh.extent(axis)
    if not dims or ranks == 1:
        return None
    (dim,) = dims
    if info.spec[dim] not in (axis, (axis,)):
        raise ValueError(f"{info.spec}: dim {dim} is split by {info.spec[dim]}, expected {axis!r} alone")
    grains, rest = divmod(info.shape[dim], info.grain)
    if rest:
        raise ValueError(f"shape {info.shape}: dim {dim} is no whole number of grains of {info.grain}")
    if grains % ranks and info.uneven == "replicate":
        return None
    return Cut(dim, axis, ranks, -(-grains // ranks) * info.grain)


def own_parts(params: Tree, layouts: Iterable[Layout | None]) -> Tree:
    """The leaves that this rank computes with: of those that are stored whole, though an axis cuts them, its part; and
    padding passes no gradient. Runs inside ``spmd``.

    invariant -> varying. A slice; transpose: psum of the cotangents, each in its place.
    """
    held = [layout for layout in layouts if layout is not None]
    slots = {slot.name: slot for layout in held for slot in layout.slots if slot.cut}
    parts = frozenset(slot.name for layout in held for slot in layout.slots if slot.bucket in layout.cuts)
    if not slots:
        return params

    def own(name: str, leaf: torch.Tensor) -> torch.Tensor:
        slot = slots.get(name)
        if slot is None or slot.cut is None:
            return leaf
        cut, size = slot.cut, slot.shape[slot.cut.dim]
        if name not in parts:
            leaf = enter(leaf, cut.axis)
            whole = F.pad(leaf.movedim(cut.dim, -1), (0, cut.part * cut.ranks - size)).movedim(-1, cut.dim)
            return part_of(whole, P(*(None,) * cut.dim, cut.axis))
        if cut.part * cut.ranks == size:
            return leaf
        index = axis_index(cut.axis).to(leaf.device, torch.int64) * cut.part
        real = torch.arange(cut.part, device=leaf.device) + index < size
        return torch.where(real.view(-1, *(1,) * (leaf.dim() - cut.dim - 1)), leaf, 0)

    return tree.map_with_name(own, params)


def splits(axis: str) -> bool:
    """Whether several ranks lie along ``axis`` here; also where nobody declares it."""
    found = current().axis(axis)
    return found is not None and found.size > 1


def lookup(table: torch.Tensor, rows: torch.Tensor, axis: str) -> torch.Tensor:
    """Rows (...) int64 of a table (V, D) of which each rank has a part (V / ranks, D): (..., D), invariant.

    Forward: each rank looks up what it has, zeros elsewhere, and psum; backward: the cotangent, onto own rows.
    """
    if not splits(axis):
        return F.embedding(rows, table)
    return leave(partial_lookup(table, rows, axis), axis)


def partial_lookup(table: torch.Tensor, rows: torch.Tensor, axis: str) -> torch.Tensor:
    """``lookup`` before the sum over ranks: partial."""
    local, mine = _own(rows, table.shape[0], axis)
    return torch.where(mine.unsqueeze(-1), F.embedding(local, table), 0)


def whole_logits(logits: torch.Tensor, vocab_size: int, axis: str) -> torch.Tensor:
    """(..., V / ranks) of each rank -> (..., V) without padding: varying -> invariant.

    Forward: psum of the parts, each in its place; backward: this rank's part of the cotangent.
    """
    if not splits(axis):
        return logits
    ranks = torch.arange(axis_size(axis), device=logits.device)
    here = ranks == axis_index(axis).to(logits.device)
    placed = torch.where(here.unsqueeze(1), logits.unsqueeze(-2), 0).flatten(-2)
    return leave(placed, axis).narrow(-1, 0, vocab_size)


def log_softmax_statistics(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, axis: str
) -> Mapping[str, torch.Tensor]:
    """Of logits (N, V / ranks) over all of the vocabulary: "logsumexp", "at" the labels, and their "sum", (N,) each.

    varying -> invariant. Padding does not count. A label out of range has the logit 0.
    """
    here = current().axis(axis)
    if here is None or here.size == 1:
        chosen = logits.gather(-1, labels.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        return {"logsumexp": logits.logsumexp(-1), "at": chosen, "sum": logits.sum(-1)}
    first = axis_index(axis).to(logits.device, torch.int64) * logits.shape[-1]
    real = torch.arange(logits.shape[-1], device=logits.device) + first < vocab_size
    largest = pmax(torch.where(real, logits, -torch.inf).detach().amax(-1), axis)
    exponentials = torch.where(real, (logits - largest.unsqueeze(-1)).exp(), 0)
    local, mine = _own(labels, logits.shape[-1], axis)
    at = torch.where(mine, logits.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0)
    sums = leave(torch.stack([exponentials.sum(-1), at, torch.where(real, logits, 0).sum(-1)]), axis)
    return {"logsumexp": sums[0].log() + largest, "at": sums[1], "sum": sums[2]}


def _own(rows: torch.Tensor, length: int, axis: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Global rows as rows of this rank's part, and which of them it has."""
    local = rows - axis_index(axis).to(rows.device, torch.int64) * length
    mine = (local >= 0) & (local < length)
    return torch.where(mine, local, 0), mine
