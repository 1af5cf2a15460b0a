"""The primitives under the collectives: one axis, one tensor, the ranks along dim 0.

Each is an autograd.Function, so that torch.func.grad, vmap, autograd and make_fx accept it, and its backward is made of
such Functions, so that it can be differentiated again. An axis of a virtual mesh is a level of vmap: the rank's index
along it, a tensor batched at just that level, is an operand, so that the batching rule knows the level where the other
ranks are; any other level is more data.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from . import process_groups
from .compressed import Wire, carried, exactly, summed
from .environment import Axis

Pairs: TypeAlias = tuple[tuple[int, int], ...]


def _collective(
    stacked: Callable[..., torch.Tensor],
    real: Callable[..., torch.Tensor],
    transpose: Callable[..., torch.Tensor],
    alone: Callable[..., torch.Tensor] = lambda x, *static: x,
    batch: tuple[int, int] = (0, 0),
) -> Callable[..., torch.Tensor]:
    """The linear collective over one axis ``(x, axis, *static)``, as an autograd.Function.

    ``stacked(x, *static)`` gets and returns the values of all ranks, along dim 0; ``real(x, axis, *static)`` those of
    this rank, which has a process group; ``alone(x, *static)`` those of the only rank. ``transpose`` is called like the
    collective, on the cotangent. ``batch``: the dims at which a batch of another level goes in and comes out.
    With a Wire among ``static``, a derivative taken outside of the mesh is the ``transpose`` on each rank too, which
    may cast otherwise than ``stacked`` does; without, it is that of ``stacked``.
    """

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor, index: torch.Tensor | None, axis: Axis, *static: Any) -> torch.Tensor:
            return real(x, axis, *static)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            _, index, ctx.axis, *ctx.static = inputs
            ctx.save_for_backward(index)

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            (axis,) = _joined(ctx.saved_tensors, (ctx.axis,))
            return transpose(cotangent, axis, *ctx.static), None, None, *(None for _ in ctx.static)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, int]:
            dim, own = in_dims[:2]
            if own is None:
                return Collective.apply(x.movedim(dim, batch[0]), *operands), batch[1]
            _, axis, *static = operands
            x, casts = _batch_first(info, x, dim), any(isinstance(value, Wire) for value in static)
            return Stacked.apply(x, axis, *static) if casts else stacked(x, *static), 0

    class Stacked(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor, axis: Axis, *static: Any) -> torch.Tensor:
            return stacked(x, *static)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            _, ctx.axis, *ctx.static = inputs

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            def on_a_rank(cotangent: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
                return transpose(cotangent, dataclasses.replace(ctx.axis, index=index), *ctx.static)

            ranks = torch.arange(ctx.axis.size, dtype=torch.int32, device=cotangent.device)
            return torch.func.vmap(on_a_rank)(cotangent, ranks), None, *(None for _ in ctx.static)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, int]:
            return Stacked.apply(x.movedim(in_dims[0], batch[0] + 1), *operands), batch[1] + 1

    # torch binds the arguments at every call; asking for the signature of a plain function is the slow part of that.
    for function in (Collective, Stacked):
        forward: Any = function.forward
        forward.__signature__ = inspect.signature(forward)

    def call(x: torch.Tensor, axis: Axis, *static: Any) -> torch.Tensor:
        return alone(x, *static) if _is_alone(axis) else Collective.apply(x, *_parted(axis), *static)

    return call


def _sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    return _on_every_rank(x.sum(0, dtype=x.dtype), x.shape[0])


def _permuted(x: torch.Tensor, perm: Pairs, *wire: Wire) -> torch.Tensor:
    values, sources = carried(x, *wire).unbind(0), {destination: source for source, destination in perm}
    zeros = torch.zeros_like(values[0])
    return torch.stack([values[sources[rank]] if rank in sources else zeros for rank in range(len(values))])


def _send(x: torch.Tensor, axis: Axis, perm: Pairs, *wire: Wire) -> torch.Tensor:
    rank = int(axis.index)
    sources = {destination: source for source, destination in perm}
    to, source = dict(perm).get(rank), sources.get(rank)
    return carried(x, *wire, by=lambda x: process_groups.send(x, _group(axis), axis.size, to, source))


def _to_root(x: torch.Tensor, axis: Axis, root: int) -> torch.Tensor:
    """The sum on the root, zero elsewhere; every rank's result depends on it, so that no graph drops it."""
    total, here = psum(x, axis), axis.index == root
    return torch.where(here if isinstance(here, torch.Tensor) else total.new_full((), here, dtype=torch.bool), total, 0)


def _reversed(wire: tuple[Wire, ...]) -> tuple[Wire, ...]:
    return tuple(one.reversed() for one in wire)


psum = _collective(
    _sum_over_ranks,
    lambda x, axis: process_groups.all_reduce(x, "sum", _group(axis)),
    transpose=lambda g, axis: psum(g, axis),
)
enter = _collective(lambda x: x, lambda x, axis: x.view_as(x), transpose=lambda g, axis: leave(g, axis))
leave = _collective(
    _sum_over_ranks,
    lambda x, axis: process_groups.all_reduce(x, "sum", _group(axis)),
    transpose=lambda g, axis: enter(g, axis),
)
# The next three have the ranks in dim 0 of this rank's value: of the result, of ``x``, of both. They and ``permute``
# take a Wire; one that compresses, for rows (..., n) of which each is all that one rank sends another.
gather = _collective(
    lambda x, *wire: _on_every_rank(carried(x, *wire), x.shape[0]),
    lambda x, axis, *wire: carried(x, *wire, by=lambda x: process_groups.all_gather(x, _group(axis), axis.size)),
    transpose=lambda g, axis, *wire: scatter(g, axis, *_reversed(wire)),
    alone=lambda x, *wire: exactly(x, *wire).unsqueeze(0),
    batch=(0, 1),
)
scatter = _collective(
    lambda x, *wire: summed(x, *wire),
    lambda x, axis, *wire: summed(
        x,
        *wire,
        by=lambda x: process_groups.reduce_scatter(x, _group(axis), axis.size),
        exchange=lambda x: process_groups.all_to_all(x, _group(axis)),
    ),
    transpose=lambda g, axis, *wire: gather(g, axis, *_reversed(wire)),
    alone=lambda x, *wire: exactly(x, *wire).squeeze(0),
    batch=(1, 0),
)
exchange = _collective(
    lambda x, *wire: carried(x, *wire).transpose(0, 1),
    lambda x, axis, *wire: carried(x, *wire, by=lambda x: process_groups.all_to_all(x, _group(axis))),
    transpose=lambda g, axis, *wire: exchange(g, axis, *_reversed(wire)),
    batch=(1, 1),
)
permute = _collective(
    _permuted,
    _send,
    transpose=lambda g, axis, perm, *wire: permute(
        g, axis, tuple((to, source) for source, to in perm), *_reversed(wire)
    ),
    alone=lambda x, perm, *wire: x if perm else torch.zeros_like(x),
)
broadcast = _collective(
    lambda x, root: _on_every_rank(x[root], x.shape[0]),
    lambda x, axis, root: process_groups.broadcast(x, root, _group(axis)),
    transpose=_to_root,
)


class _Extreme(torch.autograd.Function):
    """The largest or smallest value ("max", "min") over ``dims``, which stay with size 1, and over axes."""

    @staticmethod
    def forward(
        x: torch.Tensor, op: str, dims: tuple[int, ...], axes: tuple[Axis, ...], *indices: torch.Tensor | None
    ) -> torch.Tensor:
        best = _extreme_of(x, op, dims)
        for axis in axes:
            best = process_groups.all_reduce(best, op, _group(axis))
        return best

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, _, ctx.dims, ctx.axes, *indices = inputs
        ctx.save_for_backward(x, output, *indices)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, best, *indices = ctx.saved_tensors
        axes = _joined(indices, ctx.axes)
        tied = (x == best).to(cotangent.dtype)
        ties = along(psum, tied.sum(ctx.dims, keepdim=True) if ctx.dims else tied, axes)
        return along(psum, cotangent, axes) * tied / ties, None, None, None, *(None for _ in indices)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        x: torch.Tensor,
        op: str,
        dims: tuple[int, ...],
        axes: tuple[Axis, ...],
        *indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, int]:
        x, dims = _batch_first(info, x, in_dims[0]), tuple(dim + 1 for dim in dims)
        others = [place for place, own in enumerate(in_dims[4:]) if own is None]
        if len(others) == len(axes):
            return _Extreme.apply(x, op, dims, axes, *indices), 0
        rest, dims = tuple(axes[place] for place in others), (0, *dims)
        operands = (indices[place] for place in others)
        best = _Extreme.apply(x, op, dims, rest, *operands) if rest else _extreme_of(x, op, dims)
        return _on_every_rank(best[0], info.batch_size), 0


def extreme(x: torch.Tensor, op: str, axes: Sequence[Axis]) -> torch.Tensor:
    """The largest or smallest value ("max", "min") of any rank along these axes."""
    axes = [axis for axis in axes if not _is_alone(axis)]
    if not axes:
        return x
    indices, bare = zip(*map(_parted, axes), strict=True)
    return _Extreme.apply(x, op, (), bare, *indices)


def _extreme_of(x: torch.Tensor, op: str, dims: tuple[int, ...]) -> torch.Tensor:
    reduction = torch.amax if op == "max" else torch.amin
    return reduction(x, dims, keepdim=True) if dims else x


def along(collective: Callable[..., torch.Tensor], x: torch.Tensor, axes: Sequence[Axis], *static: Any) -> torch.Tensor:
    """A collective along one axis after another."""
    for axis in axes:
        x = collective(x, axis, *static)
    return x


def _batch_first(info: Any, x: torch.Tensor, dim: int | None) -> torch.Tensor:
    return _on_every_rank(x, info.batch_size) if dim is None else x.movedim(dim, 0)


def _on_every_rank(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.expand(size, *x.shape)


def _is_alone(axis: Axis) -> bool:
    return axis.group is None and not isinstance(axis.index, torch.Tensor)


def _parted(axis: Axis) -> tuple[torch.Tensor | None, Axis]:
    """The tensor in an axis, and the rest: a Function takes tensors as operands of their own."""
    if isinstance(axis.index, torch.Tensor):
        return axis.index, dataclasses.replace(axis, index=-1)
    return None, axis


def _joined(indices: Sequence[torch.Tensor | None], axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """``_parted`` undone."""
    return tuple(
        axis if index is None else dataclasses.replace(axis, index=index)
        for index, axis in zip(indices, axes, strict=True)
    )


def _group(axis: Axis) -> str:
    """The process group of an axis; a virtual axis has none, and outside of its vmap level no other ranks."""
    if axis.group is None:
        raise RuntimeError(f"axis {axis.name!r} of a virtual mesh is used outside of the program that declares it")
    return axis.group
