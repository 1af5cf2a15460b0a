"""The optimizers that people ask for by name, as chains. Options that only torch.optim has follow torch.optim."""

from __future__ import annotations

import torch

from functional_booster.kernels import tree

from .adam import scale_by_adam
from .base import GradientTransformation, Scalar, ScalarOrSchedule
from .combine import chain
from .decay import add_decayed_weights
from .momentum import trace
from .scaling import scale, scale_by_learning_rate
from .validate import check_scalar


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    eps_root: Scalar = 0.0,
    mu_dtype: torch.dtype | None = None,
    weight_decay: Scalar = 1e-4,
    mask: tree.Mask | None = None,
    amsgrad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay where ``mask`` is True (Loshchilov and Hutter, arXiv 1711.05101).

    ``-lr * (adam + weight_decay * params)``, as optax.adamw and torch.optim.AdamW.
    """
    return chain(
        *ascent(maximize),
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, amsgrad=amsgrad),
        *decayed(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def adam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    eps_root: Scalar = 0.0,
    mu_dtype: torch.dtype | None = None,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    amsgrad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam; ``weight_decay`` is an L2 penalty inside the moments, as in torch.optim.Adam. For AdamW see ``adamw``."""
    return chain(
        *ascent(maximize),
        *decayed(weight_decay, mask),
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, amsgrad=amsgrad),
        scale_by_learning_rate(learning_rate),
    )


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
) -> GradientTransformation:
    """Stochastic gradient descent with momentum, as torch.optim.SGD: no state where ``momentum`` is the number 0.

    Raises ValueError for ``nesterov`` without momentum or with dampening.
    """
    check_scalar("momentum", momentum)
    if nesterov and (off(momentum) or not (isinstance(dampening, torch.Tensor) or off(dampening))):
        raise ValueError(
            f"nesterov: got momentum={momentum} and dampening={dampening}, expected a momentum above 0 and no dampening"
        )
    momenta = () if off(momentum) else (trace(momentum, nesterov, accumulator_dtype, dampening=dampening),)
    return chain(*ascent(maximize), *decayed(weight_decay, mask), *momenta, scale_by_learning_rate(learning_rate))


def ascent(maximize: bool) -> tuple[GradientTransformation, ...]:
    """What makes an ascent of a descent."""
    return (scale(-1.0),) if maximize else ()


def decayed(weight_decay: Scalar, mask: tree.Mask | None) -> tuple[GradientTransformation, ...]:
    """The link that decays weights, if any do."""
    tx = add_decayed_weights(weight_decay, mask)
    return () if off(weight_decay) else (tx,)


def off(value: Scalar) -> bool:
    """Whether it is the number 0."""
    return not isinstance(value, torch.Tensor) and value == 0
