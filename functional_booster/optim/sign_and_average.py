"""Rprop and averaged SGD, whole optimizers: their rate of learning is a part of their state."""

from __future__ import annotations

from typing import NamedTuple

import torch

from functional_booster.kernels import tree

from .base import (
    GradientTransformation,
    Scalar,
    Tree,
    at,
    compute_dtype,
    elementwise,
    number_of,
    require_params,
    zero_count,
)
from .validate import check_scalar


class RpropState(NamedTuple):
    """Each element's step size, and its last gradient."""

    count: torch.Tensor  # () int32: updates made
    step_sizes: Tree  # like the parameters
    prev: Tree  # like the parameters


class AsgdState(NamedTuple):
    """The average of the parameters, and the rates of the next update."""

    count: torch.Tensor  # () int32: updates made
    eta: torch.Tensor  # () float64: rate of learning
    mu: torch.Tensor  # () float64: rate of averaging
    ax: Tree  # like the parameters


def rprop(
    learning_rate: Scalar,
    eta_minus: Scalar = 0.5,
    eta_plus: Scalar = 1.2,
    min_step_size: Scalar = 1e-6,
    max_step_size: Scalar = 50.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Steps against the sign of the gradient, longer while it stays, shorter where it turned. First: the learning rate.

    (Riedmiller and Braun 1993; torch.optim.Rprop.)
    """
    check_scalar("learning_rate", learning_rate)
    check_scalar("eta_minus", eta_minus, below=1.0)
    check_scalar("eta_plus", eta_plus, minimum=1.0)
    check_scalar("min_step_size", min_step_size)
    check_scalar("max_step_size", max_step_size)

    def init(params: Tree) -> RpropState:
        zeros = [tree.map(torch.zeros_like, params) for _ in range(2)]
        return RpropState(zero_count(params), *zeros)

    def update(updates: Tree, state: RpropState, params: Tree | None = None) -> tuple[Tree, RpropState]:
        grads = tree.map(torch.neg, updates) if maximize else updates

        def size(g: torch.Tensor, past: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            wide = step.to(compute_dtype(step))
            first = torch.ones_like(wide) * at(learning_rate, wide)
            wide = torch.where((state.count == 0).to(wide.device), first, wide)
            agreement = g.to(wide.dtype) * past.to(wide.dtype)
            grown = torch.where(agreement > 0, wide * at(eta_plus, wide), wide)
            grown = torch.where(agreement < 0, wide * at(eta_minus, wide), grown)
            return torch.clamp(grown, at(min_step_size, wide), at(max_step_size, wide)).to(step.dtype)  # type: ignore[call-overload]  # both numbers or both tensors

        step_sizes = tree.map(size, grads, state.prev, state.step_sizes)
        prev = tree.map(lambda g, past: torch.where(g * past < 0, torch.zeros_like(g), g), grads, state.prev)
        steps = tree.map(lambda g, step: -g.sign() * step, prev, step_sizes)
        return steps, RpropState(state.count + 1, step_sizes, prev)

    return GradientTransformation(init, update, elementwise)


def asgd(
    learning_rate: Scalar,
    lambd: Scalar = 1e-4,
    alpha: Scalar = 0.75,
    t0: Scalar = 1e6,
    *,
    weight_decay: Scalar = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """SGD with decay ``lambd`` and a rate that falls, whose parameters are averaged from update ``t0`` on.

    (Polyak and Juditsky 1992; torch.optim.ASGD. The average is ``ax`` in the state.)
    """
    for name, value in (("learning_rate", learning_rate), ("lambd", lambd), ("alpha", alpha), ("t0", t0)):
        check_scalar(name, value)
    check_scalar("weight_decay", weight_decay)

    def init(params: Tree) -> AsgdState:
        zeros = tree.map(lambda p: torch.zeros_like(p, dtype=compute_dtype(p)), params)
        count = zero_count(params)
        one = torch.ones_like(count, dtype=torch.float64)
        return AsgdState(count, at(learning_rate, one) * one, one, zeros)

    def update(updates: Tree, state: AsgdState, params: Tree | None = None) -> tuple[Tree, AsgdState]:
        params, t = require_params(params, "asgd"), number_of(state.count)
        rate = at(learning_rate, t)
        eta = torch.where(state.count == 0, rate, state.eta)

        def step(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            wide, value = g.to(compute_dtype(g)), p.to(compute_dtype(g))
            slope = (-wide if maximize else wide) + value * at(weight_decay, value)
            return (-at(eta, wide) * (slope + value * at(lambd, value))).to(g.dtype)

        steps = tree.map(step, updates, params)

        def averaged(ax: torch.Tensor, p: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            return torch.lerp(ax, p.to(ax.dtype) + step.to(ax.dtype), at(state.mu, ax))

        ax = tree.map(averaged, state.ax, params, steps)
        slower = rate / (1 + at(lambd, t) * rate * t) ** at(alpha, t)
        return steps, AsgdState(state.count + 1, slower, 1 / (t - at(t0, t)).clamp(min=1.0), ax)

    return GradientTransformation(init, update, elementwise)
