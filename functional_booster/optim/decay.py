"""Weight decay."""

from __future__ import annotations

from functional_booster.kernels import tree

from .base import (
    GradientTransformation,
    Scalar,
    Tree,
    add_scaled,
    elementwise,
    identity,
    is_zero,
    require_params,
    stateless,
)
from .partition import masked
from .validate import check_scalar


def add_decayed_weights(weight_decay: Scalar = 0.0, mask: tree.Mask | None = None) -> GradientTransformation:
    """``updates + weight_decay * params``, where ``mask`` is True. (optax: ``add_decayed_weights``.)

    ``update`` raises ValueError without ``params``.
    """
    check_scalar("weight_decay", weight_decay)

    def decayed(updates: Tree, params: Tree | None) -> Tree:
        return tree.map(
            lambda u, p: add_scaled(u, p, weight_decay), updates, require_params(params, "add_decayed_weights")
        )

    tx = stateless(decayed, elementwise)
    return tx if mask is None else masked(tx, mask)


def decayed(weight_decay: Scalar, mask: tree.Mask | None) -> GradientTransformation:
    """The link that decays weights. It hands updates through where none do: a chain's states keep their places."""
    link = add_decayed_weights(weight_decay, mask)
    return identity() if is_zero(weight_decay) else link


def matrices(params: Tree) -> Tree:
    """The mask of what weight decay is usually for: leaves of two dims or more, not biases and gains."""
    return tree.map(lambda leaf: len(leaf.shape) > 1, params)
