"""RMSNorm over the last dim, alone and of a sum: y = w x r with r = (mean(x^2) + eps)^(-1/2).

With g = w dy::

    dx = r (g - x r mean(g x r))        dw = sum over rows of dy x r

(Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".) Statistics and sums are in float32, in float64 for
float64, and each result is rounded once. On a GPU a Triton kernel reads what there is to read once; the backward is one
pass, too, and gives the same bits whenever it runs. The sum's kernel adds a residual on the way: the next one in line.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from . import pullback
from .choice import choose, unfit
from .primitive import leading_dims, primitive

WIDEST = 16384  # elements of a row, that a program of the Triton kernels holds


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., D), weight (D,) in any floating-point dtype -> (..., D) in x's dtype. Raises ValueError for other shapes.

    The kernel "rms_norm" of ``use``: "library" is ``F.rms_norm``.
    """
    require_fit(x, weight=weight)
    way = choose("rms_norm", x, lacks(x, weight))
    if way == "triton":
        return by_triton(x, weight, eps)
    return by_library(x, weight, eps) if way == "library" else by_torch(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm`` of the sum of x and residual (..., D), which is rounded to their dtype, and the sum.

    The kernel "add_rms_norm" of ``use``. Raises ValueError for shapes that do not fit.
    """
    require_fit(x, residual, weight=weight)
    way = choose("add_rms_norm", x, lacks(x, weight, residual))
    if way == "triton":
        return sum_by_triton(x, residual, weight, eps)
    total = x + residual
    return (by_library if way == "library" else by_torch)(total, weight, eps), total


def require_fit(x: torch.Tensor, residual: torch.Tensor | None = None, **weights: torch.Tensor) -> None:
    """Raise ValueError unless the shapes of x (..., D), residual (..., D) and weights (D,) fit."""
    for name, weight in weights.items():
        if x.dim() < 1 or weight.shape != x.shape[-1:]:
            raise ValueError(f"{name}: shape {tuple(weight.shape)}, expected {tuple(x.shape[-1:])}, as x's last dim")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual: shape {tuple(residual.shape)}, expected {tuple(x.shape)}, as x has")


def lacks(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> str | None:
    """Why the Triton kernels of norms cannot take these, if so."""
    if x.shape[-1] > WIDEST:
        return f"it holds rows of at most {WIDEST} elements"
    if residual is not None and residual.dtype != x.dtype:
        return "it adds tensors of one dtype"
    return unfit(x, weight)


def by_library(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``F.rms_norm``, in the wider of both dtypes."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), eps).to(x.dtype)


def by_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula. x (*G, ..., D), weight (*G, D), as all functions here: each member of a batch has its own weight."""
    y, w = widened(x, weight)
    return (y * _scale(y, eps) * w).to(x.dtype)


def widened(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float32 at least, the weight (*G, D) with dims of size 1 for the rows of x."""
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    rows = (1,) * (x.dim() - weight.dim())
    return x.to(wide), weight.to(wide).reshape(*weight.shape[:-1], *rows, weight.shape[-1])


def _scale(y: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)


def _sum_by_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x + residual).clone(memory_format=torch.contiguous_format)
    return _contiguous(total, weight, eps), total


def _contiguous(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return by_torch(x, weight, eps).clone(memory_format=torch.contiguous_format)


def _backward_by_torch(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, more: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y, w = widened(x, weight)
    scale = _scale(y, eps)
    normed, wanted = y * scale, dy.to(y.dtype) * w
    dx = (wanted - normed * (wanted * normed).mean(-1, keepdim=True)) * scale
    dx = dx if more is None else dx + more.to(y.dtype)
    return dx.to(x.dtype).clone(memory_format=torch.contiguous_format), sum_rows(dy.to(y.dtype) * normed, weight)


def sum_rows(terms: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """terms (*G, ..., D) -> (*G, D) in weight's dtype."""
    rows = tuple(range(weight.dim() - 1, terms.dim() - 1))
    return (terms.sum(rows) if rows else terms).to(weight.dtype).clone(memory_format=torch.contiguous_format)


def _on_cuda(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from . import norm_triton

    out = x.new_empty(x.shape)
    if x.numel():
        norm_triton.forward(out, None, x, None, weight, None, eps, centered=False)
    return out


def _sum_on_cuda(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from . import norm_triton

    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    if x.numel():
        norm_triton.forward(out, total, x, residual, weight, None, eps, centered=False)
    return out, total


def _backward_on_cuda(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, more: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from . import norm_triton

    if not x.numel():
        return x.new_empty(x.shape), weight.new_zeros(weight.shape)
    dx, dw = x.new_empty(x.shape), weight.new_empty(weight.shape)
    norm_triton.backward(dx, (dw,), dy, x, weight, more, eps, centered=False)
    return dx, dw


_pullback = primitive(
    "rms_norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor? more, float eps) -> (Tensor, Tensor)",
    reference=_backward_by_torch,
    cuda=_backward_on_cuda,
    fake=lambda dy, x, weight, more, eps: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    batching=leading_dims,
    backward=pullback.of_reference(_backward_by_torch),
)


def _differentiate(kept: tuple[Any, ...], dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, eps = kept
    return (*_pullback(dy, x, weight, None, eps), None)


def _differentiate_sum(kept: tuple[Any, ...], dy: torch.Tensor, more: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    total, weight, eps = kept
    dx, dw = _pullback(dy, total, weight, more, eps)
    return dx, dx, dw, None


by_triton = primitive(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=_contiguous,
    cuda=_on_cuda,
    fake=lambda x, weight, eps: x.new_empty(x.shape),
    batching=leading_dims,
    backward=_differentiate,
)
sum_by_triton = primitive(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=_sum_by_torch,
    cuda=_sum_on_cuda,
    fake=lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
    batching=leading_dims,
    residuals=lambda inputs, outputs: (outputs[1], *inputs[2:]),
    backward=_differentiate_sum,
)
