"""Weight decay."""

from __future__ import annotations

from functional_booster.kernels import tree

from .base import GradientTransformation, Scalar, Tree, add_scaled, elementwise, stateless
from .partition import masked
from .validate import check_scalar


def add_decayed_weights(weight_decay: Scalar = 0.0, mask: tree.Mask | None = None) -> GradientTransformation:
    """``updates + weight_decay * params``, where ``mask`` is True. (optax: ``add_decayed_weights``.)

    ``update`` raises ValueError without ``params``.
    """
    check_scalar("weight_decay", weight_decay)

    def decayed(updates: Tree, params: Tree | None) -> Tree:
        if params is None:
            raise ValueError(
                "params: got None, but add_decayed_weights needs them: call update(updates, state, params)"
            )
        return tree.map(lambda u, p: add_scaled(u, p, weight_decay), updates, params)

    tx = stateless(decayed, elementwise)
    return tx if mask is None else masked(tx, mask)


def matrices(params: Tree) -> Tree:
    """The mask of what weight decay is usually for: leaves of two dims or more, not biases and gains."""
    return tree.map(lambda leaf: len(leaf.shape) > 1, params)
