"""One device: what ``plugin=None`` means."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from functional_booster.kernels import flat, tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.precision import Policy
from functional_booster.sharding import shards
from functional_booster.sharding.mesh import Mesh

Tree = tree.Tree


@dataclass(frozen=True)
class SingleDevice:
    """No axes and no collectives: one buffer for all leaves that the optimizer treats alike."""

    data_axes: tuple[str, ...] = ()

    def axes(self, ranks: int) -> dict[str, int]:
        """No axis."""
        return {}

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """As few buffers as there are."""
        return flat.plan(abstract, labels)

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """The storage in the compute dtype."""
        return shards.join(storage, policy.compute)

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """What was prepared."""
        return prepared

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """The gradients."""
        return grads

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """The gradients."""
        return grads

    def settle(self, storage: Flat, step: torch.Tensor) -> Flat:
        """What was updated."""
        return storage
