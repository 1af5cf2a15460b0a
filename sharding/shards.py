"""Flat trees over a mesh: whole buffers, and the part of each that a rank holds. Runs inside ``spmd``."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from functional_booster.kernels.flat import Flat

from .collectives import all_gather, axis_index, axis_size, psum, psum_scatter


def part(whole: Flat) -> Flat:
    """This rank's part of every buffer that mesh axes split; the others as they are. No communication."""

    def mine(buffer: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        rows = buffer.view(axis_size(axes), -1)
        index = torch.as_tensor(axis_index(axes), dtype=torch.int64, device=buffer.device)
        return rows.index_select(0, index.reshape(1)).squeeze(0)

    return _each(whole, lambda bucket, buffer, axes: mine(buffer, axes))


def join(parts: Flat, buckets: Collection[str] | None = None) -> Flat:
    """The whole buffers (of ``buckets`` alone, if given); those that are whole already stay.

    part -> whole, varying -> invariant. Forward: all_gather; backward: psum_scatter.
    """

    def whole(bucket: str, buffer: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        if is_whole(parts, bucket) or (buckets is not None and bucket not in buckets):
            return buffer
        return all_gather(buffer, axes)

    return _each(parts, whole)


def scatter(partial: Flat, dtype: torch.dtype | None) -> Flat:
    """The sums over ranks of whole buffers, each rank's part of them, summed in ``dtype``; what is a part stays.

    partial -> part. Forward: psum_scatter; backward: all_gather.
    """

    def summed(bucket: str, buffer: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        return psum_scatter(buffer.to(dtype or buffer.dtype), axes) if is_whole(partial, bucket) else buffer

    return _each(partial, summed)


def total(partial: Flat, axes: tuple[str, ...], dtype: torch.dtype | None) -> Flat:
    """The sums over ``axes``, less those that split a buffer, in ``dtype``.

    partial -> invariant. Forward: psum; backward: psum.
    """

    def summed(bucket: str, buffer: torch.Tensor) -> torch.Tensor:
        rest = tuple(axis for axis in axes if axis not in partial.layout.axes[bucket])
        return psum(buffer.to(dtype or buffer.dtype), rest) if axis_size(rest) > 1 else buffer

    return Flat(
        {name: None if buffer is None else summed(name, buffer) for name, buffer in partial.buffers.items()},
        partial.layout,
    )


def is_whole(flat: Flat, bucket: str) -> bool:
    """Whether the buffer of a bucket that is split holds all of it."""
    return flat.buffers[bucket].shape[-1] == flat.layout.size(bucket)


def _each(flat: Flat, change: Callable[[str, torch.Tensor, tuple[str, ...]], torch.Tensor]) -> Flat:
    """``change(bucket, buffer, axes)`` of every buffer that mesh axes split."""
    axes = flat.layout.axes
    buffers = {
        name: buffer if buffer is None or not axes[name] else change(name, buffer, axes[name])
        for name, buffer in flat.buffers.items()
    }
    return Flat(buffers, flat.layout)
