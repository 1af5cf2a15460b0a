"""The Triton kernels of ``global_norm``: imported at their first use on a GPU, never before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # elements that a program adds at a time
_PARTS = 1024  # at most so many programs, whatever the GPU, so that all add in one order


def norm(x: torch.Tensor) -> torch.Tensor:
    """The norm, 0-d float64, of a tensor that is contiguous and not empty."""
    size = x.numel()
    parts = min(triton.cdiv(size, _BLOCK), _PARTS)
    sums = torch.empty(parts, dtype=torch.float64, device=x.device)
    out = torch.empty((), dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):
        _sums[(parts,)](sums, x, size, BLOCK=_BLOCK, num_warps=8)
        _root[(1,)](out, sums, parts, BLOCK=triton.next_power_of_2(parts))
    return out


@triton.jit
def _sums(sums_ptr, x_ptr, size, BLOCK: tl.constexpr):
    """Each program has every so manieth block."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(start, size, stride):
        place = first + offsets
        x = tl.load(x_ptr + place, mask=place < size, other=0.0, eviction_policy="evict_first").to(tl.float64)
        total += x * x
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _root(out_ptr, sums_ptr, parts, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(sums_ptr + place, mask=place < parts, other=0.0), axis=0)
    tl.store(out_ptr, tl.sqrt(total))
