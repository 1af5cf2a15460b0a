"""The optimizers that need less state than Adam, by name: Adafactor, CAME, Lion, Muon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functional_booster.kernels import tree

from .aliases import adamw, decayed, off
from .base import GradientTransformation, Scalar, ScalarOrSchedule, Tree, number_of
from .came import scale_by_confidence
from .combine import added, chain
from .factored import adafactor_decay, clip_by_block_rms, scale_by_factored_rms, scale_by_param_block_rms
from .lion import scale_by_lion
from .momentum import trace
from .muon import NS_COEFFS, scale_by_muon
from .partition import partition
from .scaling import scale_by_learning_rate, set_to_zero


def adafactor(
    learning_rate: ScalarOrSchedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    *,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: Scalar | None = 1.0,
    momentum: Scalar | None = None,
    eps: Scalar = 1e-30,
    min_scale: Scalar = 1e-3,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
) -> GradientTransformation:
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithm 4), as Hugging Face's; arguments are optax's.

    ``learning_rate`` None: ``min(1e-2, 1 / sqrt(t))`` at update t. With ``multiply_by_parameter_scale`` it is relative
    to each leaf's rms, ``min_scale`` at least. ``weight_decay`` is decoupled, times the whole step size.
    """
    rate = relative_step() if learning_rate is None else learning_rate
    clipped = () if clipping_threshold is None else (clip_by_block_rms(clipping_threshold),)
    scaled = (scale_by_param_block_rms(min_scale),) if multiply_by_parameter_scale else ()
    decay = decayed(weight_decay, mask)
    direction = (scale_by_factored_rms(adafactor_decay(decay_rate), eps, min_dim_size_to_factor), *clipped)
    if momentum is None:
        return chain(*direction, *decay, *scaled, scale_by_learning_rate(rate))
    smoothed = trace(momentum, dampening=momentum, dampen_first=True)
    steps = chain(*direction, *scaled, scale_by_learning_rate(rate), smoothed)
    if not decay:
        return steps
    return added(steps, chain(set_to_zero(), *decay, *scaled, scale_by_learning_rate(rate)))


def relative_step(warmup: bool = False) -> Callable[[Any], Any]:
    """Adafactor's schedule ``min(1e-2, 1 / sqrt(t))``; with ``warmup`` ``min(1e-6 * t, 1 / sqrt(t))``."""

    def rate(count: Any) -> Any:
        t = number_of(count)
        if not isinstance(t, torch.Tensor):
            return min(1e-6 * t if warmup else 1e-2, t**-0.5)
        return torch.minimum(1e-6 * t if warmup else torch.full_like(t, 1e-2), t.rsqrt())

    return rate


def came(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    b3: Scalar = 0.9999,
    eps: tuple[Scalar, Scalar] = (1e-30, 1e-16),
    *,
    clipping_threshold: Scalar = 1.0,
    min_dim_size_to_factor: int = 1,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
) -> GradientTransformation:
    """Adafactor with a momentum that is trusted less where gradients disagree with it. (Luo et al. 2023, 2307.02047.)

    ``eps``: added to squares of gradients, and to those of their distance from the momentum.
    """
    return chain(
        scale_by_factored_rms(b2, eps[0], min_dim_size_to_factor),
        clip_by_block_rms(clipping_threshold),
        scale_by_confidence(b1, b3, eps[1], min_dim_size_to_factor),
        *decayed(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def lion(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    mu_dtype: torch.dtype | None = None,
    weight_decay: Scalar = 1e-3,
    mask: tree.Mask | None = None,
) -> GradientTransformation:
    """The sign of a momentum, and decoupled weight decay. (Chen et al. 2023, arXiv 2302.06675; optax: ``lion``.)"""
    return chain(scale_by_lion(b1, b2, mu_dtype), *decayed(weight_decay, mask), scale_by_learning_rate(learning_rate))


def muon(
    learning_rate: ScalarOrSchedule,
    ns_coeffs: tuple[float, float, float] = NS_COEFFS,
    ns_steps: int = 5,
    beta: Scalar = 0.95,
    eps: float = 1e-8,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = True,
    ns_dtype: torch.dtype | None = torch.bfloat16,
    adjust_lr_fn: str | None = "original",
    muon_mask: tree.Mask | None = None,
    adam_learning_rate: ScalarOrSchedule | None = None,
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.999,
    adam_eps: Scalar = 1e-8,
    adam_weight_decay: Scalar = 0.0,
) -> GradientTransformation:
    """Orthogonalized momenta for matrices, AdamW for the rest. (Jordan et al. 2024; optax: ``contrib.muon``.)

    ``muon_mask``: the matrices, by default all leaves of two dims; embeddings and heads do better with AdamW, as with
    ``tree.by_name("attn|mlp")``. ``mask`` says where weights decay. Other arguments: ``scale_by_muon``'s; the ``adam_``
    ones are AdamW's, with ``learning_rate`` if it has none of its own.
    """

    def labels(abstract: Tree) -> Tree:
        return tree.map(lambda keep: "muon" if keep else "adam", tree.as_mask(abstract, muon_mask or _two_dims))

    matrix = chain(
        scale_by_muon(
            ns_coeffs,
            ns_steps,
            beta,
            eps,
            mu_dtype,
            nesterov=nesterov,
            ns_dtype=ns_dtype,
            adjust_lr_fn=adjust_lr_fn,
        ),
        *decayed(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
    rest = adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        adam_b1,
        adam_b2,
        adam_eps,
        weight_decay=adam_weight_decay,
        mask=mask if not off(adam_weight_decay) else None,
    )
    return partition({"muon": matrix, "adam": rest}, labels)


def _two_dims(abstract: Tree) -> Tree:
    return tree.map(lambda leaf: len(leaf.shape) == 2, abstract)
