"""LowLevelZeroPlugin: ZeRO stages 1 and 2; each rank keeps, and updates, its part of the parameters' master copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.optim.validate import check_integer
from functional_booster.precision import MixedPrecision, Policy
from functional_booster.sharding import shards, units
from functional_booster.sharding.mesh import Mesh

from . import arguments, dataloaders

Tree = tree.Tree


@dataclass(frozen=True, repr=False)
class LowLevelZeroPlugin:
    """ZeRO (Rajbhandari et al. 2020, sections 5.1 and 5.2) over "dp", replicated over "extra_dp".

    ``stage`` 1: master weights and optimizer state are split; 2: gradients too, at every microbatch. ``precision``: the
    Booster's ``mixed_precision`` where it is None, and "fp16" where that is None, too; ``max_norm`` (0: no clipping) is
    the step's where that is None. The arguments of loss scaling, ``initial_scale`` to ``max_scale``, count where the
    precision is given by name, and scales. ``reduce_bucket_size_in_m``: blocks are joined until a bucket has this many
    million (2^20) elements. ``communication_dtype``: gradients are summed in it. ``cpu_offload``: master weights and
    optimizer state live, and are updated, in the host's memory. ``master_weights=False``: parameters are stored and
    updated in the compute dtype. ``cast_inputs``: floating-point inputs of modules come in the compute dtype.
    ``use_fp8``: linear layers multiply in float8. ``fp8_communication``: parameters (e4m3) and gradients (e5m2) travel
    in float8, in blocks with scales; sums are taken as without. ``extra_dp_size``: number of replicas of the group over
    which ZeRO splits.

    ``overlap_communication``, ``overlap_allgather`` and ``verbose`` change no result and are ignored with a warning.
    Raises ValueError for what is not supported.
    """

    DEFAULT_PRECISION: ClassVar[str] = "fp16"

    stage: int = 1
    precision: str | Policy | MixedPrecision | None = None
    initial_scale: float = 2**32
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    reduce_bucket_size_in_m: float = 12
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    verbose: bool = False
    cast_inputs: bool = True
    fp8_communication: bool = False
    use_fp8: bool = False
    extra_dp_size: int = 1

    def __post_init__(self) -> None:
        expected = "expected 1 or 2 (3 is fb.GeminiPlugin or fb.TorchFSDPPlugin)"
        if isinstance(self.stage, bool) or not isinstance(self.stage, int):
            raise TypeError(f"stage: {self.stage!r}, {expected}")
        if self.stage not in (1, 2):
            raise ValueError(f"stage: {self.stage!r}, {expected}")
        arguments.check_precision(self)
        arguments.check_size(self, "reduce_bucket_size_in_m")
        arguments.check_dtype("communication_dtype", self.communication_dtype)
        arguments.check_flag(self, "cpu_offload", "master_weights", "verbose", "cast_inputs")
        arguments.check_flag(self, "overlap_communication", "overlap_allgather", "use_fp8", "fp8_communication")
        check_integer("extra_dp_size", self.extra_dp_size, minimum=1)
        arguments.ignore(self, "overlap_communication", "overlap_allgather", "verbose")

    __repr__ = arguments.shown
    prepare_dataloader = dataloaders.prepare_dataloader

    @property
    def data_axes(self) -> tuple[str, ...]:
        """("extra_dp", "dp")"""
        return ("extra_dp", "dp")

    def axes(self, ranks: int) -> dict[str, int]:
        """``extra_dp_size`` replicas of equal groups."""
        if ranks % self.extra_dp_size:
            raise ValueError(f"extra_dp_size: {self.extra_dp_size} does not divide {ranks} ranks")
        return {"extra_dp": self.extra_dp_size, "dp": ranks // self.extra_dp_size}

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """Buckets of whole blocks, each split over "dp"."""
        arguments.check_replicas(self.extra_dp_size, mesh)
        least = int(self.reduce_bucket_size_in_m * 2**20) * 4
        planned = units.layout(abstract, labels, partial(units.merged, least=least), mesh, ("dp",))
        return units.on_host(planned, planned.buckets) if self.cpu_offload else planned

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """The whole parameters, gathered in the compute dtype."""
        return shards.join(storage, policy.compute, wire=policy.wire)

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """What was prepared."""
        return prepared

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """Stage 2: this rank's part of the sum."""
        return shards.scatter(grads, policy.reduce, policy.reduce_wire) if self.stage == 2 else grads

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """This rank's part of the sum over "dp", summed over the replicas."""
        mine = shards.scatter(grads, policy.reduce, policy.reduce_wire)
        return shards.total(mine, self.data_axes, policy.reduce, policy.reduce_wire)

    def settle(self, storage: Flat, step: torch.Tensor) -> Flat:
        """What was updated."""
        return storage
