"""A state's first values: storage that is filled leaf by leaf, so that no rank ever holds more than its own part and
one leaf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from functional_booster.kernels import flat, graph, tree
from functional_booster.sharding import shards
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.mesh import own, spmd

from .checkpoint import leaves
from .plugins import Plan

Tree = tree.Tree


def zeros(layout: flat.Layout, plan: Plan, device: torch.device) -> flat.Flat:
    """Storage of this layout, where it is between steps: each buffer this rank's part, or, on a virtual mesh, the parts
    of all ranks."""
    mesh, buffers = plan.mesh, {}
    for bucket, slots in layout.buckets.items():
        whole = slots[0].offset is None
        shape = slots[0].shape if whole else (layout.size(bucket) // mesh.extent(layout.axes[bucket]),)
        away = bucket in layout.host and device.type != "cpu"
        pin = away and not graph.is_tracing()  # a fake tensor cannot be pinned
        place: dict[str, Any] = {"device": "cpu", "pin_memory": pin} if away else {"device": device}
        lead = mesh.shape if mesh.virtual else ()
        buffers[bucket] = torch.zeros((*lead, *shape), dtype=slots[0].dtype, **place)
    return flat.Flat(buffers, layout)


def fill(
    storage: Iterable[flat.Flat | None],
    given: Iterable[tuple[str, Any]],
    infos: Mapping[str, ArrayInfo],
    plan: Plan,
    to: torch.device,
) -> None:
    """Write (name, value) one by one, in the dtype of its ArrayInfo, into the parts of it that this process has.

    On processes each must give the same names in the same order, and the first one's values hold; what lies in a file
    each reads by itself. ``to`` is the device to work on. Raises ValueError, naming them, for leaves without a value
    and values without a leaf or of another shape.
    """
    flats = [one for one in storage if one is not None]
    places = {name: leaf for one in flats for name, leaf in leaves.of_flat(one, plan.mesh).items()}
    for name, value in given:
        if name not in infos or tuple(value.shape) != infos[name].shape:
            raise ValueError(f"params do not fit the model: {name}: unexpected, or of shape {tuple(value.shape)}")
        leaf = places.pop(name)
        if not isinstance(value, torch.Tensor):
            value.write(leaf)
            continue
        here = shards.of_the_first(value.detach().to(to), plan.mesh).to(infos[name].dtype)
        for piece in leaves.held(leaf):
            leaves.write(leaf, piece, here.reshape(-1).narrow(0, piece.start, piece.stop - piece.start))
        del value, here
    if places:
        raise ValueError(f"params do not fit the model: {', '.join(sorted(places))}: never initialized")


def optimizer_state(tx: Any, storage: flat.Flat, plan: Plan) -> Tree:
    """The optimizer's first state, each tensor in memory of its own."""
    made = spmd(tx.init, plan.mesh)(storage)
    if graph.transforms():
        return own(made)
    taken = {buffer.untyped_storage()._cdata for buffer in storage.buffers.values()}

    def alone(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        memory = leaf.untyped_storage()
        if memory._cdata in taken or memory.nbytes() != leaf.nbytes or not leaf.is_contiguous():
            leaf = own(leaf)
            memory = leaf.untyped_storage()
        taken.add(memory._cdata)
        return leaf

    return tree.map(alone, made)
