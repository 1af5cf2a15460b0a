"""Heavy-ball and Nesterov momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch

from functional_booster.kernels import tree

from .base import GradientTransformation, Scalar, Tree, add_scaled, elementwise, times, zero_count
from .validate import check_scalar


class TraceState(NamedTuple):
    """The decaying sum of the updates so far."""

    count: torch.Tensor  # () int32: updates made
    trace: Tree  # like the parameters, in accumulator_dtype


def trace(
    decay: Scalar,
    nesterov: bool = False,
    accumulator_dtype: torch.dtype | None = None,
    *,
    dampening: Scalar = 0.0,
    dampen_first: bool = False,
) -> GradientTransformation:
    """``trace <- decay * trace + (1 - dampening) * g``; gives the trace, or ``g + decay * trace`` with ``nesterov``.

    The first gradient enters undampened, as in torch.optim.SGD, unless ``dampen_first``. (optax: ``trace``, which has
    no dampening; with ``dampening=decay, dampen_first=True`` this is its ``ema`` without debias.)
    """
    check_scalar("decay", decay)
    check_scalar("dampening", dampening, minimum=-float("inf"))
    undamped = not isinstance(dampening, torch.Tensor) and dampening == 0

    def init(params: Tree) -> TraceState:
        return TraceState(zero_count(params), tree.map(lambda p: torch.zeros_like(p, dtype=accumulator_dtype), params))

    def update(updates: Tree, state: TraceState, params: Tree | None = None) -> tuple[Tree, TraceState]:
        def accumulate(g: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
            damped = g if undamped else times(g, 1 - dampening)
            new = damped if undamped or dampen_first else torch.where((state.count == 0).to(g.device), g, damped)
            return add_scaled(new, past, decay).to(past.dtype)

        def direction(g: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
            return add_scaled(g, momentum, decay) if nesterov else momentum.to(g.dtype)

        momenta = tree.map(accumulate, updates, state.trace)
        return tree.map(direction, updates, momenta), TraceState(state.count + 1, momenta)

    return GradientTransformation(init, update, elementwise)
