"""Weight decay."""

from __future__ import annotations

import torch

from functional_booster.kernels import tree

from .base import GradientTransformation, Scalar, Tree, at, compute_dtype, elementwise, stateless
from .partition import masked
from .validate import check_scalar


def add_decayed_weights(weight_decay: Scalar = 0.0, mask: tree.Mask | None = None) -> GradientTransformation:
    """``updates + weight_decay * params``, where ``mask`` is True. (optax: ``add_decayed_weights``.)

    ``update`` raises ValueError without ``params``.
    """
    check_scalar("weight_decay", weight_decay)

    def add(update: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        dtype = compute_dtype(update, param)
        return (update.to(dtype) + param.to(dtype) * at(weight_decay, dtype)).to(update.dtype)

    def decayed(updates: Tree, params: Tree | None) -> Tree:
        if params is None:
            raise ValueError(
                "params: got None, but add_decayed_weights needs them: call update(updates, state, params)"
            )
        return tree.map(add, updates, params)

    tx = stateless(decayed, elementwise)
    return tx if mask is None else masked(tx, mask)
