"""What a rank holds between the steps of a state, and what it takes on top while one runs, in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from functional_booster import step
from functional_booster.kernels import flat, graph, tree
from functional_booster.precision import Policy, cast
from functional_booster.sharding.mesh import Mesh, spmd

from .state import TrainState, on_ranks

Tree = tree.Tree


@dataclass(frozen=True)
class Leaf:
    """A parameter: ``split`` names the mesh axes that split its ``bucket`` into ``parts``, one a rank along them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    bucket: str
    split: tuple[str, ...]
    parts: int

    @property
    def bytes(self) -> float:
        """Bytes a rank, on average: a part of a bucket may hold all of a leaf, or nothing of it."""
        return math.prod(self.shape) * self.dtype.itemsize / self.parts


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds between steps.

    ``parameters`` are the trained ones and ``frozen`` the others, ``padding`` (a rank, on average) included;
    ``counters``: step, position, key and loss scale. ``host`` of all these are in the host's memory.
    """

    parameters: int
    frozen: int
    optimizer: int
    buffers: int
    counters: int
    padding: int
    host: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.frozen + self.optimizer + self.buffers + self.counters


@dataclass(frozen=True)
class Work:
    """Bytes that a rank takes on top while a step runs, activations and the optimizer's temporaries left out.

    ``prepared``: parameters that are copied once a step; ``gathered``: those that are copied where the loss uses them,
    ``largest`` by the largest bucket; ``gradients`` as the backward leaves them, ``kept`` of them for each microbatch,
    and ``summed`` over ranks, as the update gets them.
    """

    prepared: int
    gathered: int
    largest: int
    gradients: int
    kept: int
    summed: int


def leaves_of(state: TrainState) -> Iterable[Leaf]:
    """The parameters, in the order of the model's tree."""
    layouts = [(layout, layout is state.storage.layout) for layout in state.layouts if layout is not None]
    found = {}
    for layout, trained in layouts:
        for slot in layout.slots:
            split = layout.axes[slot.bucket]
            parts = state.plan.mesh.extent(split)
            found[slot.name] = Leaf(slot.name, slot.shape, slot.dtype, trained, slot.bucket, split, parts)
    return (found[name] for name in tree.names(state.abstract.tree))


def held_by(state: TrainState, device: torch.device) -> Held:
    """Between steps; ``state`` is one rank's, and what lives on another device than ``device`` on the host."""
    flats = [part for part in (state.storage, state.frozen) if part is not None]
    everything = [leaf for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)]
    return Held(
        parameters=_nbytes(state.storage),
        frozen=_nbytes(state.frozen),
        optimizer=_nbytes(state.opt_state),
        buffers=_nbytes(state.buffers),
        counters=_nbytes((state.step, state.position, state.key, state.loss_scale)),
        padding=round(sum(_padding(part.layout, state.plan.mesh) for part in flats)),
        host=sum(leaf.nbytes for leaf in everything if leaf.device != device),
    )


def work_of(state: TrainState, policy: Policy, accumulate: int) -> Work:
    """While a step of so many microbatches runs; ``state`` is one rank's, on fake tensors."""
    plugin = state.plan.plugin

    def local(state: TrainState) -> tuple[Tree, ...]:
        prepared = step.prepare(policy, state)
        held = [part for part in (prepared.trained, prepared.frozen) if part is not None]
        kept = plugin.reduce(prepared.trained, policy)  # a gradient is laid out as what it is taken of
        kept = cast(kept, policy.accumulate) if accumulate > 1 else kept
        return held, [plugin.gather(part, policy) for part in held], prepared.trained, kept, plugin.sync(kept, policy)

    with torch.no_grad():
        prepared, gathered, *gradients = spmd(local, state.plan.mesh)(on_ranks(state))
    copies = _fresh(gathered, prepared)
    return Work(
        sum(_fresh(prepared, (state.storage, state.frozen))),
        sum(copies),
        max(copies, default=0),
        *map(_nbytes, gradients),
    )


def _padding(layout: flat.Layout, mesh: Mesh) -> float:
    """Bytes a rank, on average."""
    return sum(
        (layout.size(bucket) - sum(slot.size for slot in slots))
        * slots[0].dtype.itemsize
        / mesh.extent(layout.axes[bucket])
        for bucket, slots in layout.buckets.items()
    )


def _fresh(values: Tree, old: Tree) -> list[int]:
    """The bytes of each tensor that is not one of the ``old`` ones, or a view of it."""
    olds = tree.leaves(old)
    return [leaf.nbytes for leaf in tree.leaves(values) if not any(graph.shares_storage(leaf, other) for other in olds)]


def _nbytes(values: Tree) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(values) if isinstance(leaf, torch.Tensor))
