"""Trust ratios: steps in proportion to the norm of the leaf that they change. (LARS, LAMB.)"""

from __future__ import annotations

import torch

from functional_booster.kernels import tree

from . import leaves
from .base import GradientTransformation, Scalar, Tree, add_scaled, at, elementwise, require_params, stateless
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
