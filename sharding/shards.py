"""Flat trees over a mesh: whole buffers, and the part of each that a rank holds. Runs inside ``spmd``, but for
``of_the_first``."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat

from . import overlap
from .collectives import all_gather, axis_index, axis_size, broadcast, psum, psum_scatter
from .mesh import Mesh, spmd

Tree = tree.Tree


def part(whole: Flat) -> Flat:
    """This rank's part of every buffer that mesh axes split; the others as they are. No communication."""
    return _each(whole, lambda bucket, buffer, axes: my_part(buffer, axes))


def my_part(whole: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """This rank's part (N / ranks,) of a buffer (N,) that ``axes`` split. No communication."""
    if not axes:
        return whole
    return whole.view(axis_size(axes), -1).index_select(0, _index(axes, whole.device).reshape(1)).squeeze(0)


def placed(part: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """The buffer (N,) with this rank's part (N / ranks,) in its place and zeros elsewhere. No communication.

    varying -> partial: the sum over ranks is the whole buffer. Transpose: ``my_part``.
    """
    if not axes:
        return part
    ranks = torch.arange(axis_size(axes), device=part.device)
    return torch.where((ranks == _index(axes, part.device)).unsqueeze(1), part, 0).reshape(-1)


def join(
    parts: Flat,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    buckets: Collection[str] | None = None,
    wire: torch.dtype | None = None,
    cotangent_wire: torch.dtype | None = None,
) -> Flat:
    """The whole buffers (of ``buckets`` alone, if given), the floating-point ones in ``dtype``; those that the layout
    says are ``kept`` go as they are, here and below.

    part -> whole, varying -> invariant. Forward: all_gather in ``dtype``; backward: psum_scatter in ``reduce_dtype``,
    back to the dtype of the parts. A buffer that every rank has whole is cast, and its gradient is left to be summed.
    ``wire`` and ``cotangent_wire``: the float8 formats in which parts travel there and gradients back, None: as they
    are.
    """

    def whole(bucket: str, buffer: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        if buckets is not None and bucket not in buckets:
            return buffer
        as_it_is = bucket in parts.layout.kept or not buffer.is_floating_point()
        if not axes or is_whole(parts, bucket):
            return buffer if as_it_is else buffer.to(dtype or buffer.dtype)
        if as_it_is:
            return all_gather(buffer, axes)
        return all_gather(
            buffer, axes, dtype=dtype, reduce_dtype=reduce_dtype, wire=wire, cotangent_wire=cotangent_wire
        )

    return _each(parts, whole)


def transient(parts: Flat) -> Flat:
    """The same parts; a jit on a real mesh gathers them anew for the backward, rather than keep what was gathered."""
    return _each(parts, lambda bucket, buffer, axes: overlap.transient(buffer) if axes else buffer)


def scatter(partial: Flat, dtype: torch.dtype | None, wire: torch.dtype | None = None) -> Flat:
    """The sums over ranks of whole buffers, each rank's part of them, summed in ``dtype``; what is a part stays.

    partial -> part. Forward: psum_scatter; backward: all_gather. ``wire``: the float8 format in which terms travel.
    """

    def summed(bucket: str, buffer: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        if not axes or not is_whole(partial, bucket):
            return buffer
        if bucket in partial.layout.kept:
            return psum_scatter(buffer, axes)
        return psum_scatter(buffer.to(dtype or buffer.dtype), axes, wire=wire)

    return _each(partial, summed)


def total(partial: Flat, axes: tuple[str, ...], dtype: torch.dtype | None, wire: torch.dtype | None = None) -> Flat:
    """The sums over ``axes``, less those that split a buffer, in ``dtype``.

    partial -> invariant. Forward: psum; backward: psum. ``wire``: the float8 format in which terms and sums travel.
    """

    def summed(bucket: str, buffer: torch.Tensor, split: tuple[str, ...]) -> torch.Tensor:
        rest = tuple(axis for axis in axes if axis not in split)
        if axis_size(rest) == 1:
            return buffer
        if bucket in partial.layout.kept:
            return psum(buffer, rest)
        return psum(buffer.to(dtype or buffer.dtype), rest, wire=wire)

    return _each(partial, summed)


def on_device(flat: Flat, device: torch.device) -> Flat:
    """The buffers of the layout's ``host`` on ``device``, to work with, and the others where they are."""

    def moved(bucket: str, buffer: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        # From pinned memory the copy runs beside the work before it; the device's stream orders all that follows.
        return buffer.to(device, non_blocking=True) if bucket in flat.layout.host else buffer

    return _each(flat, moved) if flat.layout.host else flat


def at_home(flat: Flat, pin: bool = False) -> Flat:
    """The buffers of the layout's ``host`` in the host's memory: the inverse of ``on_device``.

    ``pin``: those that come from a GPU in pages that it can copy from by itself.
    """

    def moved(bucket: str, buffer: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        if bucket not in flat.layout.host or buffer.device.type == "cpu":
            return buffer
        if not pin:
            return buffer.to("cpu")  # it is waited for: the host reads it next
        return torch.empty_like(buffer, device="cpu", pin_memory=True).copy_(buffer)

    return _each(flat, moved) if flat.layout.host else flat


def of_the_first(values: Tree, mesh: Mesh) -> Tree:
    """The values that the first process has; on a virtual mesh, and on one process, they are its own."""
    if not mesh.across:
        return values

    def local(values: Tree) -> Tree:
        for axis in mesh.names:
            values = broadcast(values, axis)
        return values

    with torch.no_grad():
        return spmd(local, mesh)(values)


def is_whole(flat: Flat, bucket: str) -> bool:
    """Whether the buffer of a bucket that is split holds all of it."""
    return flat.buffers[bucket].shape[-1] == flat.layout.size(bucket)


def _index(axes: tuple[str, ...], device: torch.device) -> torch.Tensor:
    return torch.as_tensor(axis_index(axes), dtype=torch.int64, device=device)


def _each(flat: Flat, change: Callable[[str, torch.Tensor, tuple[str, ...]], torch.Tensor]) -> Flat:
    """``change(bucket, buffer, the mesh axes that split it)`` of every buffer that there is."""
    axes = flat.layout.axes
    buffers = {
        name: None if buffer is None else change(name, buffer, axes[name]) for name, buffer in flat.buffers.items()
    }
    return Flat(buffers, flat.layout)
