"""Clipping of gradients, by value and by global norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from functional_booster.kernels import flat, tree
from functional_booster.kernels.global_norm import norm as norm_of
from functional_booster.sharding.collectives import all_gather

from .base import GradientTransformation, Scalar, Tree, at, device_of, elementwise, stateless, times
from .validate import check_scalar


def global_norm(updates: Tree) -> torch.Tensor:
    """The Euclidean norm of all leaves together, 0-d: float32, or float64 where a leaf is.

    Squares are summed in float64, so that no float32 gradient overflows; the derivative at zero is zero. Inside a step,
    each element counts once, however its buffer is split over the mesh.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for axes, leaf in _with_axes(updates):
        by_axes.setdefault(axes, []).append(leaf)
    if not by_axes:
        return torch.zeros(())
    norms, device = [], device_of(updates)
    for axes, leaves in by_axes.items():
        norm = _norm([norm_of(leaf).to(device) for leaf in leaves])
        norms.append(_norm(list(all_gather(norm, axes, tiled=False))) if axes else norm)
    wide = any(leaf.dtype == torch.float64 for leaves in by_axes.values() for leaf in leaves)
    return _norm(norms).to(torch.float64 if wide else torch.float32)


def _norm(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(norms))


def _with_axes(updates: Tree) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """(the mesh axes that split it, the tensor) of each leaf."""
    for node in tree.leaves(updates, is_leaf=lambda node: isinstance(node, flat.Flat)):
        if not isinstance(node, flat.Flat):
            yield (), node
            continue
        for bucket, buffer in node.buffers.items():
            if buffer is not None:
                yield node.layout.axes[bucket], buffer


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
