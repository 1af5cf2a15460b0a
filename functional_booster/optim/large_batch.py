"""The optimizers whose steps are in proportion to each leaf's norm, by name."""

from __future__ import annotations

import torch

from functional_booster.kernels import tree

from .adam import scale_by_adam
from .aliases import decayed, off
from .base import GradientTransformation, Scalar, ScalarOrSchedule
from .combine import chain
from .momentum import trace
from .partition import masked
from .scaling import scale_by_learning_rate
from .trust_ratio import scale_by_lars, scale_by_trust_ratio


def lamb(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-6,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    *,
    mu_dtype: torch.dtype | None = None,
    debias: bool = True,
) -> GradientTransformation:
    """AdamW whose step is as long, leaf by leaf, as the parameter times the learning rate. (optax: ``lamb``.)

    (You et al. 2020, arXiv 1904.00962, algorithm 2.) ``debias=False`` takes the moments as they are.
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, debias=debias),
        *decayed(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )


def lars(
    learning_rate: ScalarOrSchedule,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    trust_coefficient: Scalar = 0.001,
    eps: Scalar = 0.0,
    momentum: Scalar = 0.9,
    nesterov: bool = False,
) -> GradientTransformation:
    """SGD with momentum whose gradients are scaled, leaf by leaf, to the parameter's norm. (optax: ``lars``.)

    Where ``mask`` is False there is neither decay nor scaling, as is usual for biases and gains. (You et al. 2017,
    arXiv 1708.03888, algorithm 1: the momentum is of steps, the learning rate in them.)
    """
    step = scale_by_lars(weight_decay, trust_coefficient, eps)
    momenta = () if off(momentum) else (trace(momentum, nesterov),)
    scaled = step if mask is None else masked(step, mask)
    return chain(scaled, scale_by_learning_rate(learning_rate), *momenta)
