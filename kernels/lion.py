"""Lion over a flat buffer in one pass (Chen et al. 2023, arXiv 2302.06675). With g the scaled gradient::

param' = param - lr (sign(b1 mu + (1 - b1) g) + weight_decay param)          mu' = b2 mu + (1 - b2) g
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .elementwise_update import Buffers, Scalar, add_scaled, is_zero, updater


class Coefficients(NamedTuple):
    """What all elements have in common in one update: numbers or 0-d tensors."""

    factor: Scalar  # of the gradient
    toward: Scalar  # 1 - b1
    toward_next: Scalar  # 1 - b2
    weight_decay: Scalar
    negative_rate: Scalar


def coefficients(
    learning_rate: Scalar, b1: Scalar = 0.9, b2: Scalar = 0.99, weight_decay: Scalar = 0.0, factor: Scalar = 1.0
) -> Coefficients:
    """Those of one update."""
    return Coefficients(factor, 1 - b1, 1 - b2, weight_decay, -learning_rate)


def lion(
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
    toward, toward_next, weight_decay, negative_rate = coefficients
    step = torch.lerp(mu, grad, toward).sign()
    if decayed:
        step = add_scaled(step, param, weight_decay)
    return param + step * negative_rate, torch.lerp(mu, grad, toward_next), None


_update = updater("lion", rule)
