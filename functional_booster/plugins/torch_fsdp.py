"""TorchFSDPPlugin: parameters, gradients and optimizer state are split; the loss gathers a block where it uses it."""

from __future__ import annotations

from dataclasses import dataclass

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.precision import Policy, cast
from functional_booster.sharding import shards, units
from functional_booster.sharding.mesh import Mesh

Tree = tree.Tree


@dataclass(frozen=True)
class TorchFSDPPlugin:
    """Fully sharded data parallelism (Zhao et al. 2023, PyTorch FSDP) over "fsdp", replicated over "dp"."""

    @property
    def data_axes(self) -> tuple[str, ...]:
        """("dp", "fsdp")"""
        return ("dp", "fsdp")

    def axes(self, ranks: int) -> dict[str, int]:
        """All ranks along "fsdp"."""
        return {"dp": 1, "fsdp": ranks}

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """A bucket a block, split over "fsdp"."""
        return units.layout(abstract, labels, 0, mesh, ("fsdp",))

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """The storage."""
        return storage

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """Each block, gathered in the compute dtype. Forward: all_gather; backward: psum_scatter."""
        return shards.join(cast(prepared, policy.compute))

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """This rank's part of the sum, from the transposed gather."""
        return grads

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """The sum over the replicas."""
        return shards.total(grads, ("dp",), policy.reduce)
