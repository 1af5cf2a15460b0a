"""The Triton kernels of ``scaled_masked_softmax``: imported at their first use on a GPU, never before.

A program has some short rows, or one long one. A row of at most ``_LONGEST`` columns is read once; a longer one twice,
the first time for its maximum and sum of exponentials (Milakov and Gimelshein 2018, "Online normalizer calculation").
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LONGEST = 8192  # columns that a program holds at a time
_TILE = 2048  # elements of several short rows


def forward(out: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> None:
    """Fill ``out`` from x (..., Q, K), both contiguous and not empty; the mask broadcasts to x, by its strides."""
    size = x.shape[-1]
    queries, heads, strides = 1 if x.dim() < 2 else x.shape[-2], 1, (0, 0, 0, 0)
    if mask is not None:
        mask = mask.expand(x.shape)
        mask = mask[(None,) * (4 - x.dim())] if x.dim() <= 4 else mask.reshape(1, -1, queries, size)
        heads, strides = mask.shape[1], mask.stride()
    rows, block, warps = _tiles(size)
    with torch.cuda.device_of(x):
        _forward[(triton.cdiv(x.numel() // size, rows),)](
            out,
            x,
            x if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask,
            x.numel() // size,
            size,
            queries,
            heads,
            *strides,
            scale,
            MASK=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
            CAUSAL=causal,
            ROWS=rows,
            BLOCK=block,
            IS_WHOLE=size <= block,
            num_warps=warps,
        )


def backward(out: torch.Tensor, y: torch.Tensor, cotangent: torch.Tensor, scale: float) -> None:
    """Fill ``out`` from y and its cotangent (..., K), all contiguous and not empty."""
    size = y.shape[-1]
    rows, block, warps = _tiles(size)
    with torch.cuda.device_of(y):
        _backward[(triton.cdiv(y.numel() // size, rows),)](
            out,
            y,
            cotangent,
            y.numel() // size,
            size,
            scale,
            ROWS=rows,
            BLOCK=block,
            IS_WHOLE=size <= block,
            num_warps=warps,
        )


def _tiles(size: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps."""
    block = min(triton.next_power_of_2(size), _LONGEST)
    rows = max(1, _TILE // block)
    return rows, block, max(4, min(16, block // 512))


@triton.jit
def _scores(
    x_ptr, mask_ptr, row, column, inside, size, queries, heads, batch_stride, head_stride, query_stride, key_stride,
    scale, MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The scores at rows (ROWS, 1) and columns (1, BLOCK), -inf where there is none or it is masked."""
    query = row % queries
    if CAUSAL:
        inside = inside & (column <= query)
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    z = x * scale
    if MASK:
        above = row // queries
        start = above // heads * batch_stride + above % heads * head_stride + query * query_stride
        mask = tl.load(mask_ptr + start + column * key_stride, mask=inside, other=0)
        if MASK == 1:
            inside = inside & (mask != 0)
        else:
            z += mask.to(tl.float32)
    return tl.where(inside, z, float("-inf"))


@triton.jit
def _inverse(total):
    """One over a row's sum; of an empty row's, whose exponentials are all 0, 1."""
    return 1.0 / tl.where(total == 0, 1.0, total)


@triton.jit
def _forward(
    out_ptr, x_ptr, mask_ptr, rows, size, queries, heads, batch_stride, head_stride, query_stride, key_stride, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    offsets = tl.arange(0, BLOCK)[None, :]
    dtype = out_ptr.dtype.element_ty
    lowest = -3.0e38  # of finite magnitude, so that -inf - lowest is no NaN, and an empty row's exponentials are 0
    if IS_WHOLE:
        inside = (row < rows) & (offsets < size)
        z = _scores(
            x_ptr, mask_ptr, row, offsets, inside, size, queries, heads, batch_stride, head_stride, query_stride,
            key_stride, scale, MASK, CAUSAL,
        )  # fmt: skip
        power = tl.exp(z - tl.maximum(tl.max(z, axis=1), lowest)[:, None])
        y = power * _inverse(tl.sum(power, axis=1))[:, None]
        tl.store(out_ptr + row * size + offsets, y.to(dtype), mask=inside)
    else:
        most, total = tl.full((ROWS,), lowest, tl.float32), tl.zeros((ROWS,), tl.float32)
        for start in range(0, size, BLOCK):
            column = start + offsets
            z = _scores(
                x_ptr, mask_ptr, row, column, (row < rows) & (column < size), size, queries, heads, batch_stride,
                head_stride, query_stride, key_stride, scale, MASK, CAUSAL,
            )  # fmt: skip
            higher = tl.maximum(most, tl.max(z, axis=1))
            total = total * tl.exp(most - higher) + tl.sum(tl.exp(z - higher[:, None]), axis=1)
            most = higher
        inverse = _inverse(total)[:, None]
        for start in range(0, size, BLOCK):
            column = start + offsets
            inside = (row < rows) & (column < size)
            z = _scores(
                x_ptr, mask_ptr, row, column, inside, size, queries, heads, batch_stride, head_stride, query_stride,
                key_stride, scale, MASK, CAUSAL,
            )  # fmt: skip
            y = tl.exp(z - most[:, None]) * inverse
            tl.store(out_ptr + row * size + column, y.to(dtype), mask=inside)


@triton.jit
def _backward(
    out_ptr, y_ptr, cotangent_ptr, rows, size, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    offsets = tl.arange(0, BLOCK)[None, :]
    dtype = out_ptr.dtype.element_ty
    if IS_WHOLE:
        place, inside = row * size + offsets, (row < rows) & (offsets < size)
        y = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(cotangent_ptr + place, mask=inside, other=0.0).to(tl.float32)
        along = tl.sum(y * dy, axis=1)[:, None]
        tl.store(out_ptr + place, (scale * y * (dy - along)).to(dtype), mask=inside)
    else:
        along = tl.zeros((ROWS,), tl.float32)
        for start in range(0, size, BLOCK):
            place, inside = row * size + start + offsets, (row < rows) & (start + offsets < size)
            y = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
            along += tl.sum(y * tl.load(cotangent_ptr + place, mask=inside, other=0.0).to(tl.float32), axis=1)
        for start in range(0, size, BLOCK):
            place, inside = row * size + start + offsets, (row < rows) & (start + offsets < size)
            y = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(cotangent_ptr + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + place, (scale * y * (dy - along[:, None])).to(dtype), mask=inside)
