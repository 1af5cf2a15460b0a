"""LARS: gradients scaled in proportion to each leaf's norm. (You et al. 2017, arXiv 1708.03888.)"""

from __future__ import annotations

import torch

from functional_booster.kernels import tree

from . import leaves
from .base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    Tree,
    add_scaled,
    at,
    elementwise,
    is_zero,
    require_params,
    stateless,
)
from .combine import chain
from .partition import masked
from .scaling import scale_by_learning_rate
from .sgd import trace
from .validate import check_scalar


def scale_by_lars(
    weight_decay: Scalar = 0.0, trust_coefficient: Scalar = 0.001, eps: Scalar = 0.0
) -> GradientTransformation:
    """``ratio * (g + weight_decay * p)`` with ``ratio = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)``.

    The ratio is 1 for a leaf whose norm, or whose gradient's, is 0. (You et al. 2017, "LARS", arXiv 1708.03888,
    equation 6.) ``update`` raises ValueError without ``params``.
    """
    check_scalar("weight_decay", weight_decay)
    check_scalar("trust_coefficient", trust_coefficient)
    check_scalar("eps", eps)

    def scaled(updates: Tree, params: Tree | None) -> Tree:
        params = require_params(params, "scale_by_lars")
        sizes, slopes = leaves.norms(params, updates)

        def ratio(size: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
            moves = (size > 0) & (slope > 0)
            whole = slope + at(weight_decay, size) * size + at(eps, size)
            return torch.where(moves, at(trust_coefficient, size) * size / torch.where(moves, whole, 1), 1)

        decayed = tree.map(lambda g, p: add_scaled(g, p, weight_decay), updates, params)
        return leaves.scaled(decayed, tree.map(ratio, sizes, slopes))

    return stateless(scaled, elementwise)


def lars(
    learning_rate: ScalarOrSchedule,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    trust_coefficient: Scalar = 0.001,
    eps: Scalar = 0.0,
    momentum: Scalar = 0.9,
    nesterov: bool = False,
) -> GradientTransformation:
    """SGD with momentum whose gradients are scaled, leaf by leaf, to the parameter's norm. (optax: ``lars``.)

    Where ``mask`` is False there is neither decay nor scaling, as is usual for biases and gains. (You et al. 2017,
    arXiv 1708.03888, algorithm 1: the momentum is of steps, the learning rate in them.)
    """
    step = scale_by_lars(weight_decay, trust_coefficient, eps)
    momenta = () if is_zero(momentum) else (trace(momentum, nesterov),)
    scaled = step if mask is None else masked(step, mask)
    return chain(scaled, scale_by_learning_rate(learning_rate), *momenta)
