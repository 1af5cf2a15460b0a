"""The Triton kernel of ``rotary``: imported at its first use on a GPU, never before.

A program has some tokens: their cosines and sines are read once for all heads of queries and keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 2048  # elements of each half of a tile: some tokens of some heads


def turn(
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: bool,
    tile: int = _TILE,
    warps: int = 4,
) -> None:
    """Fill q_out (..., H, T, d) and k_out (..., K, T, d), which lie as (..., T, H, d), contiguous; not both are empty.

    cos and sin (..., 1, T, d/2), their leading dims those of q or 1.
    """
    leading, (tokens, size) = q.shape[:-3], q.shape[-2:]
    half = size // 2
    q, k = (_joined(x, leading.numel()) for x in (q, k))
    cos, sin = (_table(x, leading) for x in (cos, sin))
    wide = torch.float64 in (q.dtype, k.dtype, cos.dtype)
    most, block = max(q.shape[1], k.shape[1]), triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(most), max(1, tile // block))
    several = max(1, tile // (heads * block))
    spans = triton.cdiv(tokens, several)
    with torch.cuda.device_of(q):
        _turn[(spans * len(q),)](
            q_out,
            k_out,
            q,
            k,
            cos,
            sin,
            tokens,
            spans,
            half,
            q.shape[1],
            k.shape[1],
            *q.stride()[:3],
            *k.stride()[:3],
            *cos.stride()[:2],
            INVERSE=inverse,
            KIND=tl.float64 if wide else tl.float32,
            TOKENS=several,
            HEADS=heads,
            KEY_HEADS=min(triton.next_power_of_2(max(1, k.shape[1])), heads),
            HALF=block,
            num_warps=warps,
        )


def _joined(x: torch.Tensor, batch: int) -> torch.Tensor:
    """x (..., H, T, d) as (B, H, T, d), its last dim contiguous; copied only where no strides say that."""
    x = x.reshape(batch, *x.shape[-3:])
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _table(x: torch.Tensor, leading: torch.Size) -> torch.Tensor:
    """cos or sin (..., 1, T, d/2) as (B, T, d/2), with a batch stride of 0 where there is one for all."""
    x = x.squeeze(-3).contiguous()
    if x.shape[:-2].numel() == 1:
        return x.reshape(1, *x.shape[-2:]).expand(leading.numel(), *x.shape[-2:])
    return x.expand(*leading, *x.shape[-2:]).reshape(-1, *x.shape[-2:])


@triton.jit
def _turn_heads(
    out_ptr,
    x_ptr,
    cos,
    sin,
    batch,
    token,
    tokens,
    half,
    heads,
    x_batch,
    x_head,
    x_token,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Turn all heads of some tokens: tiles (TOKENS, HEADS, HALF) of the first half of the dims, and of the second."""
    column = tl.arange(0, HALF)[None, None, :]
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)[None, :, None]
        inside = (token < tokens) & (head < heads) & (column < half)
        source = x_ptr + (batch * x_batch + token * x_token + head.to(tl.int64) * x_head) + column
        first = tl.load(source, mask=inside, other=0.0).to(KIND)
        second = tl.load(source + half, mask=inside, other=0.0).to(KIND)
        place = out_ptr + ((batch * tokens + token) * heads + head) * (2 * half) + column
        tl.store(place, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(place + half, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _turn(
    q_out_ptr,
    k_out_ptr,
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    spans,
    half,
    q_heads,
    k_heads,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    table_batch,
    table_token,
    INVERSE: tl.constexpr,
    KIND: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    batch = (tl.program_id(0) // spans).to(tl.int64)
    token = (tl.program_id(0) % spans * TOKENS + tl.arange(0, TOKENS))[:, None, None].to(tl.int64)
    column = tl.arange(0, HALF)[None, None, :]
    inside = (token < tokens) & (column < half)
    place = batch * table_batch + token * table_token + column
    cos = tl.load(cos_ptr + place, mask=inside, other=0.0).to(KIND)
    sin = tl.load(sin_ptr + place, mask=inside, other=0.0).to(KIND)
    if INVERSE:
        sin = -sin
    _turn_heads(
        q_out_ptr, q_ptr, cos, sin, batch, token, tokens, half, q_heads, q_batch, q_head, q_token, KIND, HEADS, HALF
    )
    _turn_heads(
        k_out_ptr, k_ptr, cos, sin, batch, token, tokens, half, k_heads, k_batch, k_head, k_token, KIND, KEY_HEADS, HALF
    )
