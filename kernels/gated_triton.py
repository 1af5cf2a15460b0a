"""The Triton kernels of ``gated``: imported at their first use on a GPU, never before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .activations_triton import activated

_TILE, _COLUMNS = 2048, 1024  # elements of a tile, and its columns at most


def forward(out: torch.Tensor, x: torch.Tensor, activation: str, tile: int = _TILE, warps: int = 4) -> None:
    """Fill out (..., F), contiguous, from x (..., 2F), neither empty."""
    x = _rows(x)
    size = out.shape[-1]
    rows, columns, grid = _tiles(len(x), size, tile)
    with torch.cuda.device_of(x):
        _forward[grid](
            out,
            x,
            len(x),
            size,
            x.stride(0),
            grid[0] // triton.cdiv(len(x), rows),
            ACTIVATION=activation,
            KIND=tl.float64 if x.dtype == torch.float64 else tl.float32,
            SHORT=x.element_size() == 2,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
        )


def backward(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, activation: str, tile: int = _TILE, warps: int = 4
) -> None:
    """Fill dx (..., 2F), contiguous, from the cotangent dy (..., F) and x (..., 2F), none empty."""
    dy, x = _rows(dy), _rows(x)
    size = dy.shape[-1]
    rows, columns, grid = _tiles(len(x), size, tile)
    with torch.cuda.device_of(x):
        _backward[grid](
            dx,
            dy,
            x,
            len(x),
            size,
            dy.stride(0),
            x.stride(0),
            grid[0] // triton.cdiv(len(x), rows),
            ACTIVATION=activation,
            KIND=tl.float64 if x.dtype == torch.float64 else tl.float32,
            SHORT=x.element_size() == 2,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
        )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., F) as (N, F), its last dim contiguous; copied only where no strides say that."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _tiles(count: int, size: int, tile: int) -> tuple[int, int, tuple[int]]:
    """Rows and columns of a tile, and the grid that covers (count, size)."""
    columns = min(triton.next_power_of_2(size), _COLUMNS)
    rows = max(1, tile // columns)
    return rows, columns, (triton.cdiv(count, rows) * triton.cdiv(size, columns),)


@triton.jit
def _place(across, rows, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row (ROWS, 1) int64 and column (1, COLUMNS) of a program, and what of them is inside."""
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    return row[:, None], column[None, :], (row < rows)[:, None] & (column < size)[None, :]


@triton.jit
def _forward(
    out_ptr,
    x_ptr,
    rows,
    size,
    x_row,
    across,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, inside = _place(across, rows, size, ROWS, COLUMNS)
    gate = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(KIND)
    up = tl.load(x_ptr + row * x_row + size + column, mask=inside, other=0.0).to(KIND)
    value, _ = activated(gate, ACTIVATION, SHORT)
    tl.store(out_ptr + row * size + column, (value * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dx_ptr,
    dy_ptr,
    x_ptr,
    rows,
    size,
    dy_row,
    x_row,
    across,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, inside = _place(across, rows, size, ROWS, COLUMNS)
    gate = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(KIND)
    up = tl.load(x_ptr + row * x_row + size + column, mask=inside, other=0.0).to(KIND)
    dy = tl.load(dy_ptr + row * dy_row + column, mask=inside, other=0.0).to(KIND)
    value, slope = activated(gate, ACTIVATION, SHORT)
    place = dx_ptr + row * (2 * size) + column
    tl.store(place, (dy * up * slope).to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(place + size, (dy * value).to(dx_ptr.dtype.element_ty), mask=inside)
