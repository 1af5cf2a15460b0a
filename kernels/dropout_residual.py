"""Dropout and the residual connection after it, in one pass (Srivastava et al. 2014; He et al. 2016)::

    y = residual + keep x / (1 - p)            dx = keep dy / (1 - p),  dresidual = dy

The mask is that of ``random.dropout`` under the same key, bit for bit. It is never stored: the backward draws it again.
The sum is rounded once, from float32 at least. On a GPU a Triton kernel draws the bits in registers; elsewhere, and for
float64, this is plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

from . import random
from .primitive import leading_dims, primitive
from .random import _check_key, _check_probability
from .threefry import bits


def dropout_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    key: torch.Tensor,
    *,
    global_shape: random.Shape | None = None,
    start: random.Start | None = None,
) -> torch.Tensor:
    """``residual + random.dropout(x, p, key)`` of one shape and dtype; what is dropped counts as 0 even where x is inf.

    ``global_shape`` and ``start`` place ``x`` in the whole activation, as for ``random.dropout``; that form keeps one
    byte an element for the backward. Raises as ``random.dropout``, and ValueError for a residual unlike x.
    """
    if (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device):
        given = f"{residual.dtype} of shape {tuple(residual.shape)} on {residual.device}"
        raise ValueError(f"residual: {given}, expected x's {x.dtype} of shape {tuple(x.shape)} on {x.device}")
    _check_probability("dropout_residual", p)
    _check_key(key)
    if not x.is_floating_point():
        raise TypeError(f"x: {x.dtype}, expected a floating-point dtype")
    dropped = round(p * 2**16)
    if dropped == 0:
        return residual + x
    if global_shape is not None or start is not None:
        return residual + random.dropout(x, p, key, global_shape=global_shape, start=start)
    return _fused(x, residual, key, dropped)


def by_torch(x: torch.Tensor, residual: torch.Tensor | None, key: torch.Tensor, dropped: int) -> torch.Tensor:
    """x (..., *shape), its residual or None for 0, and key (..., 2) -> their sum, with ``dropped`` of 2**16 dropped."""
    shape = tuple(x.shape[key.dim() - 1 :])
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    keep = bits(key, None, 0, shape, strides[: len(shape)], 16) > dropped - 2**15 - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    kept = torch.where(keep, x.to(dtype) * _scale(dropped), 0.0)
    return (kept if residual is None else residual.to(dtype) + kept).to(x.dtype)


def _on_cuda(x: torch.Tensor, residual: torch.Tensor | None, key: torch.Tensor, dropped: int) -> torch.Tensor:
    kernels = _kernels()
    if kernels is None or x.dtype == torch.float64:
        return by_torch(x, residual, key, dropped)
    out = _empty(x)
    if out.numel():
        given = None if residual is None else residual.contiguous()
        kernels.add(out, x.contiguous(), given, key.contiguous(), dropped, _scale(dropped))
    return out


def _empty(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _scale(dropped: int) -> float:
    return 2**16 / (2**16 - dropped) if dropped < 2**16 else 0.0


def _kernels() -> Any:
    try:
        from . import dropout_residual_triton
    except ModuleNotFoundError:  # torch without triton
        return None
    return dropout_residual_triton


def _backward(residuals: tuple[Any, ...], cotangent: torch.Tensor) -> tuple[Any, ...]:
    has_residual, key, dropped = residuals
    return _fused(cotangent, None, key, dropped), cotangent if has_residual else None, None, None


_fused = primitive(
    "dropout_residual",
    "(Tensor x, Tensor? residual, Tensor key, int dropped) -> Tensor",
    reference=by_torch,
    cuda=_on_cuda,
    fake=_empty,
    batching=leading_dims,
    residuals=lambda inputs, output: (inputs[1] is not None, inputs[2], inputs[3]),
    backward=_backward,
)
