"""Placement by measurement: chunks begin in the host's memory, and as many as there is room for come to the device.

Where a layout is ``provisional``, the first step shows how much memory everything but the chunks takes at its peak;
what the plugin's ``place`` then decides holds once and for all. (Fang et al. 2021, "PatrickStar", 3.2: the warm-up.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from functional_booster.kernels import flat, tree
from functional_booster.sharding.collectives import pmax
from functional_booster.sharding.mesh import spmd

from .state import TrainState

Tree = tree.Tree


def is_provisional(state: TrainState) -> bool:
    """Whether the next step is to be measured. On the CPU there is nothing to decide: all memory is the host's."""
    return state.storage.layout.provisional and state.step.device.type == "cuda"


def measured(run: Callable[[TrainState], tuple[TrainState, Any]], state: TrainState) -> tuple[TrainState, Any]:
    """``run(state)``, with the chunks of the new state where the peak of its memory has room for them."""
    device = state.step.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    new, metrics = run(state)
    torch.cuda.synchronize(device)
    peak, capacity = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return settled(new, *_agreed(new, peak, capacity)), metrics


def settled(state: TrainState, peak: int, capacity: int) -> TrainState:
    """The state with its chunks placed for good, trained and frozen ones.

    ``peak``: bytes that a step takes on the device while all chunks are in the host's memory, with the copies of the
    parameters that it works with: so what comes to the device in addition is a chunk's optimizer state alone;
    ``capacity``: bytes of the device.
    """
    place, layout = state.plan.plugin.place, state.storage.layout  # type: ignore[attr-defined]  # has provisional layouts
    held = _held(state.opt_state)
    chosen = place(layout, held, peak, capacity)
    new = state.replace(
        storage=_moved(state.storage, chosen, state.step.device),
        opt_state=_moved(state.opt_state, chosen, state.step.device),
    )
    if state.frozen is None:
        return new
    taken = peak + sum(size for bucket, size in held.items() if bucket not in chosen.host)
    still = place(state.frozen.layout, {}, taken, capacity)
    return new.replace(frozen=_moved(state.frozen, still, state.step.device))


def _held(values: Tree) -> dict[str, int]:
    """Bytes of each bucket, over all Flats of a tree."""
    sizes: dict[str, int] = {}
    for node in tree.leaves(values, is_leaf=_is_flat):
        for bucket, buffer in node.buffers.items() if _is_flat(node) else ():
            if isinstance(buffer, torch.Tensor):
                sizes[bucket] = sizes.get(bucket, 0) + buffer.nbytes
    return sizes


def _moved(values: Tree, layout: flat.Layout, device: torch.device) -> Tree:
    """The Flats of a tree with this layout, their buffers where it says."""

    def moved(node: Any) -> Any:
        if not _is_flat(node):
            return node
        buffers: Mapping[str, Any] = {
            bucket: buffer.to(device) if isinstance(buffer, torch.Tensor) and bucket not in layout.host else buffer
            for bucket, buffer in node.buffers.items()
        }
        return flat.Flat(dict(buffers), replace(node.layout, host=layout.host, provisional=False))

    return tree.map(moved, values, is_leaf=_is_flat)


def _agreed(state: TrainState, peak: int, capacity: int) -> tuple[int, int]:
    """The largest peak and the smallest capacity of all ranks, which must place alike."""
    mesh = state.plan.mesh
    if not mesh.across:
        return peak, capacity
    mine = torch.tensor([peak, -capacity], dtype=torch.int64, device=state.step.device)
    most, least = spmd(lambda x: pmax(x, mesh.names), mesh)(mine).tolist()
    return most, -least


def _is_flat(node: Any) -> bool:
    return isinstance(node, flat.Flat)
