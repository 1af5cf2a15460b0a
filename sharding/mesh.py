"""Mesh: ordered named axes with sizes, virtual or real; and ``spmd``, which runs one program on every rank of it.

A virtual mesh is N ranks inside one process, under vmap: tensors hold the values of all ranks, with one leading dim an
axis. A real mesh is this process's place among others, with a process group an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from functional_booster.kernels import tree

from . import environment
from .environment import Axis

Tree = tree.Tree

# A layout's process groups are made once in a world, so that states of equal layout are interchangeable.
_meshes: WeakKeyDictionary[Any, dict[Any, Mesh]] = WeakKeyDictionary()


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
        return not self.groups and bool(self.axes)

    @property
    def across(self) -> bool:
        """Whether the ranks are several processes, which must call together."""
        return not self.virtual and self.size > 1

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

    def with_axes(self, names: tuple[str, ...], of: str) -> Mesh:
        """The mesh with exactly these axes, in this order, size 1 for those that it lacks.

        Raises ValueError for an axis that is not among them: ``of`` says whose they are.
        """
        for name in self.names:
            if name not in names:
                raise ValueError(f"mesh: axis {name!r} is not one of {of}'s: {names}")
        if not self.virtual and [name for name in names if name in self.names] != list(self.names):
            raise ValueError(f"mesh: axes {self.names}, expected them in {of}'s order: {names}")
        sizes = dict(self.axes)
        axes = tuple((name, sizes.get(name, 1)) for name in names)
        if self.virtual:
            return Mesh(axes)
        groups, place = dict(zip(self.names, self.groups, strict=True)), dict(zip(self.names, self.place, strict=True))
        return Mesh(axes, tuple(groups.get(name) for name in names), tuple(place.get(name, 0) for name in names))

    def __str__(self) -> str:
        kind = "virtual" if self.virtual else f"real, this rank at {self.place}"
        return f"mesh({', '.join(f'{name}={size}' for name, size in self.axes)}; {kind})"


def virtual_mesh(size: int | None = None, /, **axes: int) -> Mesh:
    """``virtual_mesh(8)``: 8 ranks in one process, for a plugin to lay out; ``virtual_mesh(dp=2, tp=4)``: by axes."""
    if (size is None) == (not axes):
        raise TypeError("virtual_mesh: expected either a number of ranks or axes by name, as virtual_mesh(dp=2, tp=4)")
    return Mesh((("", size),)) if size is not None else Mesh(tuple(axes.items()))


def real_mesh(axes: Mapping[str, int] | Callable[[int], Mapping[str, int]], device_type: str) -> Mesh:
    """The mesh of these axes over the processes of torch.distributed; every process must call this.

    ``axes`` may be a function of the number of processes. Without an initialized torch.distributed there is one rank.
    Raises ValueError where the sizes do not multiply to the number of processes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    axes = axes(world) if callable(axes) else axes
    if math.prod(axes.values()) != world:
        raise ValueError(f"mesh: {dict(axes)} is {math.prod(axes.values())} ranks, but there are {world} processes")
    return _real_mesh(tuple(axes.items()), device_type)


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The Mesh of a torch DeviceMesh with named dims, over all processes of torch.distributed.

    Raises ValueError, on each, where it lacks some of them, or ranks do not ascend along each dim.
    """
    if not device_mesh.mesh_dim_names:
        raise ValueError("mesh: the DeviceMesh has no mesh_dim_names")
    ranks, world = device_mesh.mesh, dist.get_world_size()
    if (given := sorted(ranks.flatten().tolist())) != list(range(world)):  # a failure, for one, is that of all
        raise ValueError(f"mesh: the DeviceMesh holds ranks {given} of {world} processes, expected all")
    if any((ranks.diff(dim=dim) < 0).any() for dim in range(ranks.dim())):  # as they do in a process group
        raise ValueError(f"mesh: the ranks of the DeviceMesh must ascend along each dim, got {ranks.tolist()}")
    names, shape = device_mesh.mesh_dim_names, tuple(device_mesh.mesh.shape)
    groups = tuple(
        device_mesh.get_group(name).group_name if size > 1 else None for name, size in zip(names, shape, strict=True)
    )
    return Mesh(tuple(zip(names, shape, strict=True)), groups, tuple(device_mesh.get_coordinate() or ()))


def _real_mesh(axes: tuple[tuple[str, int], ...], device_type: str) -> Mesh:
    if not dist.is_initialized():
        return Mesh(axes, (None,) * len(axes), (0,) * len(axes))
    made = _meshes.setdefault(dist.group.WORLD, {})
    if (axes, device_type) not in made:
        names, shape = tuple(name for name, _ in axes), tuple(size for _, size in axes)
        made[axes, device_type] = mesh_of(init_device_mesh(device_type, shape, mesh_dim_names=names))
    return made[axes, device_type]


@dataclass(frozen=True)
class Replicated:
    """Around an argument or a result of a function on ranks: one value for all of them, without the mesh's dims."""

    value: Any


tree.register(Replicated, ("value",))


def spmd(fn: Callable[..., Tree], mesh: Mesh) -> Callable[..., Tree]:
    """``fn`` as one program on every rank: its collectives by axis name are those of ``mesh``.

    On a real mesh, and on one without axes, each process calls it on its own values. On a virtual mesh every tensor
    among the arguments and results has the mesh's dims in front, the values of all ranks ``(*mesh.shape, *local)``;
    what stands in a ``Replicated`` has not. ``fn`` sees what is in it, and the caller what is in those it returns.
    """

    def on_this_rank(*args: Tree) -> Tree:
        if not mesh.axes:
            return _unwrapped(fn(*_unwrapped(args)))
        axes = zip(mesh.axes, mesh.groups, mesh.place, strict=True)
        with environment.bind(axes=tuple(Axis(name, size, index, group) for (name, size), group, index in axes)):
            return _unwrapped(fn(*_unwrapped(args)))

    def on_all_ranks(*args: Tree) -> Tree:
        leaves, structure = tree.flatten(args, is_leaf=_is_replicated)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for place in places:
            if leaves[place].shape[: len(mesh.axes)] != mesh.shape:
                name, shape = tree.names(args, _is_replicated)[place], tuple(leaves[place].shape)
                raise ValueError(f"spmd: argument {name} has shape {shape}, expected {mesh.shape} in front")
        device = next((leaf.device for leaf in tree.leaves(args) if isinstance(leaf, torch.Tensor)), None)
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
                returned = fn(*_unwrapped(tree.unflatten(structure, filled)))
            outputs, rebuilt = tree.flatten(returned, is_leaf=_is_replicated)
            inner = [tree.flatten(leaf.value if _is_replicated(leaf) else leaf) for leaf in outputs]
            results[:] = [outputs, rebuilt, inner]
            return tuple(leaf for found, _ in inner for leaf in found if isinstance(leaf, torch.Tensor))

        stacked = iter(ranks((), mesh.axes, tuple(leaves[place] for place in places)))
        outputs, rebuilt, inner = results
        first = (0,) * len(mesh.axes)

        def value(output: Any, found: list[Any], inside: tree.Structure) -> Any:
            tensors = [next(stacked) if isinstance(leaf, torch.Tensor) else leaf for leaf in found]
            if _is_replicated(output):
                tensors = [leaf[first] if isinstance(leaf, torch.Tensor) else leaf for leaf in tensors]
            return tree.unflatten(inside, tensors)

        return tree.unflatten(rebuilt, [value(output, *found) for output, found in zip(outputs, inner, strict=True)])

    return on_all_ranks if mesh.virtual else on_this_rank


def own(values: Tree) -> Tree:
    """The tensors in memory of their own, where ``spmd`` gave views."""

    def copy(leaf: Any) -> Any:
        return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, torch.Tensor) else leaf

    return tree.map(copy, values)


def _is_replicated(node: Any) -> bool:
    return isinstance(node, Replicated)


def _unwrapped(values: Tree) -> Tree:
    return tree.map(lambda node: node.value if _is_replicated(node) else node, values, is_leaf=_is_replicated)
