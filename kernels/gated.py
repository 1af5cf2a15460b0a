"""Gated activations: a(gate) * up, of gate and up side by side, as one matrix product gives them.

    d gate = dy up a'(gate)        d up = dy a(gate)

(Shazeer 2020, "GLU Variants Improve Transformer": SwiGLU with a = silu, GeGLU with a = gelu, by erf or by tanh, and
ReGLU.) Computed in float32, in float64 for float64, and rounded once. On a GPU a Triton kernel makes one pass; the
backward computes the activation again, and writes both gradients where the gradient of that product is wanted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from . import pullback
from .choice import choose, unfit
from .primitive import leading_dims, primitive

# Hugging Face's names of activations -> ours
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x (..., 2F), gate before up -> (..., F) in x's dtype. ``activation``: one of ``ACTIVATIONS``.

    The kernel "gated" of ``use``. Raises ValueError for another activation and for an odd last dim.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    if x.dim() < 1 or x.shape[-1] % 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected (..., 2F): gate and up side by side")
    way = choose("gated", x, unfit(x))
    return (by_triton if way == "triton" else by_torch)(x, ACTIVATIONS[activation])


def by_torch(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The formula, for our names of activations."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return (_activated(gate, activation) * up).to(x.dtype)


def _activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation.startswith("gelu"):
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.silu(gate) if activation == "silu" else F.relu(gate)


def _contiguous(x: torch.Tensor, activation: str) -> torch.Tensor:
    return by_torch(x, activation).clone(memory_format=torch.contiguous_format)


def _backward_by_torch(dy: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = x.to(wide).chunk(2, -1)
    value, pull = torch.func.vjp(lambda gate: _activated(gate, activation), gate)[:2]
    dy = dy.to(wide)
    return torch.cat([pull(dy * up)[0], dy * value], -1).to(x.dtype)


def _empty(x: torch.Tensor, activation: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _on_cuda(x: torch.Tensor, activation: str) -> torch.Tensor:
    from . import gated_triton

    out = _empty(x, activation)
    if out.numel():
        gated_triton.forward(out, x, activation)
    return out


def _backward_on_cuda(dy: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    from . import gated_triton

    dx = x.new_empty(x.shape)
    if dx.numel():
        gated_triton.backward(dx, dy, x, activation)
    return dx


_pullback = primitive(
    "gated_backward",
    "(Tensor dy, Tensor x, str activation) -> Tensor",
    reference=_backward_by_torch,
    cuda=_backward_on_cuda,
    fake=lambda dy, x, activation: x.new_empty(x.shape),
    batching=leading_dims,
    backward=pullback.of_reference(_backward_by_torch),
)


def _differentiate(kept: tuple[Any, ...], dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _pullback(dy, *kept), None


by_triton = primitive(
    "gated",
    "(Tensor x, str activation) -> Tensor",
    reference=_contiguous,
    cuda=_on_cuda,
    fake=_empty,
    batching=leading_dims,
    backward=_differentiate,
)
