"""The leaves of a state by name, whole, whatever the layout."""

from __future__ import annotations

from typing import Any

from functional_booster.kernels import flat, tree
from functional_booster.sharding import shards
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.mesh import Replicated, spmd
from functional_booster.state import TrainState, on_ranks

from . import leaves

Tree = tree.Tree


def named_tensors(state: TrainState) -> dict[str, Any]:
    """{name: leaf} of a state, as the model names them, whatever the layout: params.*, opt_state.*, step, ...

    Whole tensors, or ArrayInfo where the state holds ArrayInfo. On processes, each must call it.
    """
    if any(isinstance(leaf, ArrayInfo) for leaf in tree.leaves(state)):
        return {name: ArrayInfo(leaf.shape, leaf.dtype) for name, leaf in leaves.of_state(state).items()}
    return tree.named_leaves(spmd(lambda state: Replicated(_plain(state)), state.plan.mesh)(on_ranks(state)))


def _plain(state: TrainState) -> dict[str, Tree]:
    """The parts of a state as trees of whole leaves; runs on every rank."""
    names = ("step", "position", "opt_state", "buffers", "key", "loss_scale", "storage", "frozen")
    parts = {name: getattr(state, name) for name in names}
    device = state.step.device

    def whole(node: Any) -> Any:
        return flat.unravel(shards.join(shards.on_device(node, device))) if leaves.is_flat(node) else node

    plain = tree.map(whole, parts, is_leaf=leaves.is_flat)
    trained, frozen = plain.pop("storage"), plain.pop("frozen")
    return {**plain, "params": trained if frozen is None else tree.combine(trained, frozen)}
