"""The Triton kernels of ``bias_gelu``: imported at their first use on a GPU, never before.

A program has some columns and goes over tiles of rows. In the backward it keeps the sums for the bias in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .activations_triton import activated
from .partial_sums_triton import add_up, processors

_TILE, _COLUMNS = 2048, 1024  # elements of a tile, and its columns at most


def forward(out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, approximate: str, warps: int = 4) -> None:
    """Fill out (*G, ..., F), contiguous, from x and bias (*G, F), neither empty."""
    x, bias, rows, columns, across, tiles = _laid_out(x, bias)
    with torch.cuda.device_of(x):
        _forward[(across * tiles, len(x))](
            out,
            x,
            bias,
            *x.shape[1:],
            *x.stride()[:2],
            across,
            ACTIVATION="gelu_tanh" if approximate == "tanh" else "gelu",
            KIND=_kind(x, bias),
            SHORT=x.element_size() == 2,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
        )


def backward(
    dx: torch.Tensor,
    db: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor,
    approximate: str,
    per_sm: int = 6,
    stages: int = 3,
    warps: int = 4,
) -> None:
    """Fill dx (*G, ..., F) and db (*G, F), contiguous, from the cotangent dy, x and bias, none empty."""
    dy, *_ = _laid_out(dy, bias)
    x, bias, rows, columns, across, tiles = _laid_out(x, bias)
    members, count, size = x.shape
    programs = min(tiles, max(1, per_sm * processors(x.device) // across))
    kind = torch.float64 if torch.float64 in (x.dtype, bias.dtype) else torch.float32
    parts = torch.empty((1, members, programs, size), dtype=kind, device=x.device)
    with torch.cuda.device_of(x):
        _backward[(across, programs, members)](
            dx,
            parts,
            dy,
            x,
            bias,
            count,
            size,
            *dy.stride()[:2],
            *x.stride()[:2],
            ACTIVATION="gelu_tanh" if approximate == "tanh" else "gelu",
            KIND=_kind(x, bias),
            SHORT=x.element_size() == 2,
            ROWS=rows,
            COLUMNS=columns,
            STAGES=stages,
            num_warps=warps,
        )
    add_up((db,), parts)


def _laid_out(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    """x (*G, ..., F) as (G, N, F), its last dim contiguous; bias; rows and columns of a tile; tiles across and down."""
    x = x.reshape(bias.shape[:-1].numel(), -1, x.shape[-1])
    x = x if x.stride(2) == 1 else x.contiguous()
    columns = min(triton.next_power_of_2(x.shape[2]), _COLUMNS)
    rows = _TILE // columns
    return x, bias.contiguous(), rows, columns, triton.cdiv(x.shape[2], columns), triton.cdiv(x.shape[1], rows)


def _kind(*tensors: torch.Tensor) -> tl.dtype:
    return tl.float64 if any(x.dtype == torch.float64 for x in tensors) else tl.float32


@triton.jit
def _forward(
    out_ptr,
    x_ptr,
    bias_ptr,
    rows,
    size,
    x_member,
    x_row,
    across,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    member = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS))[:, None]
    inside = (row < rows) & (column < size)[None, :]
    row = row.to(tl.int64)
    bias = tl.load(bias_ptr + member * size + column, mask=column < size, other=0.0).to(KIND)
    x = tl.load(x_ptr + (member * x_member + row * x_row) + column[None, :], mask=inside, other=0.0).to(KIND)
    value, _ = activated(x + bias[None, :], ACTIVATION, SHORT)
    place = (member * rows + row) * size + column[None, :]
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dx_ptr,
    parts_ptr,
    dy_ptr,
    x_ptr,
    bias_ptr,
    rows,
    size,
    dy_member,
    dy_row,
    x_member,
    x_row,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    member = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.load(bias_ptr + member * size + column, mask=column < size, other=0.0).to(KIND)
    total = tl.zeros((ROWS, COLUMNS), KIND)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column < size)[None, :]
        row = row.to(tl.int64)
        x = tl.load(x_ptr + (member * x_member + row * x_row) + column[None, :], mask=inside, other=0.0).to(KIND)
        dy = tl.load(dy_ptr + (member * dy_member + row * dy_row) + column[None, :], mask=inside, other=0.0).to(KIND)
        _, slope = activated(x + bias[None, :], ACTIVATION, SHORT)
        dx = dy * slope
        total += dx
        place = (member * rows + row) * size + column[None, :]
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    part = member * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts_ptr + part * size + column, tl.sum(total, axis=0), mask=column < size)
