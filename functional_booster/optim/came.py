"""CAME: smoothed steps, smaller where they disagree with their past. (Luo et al. 2023, arXiv 2307.02047.)"""

from __future__ import annotations

from typing import NamedTuple

import torch

from functional_booster.kernels import tree

from .adafactor import clip_by_block_rms
from .base import GradientTransformation, Scalar, ScalarOrSchedule, Tree, at, compute_dtype, spread, stands_for
from .combine import chain
from .decay import decayed
from .factored import FactoredState, factored, scale_by_factored_rms
from .scaling import scale_by_learning_rate
from .validate import check_integer, check_length, check_scalar


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


def came(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    b3: Scalar = 0.9999,
    eps: tuple[Scalar, Scalar] = (1e-30, 1e-16),
    *,
    clipping_threshold: Scalar = 1.0,
    min_dim_size_to_factor: int = 1,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
) -> GradientTransformation:
    """Adafactor with a momentum that is trusted less where gradients disagree with it. (Luo et al. 2023, 2307.02047.)

    ``eps``: added to squares of gradients, and to those of their distance from the momentum.
    """
    check_length("eps", eps, 2)
    return chain(
        scale_by_factored_rms(b2, eps[0], min_dim_size_to_factor),
        clip_by_block_rms(clipping_threshold),
        scale_by_confidence(b1, b3, eps[1], min_dim_size_to_factor),
        decayed(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
