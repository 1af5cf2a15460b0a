"""Sums over rows without atomics: each program keeps its own, a second kernel adds them up, always in one order."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

_COLUMNS, _PARTS = 16, 512  # of the tile that a program adds up at a time


@functools.cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a GPU: programs beyond as many as fit there at once are waiting."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def add_up(outs: tuple[torch.Tensor, ...], parts: torch.Tensor) -> None:
    """Fill one or two outs (*G, D), contiguous, with the sums of parts (outs, G, P, D) over P."""
    _, members, count, size = parts.shape
    with torch.cuda.device_of(parts):
        _add_up[(triton.cdiv(size, _COLUMNS), members, len(outs))](
            outs[0],
            outs[-1],
            parts,
            count,
            size,
            PARTS=min(triton.next_power_of_2(count), _PARTS),
            COLUMNS=_COLUMNS,
            num_warps=8,
        )


@triton.jit
def _add_up(first_ptr, second_ptr, parts_ptr, count, size, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    member, members, which = tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.program_id(2)
    parts_ptr += (which * members + member) * count * size
    total = tl.zeros((PARTS, COLUMNS), parts_ptr.dtype.element_ty)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < count)[:, None] & (column < size)[None, :]
        total += tl.load(parts_ptr + part[:, None].to(tl.int64) * size + column[None, :], mask=inside, other=0.0)
    found = tl.sum(total, axis=0)
    place = member * size + column
    if which == 0:
        tl.store(first_ptr + place, found.to(first_ptr.dtype.element_ty), mask=column < size)
    else:
        tl.store(second_ptr + place, found.to(second_ptr.dtype.element_ty), mask=column < size)
