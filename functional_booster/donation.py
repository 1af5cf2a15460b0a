"""Donation: an argument whose storage the result takes over is consumed, and using it afterwards is an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from functional_booster.kernels import tree

_CONSUMED = "_functional_booster_consumed_by"


class DonatedError(RuntimeError):
    """An argument was used after it had been donated."""


def consume(argument: Any, tensors: Iterable[torch.Tensor], taker: str) -> None:
    """Mark an argument as consumed by ``taker``: its tensors, wherever else they are held, and views made of them.

    A TrainState (any object with ``consumed_by``) is emptied besides, so that each access raises.
    """
    for tensor in tensors:
        setattr(tensor, _CONSUMED, taker)
    nodes = [argument] if _can_be_emptied(argument) else tree.leaves(argument, is_leaf=_can_be_emptied)
    for node in nodes:
        if _can_be_emptied(node):
            vars(node).clear()
            object.__setattr__(node, "consumed_by", taker)


def consumed_by(leaf: Any) -> str | None:
    """Who took over the storage of the tensor, or of the tensor that it is a view of; None if nobody did."""
    if not isinstance(leaf, torch.Tensor):
        return None
    taker = getattr(leaf, _CONSUMED, None)
    return taker if taker is not None or leaf._base is None else getattr(leaf._base, _CONSUMED, None)


def refuse_consumed(names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise DonatedError, naming the leaf, if one was consumed earlier."""
    for name, leaf in zip(names, leaves, strict=True):
        if taker := consumed_by(leaf):
            raise DonatedError(f"{name} was donated to {taker} and its storage belongs to the result: use the result")


def refuse_aliases(names: Sequence[str], leaves: Sequence[Any], donated: Sequence[bool]) -> None:
    """Raise ValueError, naming both, if a donated tensor and another one have memory in common."""
    ranges = sorted(
        (*_bytes(leaf), place)
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.device.type != "meta"
    )
    reach, owner = 0, -1
    for start, end, place in ranges:
        if start < reach and (donated[place] or donated[owner]):
            raise ValueError(
                f"{names[min(owner, place)]} and {names[max(owner, place)]} share storage, and one of them is donated: "
                "writing the one would change the other. Clone one of them, or make it one leaf"
            )
        if end > reach:
            reach, owner = end, place


def _can_be_emptied(node: Any) -> bool:
    return hasattr(type(node), "consumed_by")


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of the tensor, and the one after its last."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size()
