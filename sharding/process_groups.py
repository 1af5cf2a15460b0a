"""The ops that move tensors between processes, by the name of a process group: torch's functional collectives.

The only file that binds them, as raw ops, whose names and schemas are the same in torch 2.11 and 2.13. An op starts a
collective and ``wait_tensor`` ends it: two nodes of a traced graph, so that a compiler can move the second one. Every
result is fresh storage.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed._functional_collectives  # registers the shapes that the ops return on fake tensors

_ops = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """Sum ("sum"), or largest or smallest element ("max", "min"), over the ranks of the group."""
    return _carried(x, lambda x: _ops.all_reduce(x, op, group))


def all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The values of all ``size`` ranks, (size, *x.shape)."""
    return _carried(x.unsqueeze(0), lambda x: _ops.all_gather_into_tensor(x, size, group))


def reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The sum over ranks of x (size, ...), of which rank r gets the part x[r]."""
    return _carried(x, lambda x: _ops.reduce_scatter_tensor(x, "sum", size, group)).squeeze(0)


def all_to_all(x: torch.Tensor, group: str) -> torch.Tensor:
    """x (size, ...): rank r sends x[j] to rank j, and finds what it gets from j at place j."""
    ones = [1] * x.shape[0]
    return _carried(x, lambda x: _ops.all_to_all_single(x, ones, ones, group))


def send(x: torch.Tensor, group: str, size: int, destination: int | None, source: int | None) -> torch.Tensor:
    """Send x to one rank (None: to nobody) and return what ``source`` sends, of x's shape (None: zeros)."""
    given = [int(rank == destination) for rank in range(size)]
    taken = [int(rank == source) for rank in range(size)]
    mine = x.unsqueeze(0)[: sum(given)]
    got = _carried(mine, lambda x: _ops.all_to_all_single(x, taken, given, group))
    # Zeros that still depend on the collective: other ranks wait for it, so no graph may drop it.
    return torch.cat([got, x.new_zeros(1 - sum(taken), *x.shape)]).squeeze(0)


def broadcast(x: torch.Tensor, root: int, group: str) -> torch.Tensor:
    """The value of x on the rank ``root`` of the group."""
    return _carried(x, lambda x: _ops.broadcast(x, root, group))


def _carried(x: torch.Tensor, collective: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``collective(x)``, waited for; bools and float8 travel as bytes and complex numbers as pairs of reals."""
    if x.dtype == torch.bool:
        return _carried(x.to(torch.uint8), collective).to(torch.bool)
    if x.is_floating_point() and x.itemsize == 1:
        return _carried(x.view(torch.uint8), collective).view(x.dtype)
    if x.is_complex():
        return torch.view_as_complex(_carried(torch.view_as_real(x.resolve_conj()), collective))
    return _ops.wait_tensor(collective(x.contiguous()))
