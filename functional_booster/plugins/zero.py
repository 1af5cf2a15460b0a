"""ZeRO by stage, over one data axis: what HybridParallelPlugin lays around tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.precision import Policy
from functional_booster.sharding import shards, units
from functional_booster.sharding.mesh import Mesh

Tree = tree.Tree


@dataclass(frozen=True)
class Zero:
    """ZeRO (Rajbhandari et al. 2020) over ``axis``: TorchDDP's layout at stage 0, LowLevelZero's, TorchFSDP's at 3.

    ``least``: bytes that a bucket has at least; at stage 3 a bucket is a block. ``offload``: to the host's memory.
    """

    axis: str
    stage: int
    least: int = 0
    offload: bool = False

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """Buckets of whole blocks, from stage 1 on split over the axis."""
        join = partial(units.merged, least=0 if self.stage == 3 else self.least)
        if self.stage == 0:
            return units.layout(abstract, labels, join)
        planned = units.layout(abstract, labels, join, mesh, (self.axis,))
        return units.on_host(planned, planned.buckets) if self.offload else planned

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """The whole parameters in the compute dtype; at stage 3 the storage."""
        return storage if self.stage == 3 else shards.join(storage, policy.compute, wire=policy.wire)

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """What was prepared; at stage 3 each block, gathered, and again for the backward."""
        if self.stage < 3:
            return prepared
        wires = {"wire": policy.wire, "cotangent_wire": policy.reduce_wire}
        return shards.join(shards.transient(prepared), policy.compute, policy.reduce, **wires)

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """Stage 2: this rank's part of the sum."""
        return shards.scatter(grads, policy.reduce, policy.reduce_wire) if self.stage == 2 else grads

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """The sums over the axis: this rank's part of them where the storage is split."""
        mine = shards.scatter(grads, policy.reduce, policy.reduce_wire)
        return shards.total(mine, (self.axis,), policy.reduce, policy.reduce_wire)
