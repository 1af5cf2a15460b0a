"""The Triton kernels of ``fp8_swiglu``: imported at their first use on a GPU, never before.

Each value is computed twice, for the largest magnitude and for the cast, and never written in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .fp8_cast_triton import _exponent, _magnitude_bits, _power_of_two, _rounded, _scale

_PARTS = 512  # programs that look for the largest magnitude, each in its tiles
_ROWS, _COLUMNS = 64, 128  # of a tile


def cast(
    out: tuple[torch.Tensor, ...],
    gated: torch.Tensor,
    cotangent: torch.Tensor | None,
    exponent: int,
    limit: float,
    native: bool,
) -> None:
    """Fill values, scale, transposed values and their scale, of silu(gate) * up, or of its pullback.

    ``gated`` (M, 2F): gate and up side by side, contiguous; ``cotangent`` (M, F) contiguous, for the pullback, whose
    values are (M, 2F), or None, for values (M, F).
    """
    values, scale, turned, turned_scale = out
    rows, size = gated.shape[0], gated.shape[1] // 2
    across = -(-size // _COLUMNS)
    tiles = -(-rows // _ROWS) * across
    parts = torch.empty(min(tiles, _PARTS), dtype=torch.int32, device=gated.device)
    grad = gated if cotangent is None else cotangent
    backward = cotangent is not None
    with torch.cuda.device_of(gated):
        _largest[(len(parts),)](
            parts, gated, grad, rows, size, across, tiles, BACKWARD=backward, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8
        )
        _cast[(tiles,)](
            values.view(torch.uint8),
            turned.view(torch.uint8),
            scale,
            turned_scale,
            gated,
            grad,
            parts,
            rows,
            size,
            across,
            len(parts),
            limit,
            BACKWARD=backward,
            PARTS=1 << (len(parts) - 1).bit_length(),
            EXPONENT=exponent,
            MANTISSA=3 if exponent == 8 else 2,
            NATIVE=native,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=8,
        )


@triton.jit
def _place(tile, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tile // across * ROWS + tl.arange(0, ROWS), tile % across * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _computed(gated_ptr, grad_ptr, row, column, rows, size, BACKWARD: tl.constexpr):
    """silu(gate) * up, twice, or the pullbacks to gate and to up: float32, rounded to the dtype of ``gated``."""
    inside = (row < rows)[:, None] & (column < size)[None, :]
    start = row[:, None].to(tl.int64) * (2 * size) + column[None, :]
    gate = tl.load(gated_ptr + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gated_ptr + start + size, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    if BACKWARD:
        place = row[:, None].to(tl.int64) * size + column[None, :]
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        first = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        second = grad * gate * sigmoid
    else:
        first = gate * sigmoid * up
        second = first
    kind = gated_ptr.dtype.element_ty
    return first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)


@triton.jit
def _largest(
    parts_ptr,
    gated_ptr,
    grad_ptr,
    rows,
    size,
    across,
    tiles,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = _place(tile, across, ROWS, COLUMNS)
        first, second = _computed(gated_ptr, grad_ptr, row, column, rows, size, BACKWARD)
        most = tl.maximum(most, tl.maximum(_magnitude_bits(first), _magnitude_bits(second)))
    tl.store(parts_ptr + tl.program_id(0), tl.max(tl.max(most, axis=1), axis=0))


@triton.jit
def _store(values_ptr, turned_ptr, code, row, column, rows, inside, width):
    place = row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(values_ptr + place, code, mask=inside)
    across = column[:, None].to(tl.int64) * rows + row[None, :]
    tl.store(turned_ptr + across, tl.trans(code), mask=tl.trans(inside))


@triton.jit
def _cast(
    values_ptr,
    turned_ptr,
    scale_ptr,
    turned_scale_ptr,
    gated_ptr,
    grad_ptr,
    parts_ptr,
    rows,
    size,
    across,
    parts,
    limit,
    BACKWARD: tl.constexpr,
    PARTS: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    part = tl.arange(0, PARTS)
    bits = tl.max(tl.load(parts_ptr + part, mask=part < parts, other=0), axis=0)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, _scale(bits, EXPONENT))
        tl.store(turned_scale_ptr, _scale(bits, EXPONENT))
    factor = _power_of_two(-_exponent(bits, EXPONENT))
    row, column = _place(tl.program_id(0), across, ROWS, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    first, second = _computed(gated_ptr, grad_ptr, row, column, rows, size, BACKWARD)
    code = _rounded(tl.minimum(tl.maximum(first, -limit), limit) * factor, MANTISSA, NATIVE)
    if BACKWARD:
        _store(values_ptr, turned_ptr, code, row, column, rows, inside, 2 * size)
        other = _rounded(tl.minimum(tl.maximum(second, -limit), limit) * factor, MANTISSA, NATIVE)
        _store(values_ptr, turned_ptr, other, row, column + size, rows, inside, 2 * size)
    else:
        _store(values_ptr, turned_ptr, code, row, column, rows, inside, size)
