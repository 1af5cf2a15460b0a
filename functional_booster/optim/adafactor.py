"""Adafactor: factored second moments, steps relative to each leaf. (Shazeer and Stern 2018, arXiv 1804.04235.)"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from functional_booster.kernels import tree

from . import leaves
from .base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    Tree,
    at,
    elementwise,
    is_zero,
    number_of,
    require_params,
    stands_for,
    stateless,
)
from .combine import added, chain
from .decay import decayed
from .factored import scale_by_factored_rms
from .scaling import scale_by_learning_rate, set_to_zero
from .sgd import trace
from .validate import check_scalar


def adafactor(
    learning_rate: ScalarOrSchedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: Scalar = 0.8,
    *,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: Scalar | None = 1.0,
    momentum: Scalar | None = None,
    eps: Scalar = 1e-30,
    min_scale: Scalar = 1e-3,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
) -> GradientTransformation:
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithm 4), as Hugging Face's; arguments are optax's.

    ``learning_rate`` None: ``min(1e-2, 1 / sqrt(t))`` at update t. With ``multiply_by_parameter_scale`` it is relative
    to each leaf's rms, ``min_scale`` at least. ``weight_decay`` is decoupled, times the whole step size.
    """
    if momentum is not None:
        check_scalar("momentum", momentum, below=1.0)
    rate = relative_step() if learning_rate is None else learning_rate
    clipped = () if clipping_threshold is None else (clip_by_block_rms(clipping_threshold),)
    scaled = (scale_by_param_block_rms(min_scale),) if multiply_by_parameter_scale else ()
    decay = decayed(weight_decay, mask)
    direction = (scale_by_factored_rms(adafactor_decay(decay_rate), eps, min_dim_size_to_factor), *clipped)
    if momentum is None:
        return chain(*direction, decay, *scaled, scale_by_learning_rate(rate))
    smoothed = trace(momentum, dampening=momentum, dampen_first=True)
    steps = chain(*direction, *scaled, scale_by_learning_rate(rate), smoothed)
    return added(steps, chain(set_to_zero(), decay, *scaled, scale_by_learning_rate(rate)))


def relative_step(warmup: bool = False) -> Callable[[Any], Any]:
    """Adafactor's schedule ``min(1e-2, 1 / sqrt(t))``; with ``warmup`` ``min(1e-6 * t, 1 / sqrt(t))``."""

    def rate(count: Any) -> Any:
        t = number_of(count)
        if not isinstance(t, torch.Tensor):
            return min(1e-6 * t if warmup else 1e-2, t**-0.5)
        return torch.minimum(1e-6 * t if warmup else torch.full_like(t, 1e-2), t.rsqrt())

    return rate


def adafactor_decay(decay_rate: Scalar) -> Callable[[Any], Any]:
    """``1 - t^-decay_rate`` at update t = 1, 2, ...: the first moment is the first square. (Section 7.2.)"""
    check_scalar("decay_rate", decay_rate)
    return lambda count: 1 - number_of(count) ** -decay_rate


def clip_by_block_rms(threshold: Scalar) -> GradientTransformation:
    """Divide each leaf's update by ``max(1, rms / threshold)``. (Section 6; optax: ``clip_by_block_rms``.)"""
    check_scalar("threshold", threshold)
    if is_zero(threshold):
        raise ValueError(f"threshold: got {threshold!r}, expected a number above 0")

    def clipped(updates: Tree, params: Tree | None) -> Tree:
        rms = tree.map(_root_mean, leaves.norms(updates)[0], stands_for(updates))
        return leaves.scaled(updates, tree.map(lambda size: 1 / (size / at(threshold, size)).clamp(min=1.0), rms))

    return stateless(clipped, elementwise)


def scale_by_param_block_rms(min_scale: Scalar = 1e-3) -> GradientTransformation:
    """Multiply each leaf's update by its parameter's rms, ``min_scale`` at least. (optax: same name.)

    ``update`` raises ValueError without ``params``. (Section 8.)
    """
    check_scalar("min_scale", min_scale)

    def scaled(updates: Tree, params: Tree | None) -> Tree:
        params = require_params(params, "scale_by_param_block_rms")
        rms = tree.map(_root_mean, leaves.norms(params)[0], stands_for(params))
        return leaves.scaled(updates, tree.map(lambda size: size.clamp(min=at(min_scale, size)), rms))

    return stateless(scaled, elementwise)


def _root_mean(norm: torch.Tensor, leaf: Any) -> torch.Tensor:
    return norm / math.sqrt(max(math.prod(leaf.shape), 1))
