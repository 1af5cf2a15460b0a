"""LowLevelZeroPlugin: ZeRO stages 1 and 2; each rank keeps, and updates, its part of the parameters' master copy."""

from __future__ import annotations

from dataclasses import dataclass

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.precision import Policy, cast
from functional_booster.sharding import shards, units
from functional_booster.sharding.mesh import Mesh

Tree = tree.Tree


@dataclass(frozen=True)
class LowLevelZeroPlugin:
    """ZeRO (Rajbhandari et al. 2020, sections 5.1 and 5.2) over "dp", replicated over "extra_dp".

    ``stage`` 1: master weights and optimizer state are split; 2: gradients too, at every microbatch.
    ``reduce_bucket_size_in_m``: blocks are joined until a bucket has this many million elements.
    """

    stage: int = 1
    reduce_bucket_size_in_m: float = 12
    extra_dp_size: int = 1

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
        return units.layout(abstract, labels, int(self.reduce_bucket_size_in_m * 2**20) * 4, mesh, ("dp",))

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """The whole parameters, gathered in the compute dtype."""
        return shards.join(cast(storage, policy.compute))

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """What was prepared."""
        return prepared

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """Stage 2: this rank's part of the sum."""
        return shards.scatter(grads, policy.reduce) if self.stage == 2 else grads

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """This rank's part of the sum over "dp", summed over the replicas."""
        return shards.total(shards.scatter(grads, policy.reduce), ("extra_dp",), policy.reduce)
