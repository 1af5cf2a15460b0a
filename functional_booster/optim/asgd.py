"""SGD whose parameters are averaged. (Polyak and Juditsky 1992; torch.optim.ASGD.)"""

from __future__ import annotations

from typing import NamedTuple

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
    evaluate,
    number_of,
    require_params,
    zero_count,
)
from .combine import chain
from .decay import decayed
from .scaling import ascent
from .validate import check_scalar


class AsgdState(NamedTuple):
    """The average of the parameters, and the rates of the next update."""

    count: torch.Tensor  # () int32: updates made
    eta: torch.Tensor  # () float64: rate of learning
    mu: torch.Tensor  # () float64: rate of averaging
    ax: Tree  # like the parameters


def asgd(
    learning_rate: ScalarOrSchedule,
    lambd: Scalar = 1e-4,
    alpha: Scalar = 0.75,
    t0: Scalar = 1e6,
    *,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    maximize: bool = False,
) -> GradientTransformation:
    """SGD with decay ``lambd`` and a rate that falls, whose parameters are averaged from update ``t0`` on.

    (Polyak and Juditsky 1992; torch.optim.ASGD. The average is ``ax`` in the state.)
    """
    check_scalar("learning_rate", learning_rate, schedule=True)
    for name, value in (("lambd", lambd), ("alpha", alpha), ("t0", t0)):
        check_scalar(name, value)

    def init(params: Tree) -> AsgdState:
        zeros = tree.map(lambda p: torch.zeros_like(p, dtype=compute_dtype(p)), params)
        count = zero_count(params)
        one = torch.ones_like(count, dtype=torch.float64)
        return AsgdState(count, at(evaluate(learning_rate, count), one) * one, one, zeros)

    def update(updates: Tree, state: AsgdState, params: Tree | None = None) -> tuple[Tree, AsgdState]:
        params, t = require_params(params, "asgd"), number_of(state.count)
        rate = at(evaluate(learning_rate, state.count), t)
        eta = torch.where(state.count == 0, rate, state.eta)

        def step(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            wide, value = g.to(compute_dtype(g)), p.to(compute_dtype(g))
            return (-at(eta, wide) * (wide + value * at(lambd, value))).to(g.dtype)

        steps = tree.map(step, updates, params)

        def averaged(ax: torch.Tensor, p: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            return torch.lerp(ax, p.to(ax.dtype) + step.to(ax.dtype), at(state.mu, ax))

        ax = tree.map(averaged, state.ax, params, steps)
        slower = rate / (1 + at(lambd, t) * rate * t) ** at(alpha, t)
        return steps, AsgdState(state.count + 1, slower, 1 / (t - at(t0, t)).clamp(min=1.0), ax)

    return ascent(maximize, chain(decayed(weight_decay, mask), GradientTransformation(init, update, elementwise)))
