"""The Euclidean norm of a buffer in one pass, as global gradient clipping needs it (Pascanu et al. 2013)::

    norm(x) = sqrt(sum x^2)            dnorm/dx = x / norm, 0 where the norm is 0

Squares are summed in float64, so that no float32 gradient overflows. On a GPU two Triton kernels add up fixed parts,
and then the parts, in a fixed order, without atomics: the same bits at every call. Elsewhere, and for float64, this is
plain torch, open to the compiler.
"""

from __future__ import annotations

from typing import Any

import torch

from .primitive import primitive


def norm(x: torch.Tensor) -> torch.Tensor:
    """The norm of all elements of a floating-point tensor: 0-d float64, 0 for an empty one."""
    on_gpu = x.device.type == "cuda" and x.dtype != torch.float64 and _kernels() is not None
    return _by_triton(x) if on_gpu else by_torch(x)


def by_torch(x: torch.Tensor) -> torch.Tensor:
    """The norm in plain torch."""
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def _on_cuda(x: torch.Tensor) -> torch.Tensor:
    if (kernels := _kernels()) is None:
        return by_torch(x)
    return kernels.norm(x.contiguous()) if x.numel() else _empty(x).zero_()


def _empty(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((), dtype=torch.float64)


def _kernels() -> Any:
    try:
        from . import global_norm_triton
    except ModuleNotFoundError:  # torch without triton
        return None
    return global_norm_triton


def _backward(residuals: tuple[Any, ...], cotangent: torch.Tensor) -> tuple[torch.Tensor]:
    x, length = residuals
    slope = torch.where(length > 0, cotangent / torch.where(length > 0, length, 1.0), 0.0)
    return ((x.to(torch.promote_types(x.dtype, torch.float32)) * slope).to(x.dtype),)


_by_triton = primitive(
    "euclidean_norm",
    "(Tensor x) -> Tensor",
    reference=by_torch,
    cuda=_on_cuda,
    fake=_empty,
    residuals=lambda inputs, output: (*inputs, output),
    backward=_backward,
)
