"""How the forward of an imperative loop computes: in which dtypes, and with gradients scaled while they are in it.

Loss scaling is the module's own affair here: cotangents are multiplied by the scale where they enter, at the outputs,
and divided by it where they leave, at the weights (in the dtype these are stored in) and the inputs. So any loss will
do, any call of ``backward``, and every ``.grad`` is a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as torch_pytree

from functional_booster.kernels import tree
from functional_booster.precision import MixedPrecision, cast, cast_arguments, scale_gradient

from .state import TrainState

Tree = tree.Tree


def weights(precision: MixedPrecision, state: TrainState, params: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The parameters, by name, as the model computes with them."""
    layout = state.storage.layout
    kept = {slot.name for bucket in layout.kept for slot in layout.buckets[bucket]}
    compute = precision.policy.compute
    leaves = {
        name: cast(_unscaled(precision, state, leaf), None if name in kept else compute)
        for name, leaf in params.items()
    }
    return leaves if precision.fp8 is None else precision.fp8.mark(leaves)


def inputs(precision: MixedPrecision, state: TrainState, arguments: Any) -> Any:
    """The arguments of a call of the model."""
    return torch_pytree.tree_map(lambda leaf: _unscaled(precision, state, leaf), arguments)


def outputs(precision: MixedPrecision, state: TrainState, values: Any) -> Any:
    """What the model returned, in the dtype of the policy."""
    cast_values = cast_arguments(values, precision.policy.output)
    if precision.scaling is None:
        return cast_values
    factor = state.loss_scale.factor
    return torch_pytree.tree_map(lambda leaf: scale_gradient(leaf, factor) if _is_float(leaf) else leaf, cast_values)


def _unscaled(precision: MixedPrecision, state: TrainState, leaf: Any) -> Any:
    if precision.scaling is None or not _is_float(leaf):
        return leaf
    return scale_gradient(leaf, 1 / state.loss_scale.factor)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
