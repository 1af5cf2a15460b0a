"""Clipping of gradients, by value and by global norm."""

from __future__ import annotations

from typing import Any

import torch

from functional_booster.kernels import tree

from .base import GradientTransformation, Scalar, Tree, at, elementwise, stateless, times
from .validate import check_scalar


def global_norm(updates: Tree) -> torch.Tensor:
    """The Euclidean norm of all leaves together, 0-d: float32, or float64 where a leaf is.

    Squares are summed in float64, so that no float32 gradient overflows; the derivative at zero is zero.
    """
    leaves = tree.leaves(updates)
    if not leaves:
        return torch.zeros(())
    norms = torch.stack([torch.linalg.vector_norm(leaf, dtype=torch.float64) for leaf in leaves])
    wide = any(leaf.dtype == torch.float64 for leaf in leaves)
    return torch.linalg.vector_norm(norms).to(torch.float64 if wide else torch.float32)


def clip_by_global_norm(max_norm: Scalar) -> GradientTransformation:
    """``updates * min(1, max_norm / (norm + 1e-6))``: torch.nn.utils.clip_grad_norm_'s rule."""
    check_scalar("max_norm", max_norm)

    def clipped(updates: Tree, params: Tree | None) -> Tree:
        norm = global_norm(updates)
        factor = (at(max_norm, norm) / (norm + 1e-6)).clamp(max=1.0)
        return tree.map(lambda u: times(u, factor), updates)

    return stateless(clipped, elementwise)


def clip(max_delta: Scalar) -> GradientTransformation:
    """Clip every element to [-max_delta, max_delta]. (optax: ``clip``.)"""
    check_scalar("max_delta", max_delta)

    def bound(update: torch.Tensor) -> torch.Tensor:
        limit: Any = at(max_delta, update)
        return torch.clamp(update, -limit, limit)

    return stateless(lambda updates, params: tree.map(bound, updates), elementwise)
