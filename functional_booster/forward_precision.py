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
from functional_booster.precision import MixedPrecision, cast, cast_arguments, is_float, scale_gradient

from .state import TrainState

Tree = tree.Tree


def weights(precision: MixedPrecision, state: TrainState, params: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The parameters, by name, as the model computes with them."""
    kept = state.storage.layout.kept_names
    compute = precision.policy.compute
    leaves = {
        name: cast(_unscaled(precision, state, leaf), None if name in kept else compute)
        for name, leaf in params.items()
    }
    return leaves if precision.fp8 is None else precision.fp8.mark(leaves, kept)


def inputs(precision: MixedPrecision, state: TrainState, arguments: Any) -> Any:
    """The arguments of a call of the model."""
    return torch_pytree.tree_map(lambda leaf: _unscaled(precision, state, leaf), arguments)


def outputs(precision: MixedPrecision, state: TrainState, values: Any) -> Any:
    """What the model returned, in the dtype of the policy; where the loss is scaled in float32 at least, since
    cotangents in half precision would be lost before they are scaled."""
    given = cast_arguments(values, precision.policy.output)
    if precision.scaling is None:
        return given

    def scaled(leaf: Any) -> Any:
        if not is_float(leaf):
            return leaf
        wide = leaf.to(torch.promote_types(leaf.dtype, torch.float32))
        return scale_gradient(wide, state.loss_scale.factor).clone()  # of its own: it may be changed in place

    return torch_pytree.tree_map(scaled, given)


def _unscaled(precision: MixedPrecision, state: TrainState, leaf: Any) -> Any:
    if precision.scaling is None or not is_float(leaf):
        return leaf
    return scale_gradient(leaf, 1 / state.loss_scale.factor)
