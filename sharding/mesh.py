"""Mesh: ordered named axes with sizes, virtual or real; and ``spmd``, which runs one program on every rank of it.

A virtual mesh is N ranks inside one process, under vmap: tensors hold the values of all ranks, with one leading dim an
axis. A real mesh is this process's place among others, with a process group an axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from functional_booster.kernels import tree

from . import environment
from .environment import Axis

Tree = tree.Tree


@dataclass(frozen=True)
class Mesh:
    """``axes``: (name, size) in order, the last one varying fastest over ranks. ``virtual_mesh`` and ``real_mesh`` make
    one.

    On a real mesh ``groups`` names the process group of each axis (None where its size is 1) and ``place`` is this
    rank's index along each; both are empty on a virtual mesh. A virtual mesh of one axis without a name is a number of
    ranks that a plugin lays out. Raises ValueError for a size below 1 or a name given twice.
    """

    axes: tuple[tuple[str, int], ...]
    groups: tuple[str | None, ...] = ()
    place: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, size in self.axes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh: axis {name!r} has size {size!r}, expected a whole number of ranks, at least 1")
        if len(set(self.names)) < len(self.axes):
            raise ValueError(f"mesh: an axis is named twice in {self.names}")

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, in order."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def virtual(self) -> bool:
        """Whether all ranks live in this process."""
        return not self.groups

    @property
    def unnamed(self) -> bool:
        """Whether this is a number of ranks that no plugin has laid out yet."""
        return self.names == ("",)

    def extent(self, axes: str | tuple[str, ...]) -> int:
        """The number of ranks along one axis, or along several together."""
        sizes = dict(self.axes)
        for name in (axes,) if isinstance(axes, str) else axes:
            if name not in sizes:
                raise ValueError(f"axis {name!r} is not declared: the mesh has {self.names}")
        return math.prod(sizes[name] for name in ((axes,) if isinstance(axes, str) else axes))

    def __str__(self) -> str:
        kind = "virtual" if self.virtual else f"real, this rank at {self.place}"
        return f"mesh({', '.join(f'{name}={size}' for name, size in self.axes)}; {kind})"


def virtual_mesh(size: int | None = None, /, **axes: int) -> Mesh:
    """``virtual_mesh(8)``: 8 ranks of this process, for a plugin to lay out; ``virtual_mesh(dp=2, tp=4)``: these axes."""
    if (size is None) == (not axes):
        raise TypeError("virtual_mesh: expected either a number of ranks or axes by name, as virtual_mesh(dp=2, tp=4)")
    return Mesh((("", size),)) if size is not None else Mesh(tuple(axes.items()))


def real_mesh(axes: Mapping[str, int], device_type: str) -> Mesh:
    """The mesh of these axes over the processes of torch.distributed; every process must call this.

    Without an initialized torch.distributed there is one rank. Raises ValueError where the sizes do not multiply to the
    number of processes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if math.prod(axes.values()) != world:
        raise ValueError(f"mesh: {dict(axes)} is {math.prod(axes.values())} ranks, but there are {world} processes")
    name = dist.group.WORLD.group_name if dist.is_initialized() else ""  # type: ignore[union-attr]
    return _real_mesh(tuple(axes.items()), device_type, name)


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The Mesh of a torch DeviceMesh with named dims."""
    if not device_mesh.mesh_dim_names:
        raise ValueError("mesh: the DeviceMesh has no mesh_dim_names")
    names, shape = device_mesh.mesh_dim_names, tuple(device_mesh.mesh.shape)
    groups = tuple(
        device_mesh.get_group(name).group_name if size > 1 else None for name, size in zip(names, shape, strict=True)
    )
    return Mesh(tuple(zip(names, shape, strict=True)), groups, tuple(device_mesh.get_coordinate() or ()))


@functools.cache  # a layout's process groups are made once, so that states of equal layout are interchangeable
def _real_mesh(axes: tuple[tuple[str, int], ...], device_type: str, world: str) -> Mesh:
    if not world:
        return Mesh(axes, (None,) * len(axes), (0,) * len(axes))
    names, shape = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    return mesh_of(init_device_mesh(device_type, shape, mesh_dim_names=names))


def spmd(fn: Callable[..., Tree], mesh: Mesh) -> Callable[..., Tree]:
    """``fn`` as one program on every rank: its collectives by axis name are those of ``mesh``.

    On a real mesh each process calls it on its own values. On a virtual mesh every tensor among the arguments and
    results has the mesh's dims in front: the values of all ranks, ``(*mesh.shape, *local shape)``.
    """

    def on_this_rank(*args: Tree) -> Tree:
        axes = zip(mesh.axes, mesh.groups, mesh.place, strict=True)
        with environment.bind(axes=tuple(Axis(name, size, index, group) for (name, size), group, index in axes)):
            return fn(*args)

    def on_all_ranks(*args: Tree) -> Tree:
        leaves, structure = tree.flatten(args)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        device = next((leaves[place].device for place in places), torch.device("cpu"))
        results: list[Any] = []

        def ranks(bound: tuple[Axis, ...], rest: tuple[tuple[str, int], ...], tensors: tuple[torch.Tensor, ...]) -> Any:
            if rest:
                (name, size), *further = rest

                def along(index: torch.Tensor, *inner: torch.Tensor) -> Any:
                    return ranks((*bound, Axis(name, size, index)), tuple(further), inner)

                return torch.func.vmap(along)(torch.arange(size, dtype=torch.int32, device=device), *tensors)
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            with environment.bind(axes=bound):
                outputs, rebuilt = tree.flatten(fn(*tree.unflatten(structure, filled)))
            results[:] = [outputs, rebuilt]
            return tuple(leaf for leaf in outputs if isinstance(leaf, torch.Tensor))

        stacked = iter(ranks((), mesh.axes, tuple(leaves[place] for place in places)))
        outputs, rebuilt = results
        return tree.unflatten(
            rebuilt, [next(stacked) if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs]
        )

    return on_all_ranks if mesh.virtual else on_this_rank


def replicate(values: Tree, mesh: Mesh) -> Tree:
    """The same values on every rank, as ``spmd`` takes them (views)."""
    if not mesh.virtual:
        return values
    lead = mesh.shape
    return tree.map(lambda leaf: leaf.expand(*lead, *leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, values)


def first_rank(values: Tree, mesh: Mesh) -> Tree:
    """What ``spmd`` returned on one rank: on a virtual mesh the first, on a real one this."""
    if not mesh.virtual:
        return values
    return tree.map(
        lambda leaf: leaf[(0,) * len(mesh.axes)] if isinstance(leaf, torch.Tensor) else leaf, values
    )
