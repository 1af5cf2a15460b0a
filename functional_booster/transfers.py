"""What the collectives of a step move: counted call by call in the graphs of one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from functional_booster.sharding.mesh import Mesh

from .lowered import Lowered, nbytes


@dataclass(frozen=True)
class Transfer:
    """A kind of collective in one step: ``count`` calls over the ``ranks`` of an axis, whose results have ``bytes``.

    ``wire``: bytes that this rank sends. In all_to_all_single (all_to_all and ppermute) that is what goes to others; in
    the other collectives the ranks are taken to form a ring: of a whole of W bytes over n ranks, all_gather and
    reduce_scatter send W (n - 1) / n, all_reduce twice that, broadcast W.
    """

    op: str
    axis: str
    ranks: int
    dtype: torch.dtype
    count: int
    bytes: int
    wire: int


def transfers(graphs: Iterable[tuple[int, Lowered]], mesh: Mesh) -> tuple[Transfer, ...]:
    """The collectives of graphs that the rank of ``mesh`` calls so many times each: most bytes on the wire first."""
    found: dict[tuple[str, str, torch.dtype], list[tuple[int, int, int]]] = {}
    for times, lowered in graphs:
        for op, axis, node in lowered.calls:
            ranks, place = mesh.extent(axis), dict(zip(mesh.names, mesh.place, strict=True))[axis]
            result = node.meta["val"]
            sizes = times, times * nbytes(result), times * sent(node, ranks, place)
            found.setdefault((op, axis, result.dtype), []).append(sizes)
    kinds = (
        Transfer(op, axis, mesh.extent(axis), dtype, *(sum(column) for column in zip(*calls, strict=True)))
        for (op, axis, dtype), calls in found.items()
    )
    return tuple(sorted(kinds, key=lambda one: (-one.wire, one.op, one.axis, str(one.dtype))))


def sent(node: Node, ranks: int, place: int) -> int:
    """The bytes that rank ``place`` of so many sends in one call of a collective, as ``Transfer`` counts them."""
    given: int = nbytes(node.args[0].meta["val"])  # type: ignore[union-attr]
    op = node.target._opname  # type: ignore[union-attr]
    if op == "all_to_all_single":
        parts: list[int] = list(node.args[2])  # type: ignore[arg-type]
        return given * (sum(parts) - parts[place]) // max(sum(parts), 1)
    if op == "all_gather_into_tensor":
        return given * (ranks - 1)
    if op == "broadcast":
        return given
    return (1 + (op == "all_reduce")) * given * (ranks - 1) // ranks
