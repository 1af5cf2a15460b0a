"""Collectives by axis name, as model code states them. On an axis that nobody declares they are the identity.

In this version every model runs on one device, and no axis is ever declared.
"""

from __future__ import annotations

import torch


def enter(x: torch.Tensor, axis: str) -> torch.Tensor:
    """invariant -> varying over ``axis``, before a column-parallel layer. Forward: identity; backward: psum."""
    return x


def leave(x: torch.Tensor, axis: str) -> torch.Tensor:
    """partial -> invariant over ``axis``, after a row-parallel layer. Forward: psum; backward: identity."""
    return x
