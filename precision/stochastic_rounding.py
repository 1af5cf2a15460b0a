"""Stochastic rounding: up or down by chance, so that the expected value is exact (Gupta et al. 2015, 3.1)."""

from __future__ import annotations

import torch

_KEPT = -(1 << 16)  # the bits of a float32 that a bfloat16 has


def stochastic_round(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """A float32 tensor in bfloat16: one of its two neighbours, the nearer one the likelier, itself where it is one.

    ``bits``: uniform, int32, of x's shape. Infinities and NaN stay; above the largest number it may be infinity.
    """
    raw = x.view(torch.int32)
    rounded = ((raw + (bits & ~_KEPT)) & _KEPT).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
