"""TorchFSDPPlugin: parameters, gradients and optimizer state are split; the loss gathers a block where it uses it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.precision import Policy, precision_of
from functional_booster.sharding import shards, units
from functional_booster.sharding.mesh import Mesh

from . import arguments, dataloaders

Tree = tree.Tree
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@dataclass(frozen=True, repr=False)
class TorchFSDPPlugin:
    """Fully sharded data parallelism (Zhao et al. 2023, PyTorch FSDP) over "fsdp", replicated over "dp".

    ``sharding_strategy``: torch's ShardingStrategy or its name. FULL_SHARD (None): the loss gathers each unit;
    SHARD_GRAD_OP: parameters are gathered once a step; NO_SHARD: nothing is split; HYBRID_SHARD and
    _HYBRID_SHARD_ZERO2: as the first two, within each machine, or as the Booster's mesh says (``dp=2, fsdp=4``).
    ``cpu_offload`` (bool or torch's CPUOffload): parameters and optimizer state live, and are updated, in the host's
    memory. ``auto_wrap_policy``: what a unit is, as names in the parameter tree with shell patterns (``{"h.*"}``; what
    none of them matches is one more unit) or a function from a leaf's name to its unit's; None: each block.
    ``mixed_precision``: as the Booster's, or torch's MixedPrecision. ``ignored_modules``: names, as above, of what
    every rank keeps whole; gradients are summed all the same. ``fp8_communication``: as LowLevelZero's.

    ``backward_prefetch`` changes no result and is ignored with a warning. Raises ValueError for what is not supported.
    """

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    auto_wrap_policy: Callable[[str], str] | Collection[str] | None = None
    backward_prefetch: Any = None
    mixed_precision: Any = None
    ignored_modules: Collection[str] | None = None
    param_init_fn: Any = None
    sync_module_states: bool = False
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        arguments.refuse(
            self,
            process_group="the Booster's mesh says which ranks take part",
            param_init_fn="model.init makes the parameters",
            sync_module_states="every rank makes the same parameters from one key, or is given the same",
        )
        arguments.check_flag(self, "fp8_communication")
        arguments.ignore(self, "backward_prefetch")
        object.__setattr__(self, "sharding_strategy", _strategy(self.sharding_strategy))
        object.__setattr__(self, "cpu_offload", _offload(self.cpu_offload))
        object.__setattr__(self, "mixed_precision", _policy(self.mixed_precision))
        object.__setattr__(self, "ignored_modules", _names("ignored_modules", self.ignored_modules))
        if self.auto_wrap_policy is not None and not callable(self.auto_wrap_policy):
            object.__setattr__(self, "auto_wrap_policy", _names("auto_wrap_policy", self.auto_wrap_policy))
        arguments.check_hashable(self, "auto_wrap_policy", "backward_prefetch")

    @property
    def precision(self) -> str | Policy | None:
        """``mixed_precision``, under the name that other plugins have for it."""
        return self.mixed_precision

    __repr__ = arguments.shown
    prepare_dataloader = dataloaders.prepare_dataloader

    @property
    def data_axes(self) -> tuple[str, ...]:
        """("dp", "fsdp")"""
        return ("dp", "fsdp")

    def axes(self, ranks: int) -> dict[str, int]:
        """All ranks along "fsdp", those of each machine where the strategy is a hybrid one, or none."""
        if self.sharding_strategy == "NO_SHARD":
            return {"dp": ranks, "fsdp": 1}
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if "HYBRID" in self.sharding_strategy else ranks
        if ranks % local:
            raise ValueError(
                f"sharding_strategy: {self.sharding_strategy}, but {ranks} ranks are not {local} a machine"
            )
        return {"dp": ranks // local, "fsdp": local}

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """A bucket a unit, split over "fsdp".

        Raises ValueError for a pattern that matches nothing, and for ranks none of which lie along "fsdp".
        """
        split = () if self.sharding_strategy == "NO_SHARD" else ("fsdp",)
        if self.sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and mesh.extent("fsdp") == 1 < mesh.size:
            raise ValueError(
                f"mesh: {mesh} splits nothing: {self.sharding_strategy} splits over the axis 'fsdp', as that of "
                f"fb.virtual_mesh(fsdp={mesh.size}); expected ranks along it, or sharding_strategy='NO_SHARD'"
            )
        units.check_patterns("ignored_modules", self.ignored_modules or (), abstract)
        if not callable(self.auto_wrap_policy):
            units.check_patterns("auto_wrap_policy", self.auto_wrap_policy or (), abstract)
        each, whole = partial(units.merged, least=0), self.ignored_modules or ()
        planned = units.layout(abstract, labels, each, mesh, split, unit=self._unit, whole=whole)
        return units.on_host(planned, planned.buckets) if self.cpu_offload else planned

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """The storage; where the strategy gathers once a step, the whole parameters in the compute dtype."""
        return shards.join(storage, policy.compute, wire=policy.wire) if self._once else storage

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """Each unit, gathered in the compute dtype, and again for the backward. Transposed: psum_scatter."""
        if self._once:
            return prepared
        wires = {"wire": policy.wire, "cotangent_wire": policy.reduce_wire}
        return shards.join(shards.transient(prepared), policy.compute, policy.reduce, **wires)

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """This rank's part of the sum."""
        return shards.scatter(grads, policy.reduce, policy.reduce_wire) if self._once else grads

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """The sum over the replicas."""
        return shards.total(grads, self.data_axes, policy.reduce, policy.reduce_wire)

    def settle(self, storage: Flat, step: torch.Tensor) -> Flat:
        """What was updated."""
        return storage

    @property
    def _once(self) -> bool:
        """Whether parameters are gathered once a step, and not at each microbatch."""
        return self.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2")

    def _unit(self, name: str) -> str:
        if self.auto_wrap_policy is None:
            return units.unit_of(name)
        if not callable(self.auto_wrap_policy):
            return units.prefix(name, self.auto_wrap_policy) or ""
        unit = self.auto_wrap_policy(name)
        if not isinstance(unit, str):
            raise TypeError(
                f"auto_wrap_policy: {unit!r} for the parameter {name!r}, expected the name of its unit, a str"
            )
        return unit


def _strategy(given: Any) -> str:
    name = "FULL_SHARD" if given is None else getattr(given, "name", given)
    if name not in _STRATEGIES:
        raise ValueError(f"sharding_strategy: {given!r}, expected one of {', '.join(_STRATEGIES)}, or None")
    return name


def _offload(given: Any) -> bool:
    flag = getattr(given, "offload_params", False if given is None else given)
    if not isinstance(flag, bool):
        raise TypeError(f"cpu_offload: {given!r}, expected a bool, torch's CPUOffload or None")
    return flag


def _policy(given: Any) -> str | Policy | None:
    """A torch MixedPrecision as a Policy: torch keeps parameters as they are, and sums in the compute dtype."""
    if not hasattr(given, "param_dtype"):
        precision_of(given)
        return given
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if field.name not in ("param_dtype", "reduce_dtype") and value != field.default:
            raise ValueError(
                f"mixed_precision: {field.name}={value!r} is not supported, expected {field.default!r}: buffers are "
                "not cast, gradients arrive in the parameters' dtype, and the module's inputs are cast, once"
            )
    return Policy(compute=given.param_dtype, reduce=given.reduce_dtype or given.param_dtype)


def _names(argument: str, given: Any) -> tuple[str, ...]:
    several = isinstance(given, Collection) and not isinstance(given, str)
    names = () if given is None else tuple(given) if several else (given,)
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"{argument}: {type(name).__name__} {name!r}, expected names in the parameter tree, such as 'h.*'"
            )
    return tuple(sorted(set(names)))
