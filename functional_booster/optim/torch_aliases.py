"""The other optimizers of torch.optim, with its numbers, by name."""

from __future__ import annotations

from typing import Any

import torch

from functional_booster.kernels import tree

from .accumulators import scale_by_adadelta, scale_by_rms, scale_by_rss
from .adam_variants import scale_by_adamax, scale_by_nadam, scale_by_radam
from .aliases import ascent, decayed, off
from .base import GradientTransformation, Scalar, ScalarOrSchedule, at, number_of
from .combine import chain
from .momentum import trace
from .scaling import scale_by_learning_rate, scale_by_schedule


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

    def slower(count: Any) -> Any:
        t = number_of(count)
        return 1 / (1 + (t - 1) * (at(lr_decay, t) if isinstance(t, torch.Tensor) else lr_decay))

    return chain(
        *ascent(maximize),
        *decayed(weight_decay, mask),
        scale_by_rss(initial_accumulator_value, eps),
        *(() if off(lr_decay) else (scale_by_schedule(slower),)),
        scale_by_learning_rate(learning_rate),
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
    return chain(
        *ascent(maximize),
        *decayed(weight_decay, mask),
        scale_by_adadelta(rho, eps),
        scale_by_learning_rate(learning_rate),
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
    return chain(
        *ascent(maximize),
        *decayed(weight_decay, mask),
        scale_by_rms(decay, eps, centered=centered),
        *(() if off(momentum) else (trace(momentum),)),
        scale_by_learning_rate(learning_rate),
    )


def nadam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    momentum_decay: Scalar = 0.004,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """NAdam (Dozat 2016), as torch.optim.NAdam."""
    step = scale_by_nadam(b1, b2, eps, momentum_decay)
    return _decaying(step, learning_rate, weight_decay, mask, decoupled_weight_decay, maximize)


def radam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """RAdam (Liu et al. 2020, arXiv 1908.03265), as torch.optim.RAdam."""
    step = scale_by_radam(b1, b2, eps)
    return _decaying(step, learning_rate, weight_decay, mask, decoupled_weight_decay, maximize)


def adamax(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    maximize: bool = False,
) -> GradientTransformation:
    """AdaMax (Kingma and Ba, arXiv 1412.6980, section 7), as torch.optim.Adamax."""
    return _decaying(scale_by_adamax(b1, b2, eps), learning_rate, weight_decay, mask, False, maximize)


def _decaying(
    step: GradientTransformation,
    learning_rate: ScalarOrSchedule,
    weight_decay: Scalar,
    mask: tree.Mask | None,
    decoupled: bool,
    maximize: bool,
) -> GradientTransformation:
    """``step`` with decay after it, or as an L2 penalty before it."""
    decay = decayed(weight_decay, mask)
    before, after = ((), decay) if decoupled else (decay, ())
    return chain(*ascent(maximize), *before, step, *after, scale_by_learning_rate(learning_rate))
