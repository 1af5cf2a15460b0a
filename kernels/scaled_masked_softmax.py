"""Softmax of scaled and masked scores, forward and backward in one pass each (Megatron-LM's fused softmax kernels,
Narayanan et al. 2021, section 5.8; Colossal-AI's scaled masked and scaled upper-triangular softmax)::

    z = scale x + mask         y = exp(z - max z) / sum exp(z - max z)         dz = y (dy - sum y dy),  dx = scale dz

A boolean mask keeps what is True, as in ``scaled_dot_product_attention``; the causal one keeps key k of query q for
k <= q, and its upper triangle is never read. A row with nothing kept (all -inf) is 0, and so are its gradients: no NaN.
Arithmetic is in float32 at least. On a GPU Triton kernels hold a row in registers; elsewhere, and for float64, this is
plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

from .primitive import primitive


def scaled_masked_softmax(x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
    """Scores (..., Q, K), and a mask that broadcasts to them -> probabilities (..., Q, K) in their dtype.

    The mask is bool (True: keep) or floating-point, added after scaling, and then differentiable. Raises TypeError for
    another dtype, ValueError for a mask that does not broadcast to x, or is elsewhere.
    """
    _check_scores(x)
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"mask: {mask.dtype}, expected bool (True: keep) or a floating-point dtype")
        if mask.device != x.device:
            raise ValueError(f"mask: on {mask.device}, expected {x.device}, where x is")
        if mask.dim() > x.dim() or any(
            size not in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(x.shape), strict=False)
        ):
            raise ValueError(f"mask: shape {tuple(mask.shape)}, expected one that broadcasts to {tuple(x.shape)}")
    return _forward(x, mask, float(scale), False)


def scaled_causal_softmax(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Scores (..., T, T) -> probabilities (..., T, T): position t attends up to t. Raises ValueError if not square."""
    _check_scores(x)
    if x.dim() < 2 or x.shape[-1] != x.shape[-2]:
        raise ValueError(f"x: shape {tuple(x.shape)}, expected as many keys as queries (..., T, T)")
    return _forward(x, None, float(scale), True)


def by_torch(x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
    """The probabilities in plain torch."""
    z = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    if causal:
        z = z.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1), -torch.inf)
    elif mask is not None and mask.dtype == torch.bool:
        z = torch.where(mask, z, -torch.inf)
    elif mask is not None:
        z = z + mask
    empty = (z == -torch.inf).all(-1, keepdim=True)
    return torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, z), -1)).to(x.dtype)


def backward_by_torch(y: torch.Tensor, cotangent: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of the scores in plain torch: ``scale * y * (dy - sum(y * dy))``."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    wide, dy = y.to(dtype), cotangent.to(dtype)
    return (scale * wide * (dy - (wide * dy).sum(-1, keepdim=True))).to(y.dtype)


def _check_scores(x: torch.Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"x: {x.dtype}, expected a floating-point dtype")
    if x.dim() == 0:
        raise ValueError("x: shape (), expected scores (..., Q, K)")


def _on_cuda(x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
    kernels = _kernels()
    if kernels is None or x.dtype == torch.float64 or (mask is not None and mask.dtype == torch.float64):
        return by_torch(x, mask, scale, causal)
    out = _empty(x)
    if out.numel():
        kernels.forward(out, x.contiguous(), mask, scale, causal)
    return out


def _backward_on_cuda(y: torch.Tensor, cotangent: torch.Tensor, scale: float) -> torch.Tensor:
    kernels = _kernels()
    if kernels is None or y.dtype == torch.float64:
        return backward_by_torch(y, cotangent, scale)
    out = _empty(y)
    if out.numel():
        kernels.backward(out, y.contiguous(), cotangent.contiguous(), scale)
    return out


def _empty(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _kernels() -> Any:
    try:
        from . import scaled_masked_softmax_triton
    except ModuleNotFoundError:  # torch without triton
        return None
    return scaled_masked_softmax_triton


def _gradients(residuals: tuple[Any, ...], cotangent: torch.Tensor) -> tuple[Any, ...]:
    mask, scale, y = residuals
    is_additive = mask is not None and mask.dtype != torch.bool
    of_mask = _backward(y, cotangent, 1.0).sum_to_size(mask.shape).to(mask.dtype) if is_additive else None
    return _backward(y, cotangent, scale), of_mask, None, None


def _second_gradients(residuals: tuple[Any, ...], cotangent: torch.Tensor) -> tuple[Any, ...]:
    y, dy, scale = residuals
    along = (y * dy).sum(-1, keepdim=True)
    of_y = scale * (cotangent * (dy - along) - dy * (cotangent * y).sum(-1, keepdim=True))
    return of_y, _backward(y, cotangent, scale), None


_backward = primitive(
    "scaled_masked_softmax_backward",
    "(Tensor y, Tensor cotangent, float scale) -> Tensor",
    reference=backward_by_torch,
    cuda=_backward_on_cuda,
    fake=_empty,
    backward=_second_gradients,
)
_forward = primitive(
    "scaled_masked_softmax",
    "(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
    reference=by_torch,
    cuda=_on_cuda,
    fake=_empty,
    residuals=lambda inputs, output: (inputs[1], inputs[2], output),
    backward=_gradients,
)
