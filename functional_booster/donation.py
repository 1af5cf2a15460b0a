"""Donation: an argument whose storage the result takes over is consumed, and using it afterwards is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functional_booster.kernels import tree

_CONSUMED = "_functional_booster_consumed_by"


class DonatedError(RuntimeError):
    """An argument was used after it had been donated."""


def consume(argument: Any, taker: str) -> Any:
    """Mark the argument as consumed by ``taker``.

    A TrainState (any object with ``consumed_by``) is emptied, so that each access raises; of other trees the tensors
    are marked, so that ``refuse_consumed`` finds them, and the results get tensor objects of their own.
    """
    if hasattr(type(argument), "consumed_by"):
        vars(argument).clear()
        object.__setattr__(argument, "consumed_by", taker)
        return
    for leaf in tree.leaves(argument):
        if isinstance(leaf, torch.Tensor):
            setattr(leaf, _CONSUMED, taker)


def refuse_consumed(names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise DonatedError, naming the leaf, if one was consumed earlier."""
    for name, leaf in zip(names, leaves, strict=True):
        if taker := getattr(leaf, _CONSUMED, None):
            raise DonatedError(f"{name} was donated to {taker} and its storage belongs to the result: use the result")


def is_consumed(leaf: Any) -> bool:
    """Whether the leaf was donated before."""
    return hasattr(leaf, _CONSUMED)


def refuse_aliases(names: Sequence[str], leaves: Sequence[Any], donated: Sequence[bool]) -> None:
    """Raise ValueError, naming both, if a donated tensor and another one start at the same memory."""
    seen: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.numel() == 0:
            continue
        other = seen.setdefault(leaf.data_ptr(), place)
        if other != place and (donated[place] or donated[other]):
            raise ValueError(
                f"{names[other]} and {names[place]} share storage, and one of them is donated: writing the one would "
                "change the other. Clone one of them, or make it one leaf"
            )
