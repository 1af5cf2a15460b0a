"""Bias and GELU: y = gelu(x + b), by erf or by tanh.

    dx = dy gelu'(x + b)        db = sum over rows of dx

(Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".) Computed in float32, in float64 for float64, and rounded
once. On a GPU Triton kernels make one pass each way, and the gradient of the bias is the same bits at every run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from . import pullback
from .choice import choose, unfit
from .primitive import leading_dims, primitive
from .rms_norm import require_fit, sum_rows, widened


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x (..., F), bias (F,) in any floating-point dtype -> (..., F) in x's dtype. ``approximate``: "none" or "tanh".

    The kernel "bias_gelu" of ``use``. Raises ValueError for another approximation and for shapes that do not fit.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: {approximate!r}, expected 'none' or 'tanh'")
    require_fit(x, bias=bias)
    way = choose("bias_gelu", x, unfit(x, bias))
    return (by_triton if way == "triton" else by_torch)(x, bias, approximate)


def by_torch(x: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    """The formula. x (*G, ..., F), bias (*G, F), as all functions here: each member of a batch has its own bias."""
    y, b = widened(x, bias)
    return F.gelu(y + b, approximate=approximate).to(x.dtype)


def _contiguous(x: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    return by_torch(x, bias, approximate).clone(memory_format=torch.contiguous_format)


def _backward_by_torch(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    y, b = widened(x, bias)
    _, pull = torch.func.vjp(lambda y: F.gelu(y, approximate=approximate), y + b)[:2]
    (dx,) = pull(dy.to(y.dtype))
    return dx.to(x.dtype).clone(memory_format=torch.contiguous_format), sum_rows(dx, bias)


def _on_cuda(x: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    from . import bias_gelu_triton

    out = x.new_empty(x.shape)
    if x.numel():
        bias_gelu_triton.forward(out, x, bias, approximate)
    return out


def _backward_on_cuda(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    from . import bias_gelu_triton

    if not x.numel():
        return x.new_empty(x.shape), bias.new_zeros(bias.shape)
    dx, db = x.new_empty(x.shape), bias.new_empty(bias.shape)
    bias_gelu_triton.backward(dx, db, dy, x, bias, approximate)
    return dx, db


_pullback = primitive(
    "bias_gelu_backward",
    "(Tensor dy, Tensor x, Tensor bias, str approximate) -> (Tensor, Tensor)",
    reference=_backward_by_torch,
    cuda=_backward_on_cuda,
    fake=lambda dy, x, bias, approximate: (x.new_empty(x.shape), bias.new_empty(bias.shape)),
    batching=leading_dims,
    backward=pullback.of_reference(_backward_by_torch),
)


def _differentiate(kept: tuple[Any, ...], dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*_pullback(dy, *kept), None)


by_triton = primitive(
    "bias_gelu",
    "(Tensor x, Tensor bias, str approximate) -> Tensor",
    reference=_contiguous,
    cuda=_on_cuda,
    fake=lambda x, bias, approximate: x.new_empty(x.shape),
    batching=leading_dims,
    backward=_differentiate,
)
