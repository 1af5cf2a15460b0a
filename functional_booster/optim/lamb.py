"""LAMB: AdamW whose steps are in proportion to each leaf's norm. (You et al. 2020, arXiv 1904.00962.)"""

from __future__ import annotations

import torch

from functional_booster.kernels import tree

from . import leaves
from .adam import scale_by_adam
from .base import GradientTransformation, Scalar, ScalarOrSchedule, Tree, at, elementwise, require_params, stateless
from .combine import chain
from .decay import decayed
from .scaling import scale_by_learning_rate
from .validate import check_scalar


def scale_by_trust_ratio(
    min_norm: Scalar = 0.0, trust_coefficient: Scalar = 1.0, eps: Scalar = 0.0
) -> GradientTransformation:
    """Multiply each leaf's update by ``trust_coefficient * |param| / (|update| + eps)``, norms ``min_norm`` at least.

    A leaf whose norm, or whose update's, is 0 keeps its update. (You et al. 2020, "LAMB", arXiv 1904.00962; optax:
    ``scale_by_trust_ratio``.) ``update`` raises ValueError without ``params``.
    """
    check_scalar("min_norm", min_norm)
    check_scalar("trust_coefficient", trust_coefficient)
    check_scalar("eps", eps)

    def scaled(updates: Tree, params: Tree | None) -> Tree:
        sizes, steps = leaves.norms(require_params(params, "scale_by_trust_ratio"), updates)

        def ratio(size: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            size, step = size.clamp(min=at(min_norm, size)), step.clamp(min=at(min_norm, step))
            moves = (size > 0) & (step > 0)
            return torch.where(
                moves, at(trust_coefficient, size) * size / torch.where(moves, step + at(eps, step), 1), 1
            )

        return leaves.scaled(updates, tree.map(ratio, sizes, steps))

    return stateless(scaled, elementwise)


def lamb(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-6,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    *,
    mu_dtype: torch.dtype | None = None,
    debias: bool = True,
) -> GradientTransformation:
    """AdamW whose step is as long, leaf by leaf, as the parameter times the learning rate. (optax: ``lamb``.)

    (You et al. 2020, arXiv 1904.00962, algorithm 2.) ``debias=False`` takes the moments as they are.
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, debias=debias),
        decayed(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )
