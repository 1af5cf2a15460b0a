"""SGD with momentum over a flat buffer in one pass, as torch.optim.SGD. With g the scaled gradient::

    g'     = g + weight_decay param                 mu' = momentum mu + (1 - dampening) g'
    param' = param - lr mu', or, with Nesterov's, param - lr (g' + momentum mu')

The first gradient enters undampened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .elementwise_update import Buffers, Scalar, add_scaled, is_zero, updater


class Coefficients(NamedTuple):
    """What all elements have in common in one update: numbers or 0-d tensors."""

    factor: Scalar  # of the gradient
    momentum: Scalar
    entering: Scalar  # how much of the gradient enters the momentum
    direct: Scalar  # how much of the gradient, and of the momentum, is the step
    through: Scalar
    weight_decay: Scalar
    negative_rate: Scalar


def coefficients(
    count: torch.Tensor,
    learning_rate: Scalar,
    momentum: Scalar = 0.9,
    nesterov: bool = False,
    dampening: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    factor: Scalar = 1.0,
) -> Coefficients:
    """Those of update number ``count``, from 1 on: 0-d, on the device."""
    one = torch.ones_like(count, dtype=torch.float64)
    entering = 1.0 if is_zero(dampening) else torch.where(count == 1, one, 1 - dampening)
    direct, through = (1.0, momentum) if nesterov else (0.0, 1.0)
    return Coefficients(factor, momentum, entering, direct, through, weight_decay, -learning_rate)


def sgd_momentum(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    coefficients: Coefficients,
    *,
    copy: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
) -> Buffers:
    """Buffers of one shape after one update: (param, mu, None, copy). Arguments as for ``adamw``."""
    return _update(
        Buffers(param, mu, None, copy), grad, coefficients, keep, key, not is_zero(coefficients.weight_decay)
    )


def rule(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    _: None,
    coefficients: Sequence[Scalar],
    decayed: bool,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The update in plain torch."""
    momentum, entering, direct, through, weight_decay, negative_rate = coefficients
    if decayed:
        grad = add_scaled(grad, param, weight_decay)
    mu = add_scaled(grad * entering, mu, momentum)
    return param + add_scaled(grad * direct, mu, through) * negative_rate, mu, None


_update = updater("sgd_momentum", rule)
