"""Rotary positions on queries and keys in one pass: dim i turns with dim i + d/2, as Hugging Face has it.

With x1 and x2 the halves of a head's dims::

    y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin

(Su et al. 2021, "RoFormer".) The pullback is the turn back, so that it is the same kernel with -sin. On a GPU a Triton
kernel reads queries and keys where the fused product of a layer has them, head by head, and writes them token by token.
"""

from __future__ import annotations

from typing import Any

import torch

from .choice import choose, unfit
from .primitive import leading_dims, primitive


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, H, T, d) and k (B, K, T, d) turned, in their dtypes, by cos and sin (B or 1, 1, T, d/2) float32.

    The kernel "rotary" of ``use``. Raises ValueError for shapes that do not fit.
    """
    shapes = tuple(map(tuple, (q.shape, k.shape, cos.shape, sin.shape)))
    fits = q.dim() == k.dim() == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:]) and q.shape[3] % 2 == 0
    if not fits or any(
        tuple(table.shape) not in {(batch, 1, q.shape[2], q.shape[3] // 2) for batch in (1, q.shape[0])}
        for table in (cos, sin)
    ):
        raise ValueError(
            f"q, k, cos and sin: shapes {shapes}, expected (B, H, T, d), (B, K, T, d) and twice (B or 1, 1, T, d/2)"
        )
    if choose("rotary", q, _lacks(q, k, cos, sin)) == "triton":
        return by_triton(q, k, cos, sin, False)
    return turned(q, cos, sin), turned(k, cos, sin)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (..., H, T, d) turned by cos and sin that broadcast to (..., H, T, d/2), in x's dtype: the formula."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _lacks(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    if cos.requires_grad or sin.requires_grad:
        return "it gives no gradients of cos and sin"
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        return "cos and sin differ in shape or dtype"
    return unfit(q, k, cos)


def _empty(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _by_token(q), _by_token(k)


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """Room for an x (..., H, T, d) whose heads lie side by side: the strides of (..., T, H, d), transposed."""
    *outer, heads, tokens, size = x.shape
    strides = [heads * tokens * size] if outer else []
    for dim in reversed(outer[1:]):
        strides.insert(0, strides[0] * dim)
    return torch.empty_strided(x.shape, (*strides, size, heads * size, 1), dtype=x.dtype, device=x.device)


def _reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    sin = -sin if inverse else sin
    return _by_token(q).copy_(turned(q, cos, sin)), _by_token(k).copy_(turned(k, cos, sin))


def _on_cuda(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from . import rotary_triton

    out = _empty(q, k, cos, sin, inverse)
    if q.numel() or k.numel():
        rotary_triton.turn(*out, q, k, cos, sin, inverse)
    return out


def _differentiate(kept: tuple[Any, ...], dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    cos, sin, inverse = kept
    return (*by_triton(dq, dk, cos, sin, not inverse), None, None, None)


by_triton = primitive(
    "rotary",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor, Tensor)",
    reference=_reference,
    cuda=_on_cuda,
    fake=_empty,
    batching=leading_dims,
    residuals=lambda inputs, outputs: inputs[2:],
    backward=_differentiate,
)
