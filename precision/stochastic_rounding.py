"""Stochastic rounding: up or down by chance, so that the expected value is exact (Gupta et al. 2015, 3.1)."""

from __future__ import annotations

from functional_booster.kernels.elementwise_update import stochastic_round

__all__ = ["stochastic_round"]
