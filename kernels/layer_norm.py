"""LayerNorm over the last dim, alone and of a sum: y = w n + b with n = (x - mean(x)) r, r = (var(x) + eps)^(-1/2).

With g = w dy::

    dx = r (g - mean(g) - n mean(g n))        dw = sum over rows of dy n        db = sum over rows of dy

(Ba, Kiros and Hinton 2016, "Layer Normalization".) The kernels are those of ``rms_norm``, and so is all that it says.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from . import pullback
from .choice import choose
from .primitive import leading_dims, primitive
from .rms_norm import lacks, require_fit, sum_rows, widened


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., D), weight and bias (D,) in any one floating-point dtype -> (..., D) in x's dtype.

    The kernel "layer_norm" of ``use``: "library" is ``F.layer_norm``. Raises ValueError for shapes that do not fit.
    """
    require_fit(x, weight=weight, bias=bias)
    way = choose("layer_norm", x, lacks(x, weight) or lacks(x, bias))
    if way == "triton":
        return by_triton(x, weight, bias, eps)
    return (by_library if way == "library" else by_torch)(x, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``layer_norm`` of the sum of x and residual (..., D), which is rounded to their dtype, and the sum.

    The kernel "add_layer_norm" of ``use``. Raises ValueError for shapes that do not fit.
    """
    require_fit(x, residual, weight=weight, bias=bias)
    way = choose("add_layer_norm", x, lacks(x, weight, residual) or lacks(x, bias))
    if way == "triton":
        return sum_by_triton(x, residual, weight, bias, eps)
    total = x + residual
    return (by_library if way == "library" else by_torch)(total, weight, bias, eps), total


def by_library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """``F.layer_norm``, in the wider of the dtypes."""
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), bias.dtype)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps).to(x.dtype)


def by_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula. x (*G, ..., D), weight and bias (*G, D), as in ``rms_norm``."""
    y, w = widened(x, weight)
    normed, _ = _normed(y, eps)
    return (normed * w + widened(x, bias)[1]).to(x.dtype)


def _normed(y: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y = y - y.mean(-1, keepdim=True)
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y * scale, scale


def _contiguous(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return by_torch(x, weight, bias, eps).clone(memory_format=torch.contiguous_format)


def _sum_by_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x + residual).clone(memory_format=torch.contiguous_format)
    return _contiguous(total, weight, bias, eps), total


def _backward_by_torch(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, more: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, w = widened(x, weight)
    normed, scale = _normed(y, eps)
    dy = dy.to(y.dtype)
    wanted = dy * w
    along = (wanted * normed).mean(-1, keepdim=True)
    dx = (wanted - wanted.mean(-1, keepdim=True) - normed * along) * scale
    dx = dx if more is None else dx + more.to(y.dtype)
    return (
        dx.to(x.dtype).clone(memory_format=torch.contiguous_format),
        sum_rows(dy * normed, weight),
        sum_rows(dy, bias),
    )


def _on_cuda(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    from . import norm_triton

    out = x.new_empty(x.shape)
    if x.numel():
        norm_triton.forward(out, None, x, None, weight, bias, eps, centered=True)
    return out


def _sum_on_cuda(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from . import norm_triton

    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    if x.numel():
        norm_triton.forward(out, total, x, residual, weight, bias, eps, centered=True)
    return out, total


def _backward_on_cuda(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, more: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from . import norm_triton

    if not x.numel():
        return x.new_empty(x.shape), weight.new_zeros(weight.shape), bias.new_zeros(bias.shape)
    dx, dw, db = _empty_grads(dy, x, weight, bias, more, eps)
    norm_triton.backward(dx, (dw, db), dy, x, weight, more, eps, centered=True)
    return dx, dw, db


def _empty_grads(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, more: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


_pullback = primitive(
    "layer_norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor? more, float eps) -> (Tensor, Tensor, Tensor)",
    reference=_backward_by_torch,
    cuda=_backward_on_cuda,
    fake=_empty_grads,
    batching=leading_dims,
    backward=pullback.of_reference(_backward_by_torch),
)


def _differentiate(kept: tuple[Any, ...], dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, bias, eps = kept
    return (*_pullback(dy, x, weight, bias, None, eps), None)


def _differentiate_sum(kept: tuple[Any, ...], dy: torch.Tensor, more: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    total, weight, bias, eps = kept
    dx, dw, db = _pullback(dy, total, weight, bias, more, eps)
    return dx, dx, dw, db, None


by_triton = primitive(
    "layer_norm",
    "(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    reference=_contiguous,
    cuda=_on_cuda,
    fake=lambda x, weight, bias, eps: x.new_empty(x.shape),
    batching=leading_dims,
    backward=_differentiate,
)
sum_by_triton = primitive(
    "add_layer_norm",
    "(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)",
    reference=_sum_by_torch,
    cuda=_sum_on_cuda,
    fake=lambda x, residual, weight, bias, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
    batching=leading_dims,
    residuals=lambda inputs, outputs: (outputs[1], *inputs[2:]),
    backward=_differentiate_sum,
)
