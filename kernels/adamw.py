"""AdamW over a flat buffer in one pass (Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101).

With g the scaled gradient, t the number of the update, from 1 on::

    mu'    = b1 mu + (1 - b1) g                       nu' = b2 nu + (1 - b2) g^2
    param' = param - lr (mu' / (1 - b1^t) / (sqrt(nu' / (1 - b2^t) + eps_root) + eps) + weight_decay param)

as torch.optim.AdamW and optax.adamw have it. Both corrections come in two numbers beside the root, not in a pass::

    mu_hat / (sqrt(nu_hat + eps_root) + eps) = mu' / (stretch sqrt(nu' + root) + floor)

In float32 with a float32 gradient 28 bytes move for each parameter, with a bfloat16 copy 30.
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
    toward_square: Scalar  # 1 - b2
    stretch: Scalar
    floor: Scalar
    root: Scalar
    weight_decay: Scalar
    negative_rate: Scalar


def coefficients(
    count: torch.Tensor,
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    factor: Scalar = 1.0,
) -> Coefficients:
    """Those of update number ``count``, from 1 on: 0-d, on the device; the corrections are computed in float64."""
    number = count.to(torch.float64)
    correction1, correction2 = (1 - (b.to(number) if isinstance(b, torch.Tensor) else b) ** number for b in (b1, b2))
    return Coefficients(
        factor,
        1 - b1,
        1 - b2,
        correction1 / correction2.sqrt(),
        correction1 * eps,
        0.0 if is_zero(eps_root) else correction2 * eps_root,
        weight_decay,
        -learning_rate,
    )


def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    coefficients: Coefficients,
    *,
    copy: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
) -> Buffers:
    """Buffers (N,), or of any shape, after one update: (param, mu, nu, copy). Pure; not differentiable.

    ``keep``: 0-d bool; where it is False all buffers stay to the bit. ``copy``: the parameter in a lower dtype.
    ``key``: what is bfloat16 of param and copy is rounded by chance. Arithmetic is in the widest dtype, float32 at
    least. Raises ValueError for buffers of different shapes, TypeError for a copy in the parameter's dtype and for a
    key with nothing in bfloat16 to round.
    """
    return _update(Buffers(param, mu, nu, copy), grad, coefficients, keep, key, not is_zero(coefficients.weight_decay))


def rule(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    coefficients: Sequence[Scalar],
    decayed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The update in plain torch."""
    toward, toward_square, stretch, floor, root, weight_decay, negative_rate = coefficients
    mu = torch.lerp(mu, grad, toward)
    nu = torch.lerp(nu, grad * grad, toward_square)
    shifted = nu if is_zero(root) else nu + root
    step = mu / (torch.sqrt(shifted.clamp(min=torch.finfo(nu.dtype).tiny)) * stretch + floor)
    if decayed:
        step = add_scaled(step, param, weight_decay)
    return param + step * negative_rate, mu, nu


_update = updater("adamw", rule)
