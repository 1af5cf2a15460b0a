"""The Triton kernel of ``dropout_residual``: imported at its first use on a GPU, never before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .threefry_cipher_triton import elements

_BLOCK = 2048  # elements of a program: a whole number of the cipher's blocks, of 4


def add(
    out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, key: torch.Tensor, dropped: int, scale: float
) -> None:
    """Fill ``out`` (..., *shape) from x, its residual (None: 0) and key (..., 2), all contiguous and not empty."""
    rows = key.numel() // 2
    size = x.numel() // rows
    with torch.cuda.device_of(x):
        _add[(triton.cdiv(size, _BLOCK), rows)](
            out,
            x,
            x if residual is None else residual,
            key,
            size,
            dropped - 2**15 - 1,
            scale,
            HAS_RESIDUAL=residual is not None,
            BLOCK=_BLOCK,
        )


@triton.jit
def _add(out_ptr, x_ptr, residual_ptr, key_ptr, size, below, scale, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row, start = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * BLOCK
    column = start + tl.arange(0, BLOCK)
    place, inside = row * size + column, column < size
    keep = elements(key_ptr + row * 2, start // 4, BLOCK, 16).to(tl.int32) > below
    x = tl.load(x_ptr + place, mask=inside).to(tl.float32)
    total = tl.where(keep, x * scale, 0.0)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + place, mask=inside).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)
