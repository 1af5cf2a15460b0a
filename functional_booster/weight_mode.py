"""Tensors that stand for weights which are none: a module can hold nothing else, but torch's calls see the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch.overrides import TorchFunctionMode

from functional_booster.precision import fp8


class WeightMode(TorchFunctionMode):
    """In a ``with`` block, each tensor of ``held`` is, in every torch call, the weight of the same name.

    ``values``: {name: a tensor, or a weight}. A weight has ``stand_in()``, a tensor that is like it, and
    ``__torch_function__``, what torch's functions do with it. ``held``: {name: what a module holds}.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self._weights: dict[int, tuple[torch.Tensor, Any]] = {}
        self.held = {name: self._standing(value) for name, value in values.items()}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not self._weights:
            return func(*args, **(kwargs or {}))
        leaves, structure = torch_pytree.tree_flatten((args, kwargs or {}), is_leaf=fp8.is_weight)
        found = [self.of(leaf) for leaf in leaves]
        weight = next(filter(is_weight, found), None)
        if weight is None:
            return func(*args, **(kwargs or {}))
        args, kwargs = torch_pytree.tree_unflatten(found, structure)
        return self._standing(type(weight).__torch_function__(func, types, args, kwargs))

    def of(self, value: Any) -> Any:
        """The weight that a tensor stands for; anything else as it is."""
        return self._weights.get(id(fp8.plain(value)), (None, value))[1]

    def _standing(self, value: Any) -> Any:
        if not is_weight(value):
            return value
        tensor = value.stand_in()
        self._weights[id(tensor)] = tensor, value
        return tensor


def is_weight(value: Any) -> bool:
    """Whether a tensor stands for this in a module."""
    return hasattr(type(value), "stand_in")


def weight_of(value: Any) -> Any:
    """The weight that a tensor stands for in the active modes; anything else as it is."""
    for mode in torch.overrides._get_current_function_mode_stack():
        value = mode.of(value) if isinstance(mode, WeightMode) else value
    return value
