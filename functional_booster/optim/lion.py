"""Lion: the sign of a momentum. (Chen et al. 2023, arXiv 2302.06675.)"""

from __future__ import annotations

from typing import NamedTuple

import torch

from functional_booster.kernels import tree

from .base import GradientTransformation, Scalar, ScalarOrSchedule, Tree, at, compute_dtype, elementwise
from .combine import chain
from .decay import decayed
from .fused import fused_lion
from .scaling import scale_by_learning_rate
from .validate import check_dtype, check_scalar


class ScaleByLionState(NamedTuple):
    """The momentum."""

    mu: Tree  # like the parameters, in mu_dtype


def scale_by_lion(b1: Scalar = 0.9, b2: Scalar = 0.99, mu_dtype: torch.dtype | None = None) -> GradientTransformation:
    """``sign(b1 * mu + (1 - b1) * g)``, then ``mu = b2 * mu + (1 - b2) * g``. (optax: ``scale_by_lion``.)"""
    check_scalar("b1", b1, below=1.0)
    check_scalar("b2", b2, below=1.0)
    check_dtype("mu_dtype", mu_dtype)

    def toward(g: torch.Tensor, m: torch.Tensor, decay: Scalar) -> torch.Tensor:
        dtype = compute_dtype(g, m)
        return torch.lerp(m.to(dtype), g.to(dtype), at(1 - decay, g.to(dtype)))

    def init(params: Tree) -> ScaleByLionState:
        return ScaleByLionState(tree.map(lambda p: torch.zeros_like(p, dtype=mu_dtype), params))

    def update(updates: Tree, state: ScaleByLionState, params: Tree | None = None) -> tuple[Tree, ScaleByLionState]:
        signs = tree.map(lambda g, m: toward(g, m, b1).sign().to(g.dtype), updates, state.mu)
        mu = tree.map(lambda g, m: toward(g, m, b2).to(m.dtype), updates, state.mu)
        return signs, ScaleByLionState(mu)

    return GradientTransformation(init, update, elementwise)


def lion(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    mu_dtype: torch.dtype | None = None,
    weight_decay: Scalar = 1e-3,
    mask: tree.Mask | None = None,
    *,
    fused: bool = False,
) -> GradientTransformation:
    """The sign of a momentum, and decoupled weight decay. (Chen et al. 2023, arXiv 2302.06675; optax: ``lion``.)

    ``fused`` as for ``adamw``.
    """
    tx = chain(scale_by_lion(b1, b2, mu_dtype), decayed(weight_decay, mask), scale_by_learning_rate(learning_rate))
    if not fused:
        return tx
    return tx._replace(fused=fused_lion(learning_rate, b1, b2, weight_decay=weight_decay, mask=mask))
