"""TrainState: everything that a training run is, as one value."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from functional_booster.kernels import flat, graph, tree
from functional_booster.sharding.abstract import ArrayInfo

from .donation import DonatedError, refuse_consumed

Tree = tree.Tree
Structure = tree.Structure


@tree.hash_once
@dataclass(frozen=True)
class Abstract:
    """The abstract tree of the parameters (leaves: ArrayInfo), hashable."""

    infos: tuple[ArrayInfo, ...]
    structure: Structure

    @classmethod
    def of(cls, abstract: Tree) -> Abstract:
        """From a tree of ArrayInfo; initializers are left out, since a state has been initialized."""
        leaves, structure = tree.flatten(abstract)
        return cls(tuple(replace(info, initializer=None) for info in leaves), structure)

    @property
    def tree(self) -> Tree:
        """The tree of ArrayInfo."""
        return tree.unflatten(self.structure, self.infos)


@dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """A pytree, immutable, of 0-d counters, parameters, optimizer state and keys.

    ``step`` (int64): updates done; ``position`` (int64): batches consumed, skipped steps included; ``storage``: the
    trained parameters, flat where the optimizer allows it; ``frozen``: the others, in a tree with None for the trained
    ones, or None where there is none; ``opt_state``: the optimizer's tree over ``storage``; ``buffers``: the model's
    state that is not trained; ``key`` (2,) int32; ``loss_scale`` (float32); ``abstract``: shapes, dtypes and specs of
    the parameters, static.
    After it was donated to a step, each access raises DonatedError.
    """

    step: torch.Tensor
    position: torch.Tensor
    storage: flat.Flat
    frozen: Tree
    opt_state: Tree
    buffers: Tree
    key: torch.Tensor
    loss_scale: torch.Tensor
    abstract: Abstract

    @property
    def params(self) -> Tree:
        """The parameters as the model's tree: views of the storage."""
        refuse_consumed(tree.names(self.storage), tree.leaves(self.storage))
        return assemble(self.storage, self.frozen)

    def replace(self, **changes: Any) -> TrainState:
        """A state with other fields; ``params=tree`` is laid out like the storage."""
        if "params" in changes:
            changes["storage"], changes["frozen"] = disassemble(changes.pop("params"), self.storage.layout)
        unknown = changes.keys() - self.__dataclass_fields__.keys()
        if unknown:
            raise TypeError(f"TrainState has no field {sorted(unknown)[0]!r}")
        return replace(self, **changes)

    consumed_by = ""

    def __repr__(self) -> str:
        if self.consumed_by:
            return f"TrainState(donated to {self.consumed_by})"
        size = sum(math.prod(info.shape) for info in self.abstract.infos)
        step, where = self.step, getattr(self.step, "device", "abstract")
        done = int(step) if isinstance(step, torch.Tensor) and step.dim() == 0 and not graph.transforms() else "?"
        return f"TrainState(step={done}, {len(self.abstract.infos)} parameters of {size:,} elements, on {where})"

    def __getattr__(self, name: str) -> Any:
        if name in type(self).__dataclass_fields__:
            raise DonatedError(
                f"this TrainState was donated to {self.consumed_by}, which returned its successor: use that one "
                "(or build the step with donate=False)"
            )
        raise AttributeError(f"TrainState has no attribute {name!r}")


tree.register(
    TrainState,
    ("step", "position", "storage", "frozen", "opt_state", "buffers", "key", "loss_scale"),
    ("abstract",),
)


def assemble(storage: flat.Flat, frozen: Tree) -> Tree:
    """The parameter tree of its trained and its frozen part (None where nothing is frozen)."""
    trained = flat.unravel(storage)
    return trained if frozen is None else tree.combine(trained, frozen)


def disassemble(params: Tree, layout: flat.Layout) -> tuple[flat.Flat, Tree]:
    """The inverse of ``assemble``: copies the trained leaves into flat storage."""
    trained = {slot.name for slot in layout.slots}
    named = tree.named_leaves(params)
    for slot in layout.slots:
        if slot.name in named and named[slot.name].dtype != slot.dtype:
            raise ValueError(f"{slot.name}: {named[slot.name].dtype}, expected {slot.dtype}")
    chosen, frozen = tree.partition(params, tree.map_with_name(lambda name, _: name in trained, params))
    return flat.ravel(chosen, layout), frozen if tree.leaves(frozen) else None
