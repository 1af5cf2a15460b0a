"""Adam and AdamW: gradients over their moments. (Kingma and Ba, arXiv 1412.6980; AMSGrad: Reddi et al., 1904.09237.)"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    is_zero,
    zero_count,
)
from .combine import chain
from .decay import decayed
from .fused import fused_adamw
from .scaling import ascent, scale_by_learning_rate
from .validate import check_dtype, check_scalar


class ScaleByAdamState(NamedTuple):
    """The moments of the gradients so far, each a tree like the parameters."""

    count: torch.Tensor  # () int32: updates made
    mu: Tree  # first moment, like the parameters, in mu_dtype
    nu: Tree  # second moment, like the parameters
    nu_max: Tree | None  # AMSGrad: the largest nu so far, before bias correction (torch's rule, not optax's)


def scale_by_adam(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: torch.dtype | None = None,
    *,
    amsgrad: bool = False,
    debias: bool = True,
) -> GradientTransformation:
    """``mu_hat / (sqrt(nu_hat + eps_root) + eps)`` with bias-corrected moments. (optax: ``scale_by_adam``.)

    With ``debias=False`` the moments are taken as they are. An element that never had a gradient has update 0, and so
    is its derivative: nu is kept from 0 by the least normal number. Arithmetic is in float32 at least, whatever the
    moments' dtypes.
    """
    check_scalar("b1", b1, below=1.0)
    check_scalar("b2", b2, below=1.0)
    check_scalar("eps", eps)
    check_scalar("eps_root", eps_root)
    check_dtype("mu_dtype", mu_dtype)

    def init(params: Tree) -> ScaleByAdamState:
        def zeros() -> Tree:  # in bfloat16, whose spacing is above 1 - b2, a second moment would stand still
            return tree.map(lambda p: torch.zeros_like(p, dtype=compute_dtype(p)), params)

        mu = tree.map(lambda p: torch.zeros_like(p, dtype=mu_dtype), params)
        return ScaleByAdamState(zero_count(params), mu, zeros(), zeros() if amsgrad else None)

    def update(updates: Tree, state: ScaleByAdamState, params: Tree | None = None) -> tuple[Tree, ScaleByAdamState]:
        count = state.count + 1
        mu = tree.map(lambda g, m: moment(g, m, b1), updates, state.mu)
        nu = tree.map(lambda g, v: moment(g, v, b2, square=True), updates, state.nu)
        nu_max = tree.map(torch.maximum, state.nu_max, nu) if amsgrad else None
        one = torch.ones_like(count, dtype=torch.float64)
        correction1, correction2 = (bias_correction(b, count) if debias else one for b in (b1, b2))

        # mu_hat / (sqrt(nu_hat) + eps), with the corrections brought together in two numbers: fewer passes.
        def direction(g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            dtype = compute_dtype(g, m, v)
            v = v.to(dtype) if is_zero(eps_root) else v.to(dtype) + at(correction2 * eps_root, v.to(dtype))
            root = torch.sqrt(v.clamp(min=torch.finfo(dtype).tiny))
            denominator = root * at(correction1 / correction2.sqrt(), root) + at(correction1 * eps, root)
            return (m.to(dtype) / denominator).to(g.dtype)

        return tree.map(direction, updates, mu, nu_max if amsgrad else nu), ScaleByAdamState(count, mu, nu, nu_max)

    return GradientTransformation(init, update, elementwise)


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
    fused: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay where ``mask`` is True (Loshchilov and Hutter, arXiv 1711.05101).

    ``-lr * (adam + weight_decay * params)``, as optax.adamw and torch.optim.AdamW. ``fused``: a step updates each
    buffer in one pass, where this is its whole optimizer. Raises ValueError for ``fused`` with ``amsgrad``.
    """
    if fused and amsgrad:
        raise ValueError("fused: got True with amsgrad=True, expected one of them")
    tx = ascent(
        maximize,
        chain(
            scale_by_adam(b1, b2, eps, eps_root, mu_dtype, amsgrad=amsgrad),
            decayed(weight_decay, mask),
            scale_by_learning_rate(learning_rate),
        ),
    )
    if not fused:
        return tx
    options: Any = {"eps_root": eps_root, "weight_decay": weight_decay, "mask": mask, "maximize": maximize}
    return tx._replace(fused=fused_adamw(learning_rate, b1, b2, eps, **options))


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
    return ascent(
        maximize,
        chain(
            decayed(weight_decay, mask),
            scale_by_adam(b1, b2, eps, eps_root, mu_dtype, amsgrad=amsgrad),
            scale_by_learning_rate(learning_rate),
        ),
    )


def moment(g: torch.Tensor, past: torch.Tensor, decay: Scalar, square: bool = False) -> torch.Tensor:
    """``decay * past + (1 - decay) * g``, or of g's square, in the dtype of ``past``, computed in float32 at least."""
    dtype = compute_dtype(g, past)
    g = g.to(dtype)
    return torch.lerp(past.to(dtype), g * g if square else g, at(1 - decay, g)).to(past.dtype)


def bias_correction(decay: Scalar, count: torch.Tensor) -> torch.Tensor:
    """1 - decay^count, 0-d float64: in float32 the difference loses half its digits."""
    exponent = count.to(torch.float64)
    return 1 - at(decay, exponent) ** exponent
