"""The protocol of plugins: how trees are laid out over a mesh, and where the collectives of data parallelism go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.device_mesh import DeviceMesh

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.precision import Policy
from functional_booster.sharding.mesh import Mesh, mesh_of, real_mesh

from .single import SingleDevice

Tree = tree.Tree


@runtime_checkable
class Plugin(Protocol):
    """Pure functions, on a frozen value. All but the first three run on every rank, inside ``spmd``.

    Between steps a rank holds ``storage``: flat buffers, or parts of them. Once a step it makes ``prepare(storage)``;
    the loss sees ``gather(prepared)``, whole buffers in the compute dtype. Gradients are taken with respect to what was
    prepared: ``reduce`` goes over those of each microbatch, ``sync`` over their sum, once a step, and leaves gradients
    laid out as the storage, summed (never averaged) over the data ranks.
    """

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the batch is split."""
        ...

    def axes(self, ranks: int) -> Mapping[str, int]:
        """The mesh axes, in order, and how ``ranks`` are laid out over them; raises ValueError where they cannot be."""
        ...

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """How a tree of ArrayInfo is stored; ``labels`` as for ``flat.plan``."""
        ...

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """What a rank works with during a step."""
        ...

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """The whole buffers in the compute dtype; differentiable."""
        ...

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """What is kept of the gradients of one microbatch."""
        ...

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """The gradients of the storage: sums over all data ranks, in the dtype that the policy reduces in."""
        ...

    def settle(self, storage: Flat, step: torch.Tensor) -> Flat:
        """The storage after update number ``step`` (0-d int64, from 1 on): what was updated, or ranks made agree."""
        ...


@dataclass(frozen=True)
class Plan:
    """Who lays a state out, and over what: a static value in every TrainState."""

    plugin: Plugin
    mesh: Mesh


def plan(plugin: Any, mesh: Any, device_type: str) -> Plan:
    """The plugin's layout over ``mesh``: of a number of virtual ranks, of axes by name, or (None) of the processes.

    Axes of the plugin that a mesh does not name have size 1. Raises TypeError for what is no plugin or mesh, ValueError
    for a mesh without a plugin, an axis that the plugin does not have, and ranks that cannot be laid out.
    """
    if plugin is None:
        if mesh is not None:
            raise ValueError("mesh: given without a plugin, which says how to lay a run out over it")
        return Plan(SingleDevice(), Mesh(()))
    if isinstance(plugin, type) or not isinstance(plugin, Plugin):
        raise TypeError(f"plugin: {plugin!r}, expected None or a plugin, such as fb.TorchDDPPlugin()")
    if isinstance(mesh, DeviceMesh):
        mesh = mesh_of(mesh)
    if mesh is None:
        return Plan(plugin, real_mesh(plugin.axes, device_type))
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: {type(mesh).__name__}, expected fb.virtual_mesh(...) or a torch DeviceMesh")
    if mesh.unnamed:
        return Plan(plugin, Mesh(tuple(plugin.axes(mesh.size).items())))
    return Plan(plugin, mesh.with_axes(tuple(plugin.axes(mesh.size)), type(plugin).__name__))
