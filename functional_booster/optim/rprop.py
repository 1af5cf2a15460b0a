"""Rprop: each element has a step size of its own. (Riedmiller and Braun 1993; torch.optim.Rprop.)"""

from __future__ import annotations

from typing import NamedTuple

import torch

from functional_booster.kernels import tree

from .base import GradientTransformation, Scalar, Tree, at, compute_dtype, elementwise, zero_count
from .combine import chain
from .scaling import ascent
from .validate import check_scalar


class RpropState(NamedTuple):
    """Each element's step size, and its last gradient."""

    count: torch.Tensor  # () int32: updates made
    step_sizes: Tree  # like the parameters
    prev: Tree  # like the parameters


def rprop(
    learning_rate: Scalar,
    eta_minus: Scalar = 0.5,
    eta_plus: Scalar = 1.2,
    min_step_size: Scalar = 1e-6,
    max_step_size: Scalar = 50.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Steps against the sign of the gradient, longer while it stays, shorter where it turned. First: the learning rate.

    (Riedmiller and Braun 1993; torch.optim.Rprop.)
    """
    check_scalar("learning_rate", learning_rate)
    check_scalar("eta_minus", eta_minus, below=1.0)
    check_scalar("eta_plus", eta_plus, minimum=1.0)
    check_scalar("min_step_size", min_step_size)
    check_scalar("max_step_size", max_step_size)

    def init(params: Tree) -> RpropState:
        zeros = [tree.map(torch.zeros_like, params) for _ in range(2)]
        return RpropState(zero_count(params), *zeros)

    def update(updates: Tree, state: RpropState, params: Tree | None = None) -> tuple[Tree, RpropState]:
        def size(g: torch.Tensor, past: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            wide = step.to(compute_dtype(step))
            first = torch.ones_like(wide) * at(learning_rate, wide)
            wide = torch.where((state.count == 0).to(wide.device), first, wide)
            agreement = g.to(wide.dtype) * past.to(wide.dtype)
            grown = torch.where(agreement > 0, wide * at(eta_plus, wide), wide)
            grown = torch.where(agreement < 0, wide * at(eta_minus, wide), grown)
            return torch.clamp(grown, at(min_step_size, wide), at(max_step_size, wide)).to(step.dtype)  # type: ignore[call-overload]  # both numbers or both tensors

        step_sizes = tree.map(size, updates, state.prev, state.step_sizes)
        prev = tree.map(lambda g, past: torch.where(g * past < 0, torch.zeros_like(g), g), updates, state.prev)
        steps = tree.map(lambda g, step: -g.sign() * step, prev, step_sizes)
        return steps, RpropState(state.count + 1, step_sizes, prev)

    return ascent(maximize, chain(GradientTransformation(init, update, elementwise)))
