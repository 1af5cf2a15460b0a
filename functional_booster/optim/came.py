"""CAME's steps: smoothed, and smaller where they disagree with their past. (Luo et al. 2023, arXiv 2307.02047.)"""

from __future__ import annotations

from typing import NamedTuple

import torch

from functional_booster.kernels import tree

from .base import GradientTransformation, Scalar, Tree, at, compute_dtype, spread, stands_for
from .factored import FactoredState, factored
from .validate import check_integer, check_scalar


class ScaleByConfidenceState(NamedTuple):
    """The smoothed updates, and the averages of how far updates were from them."""

    mu: Tree  # like the parameters, float32 at least
    instability: FactoredState  # of the leaves that are factored; the others have no confidence


def scale_by_confidence(
    b1: Scalar = 0.9, b3: Scalar = 0.9999, eps: Scalar = 1e-16, min_dim_size_to_factor: int = 1
) -> GradientTransformation:
    """``mu = b1 * mu + (1 - b1) * u``, divided by the root of the moving average (b3) of ``(u - mu)^2 + eps``.

    The average is factored; leaves that are not give ``mu`` alone. (Algorithm 2, from line 9.)
    """
    check_scalar("b1", b1, below=1.0)
    check_scalar("b3", b3, below=1.0)
    check_scalar("eps", eps)
    check_integer("min_dim_size_to_factor", min_dim_size_to_factor, minimum=1)
    moments = factored(b3, eps, min_dim_size_to_factor, None)

    def sides_of(values: Tree) -> tuple[Tree, Tree]:
        return tree.partition(values, spread(moments.is_factored(stands_for(values)), values))

    def init(params: Tree) -> ScaleByConfidenceState:
        mu = tree.map(lambda p: torch.zeros_like(p, dtype=compute_dtype(p)), params)
        return ScaleByConfidenceState(mu, moments.init(sides_of(params)[0]))

    def update(
        updates: Tree, state: ScaleByConfidenceState, params: Tree | None = None
    ) -> tuple[Tree, ScaleByConfidenceState]:
        mu = tree.map(lambda m, u: torch.lerp(m, u.to(m.dtype), at(1 - b1, m)), state.mu, updates)
        sides, rest = sides_of(mu)
        distances = tree.map(lambda u, m: u.to(m.dtype) - m, sides_of(updates)[0], sides)
        instability = moments.update(distances, state.instability)
        steady = tree.map(torch.mul, sides, moments.inverse_root(instability, sides)[0])
        new = tree.map(lambda step, u: step.to(u.dtype), tree.combine(steady, rest), updates)
        return new, ScaleByConfidenceState(mu, instability)

    return GradientTransformation(init, update, moments.is_factored)
