"""NAdam, RAdam and AdaMax: Adam with another momentum, another start, another norm. Numbers are torch.optim's."""

from __future__ import annotations

from typing import NamedTuple

import torch

from functional_booster.kernels import tree

from .adam import ScaleByAdamState, bias_correction, moment
from .base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    Tree,
    at,
    compute_dtype,
    elementwise,
    number_of,
    zero_count,
)
from .combine import chain
from .decay import decayed
from .scaling import ascent, scale_by_learning_rate
from .validate import check_scalar


class ScaleByNadamState(NamedTuple):
    """Adam's moments, and the product of the momenta so far."""

    count: torch.Tensor  # () int32: updates made
    mu: Tree
    nu: Tree  # float32 at least
    mu_product: torch.Tensor  # () float64


def scale_by_nadam(
    b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8, momentum_decay: Scalar = 0.004
) -> GradientTransformation:
    """Adam with Nesterov's momentum, which grows with the number of updates. (Dozat 2016; torch.optim.NAdam.)"""
    _check(b1, b2, eps)
    check_scalar("momentum_decay", momentum_decay)

    def init(params: Tree) -> ScaleByNadamState:
        count = zero_count(params)
        return ScaleByNadamState(count, *_zeros(params), torch.ones_like(count, dtype=torch.float64))

    def update(updates: Tree, state: ScaleByNadamState, params: Tree | None = None) -> tuple[Tree, ScaleByNadamState]:
        count, t = state.count + 1, number_of(state.count)
        mu = tree.map(lambda g, m: moment(g, m, b1), updates, state.mu)
        nu = tree.map(lambda g, v: moment(g, v, b2, square=True), updates, state.nu)

        def momentum(t: torch.Tensor) -> torch.Tensor:
            return at(b1, t) * (1 - 0.5 * 0.96 ** (t * at(momentum_decay, t)))

        product = state.mu_product * momentum(t)
        now = (1 - momentum(t)) / (1 - product)
        ahead = momentum(t + 1) / (1 - product * momentum(t + 1))
        correction = bias_correction(b2, count)

        def direction(g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            wide, root = g.to(v.dtype), (v / at(correction, v)).clamp(min=torch.finfo(v.dtype).tiny).sqrt()
            return ((wide * at(now, v) + m.to(v.dtype) * at(ahead, v)) / (root + at(eps, v))).to(g.dtype)

        return tree.map(direction, updates, mu, nu), ScaleByNadamState(count, mu, nu, product)

    return GradientTransformation(init, update, elementwise)


def scale_by_radam(b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8) -> GradientTransformation:
    """Adam whose step is rectified while the second moment is uncertain, and the momentum alone in the first updates.

    (Liu et al. 2020, arXiv 1908.03265; torch.optim.RAdam.)
    """
    _check(b1, b2, eps)

    def init(params: Tree) -> ScaleByAdamState:
        return ScaleByAdamState(zero_count(params), *_zeros(params), None)

    def update(updates: Tree, state: ScaleByAdamState, params: Tree | None = None) -> tuple[Tree, ScaleByAdamState]:
        count, t = state.count + 1, number_of(state.count)
        mu = tree.map(lambda g, m: moment(g, m, b1), updates, state.mu)
        nu = tree.map(lambda g, v: moment(g, v, b2, square=True), updates, state.nu)
        correction1, correction2 = bias_correction(b1, count), bias_correction(b2, count)
        most = 2 / (1 - at(b2, t)) - 1
        length = most - 2 * t * at(b2, t) ** t / correction2
        certain = length > 5
        known = torch.where(certain, length, 6.0)
        ratio = (known - 4) * (known - 2) * most / ((most - 4) * (most - 2) * known)
        rectified = torch.where(certain, ratio, 0.0).sqrt() * correction2.sqrt()

        def direction(g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            root = v.clamp(min=torch.finfo(v.dtype).tiny).sqrt()
            factor = torch.where(certain.to(v.device), at(rectified, v) / (root + at(eps, v)), 1.0)
            return (m.to(v.dtype) / at(correction1, v) * factor).to(g.dtype)

        return tree.map(direction, updates, mu, nu), ScaleByAdamState(count, mu, nu, None)

    return GradientTransformation(init, update, elementwise)


def scale_by_adamax(b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8) -> GradientTransformation:
    """``mu_hat / nu`` with ``nu = max(b2 * nu, |g| + eps)``. (Kingma and Ba, arXiv 1412.6980, section 7.)"""
    _check(b1, b2, eps)

    def init(params: Tree) -> ScaleByAdamState:
        return ScaleByAdamState(zero_count(params), *_zeros(params), None)

    def update(updates: Tree, state: ScaleByAdamState, params: Tree | None = None) -> tuple[Tree, ScaleByAdamState]:
        count = state.count + 1
        correction = bias_correction(b1, count)
        mu = tree.map(lambda g, m: moment(g, m, b1), updates, state.mu)
        nu = tree.map(lambda g, v: torch.maximum(v * at(b2, v), g.to(v.dtype).abs() + at(eps, v)), updates, state.nu)

        def direction(g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            largest = v.clamp(min=torch.finfo(v.dtype).tiny)
            return (m.to(v.dtype) / (largest * at(correction, v))).to(g.dtype)

        return tree.map(direction, updates, mu, nu), ScaleByAdamState(count, mu, nu, None)

    return GradientTransformation(init, update, elementwise)


def nadam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    momentum_decay: Scalar = 0.004,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """NAdam (Dozat 2016), as torch.optim.NAdam."""
    step = scale_by_nadam(b1, b2, eps, momentum_decay)
    return _decaying(step, learning_rate, weight_decay, mask, decoupled_weight_decay, maximize)


def radam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """RAdam (Liu et al. 2020, arXiv 1908.03265), as torch.optim.RAdam."""
    step = scale_by_radam(b1, b2, eps)
    return _decaying(step, learning_rate, weight_decay, mask, decoupled_weight_decay, maximize)


def adamax(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    maximize: bool = False,
) -> GradientTransformation:
    """AdaMax (Kingma and Ba, arXiv 1412.6980, section 7), as torch.optim.Adamax."""
    return _decaying(scale_by_adamax(b1, b2, eps), learning_rate, weight_decay, mask, False, maximize)


def _decaying(
    step: GradientTransformation,
    learning_rate: ScalarOrSchedule,
    weight_decay: Scalar,
    mask: tree.Mask | None,
    decoupled: bool,
    maximize: bool,
) -> GradientTransformation:
    """``step`` with decay after it, or as an L2 penalty before it."""
    decay = decayed(weight_decay, mask)
    links = (step, decay) if decoupled else (decay, step)
    return ascent(maximize, chain(*links, scale_by_learning_rate(learning_rate)))


def _check(b1: Scalar, b2: Scalar, eps: Scalar) -> None:
    check_scalar("b1", b1, below=1.0)
    check_scalar("b2", b2, below=1.0)
    check_scalar("eps", eps)


def _zeros(params: Tree) -> tuple[Tree, Tree]:
    """First moments like the parameters, second ones in float32 at least."""
    return (
        tree.map(torch.zeros_like, params),
        tree.map(lambda p: torch.zeros_like(p, dtype=compute_dtype(p)), params),
    )
