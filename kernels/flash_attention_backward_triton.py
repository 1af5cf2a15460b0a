"""The Triton kernels of ``flash_attention``, backward: imported at their first use on a GPU, never before.

Three: delta, a number a row; the gradients of keys and values, by programs that own a block of keys and walk the
queries of all heads that share it; that of queries, by programs that own a block of queries (Dao 2023, algorithm 2).
Scores are computed again in both, so that no two programs write to the same place: sums have one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .flash_attention_triton import (
    LOG2E,
    Blocks,
    Mask,
    allowed,
    arguments,
    biased,
    described,
    drawn_from,
    kept,
    seen,
    span,
    store_rows,
    width,
)


def delta(out: torch.Tensor, cotangent: torch.Tensor, lse_cotangent: torch.Tensor) -> torch.Tensor:
    """sum(out * cotangent) over a row, less its lse's cotangent: what the gradient of a weight is more than a score's.

    out and its cotangent (B, H, Tq, D), lse's (B, H, Tq) float32, contiguous, as the result.
    """
    batch, heads, rows, size = out.shape
    result = torch.empty_like(lse_cotangent)
    tile = max(1, 4096 // width(size))
    with torch.cuda.device_of(out):
        _delta[(triton.cdiv(rows, tile), heads, batch)](
            result,
            lse_cotangent,
            out,
            cotangent,
            *out.stride(),
            *cotangent.stride(),
            heads,
            rows,
            size,
            BLOCK=tile,
            WIDTH=width(size),
        )
    return result


def grads_of_keys_and_values(
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    cotangent: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: Mask,
    blocks: Blocks | None = None,
) -> None:
    """Fill the gradients (B, K, Tk, D), of unit stride in D. lse and delta are contiguous; the rest as in forward."""
    batch, shared_heads, columns, _ = key.shape
    blocks = blocks or _key_blocks(query)
    with torch.cuda.device_of(query):
        _grads_of_keys_and_values[(triton.cdiv(columns, blocks.own), shared_heads, batch)](
            grad_key,
            grad_value,
            lse,
            delta,
            *(described(x, blocks.other) for x in (query, cotangent)),
            *(described(x, blocks.own) for x in (key, value)),
            *grad_key.stride()[:3],
            *grad_value.stride()[:3],
            **arguments(query, key, scale, mask),
            BLOCK_M=blocks.other,
            BLOCK_N=blocks.own,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def grad_of_queries(
    grad_query: torch.Tensor,
    cotangent: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: Mask,
    blocks: Blocks | None = None,
) -> None:
    """Fill the gradient (B, H, Tq, D), of unit stride in D. lse and delta are contiguous; the rest as in forward."""
    batch, heads, rows, _ = query.shape
    blocks = blocks or _query_blocks(query)
    with torch.cuda.device_of(query):
        _grad_of_queries[(triton.cdiv(rows, blocks.own), heads, batch)](
            grad_query,
            lse,
            delta,
            *(described(x, blocks.own) for x in (query, cotangent)),
            *(described(x, blocks.other) for x in (key, value)),
            *grad_query.stride()[:3],
            **arguments(query, key, scale, mask),
            BLOCK_M=blocks.own,
            BLOCK_N=blocks.other,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def _key_blocks(query: torch.Tensor) -> Blocks:
    if query.dtype == torch.float32 or query.shape[-1] > 128:
        return Blocks(32, 32, 4, 1)
    return Blocks(64, 64, 4, 3 if query.shape[-1] <= 64 else 2)


def _query_blocks(query: torch.Tensor) -> Blocks:
    if query.dtype == torch.float32 or query.shape[-1] > 128:
        return Blocks(32, 32, 4, 1)
    return Blocks(128, 64, 4 if query.shape[-1] <= 64 else 8, 3)


@triton.jit
def _delta(
    delta_ptr,
    lse_cotangent_ptr,
    out_ptr,
    cotangent_ptr,
    out_b,
    out_h,
    out_t,
    out_d,
    cotangent_b,
    cotangent_h,
    cotangent_t,
    cotangent_d,
    heads,
    rows,
    size,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    out_ptr += batch * out_b + head * out_h
    cotangent_ptr += batch * cotangent_b + head * cotangent_h
    out = tl.load(out_ptr + row[:, None] * out_t + column[None, :] * out_d, mask=inside, other=0.0)
    places = cotangent_ptr + row[:, None] * cotangent_t + column[None, :] * cotangent_d
    cotangent = tl.load(places, mask=inside, other=0.0)
    line = (batch * heads + head) * rows + row
    lse_cotangent = tl.load(lse_cotangent_ptr + line, mask=row < rows, other=0.0)
    product = tl.sum(out.to(tl.float32) * cotangent.to(tl.float32), 1)
    tl.store(delta_ptr + line, product - lse_cotangent, mask=row < rows)


@triton.jit
def _row_numbers(lse_ptr, delta_ptr, row, rows):
    """A row's lse, in powers of two, and delta. Rows that see nothing, and those behind the last, have no weights."""
    lse = tl.load(lse_ptr + row, mask=row < rows, other=float("inf"))
    delta = tl.load(delta_ptr + row, mask=row < rows, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E), delta


@triton.jit
def _grads_of_keys_and_values(
    grad_key_ptr,
    grad_value_ptr,
    lse_ptr,
    delta_ptr,
    query,
    cotangent,
    key,
    value,
    key_b,
    key_h,
    key_t,
    value_b,
    value_h,
    value_t,
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
    start = tl.program_id(0) * BLOCK_N
    shared_head, batch = tl.program_id(1), tl.program_id(2)
    column = start + tl.arange(0, BLOCK_N)
    if HAS_SPANS:
        spans_ptr += batch.to(tl.int64) * 2 * columns
    first, end = span(spans_ptr, column, columns, HAS_SPANS)
    # Who sees a key is whom a query at its place sees, in a mirror.
    low, low_whole, high_whole, high = seen(
        start, columns, rows, -offset, right, left, first, end, HAS_RIGHT, HAS_LEFT, HAS_SPANS, BLOCK_N, BLOCK_M
    )
    if not (HAS_LEFT or HAS_SPANS):
        high_whole = tl.maximum(high, low_whole)  # queries behind the last have no weights: they need no mask
    grad_key = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    grad_value = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    k = key.load([batch, shared_head, start, 0]).reshape(BLOCK_N, WIDTH)
    v = value.load([batch, shared_head, start, 0]).reshape(BLOCK_N, WIDTH)
    for head in range(shared_head * group, shared_head * group + group):
        line = batch.to(tl.int64) * heads + head
        head_bias_ptr = bias_ptr
        if HAS_BIAS:
            head_bias_ptr = bias_ptr + batch.to(tl.int64) * bias_b + line % heads * bias_h
        for part in tl.static_range(3):
            if part == 0:
                begin, stop = low, low_whole
            elif part == 1:
                begin, stop = low_whole, high_whole
            else:
                begin, stop = high_whole, high
            if part == 1 or HAS_SPANS or (HAS_RIGHT if part == 0 else HAS_LEFT):
                for m in tl.range(begin, stop, BLOCK_M):
                    m = tl.multiple_of(m, BLOCK_M)
                    row = m + tl.arange(0, BLOCK_M)
                    q = query.load([batch, head, m, 0]).reshape(BLOCK_M, WIDTH)
                    lse, delta = _row_numbers(lse_ptr + line * rows, delta_ptr + line * rows, row, rows)
                    scores = tl.dot(k, q.T, input_precision=PRECISION) * (scale * LOG2E)
                    if HAS_BIAS:
                        scores += biased(head_bias_ptr, row[None, :], column[:, None], rows, columns, bias_m, bias_n)
                    weights = tl.exp2(scores - lse[None, :])
                    if part != 1:
                        mask = allowed(
                            column[:, None],
                            row[None, :],
                            rows,
                            -offset,
                            right,
                            left,
                            first[:, None],
                            end[:, None],
                            HAS_RIGHT,
                            HAS_LEFT,
                            HAS_SPANS,
                        )
                        weights = tl.where(mask, weights, 0.0)
                    do = cotangent.load([batch, head, m, 0]).reshape(BLOCK_M, WIDTH)
                    kept_weights = weights
                    grad_weights = tl.dot(v, do.T, input_precision=PRECISION)
                    if HAS_DROPOUT:
                        key0, key1, place = drawn_from(draw_ptr, line, heads * members, rows, row, HAS_DROPOUT)
                        keep = kept(key0, key1, place, start, columns, dropped, QUADS, BLOCK_M, BLOCK_N).T
                        kept_weights = tl.where(keep, weights * upscale, 0.0)
                        grad_weights = tl.where(keep, grad_weights * upscale, 0.0)
                    grad_value = tl.dot(kept_weights.to(do.dtype), do, grad_value, input_precision=PRECISION)
                    grad_scores = weights * (grad_weights - delta[None, :])
                    grad_key = tl.dot(grad_scores.to(q.dtype), q, grad_key, input_precision=PRECISION)
    grad_value_ptr += batch.to(tl.int64) * value_b + shared_head.to(tl.int64) * value_h
    store_rows(grad_value_ptr, grad_value, column, columns, value_t, size, WIDTH)
    grad_key_ptr += batch.to(tl.int64) * key_b + shared_head.to(tl.int64) * key_h
    store_rows(grad_key_ptr, grad_key * scale, column, columns, key_t, size, WIDTH)


@triton.jit
def _grad_of_queries(
    grad_query_ptr,
    lse_ptr,
    delta_ptr,
    query,
    cotangent,
    key,
    value,
    query_b,
    query_h,
    query_t,
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
    grad_query = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    q = query.load([batch, head, start, 0]).reshape(BLOCK_M, WIDTH)
    do = cotangent.load([batch, head, start, 0]).reshape(BLOCK_M, WIDTH)
    lse, delta = _row_numbers(lse_ptr + line * rows, delta_ptr + line * rows, row, rows)
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
                v = value.load([batch, head // group, n, 0]).reshape(BLOCK_N, WIDTH)
                scores = tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E)
                if HAS_BIAS:
                    scores += biased(bias_ptr, row[:, None], column[None, :], rows, columns, bias_m, bias_n)
                weights = tl.exp2(scores - lse[:, None])
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
                    weights = tl.where(mask, weights, 0.0)
                grad_weights = tl.dot(do, v.T, input_precision=PRECISION)
                if HAS_DROPOUT:
                    keep = kept(key0, key1, place, n, columns, dropped, QUADS, BLOCK_M, BLOCK_N)
                    grad_weights = tl.where(keep, grad_weights * upscale, 0.0)
                grad_scores = weights * (grad_weights - delta[:, None])
                grad_query = tl.dot(grad_scores.to(k.dtype), k, grad_query, input_precision=PRECISION)
    grad_query_ptr += batch.to(tl.int64) * query_b + head.to(tl.int64) * query_h
    store_rows(grad_query_ptr, grad_query * scale, row, rows, query_t, size, WIDTH)
