"""Fused forms: a whole optimizer, the application of its updates included, as one pass over each buffer.

A chain of transformations is open to every composition, and to the compiler it is elementwise code over every buffer.
Where the chain as a whole is one update rule, its fused form does the same at once, on the same state::

    fused(grads, state, params, factor=1.0, keep=None, keys=None) -> (params, state)

``factor`` (number or 0-d tensor) scales the gradients; where ``keep`` (0-d bool) is False nothing changes; ``keys``,
like ``params``, has the keys by which parameters in bfloat16 are rounded by chance, and None for the others. The chain
is the definition: ``apply_updates(params, update(factor * grads))``, to the bit where all is float32 or float64 on a
CPU, elsewhere to rounding, of which the fused form does less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from functional_booster.kernels import adamw as adamw_kernel
from functional_booster.kernels import lion as lion_kernel
from functional_booster.kernels import sgd_momentum as sgd_kernel
from functional_booster.kernels import tree

from .base import Scalar, ScalarOrSchedule, Tree, evaluate, is_zero, spread, stands_for
from .scaling import ScaleByLearningRateState, scale_by_learning_rate

Fused: TypeAlias = Callable[..., tuple[Tree, Any]]
# (number of the update, from 1 on, learning rate, weight decay, factor) -> what the kernel calls its coefficients
Coefficients: TypeAlias = Callable[[Any, Scalar, Scalar, Scalar], Any]


def fused_adamw(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 1e-4,
    mask: tree.Mask | None = None,
    maximize: bool = False,
) -> Fused:
    """``adamw``'s, without AMSGrad."""

    def coefficients(number: torch.Tensor, rate: Scalar, decay: Scalar, factor: Scalar) -> adamw_kernel.Coefficients:
        return adamw_kernel.coefficients(number, rate, b1, b2, eps, eps_root, decay, factor)

    return _fused(adamw_kernel.adamw, ("mu", "nu"), coefficients, learning_rate, weight_decay, mask, maximize)


def fused_lion(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    *,
    weight_decay: Scalar = 1e-3,
    mask: tree.Mask | None = None,
) -> Fused:
    """``lion``'s."""

    def coefficients(number: Any, rate: Scalar, decay: Scalar, factor: Scalar) -> lion_kernel.Coefficients:
        return lion_kernel.coefficients(rate, b1, b2, decay, factor)

    return _fused(lion_kernel.lion, ("mu",), coefficients, learning_rate, weight_decay, mask)


def fused_sgd(
    learning_rate: ScalarOrSchedule,
    momentum: Scalar,
    nesterov: bool = False,
    *,
    dampening: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    maximize: bool = False,
) -> Fused:
    """``sgd``'s, with momentum."""

    def coefficients(number: torch.Tensor, rate: Scalar, decay: Scalar, factor: Scalar) -> sgd_kernel.Coefficients:
        return sgd_kernel.coefficients(number, rate, momentum, nesterov, dampening, decay, factor)

    return _fused(sgd_kernel.sgd_momentum, ("trace",), coefficients, learning_rate, weight_decay, mask, maximize)


def _fused(
    kernel: Callable[..., Any],
    moments: tuple[str, ...],
    coefficients: Coefficients,
    learning_rate: ScalarOrSchedule,
    weight_decay: Scalar,
    mask: tree.Mask | None,
    maximize: bool = False,
) -> Fused:
    """The fused form on the state of the chain: the links' states, one of which has the ``moments``, one the rate."""
    record = scale_by_learning_rate(learning_rate)

    def fused(
        grads: Tree,
        state: tuple[Any, ...],
        params: Tree,
        *,
        factor: Scalar = 1.0,
        keep: torch.Tensor | None = None,
        keys: Tree | None = None,
    ) -> tuple[Tree, tuple[Any, ...]]:
        past = next(part for part in state if hasattr(part, moments[0]))
        rate = next(part for part in state if isinstance(part, ScaleByLearningRateState))
        count = past.count if "count" in past._fields else rate.count  # a tuple has a method of that name
        value, number = evaluate(learning_rate, rate.count), count + 1
        factor = -factor if maximize else factor
        plain = coefficients(number, value, 0.0, factor)
        decaying = plain if is_zero(weight_decay) else coefficients(number, value, weight_decay, factor)

        leaves, structure = tree.flatten(params)
        columns = [tree.flatten_up_to(structure, getattr(past, moment)) for moment in moments]
        gradients = tree.flatten_up_to(structure, grads)
        given = [None] * len(leaves) if keys is None else tree.flatten_up_to(structure, keys)
        decays = [True] * len(leaves)
        if mask is not None:
            decays = tree.flatten_up_to(structure, spread(tree.as_mask(stands_for(params), mask), params))
        updated = [
            kernel(leaf, grad, *buffers, decaying if decays_it else plain, keep=keep, key=key)
            for leaf, grad, key, decays_it, *buffers in zip(leaves, gradients, given, decays, *columns, strict=True)
        ]

        def gathered(place: int) -> Tree:
            return tree.unflatten(structure, [buffers[place] for buffers in updated])

        fresh: dict[str, Any] = {moment: gathered(place) for place, moment in enumerate(moments, 1)}
        if "count" in past._fields:
            fresh["count"] = _kept(number, count, keep)
        new_rate = tree.map(lambda new, old: _kept(new, old, keep), record.update({}, rate)[1], rate)
        replaced = {id(past): past._replace(**fresh), id(rate): new_rate}
        return gathered(0), tuple(replaced.get(id(part), part) for part in state)

    return fused


def _kept(new: torch.Tensor, old: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    return new if keep is None else torch.where(keep.to(new.device), new, old)
