"""The Triton kernel of ``flash_attention``, forward: imported at its first use on a GPU, never before.

A program has a block of query rows of one head and walks the blocks of keys that they see (Dao 2023, algorithm 1).
Blocks that are seen whole come without a mask. Operands come by tensor descriptors, hardware copies on Hopper.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .threefry_cipher_triton import cipher

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Blocks(NamedTuple):
    """Rows that a program owns, rows of the other side that it takes at a time, warps, and loads in flight."""

    own: int
    other: int
    warps: int
    stages: int


class Mask(NamedTuple):
    """Which scores count, and what is done to them.

    Query i sees keys i + offset - left to i + offset + right, to the end where a side is None; of those, keys from
    spans[:, 0, i] on and before spans[:, 1, i], (B, 2, T) int32, contiguous. bias (B, H, Tq, Tk) is added, of any
    strides. Of 2**16 weights ``dropped`` are, as ``random.dropout`` of all weights of ``members`` of the batch by each
    key of draw (B / members, 2), contiguous.
    """

    left: int | None = None
    right: int | None = None
    offset: int = 0
    spans: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    draw: torch.Tensor | None = None
    dropped: int = 0
    members: int = 1


def forward(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: Mask,
    blocks: Blocks | None = None,
) -> None:
    """Fill out (B, H, Tq, D), of unit stride in D, and lse (B, H, Tq) float32, contiguous.

    query (B, H, Tq, D), key and value (B, K, Tk, D), none empty; ``scale`` is positive.
    """
    batch, heads, rows, _ = query.shape
    blocks = blocks or _blocks(query)
    with torch.cuda.device_of(query):
        _forward[(triton.cdiv(rows, blocks.own), heads, batch)](
            out,
            lse,
            described(query, blocks.own),
            described(key, blocks.other),
            described(value, blocks.other),
            *out.stride()[:3],
            **arguments(query, key, scale, mask),
            BLOCK_M=blocks.own,
            BLOCK_N=blocks.other,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def arguments(query: torch.Tensor, key: torch.Tensor, scale: float, mask: Mask) -> dict[str, Any]:
    """What all kernels of attention are told alike."""
    heads, rows, size = query.shape[1:]
    bias_strides = (0, 0, 0, 0) if mask.bias is None else mask.bias.stride()
    return {
        "spans_ptr": mask.spans,
        "bias_ptr": mask.bias,
        "draw_ptr": mask.draw,
        **dict(zip(("bias_b", "bias_h", "bias_m", "bias_n"), bias_strides, strict=True)),
        "heads": heads,
        "group": heads // key.shape[1],
        "rows": rows,
        "columns": key.shape[2],
        "size": size,
        "members": mask.members,
        "scale": scale,
        "left": mask.left or 0,
        "right": mask.right or 0,
        "offset": mask.offset,
        "dropped": mask.dropped,
        "upscale": 2**16 / (2**16 - mask.dropped) if mask.dropped < 2**16 else 0.0,
        "HAS_LEFT": mask.left is not None,
        "HAS_RIGHT": mask.right is not None,
        "HAS_SPANS": mask.spans is not None,
        "HAS_BIAS": mask.bias is not None,
        "HAS_DROPOUT": mask.draw is not None,
        "QUADS": key.shape[2] % 4 == 0,
        "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",  # three products, to float32's rounding
        "WIDTH": width(size),
    }


def width(size: int) -> int:
    """Numbers of a row in a block: what tensor cores take, and a power of two."""
    return max(16, triton.next_power_of_2(size))


def _blocks(query: torch.Tensor) -> Blocks:
    if query.dtype == torch.float32 or query.shape[-1] > 128:
        return Blocks(64, 32, 4, 2)
    return Blocks(64, 128, 4, 2 if query.shape[-1] <= 64 else 1)


def described(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x (B, H, T, D) in blocks of ``rows``, zeros behind its ends; a copy unless D and strides suit."""
    step = 16 // x.element_size()
    strides = [stride if length > 1 else step for stride, length in zip(x.stride(), x.shape, strict=True)]
    aligned = x.data_ptr() % 16 == 0 and all(stride > 0 and stride % step == 0 for stride in strides[:3])
    if not aligned or (x.stride(3) != 1 and x.shape[3] > 1):
        padded = x.new_empty((*x.shape[:3], -(-x.shape[3] // step) * step))
        x = padded[..., : x.shape[3]].copy_(x)
        strides = list(x.stride())
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, rows, width(x.shape[3])])


@triton.jit
def _forward(
    out_ptr,
    lse_ptr,
    query,
    key,
    value,
    out_b,
    out_h,
    out_t,
    spans_ptr,
    bias_ptr,
    draw_ptr,
    bias_b,
    bias_h,
    bias_m,
    bias_n,
    heads,
    group,
    rows,
    columns,
    size,
    members,
    scale,
    left,
    right,
    offset,
    dropped,
    upscale,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    QUADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # The last rows first: under a causal mask they see most.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head, batch = tl.program_id(1), tl.program_id(2)
    row = start + tl.arange(0, BLOCK_M)
    line = batch.to(tl.int64) * heads + head
    if HAS_SPANS:
        spans_ptr += batch.to(tl.int64) * 2 * columns
    if HAS_BIAS:
        bias_ptr += batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h
    key0, key1, place = drawn_from(draw_ptr, line, heads * members, rows, row, HAS_DROPOUT)
    first, end = span(spans_ptr, row, rows, HAS_SPANS)
    low, low_whole, high_whole, high = seen(
        start, rows, columns, offset, left, right, first, end, HAS_LEFT, HAS_RIGHT, HAS_SPANS, BLOCK_M, BLOCK_N
    )

    scale *= LOG2E
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    q = query.load([batch, head, start, 0]).reshape(BLOCK_M, WIDTH)
    for part in tl.static_range(3):
        if part == 0:
            begin, stop = low, low_whole
        elif part == 1:
            begin, stop = low_whole, high_whole
        else:
            begin, stop = high_whole, high
        if part > 0 or HAS_LEFT or HAS_SPANS:
            for n in tl.range(begin, stop, BLOCK_N):
                n = tl.multiple_of(n, BLOCK_N)
                column = n + tl.arange(0, BLOCK_N)
                k = key.load([batch, head // group, n, 0]).reshape(BLOCK_N, WIDTH)
                scores = tl.dot(q, k.T, input_precision=PRECISION)
                if HAS_BIAS or part != 1:
                    scores *= scale
                    if HAS_BIAS:
                        scores += biased(bias_ptr, row[:, None], column[None, :], rows, columns, bias_m, bias_n)
                    if part != 1:
                        mask = allowed(
                            row[:, None],
                            column[None, :],
                            columns,
                            offset,
                            left,
                            right,
                            first[:, None],
                            end[:, None],
                            HAS_LEFT,
                            HAS_RIGHT,
                            HAS_SPANS,
                        )
                        scores = tl.where(mask, scores, float("-inf"))
                    higher = tl.maximum(most, tl.max(scores, 1))
                    base = tl.where(higher == float("-inf"), 0.0, higher)
                    weights = tl.exp2(scores - base[:, None])
                else:
                    higher = tl.maximum(most, tl.max(scores, 1) * scale)
                    base = higher
                    weights = tl.exp2(scores * scale - base[:, None])
                shrink = tl.exp2(most - base)
                most = higher
                total = total * shrink + tl.sum(weights, 1)
                mixed = mixed * shrink[:, None]
                if HAS_DROPOUT:
                    keep = kept(key0, key1, place, n, columns, dropped, QUADS, BLOCK_M, BLOCK_N)
                    weights = tl.where(keep, weights, 0.0)
                v = value.load([batch, head // group, n, 0]).reshape(BLOCK_N, WIDTH)
                mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)

    some = tl.where(total > 0, total, 1.0)
    mixed *= ((upscale if HAS_DROPOUT else 1.0) / some)[:, None]
    tl.store(lse_ptr + line * rows + row, (most + tl.log2(some)) * LN2, mask=row < rows)
    out_ptr += batch.to(tl.int64) * out_b + head.to(tl.int64) * out_h
    store_rows(out_ptr, mixed, row, rows, out_t, size, WIDTH)


@triton.jit
def store_rows(ptr, x, row, rows, stride, size, WIDTH: tl.constexpr):
    """x (BLOCK, WIDTH) to rows of ``size`` numbers, one next to the other."""
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    tl.store(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def span(spans_ptr, row, rows, HAS_SPANS: tl.constexpr):
    """The first and the end of what each row's document sees; those of the last row behind the last row."""
    first = tl.zeros(row.shape, tl.int32)
    end = first
    if HAS_SPANS:
        inside = tl.minimum(row, rows - 1)
        first = tl.load(spans_ptr + inside)
        end = tl.load(spans_ptr + rows + inside)
    return first, end


@triton.jit
def seen(
    start,
    rows,
    columns,
    shift,
    before,
    after,
    first,
    end,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
):
    """What a block of rows sees of the columns, in steps of OTHER: [low, high), whole within the middle two bounds.

    Row i sees columns i + shift - before to i + shift + after, of those from its ``first`` to its ``end``.
    """
    top = start + shift
    bottom = tl.minimum(start + OWN, rows) - 1 + shift
    low, low_whole, high, high_whole = 0, 0, columns, columns
    if HAS_BEFORE:
        low, low_whole = top - before, bottom - before
    if HAS_AFTER:
        high, high_whole = tl.minimum(columns, bottom + after + 1), tl.minimum(columns, top + after + 1)
    if HAS_SPANS:
        low, low_whole = tl.maximum(low, tl.min(first, 0)), tl.maximum(low_whole, tl.max(first, 0))
        high, high_whole = tl.minimum(high, tl.max(end, 0)), tl.minimum(high_whole, tl.min(end, 0))
    low = tl.maximum(low, 0) // OTHER * OTHER
    high = tl.maximum(high, low)
    low_whole = tl.maximum(low_whole, low)
    low_whole = tl.minimum((low_whole + OTHER - 1) // OTHER * OTHER, (high + OTHER - 1) // OTHER * OTHER)
    high_whole = tl.maximum(tl.maximum(high_whole, 0) // OTHER * OTHER, low_whole)
    return low, low_whole, high_whole, high


@triton.jit
def allowed(
    row,
    column,
    columns,
    shift,
    before,
    after,
    first,
    end,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):
    """``seen``, place by place."""
    mask = (column < columns) & (row >= 0)
    if HAS_BEFORE:
        mask &= column >= row + shift - before
    if HAS_AFTER:
        mask &= column <= row + shift + after
    if HAS_SPANS:
        mask &= (column >= first) & (column < end)
    return mask


@triton.jit
def biased(bias_ptr, row, column, rows, columns, bias_m, bias_n):
    """The bias of a block, in powers of two."""
    places = bias_ptr + row.to(tl.int64) * bias_m + column.to(tl.int64) * bias_n
    return tl.load(places, mask=(row < rows) & (column < columns), other=0.0).to(tl.float32) * LOG2E


@triton.jit
def drawn_from(draw_ptr, line, lines, rows, row, HAS_DROPOUT: tl.constexpr):
    """The words of a head's key, and the number of each row in the key's draw of (B, H, Tq, Tk)."""
    place = row.to(tl.int64)
    key0 = tl.full((), 0, tl.uint32)
    key1 = key0
    if HAS_DROPOUT:
        draw_ptr += line // lines * 2
        key0 = tl.load(draw_ptr).to(tl.uint32, bitcast=True)
        key1 = tl.load(draw_ptr + 1).to(tl.uint32, bitcast=True)
        place += line % lines * rows
    return key0, key1, place


@triton.jit
def kept(key0, key1, place, n, columns, dropped, QUADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_M, BLOCK_N) bool: what ``random.dropout`` keeps of these rows at columns n and on.

    Four elements of 16 bits come of a block of the cipher; only rows of whole blocks need each block but once.
    """
    if QUADS:
        x0, x1 = cipher(key0, key1, (place * columns + n)[:, None] // 4 + tl.arange(0, BLOCK_N // 4)[None, :])
        low, high = tl.interleave(x0 & 0xFFFF, x1 & 0xFFFF), tl.interleave(x0 >> 16, x1 >> 16)
        drawn = tl.interleave(low, high)
    else:
        element = (place * columns + n)[:, None] + tl.arange(0, BLOCK_N)[None, :]
        x0, x1 = cipher(key0, key1, element >> 2)
        word = tl.where((element & 2) != 0, x1, x0)
        drawn = tl.where((element & 1) != 0, word >> 16, word & 0xFFFF)
    return (drawn ^ 0x8000) >= dropped
