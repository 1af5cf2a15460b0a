"""TorchDDPPlugin: every rank holds everything; gradients are summed."""

from __future__ import annotations

from dataclasses import dataclass

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.precision import Policy, cast
from functional_booster.sharding import shards, units
from functional_booster.sharding.mesh import Mesh

Tree = tree.Tree


@dataclass(frozen=True)
class TorchDDPPlugin:
    """Data parallelism by replication (Li et al. 2020, PyTorch Distributed), over the axis "dp".

    ``bucket_cap_mb``: blocks are joined until a bucket, one psum, has this many MB.
    """

    bucket_cap_mb: float = 25

    @property
    def data_axes(self) -> tuple[str, ...]:
        """("dp",)"""
        return ("dp",)

    def axes(self, ranks: int) -> dict[str, int]:
        """All ranks along "dp"."""
        return {"dp": ranks}

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """Buckets of whole blocks."""
        return units.layout(abstract, labels, int(self.bucket_cap_mb * 2**20))

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """The storage in the compute dtype."""
        return cast(storage, policy.compute)

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """What was prepared."""
        return prepared

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """This rank's gradients."""
        return grads

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """One psum a bucket."""
        return shards.total(grads, self.data_axes, policy.reduce)
