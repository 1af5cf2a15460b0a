"""The Triton kernels of ``rms_norm`` and ``layer_norm``: imported at their first use on a GPU, never before.

A tile is some whole rows. A program goes over tiles, the weights in its registers, while the copies of the next tiles
are under way: a norm does little else than wait for memory. The backward computes the statistics again, which costs
nothing, and keeps the sums for the weights in registers, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .partial_sums_triton import add_up, processors


@dataclass(frozen=True)
class Plan:
    """How a kernel is laid out: ``warps`` of a program, ``rows`` of a tile, programs ``per_sm`` (0: one a tile), tiles
    under way at once, ``stages``."""

    warps: int
    rows: int = 1
    per_sm: int = 0
    stages: int = 1


def forward_plan(size: int, width: int) -> Plan:
    """For rows of ``size`` elements of ``width`` bytes."""
    block = triton.next_power_of_2(size)
    warps = max(1, min(16, block // 512))
    rows = max(1, 1024 // block)
    return Plan(warps, rows, per_sm=max(1, 24 // warps), stages=_stages(block * rows * width))


def backward_plan(size: int, width: int) -> Plan:
    """For rows of ``size`` elements of ``width`` bytes, of x and of the cotangent."""
    block = triton.next_power_of_2(size)
    warps = max(1, min(16, block // 512))
    rows = max(1, 512 // block)
    return Plan(warps, rows, per_sm=max(1, 16 // warps), stages=_stages(2 * block * rows * width))


def _stages(tile: int) -> int:
    """As many tiles of this many bytes under way as shared memory has room for, beside another program's."""
    return 3 if tile <= 2**15 else 2 if tile <= 2**16 else 1


def forward(
    out: torch.Tensor,
    total: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    plan: Plan | None = None,
) -> None:
    """Fill out (*G, ..., D), and total with x + residual, from x and residual and weight and bias (*G, D).

    ``centered``: the mean is subtracted. None is empty; out and total are contiguous.
    """
    x, weight, bias = _rows(x, weight), weight.contiguous(), None if bias is None else bias.contiguous()
    residual = None if residual is None else _rows(residual, weight)
    members, rows, size = x.shape
    plan = plan or forward_plan(size, x.element_size())
    tiles = triton.cdiv(rows, plan.rows)
    programs = min(tiles, plan.per_sm * processors(x.device)) if plan.per_sm else tiles
    other = x if residual is None else residual
    with torch.cuda.device_of(x):
        _forward[(programs, members)](
            out,
            out if total is None else total,
            x,
            other,
            weight,
            weight if bias is None else bias,
            rows,
            size,
            *x.stride()[:2],
            *other.stride()[:2],
            EPS=eps,
            CENTERED=centered,
            RESIDUAL=residual is not None,
            BIAS=bias is not None,
            KIND=_kind(x, weight),
            ROWS=plan.rows,
            BLOCK=triton.next_power_of_2(size),
            STAGES=plan.stages,
            num_warps=plan.warps,
        )


def backward(
    dx: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    more: torch.Tensor | None,
    eps: float,
    centered: bool,
    plan: Plan | None = None,
) -> None:
    """Fill dx (*G, ..., D) and the gradients ``weights`` (*G, D) of the weight, and of the bias if there are two.

    dy is the cotangent of the output, ``more`` that of the input itself, which is added; the rest is as in ``forward``.
    """
    dy, x, more = _rows(dy, weight), _rows(x, weight), None if more is None else _rows(more, weight)
    weight = weight.contiguous()
    members, rows, size = x.shape
    plan = plan or backward_plan(size, x.element_size())
    tiles = triton.cdiv(rows, plan.rows)
    programs = min(tiles, max(1, plan.per_sm) * processors(x.device))
    kind = torch.float64 if torch.float64 in (x.dtype, weight.dtype) else torch.float32
    parts = torch.empty((len(weights), members, programs, size), dtype=kind, device=x.device)
    other = dy if more is None else more
    with torch.cuda.device_of(x):
        _backward[(programs, members)](
            dx,
            parts,
            dy,
            x,
            weight,
            other,
            rows,
            size,
            *dy.stride()[:2],
            *x.stride()[:2],
            *other.stride()[:2],
            EPS=eps,
            CENTERED=centered,
            MORE=more is not None,
            BIAS=len(weights) > 1,
            KIND=_kind(x, weight),
            ROWS=plan.rows,
            BLOCK=triton.next_power_of_2(size),
            STAGES=plan.stages,
            num_warps=plan.warps,
        )
    add_up(weights, parts)


def _rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (*G, ..., D) as (G, N, D), its last dim contiguous; copied only where no strides say that."""
    x = x.reshape(weight.shape[:-1].numel(), -1, x.shape[-1])
    return x if x.stride(2) == 1 else x.contiguous()


def _kind(*tensors: torch.Tensor) -> tl.dtype:
    return tl.float64 if any(x.dtype == torch.float64 for x in tensors) else tl.float32


@triton.jit
def _mean(x, size):
    """Of rows (R, D) with ``size`` elements and zeros behind: rounded once, or else equal elements would differ."""
    total = tl.sum(x, axis=1)
    if total.dtype == tl.float64:  # noqa: SIM108
        mean = total / size
    else:
        mean = tl.math.div_rn(total, tl.zeros_like(total) + size)
    return mean


@triton.jit
def _forward(
    out_ptr,
    total_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    size,
    x_member,
    x_row,
    residual_member,
    residual_row,
    EPS: tl.constexpr,
    CENTERED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    member = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + member * size + column, mask=column < size, other=0.0).to(KIND)
    bias = weight
    if BIAS:
        bias = tl.load(bias_ptr + member * size + column, mask=column < size, other=0.0).to(KIND)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        row = row[:, None].to(tl.int64)
        place = (member * rows + row) * size + column[None, :]
        x = tl.load(x_ptr + (member * x_member + row * x_row) + column[None, :], mask=inside, other=0.0).to(KIND)
        if RESIDUAL:
            source = residual_ptr + (member * residual_member + row * residual_row) + column[None, :]
            x += tl.load(source, mask=inside, other=0.0).to(KIND)
            rounded = x.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + place, rounded, mask=inside)
            x = rounded.to(KIND)
        if CENTERED:
            x = tl.where(inside, x - _mean(x, size)[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + EPS)
        y = x * scale[:, None] * weight[None, :]
        if BIAS:
            y += bias[None, :]
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dx_ptr,
    parts_ptr,
    dy_ptr,
    x_ptr,
    weight_ptr,
    more_ptr,
    rows,
    size,
    dy_member,
    dy_row,
    x_member,
    x_row,
    more_member,
    more_row,
    EPS: tl.constexpr,
    CENTERED: tl.constexpr,
    MORE: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    member, members = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + member * size + column, mask=column < size, other=0.0).to(KIND)
    to_weight = tl.zeros((BLOCK,), KIND)
    to_bias = tl.zeros((BLOCK,), KIND)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        row = row[:, None].to(tl.int64)
        x = tl.load(x_ptr + (member * x_member + row * x_row) + column[None, :], mask=inside, other=0.0).to(KIND)
        dy = tl.load(dy_ptr + (member * dy_member + row * dy_row) + column[None, :], mask=inside, other=0.0).to(KIND)
        wanted = dy * weight[None, :]
        if CENTERED:
            x = tl.where(inside, x - _mean(x, size)[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + EPS)
        along = tl.sum(wanted * x, axis=1) * scale / size
        normed = x * scale[:, None]
        to_weight += tl.sum(dy * normed, axis=0)
        if BIAS:
            to_bias += tl.sum(dy, axis=0)
        if CENTERED:
            wanted -= _mean(wanted, size)[:, None]
        dx = (wanted - normed * along[:, None]) * scale[:, None]
        if MORE:
            source = more_ptr + (member * more_member + row * more_row) + column[None, :]
            dx += tl.load(source, mask=inside, other=0.0).to(KIND)
        place = (member * rows + row) * size + column[None, :]
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    part = member * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts_ptr + part * size + column, to_weight, mask=column < size)
    if BIAS:
        part += members * tl.num_programs(0)
        tl.store(parts_ptr + part * size + column, to_bias, mask=column < size)
