"""TorchDDPPlugin: every rank holds everything; gradients are summed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.precision import Policy
from functional_booster.sharding import shards, units
from functional_booster.sharding.mesh import Mesh

from . import arguments, dataloaders

Tree = tree.Tree
_DDPS_OWN = (
    "broadcast_buffers",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
)


@dataclass(frozen=True, repr=False)
class TorchDDPPlugin:
    """Data parallelism by replication (Li et al. 2020, PyTorch Distributed), over the axis "dp".

    ``bucket_cap_mb``: blocks are joined until a bucket, one psum, has this many MB. Buffers are the same on all ranks
    with or without ``broadcast_buffers``; that and the other arguments, DDP's own, change no result and are ignored
    with a warning. ``fp8_communication``: gradients travel in float8 (e5m2), in blocks with scales; their sums do not.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        arguments.check_size(self, "bucket_cap_mb")
        arguments.check_flag(self, "fp8_communication", *_DDPS_OWN)
        arguments.ignore(self, *_DDPS_OWN)

    __repr__ = arguments.shown
    prepare_dataloader = dataloaders.prepare_dataloader

    @property
    def data_axes(self) -> tuple[str, ...]:
        """("dp",)"""
        return ("dp",)

    def axes(self, ranks: int) -> dict[str, int]:
        """All ranks along "dp"."""
        return {"dp": ranks}

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """Buckets of whole blocks."""
        return units.layout(abstract, labels, partial(units.merged, least=int(self.bucket_cap_mb * 2**20)))

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """The storage in the compute dtype."""
        return shards.join(storage, policy.compute)

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """What was prepared."""
        return prepared

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """This rank's gradients."""
        return grads

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """One psum a bucket."""
        return shards.total(grads, self.data_axes, policy.reduce, policy.reduce_wire)

    def settle(self, storage: Flat, step: torch.Tensor) -> Flat:
        """What was updated."""
        return storage
