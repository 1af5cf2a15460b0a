"""``prepare_dataloader`` of the plugins: data ranks share a data set; on a virtual mesh one process reads for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

import torch.distributed as dist

from functional_booster import dataloader
from functional_booster.dataloader import Loader
from functional_booster.sampler import whole
from functional_booster.sharding.mesh import Mesh

from .plugin import Plan, Plugin, plan


def prepare_dataloader(
    self: Plugin,
    dataset: Any,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    distributed_sampler_cls: Callable[..., Any] | None = None,
    *,
    mesh: Any = None,
    position: SupportsIndex = 0,
    **kwargs: Any,
) -> Loader:
    """The batches that this process hands to a step, of ``batch_size`` rows a data rank, from ``position`` on.

    ``mesh`` is the Booster's; without it, the processes of torch.distributed are laid out as the plugin does. On a real
    mesh each process reads its data rank's rows (ranks that differ along other axes read the same); on a virtual mesh
    the one process reads the global batch, of batch_size x data ranks rows. Order, tail, ``position`` and the other
    arguments are ``fb.prepare_dataloader``'s; what is drawn at random in making a batch follows the process that makes
    it.

    Raises TypeError or ValueError as that does.
    """
    laid_out = _placed(self) if mesh is None else plan(self, mesh, "cpu").mesh
    which, readers = share(laid_out, self.data_axes)
    together = laid_out.extent(self.data_axes) // readers  # data ranks that this process reads for
    return dataloader.prepare_dataloader(
        dataset,
        whole("batch_size", batch_size, 1) * together,
        shuffle,
        seed,
        drop_last,
        pin_memory,
        num_workers,
        distributed_sampler_cls,
        rank=which,
        world_size=readers,
        position=position,
        **kwargs,
    )


def check_tail(loader: Any, plan: Plan) -> None:
    """Raise ValueError for a Loader whose last batch an imperative loop refuses: some rank has no row of it (on a
    virtual mesh, fewer than others), while gradients are means over ranks."""
    tail, ranks = getattr(loader, "tail", 0), plan.mesh.extent(plan.plugin.data_axes)
    if (plan.mesh.across and 0 < tail < ranks) or (plan.mesh.virtual and tail % ranks):
        raise ValueError(
            f"dataloader: an epoch's last batch has {tail} rows for {ranks} data-parallel ranks; an imperative loop "
            "needs rows on each (on virtual ones equally many): set drop_last=True or another batch_size, or train by "
            "a train_step"
        )


def share(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, int]:
    """(which, of how many) equal parts of a global batch this process hands to a step: all of it on a virtual mesh."""
    if mesh.virtual:
        return 0, 1
    rank = 0
    for (name, size), index in zip(mesh.axes, mesh.place, strict=True):
        rank = rank * size + index if name in axes else rank
    return rank, mesh.extent(axes)


def _placed(plugin: Plugin) -> Mesh:
    """The plugin's mesh over the processes, without the groups to communicate in."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    axes = tuple(plugin.axes(world).items())
    place = []
    for _, size in reversed(axes):
        rank, index = divmod(rank, size)
        place.append(index)
    return Mesh(axes, (None,) * len(axes), tuple(reversed(place)))
