"""Collectives by axis name."""

from __future__ import annotations

import torch

from .environment import current


def is_bound(axis: str) -> bool:
    """Whether the axis is in scope."""
    return axis in current().axes


def enter(x: torch.Tensor, axis: str) -> torch.Tensor:
    """invariant -> varying. Forward: identity; backward: psum. The identity on an axis that is not declared."""
    if is_bound(axis):
        raise NotImplementedError
    return x


def leave(x: torch.Tensor, axis: str) -> torch.Tensor:
    """partial -> invariant. Forward: psum; backward: identity. The identity on an axis that is not declared."""
    if is_bound(axis):
        raise NotImplementedError
    return x
