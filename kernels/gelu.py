"""GELU for the compiler: x Phi(x), and its tanh form, which is written by a sigmoid. (Hendrycks and Gimpel 2016.)

tanh(u) = 2 sigmoid(2u) - 1, so 0.5 x (1 + tanh(u)) = x sigmoid(2u): one exponential instead of a tanh, in the forward
and in the backward, half the time on a CPU. Equal to torch's to rounding.
"""

from __future__ import annotations

import math

import torch

_SLOPE = 2 * math.sqrt(2 / math.pi)  # 2u = _SLOPE * (x + _CUBIC x^3)
_CUBIC = 0.044715


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """``F.gelu(x, approximate=...)``; in float32 at least."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return (y * _gate(y, approximate)).to(x.dtype)


def gelu_backward(cotangent: torch.Tensor, x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The pullback of ``gelu`` at x: the cotangent times d/dx."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    gate = _gate(y, approximate)
    if approximate == "none":
        slope = torch.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)
    else:
        slope = gate * (1 - gate) * _SLOPE * (1 + 3 * _CUBIC * y * y)
    return (cotangent.to(y.dtype) * (gate + y * slope)).to(cotangent.dtype)


def _gate(x: torch.Tensor, approximate: str) -> torch.Tensor:
    if approximate == "none":
        return 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return torch.sigmoid(_SLOPE * (x + _CUBIC * x * x * x))
