"""The activations of ``gated`` and ``bias_gelu`` inside a Triton kernel, each with its slope."""

from __future__ import annotations

import triton
import triton.language as tl

_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): as in gelu
_CUBIC = tl.constexpr(0.044715)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # of the normal distribution at 0


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, SHORT: tl.constexpr):
    """x, in float32 or float64, -> a(x), a'(x). ``SHORT``: for results of half precision."""
    if ACTIVATION == "relu":
        gate = tl.where(x > 0, 1.0, 0.0).to(x.dtype)
        slope = gate
    elif ACTIVATION == "silu":
        gate = 1 / (1 + tl.exp(-x))
        slope = gate * (1 + x * (1 - gate))
    elif ACTIVATION == "gelu_tanh":
        gate = 1 / (1 + tl.exp(-(x + x * x * x * _CUBIC) * _SLOPE))
        slope = gate + x * gate * (1 - gate) * _SLOPE * (1 + x * x * (3 * _CUBIC))
    else:
        bell = tl.exp(-0.5 * x * x)
        gate = _normal_cdf(x, bell) if SHORT else 0.5 * (1 + tl.erf(x * _ROOT_HALF))
        slope = gate + x * _DENSITY * bell
    return x * gate, slope


@triton.jit
def _normal_cdf(x, bell):
    """Phi(x) from exp(-x^2 / 2), a third of erf's work, which would outlast the memory.

    (Abramowitz and Stegun 1964, 7.1.26: within 1e-7.)
    """
    t = 1 / (1 + tl.abs(x) * (0.3275911 * _ROOT_HALF))
    series = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    tail = 0.5 * series * t * bell
    return tl.where(x < 0, tail, 1 - tail)
