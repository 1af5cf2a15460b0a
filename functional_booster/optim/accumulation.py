"""Updates summed over several steps."""

from __future__ import annotations

from typing import NamedTuple

import torch

from functional_booster.kernels import tree

from .base import GradientTransformation, Tree, elementwise, zero_count
from .validate import check_integer


class ApplyEveryState(NamedTuple):
    """The updates held back so far."""

    count: torch.Tensor  # () int32: calls so far
    grad_acc: Tree  # like the parameters: their sum since the last one that was handed out


def apply_every(k: int = 1) -> GradientTransformation:
    """Hold updates back, and hand out their sum every k-th call, zeros between. (optax: ``apply_every``.)"""
    check_integer("k", k, minimum=1)

    def init(params: Tree) -> ApplyEveryState:
        return ApplyEveryState(zero_count(params), tree.map(torch.zeros_like, params))

    def update(updates: Tree, state: ApplyEveryState, params: Tree | None = None) -> tuple[Tree, ApplyEveryState]:
        position = state.count % k
        grad_acc = tree.map(
            lambda u, held: u + torch.where((position == 0).to(u.device), torch.zeros_like(held), held),
            updates,
            state.grad_acc,
        )
        due = position == k - 1
        handed = tree.map(lambda total: torch.where(due.to(total.device), total, torch.zeros_like(total)), grad_acc)
        return handed, ApplyEveryState(state.count + 1, grad_acc)

    return GradientTransformation(init, update, elementwise)
