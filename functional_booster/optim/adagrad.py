"""AdaGrad, RMSProp and AdaDelta: gradients over the root of their squares, summed or averaged. As torch.optim's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from functional_booster.kernels import tree

from .base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    Tree,
    at,
    compute_dtype,
    elementwise,
    is_zero,
    number_of,
)
from .combine import chain
from .decay import decayed
from .scaling import ascent, scale_by_learning_rate, scale_by_schedule
from .sgd import trace
from .validate import check_scalar


class ScaleByRssState(NamedTuple):
    """The sum of squares."""

    sum_of_squares: Tree  # like the parameters, float32 at least


class ScaleByRmsState(NamedTuple):
    """Averages of squares and, if centred, of gradients."""

    nu: Tree  # like the parameters, float32 at least
    mu: Tree | None


class ScaleByAdadeltaState(NamedTuple):
    """Averages of the squares of gradients and of steps."""

    e_g: Tree  # like the parameters, float32 at least
    e_x: Tree


def scale_by_rss(initial_accumulator_value: float = 0.0, eps: Scalar = 1e-10) -> GradientTransformation:
    """``g / (sqrt(sum of g^2) + eps)``. (Duchi et al. 2011, "AdaGrad"; optax has eps in the root.)"""
    check_scalar("initial_accumulator_value", initial_accumulator_value)
    check_scalar("eps", eps)

    def init(params: Tree) -> ScaleByRssState:
        return ScaleByRssState(
            tree.map(lambda p: torch.full_like(p, initial_accumulator_value, dtype=compute_dtype(p)), params)
        )

    def update(updates: Tree, state: ScaleByRssState, params: Tree | None = None) -> tuple[Tree, ScaleByRssState]:
        total = tree.map(lambda g, s: s + g.to(s.dtype).square(), updates, state.sum_of_squares)
        return tree.map(lambda g, s: _over_root(g, s, eps), updates, total), ScaleByRssState(total)

    return GradientTransformation(init, update, elementwise)


def scale_by_rms(decay: Scalar = 0.99, eps: Scalar = 1e-8, *, centered: bool = False) -> GradientTransformation:
    """``g / (sqrt(average of g^2) + eps)``; centered: over the deviation from the average. (Tieleman and Hinton 2012.)

    As torch.optim.RMSprop. (optax: ``scale_by_rms`` and ``scale_by_stddev``, with eps in the root.)
    """
    check_scalar("decay", decay, below=1.0)
    check_scalar("eps", eps)

    def init(params: Tree) -> ScaleByRmsState:
        return ScaleByRmsState(_zeros(params), _zeros(params) if centered else None)

    def update(updates: Tree, state: ScaleByRmsState, params: Tree | None = None) -> tuple[Tree, ScaleByRmsState]:
        nu = tree.map(lambda g, v: _averaged(g.to(v.dtype).square(), v, decay), updates, state.nu)
        if not centered:
            return tree.map(lambda g, v: _over_root(g, v, eps), updates, nu), ScaleByRmsState(nu, None)
        mu = tree.map(lambda g, m: _averaged(g.to(m.dtype), m, decay), updates, state.mu)
        variance = tree.map(lambda v, m: (v - m.square()).clamp(min=0), nu, mu)  # rounding takes it below zero
        return tree.map(lambda g, v: _over_root(g, v, eps), updates, variance), ScaleByRmsState(nu, mu)

    return GradientTransformation(init, update, elementwise)


def scale_by_adadelta(rho: Scalar = 0.9, eps: Scalar = 1e-6) -> GradientTransformation:
    """``g * sqrt(average of steps^2 + eps) / sqrt(average of g^2 + eps)``. (Zeiler 2012, arXiv 1212.5701.)"""
    check_scalar("rho", rho, below=1.0)
    check_scalar("eps", eps)

    def init(params: Tree) -> ScaleByAdadeltaState:
        return ScaleByAdadeltaState(_zeros(params), _zeros(params))

    def update(
        updates: Tree, state: ScaleByAdadeltaState, params: Tree | None = None
    ) -> tuple[Tree, ScaleByAdadeltaState]:
        e_g = tree.map(lambda g, e: _averaged(g.to(e.dtype).square(), e, rho), updates, state.e_g)

        def step(g: torch.Tensor, squares: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
            return g.to(past.dtype) * ((past + at(eps, past)) / (squares + at(eps, past))).sqrt()

        steps = tree.map(step, updates, e_g, state.e_x)
        e_x = tree.map(lambda x, e: _averaged(x.square(), e, rho), steps, state.e_x)
        return tree.map(lambda x, g: x.to(g.dtype), steps, updates), ScaleByAdadeltaState(e_g, e_x)

    return GradientTransformation(init, update, elementwise)


def adagrad(
    learning_rate: ScalarOrSchedule,
    initial_accumulator_value: float = 0.0,
    eps: Scalar = 1e-10,
    *,
    lr_decay: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    maximize: bool = False,
) -> GradientTransformation:
    """AdaGrad (Duchi et al. 2011), as torch.optim.Adagrad: the rate is divided by ``1 + lr_decay * (t - 1)``."""
    check_scalar("lr_decay", lr_decay)

    def slower(count: Any) -> Any:
        t = number_of(count)
        return 1 / (1 + (t - 1) * (at(lr_decay, t) if isinstance(t, torch.Tensor) else lr_decay))

    return ascent(
        maximize,
        chain(
            decayed(weight_decay, mask),
            scale_by_rss(initial_accumulator_value, eps),
            scale_by_schedule(slower),
            scale_by_learning_rate(learning_rate),
        ),
    )


def adadelta(
    learning_rate: ScalarOrSchedule = 1.0,
    rho: Scalar = 0.9,
    eps: Scalar = 1e-6,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """AdaDelta (Zeiler 2012), as torch.optim.Adadelta."""
    return ascent(
        maximize,
        chain(
            decayed(weight_decay, mask),
            scale_by_adadelta(rho, eps),
            scale_by_learning_rate(learning_rate),
        ),
    )


def rmsprop(
    learning_rate: ScalarOrSchedule,
    decay: Scalar = 0.99,
    eps: Scalar = 1e-8,
    *,
    centered: bool = False,
    momentum: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    maximize: bool = False,
) -> GradientTransformation:
    """RMSProp (Tieleman and Hinton 2012), as torch.optim.RMSprop: the momentum is of steps before the learning rate."""
    return ascent(
        maximize,
        chain(
            decayed(weight_decay, mask),
            scale_by_rms(decay, eps, centered=centered),
            *(() if is_zero(momentum) else (trace(momentum),)),
            scale_by_learning_rate(learning_rate),
        ),
    )


def _zeros(params: Tree) -> Tree:
    return tree.map(lambda p: torch.zeros_like(p, dtype=compute_dtype(p)), params)


def _averaged(new: torch.Tensor, past: torch.Tensor, decay: Scalar) -> torch.Tensor:
    return torch.lerp(past, new, at(1 - decay, past))


def _over_root(g: torch.Tensor, squares: torch.Tensor, eps: Scalar) -> torch.Tensor:
    root = squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()  # an element without a gradient has update 0
    return (g.to(squares.dtype) / (root + at(eps, root))).to(g.dtype)
