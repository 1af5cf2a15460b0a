"""Stochastic gradient descent, with heavy-ball or Nesterov momentum. Numbers are torch.optim's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from functional_booster.kernels import tree

from .base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    Tree,
    add_scaled,
    elementwise,
    is_zero,
    times,
    zero_count,
)
from .combine import chain
from .decay import decayed
from .fused import fused_sgd
from .scaling import ascent, scale_by_learning_rate
from .validate import check_dtype, check_scalar


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
    check_dtype("accumulator_dtype", accumulator_dtype)
    undamped = is_zero(dampening)

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


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: Scalar = 0.0,
    nesterov: bool = False,
    *,
    accumulator_dtype: torch.dtype | None = None,
    dampening: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    maximize: bool = False,
    fused: bool = False,
) -> GradientTransformation:
    """Stochastic gradient descent with momentum, as torch.optim.SGD: no state where ``momentum`` is the number 0.

    ``fused`` as for ``adamw``. Raises ValueError for ``nesterov`` without momentum or with dampening, and for ``fused``
    without momentum.
    """
    check_scalar("momentum", momentum)
    if nesterov and (is_zero(momentum) or not (isinstance(dampening, torch.Tensor) or is_zero(dampening))):
        raise ValueError(
            f"nesterov: got momentum={momentum} and dampening={dampening}, expected a momentum above 0 and no dampening"
        )
    if fused and is_zero(momentum):
        raise ValueError(f"fused: got True with momentum={momentum}, expected a momentum above 0")
    momenta = () if is_zero(momentum) else (trace(momentum, nesterov, accumulator_dtype, dampening=dampening),)
    tx = ascent(maximize, chain(decayed(weight_decay, mask), *momenta, scale_by_learning_rate(learning_rate)))
    if not fused:
        return tx
    options: Any = {"dampening": dampening, "weight_decay": weight_decay, "mask": mask, "maximize": maximize}
    return tx._replace(fused=fused_sgd(learning_rate, momentum, nesterov, **options))
