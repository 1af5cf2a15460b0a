"""TrainState: everything that a training run is, as one value."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from functional_booster.kernels import flat, graph, tree
from functional_booster.precision import LossScale, MixedPrecision
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.mesh import Replicated

from .donation import DonatedError, refuse_consumed
from .plugins import Plan

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
    trained parameters, flat where the optimizer allows it; ``frozen``: the others, or None where there is none;
    ``opt_state``: the optimizer's tree over ``storage``; ``buffers``: the model's state that is not trained; ``key``
    (2,) int32; ``loss_scale``: the loss's factor, with its counters; ``abstract``: shapes, dtypes and specs of the
    parameters, static; ``plan``: the plugin and the mesh it is laid out over, static; ``precision``: what it is trained
    in, static. On a virtual mesh the tensors of storage, frozen and opt_state have the mesh's dims in front: the values
    of all ranks.
    After it was donated to a step, each access raises DonatedError.
    """

    step: torch.Tensor
    position: torch.Tensor
    storage: flat.Flat
    frozen: flat.Flat | None
    opt_state: Tree
    buffers: Tree
    key: torch.Tensor
    loss_scale: LossScale
    abstract: Abstract
    plan: Plan
    precision: MixedPrecision

    @property
    def params(self) -> Tree:
        """The parameters as the model's tree: views of the storage. Raises ValueError on a mesh."""
        self._refuse_meshes("booster.full_params(state) has its params")
        refuse_consumed(tree.names(self.storage), tree.leaves(self.storage))
        return assemble(self.storage, self.frozen)

    @property
    def layouts(self) -> tuple[flat.Layout, flat.Layout | None]:
        """How the trained and the frozen parameters are stored."""
        return self.storage.layout, None if self.frozen is None else self.frozen.layout

    def _refuse_meshes(self, remedy: str) -> None:
        if self.plan.mesh.virtual or self.plan.mesh.across:
            raise ValueError(f"this state is laid out over {self.plan.mesh}: {remedy}")

    def replace(self, **changes: Any) -> TrainState:
        """A state with other fields; ``params=tree`` is laid out like the storage.

        Raises TypeError for a field that there is not, ValueError with the whole list of leaves that do not fit.
        """
        if "params" in changes:
            self._refuse_meshes("booster.shard(params, like=state) lays params out")
            check_params(changes["params"], self.abstract.tree)
            changes["storage"], changes["frozen"] = disassemble(changes.pop("params"), *self.layouts)
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
    ("abstract", "plan", "precision"),
)


def on_ranks(state: TrainState) -> TrainState:
    """The state as ``spmd`` takes and returns it: what all ranks have alike is one value."""
    alike = ("step", "position", "buffers", "key", "loss_scale")
    wrapped: dict[str, Any] = {name: Replicated(getattr(state, name)) for name in alike}
    return replace(state, **wrapped)


def check_state(argument: str, state: Any) -> None:
    """Raise TypeError, naming the argument, for what is no TrainState."""
    if not isinstance(state, TrainState):
        raise TypeError(f"{argument}: {type(state).__name__}, expected a TrainState (booster.init makes one)")


def check_params(params: Tree, abstract: Tree) -> None:
    """Raise ValueError listing every leaf of ``params`` that is missing, unexpected or of another shape."""
    given, wanted = tree.named_leaves(params), tree.named_leaves(abstract)
    problems = [f"{name}: missing" for name in wanted if name not in given]
    problems += [f"{name or type(params).__name__}: unexpected" for name in given if name not in wanted]
    for name in given.keys() & wanted.keys():
        leaf, info = given[name], wanted[name]
        if not isinstance(leaf, torch.Tensor):
            problems.append(f"{name}: {type(leaf).__name__}, expected a torch.Tensor")
        elif leaf.is_floating_point() != info.dtype.is_floating_point or leaf.is_complex() != info.dtype.is_complex:
            problems.append(f"{name}: {leaf.dtype}, expected {info.dtype}")
        elif tuple(leaf.shape) != tuple(info.shape):
            problems.append(f"{name}: shape {tuple(leaf.shape)}, expected {tuple(info.shape)}")
    if problems:
        raise ValueError("params do not fit the model:\n  " + "\n  ".join(sorted(problems)))


def assemble(storage: flat.Flat, frozen: flat.Flat | None) -> Tree:
    """The parameter tree of its trained and its frozen part (None where nothing is frozen)."""
    trained = flat.unravel(storage)
    return trained if frozen is None else tree.combine(trained, flat.unravel(frozen))


def disassemble(
    params: Tree, layout: flat.Layout, frozen_layout: flat.Layout | None
) -> tuple[flat.Flat, flat.Flat | None]:
    """The inverse of ``assemble``: copies the leaves into flat storage."""
    named = tree.named_leaves(params)
    for slot in (*layout.slots, *(frozen_layout.slots if frozen_layout else ())):
        if slot.name in named and named[slot.name].dtype != slot.dtype:
            raise ValueError(f"{slot.name}: {named[slot.name].dtype}, expected {slot.dtype}")
    trained = {slot.name for slot in layout.slots}
    chosen, frozen = tree.partition(params, tree.map_with_name(lambda name, _: name in trained, params))
    return flat.ravel(chosen, layout), None if frozen_layout is None else flat.ravel(frozen, frozen_layout)
