"""Trees over a mesh, split as PartitionSpecs say: each leaf along its dims, uneven ones padded with zeros.

``shard`` and ``unshard`` go between whole trees and the values of all ranks, outside of a program; ``part_of`` and
``whole_of`` do it for one leaf inside of one. The padding belongs to the spec: a dim of 50257 over 8 ranks is 6283 on
each, the last 7 of them zeros, and what is made whole again never shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functional_booster.kernels import tree

from .collectives import all_gather, axis_index, axis_size
from .mesh import Mesh, Replicated, own, spmd
from .spec import PartitionSpec

Tree = tree.Tree
Shape = tuple[int, ...]


def shard(values: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """The parts that ranks hold of whole leaves, in fresh storage, as ``spmd`` takes them. No communication.

    On a virtual mesh the parts of all ranks, ``(*mesh.shape, *local)``; on a real one this rank's, where each process
    gives the same ``values``. ``specs`` is a tree of PartitionSpecs with the structure of ``values``. Raises
    ValueError, naming the leaf, for a spec with more entries than dims or an axis that the mesh lacks, and for another
    structure.
    """
    paired = _with_specs(values, specs)
    for name, value, spec in paired:
        _local_shape(name, tuple(value.shape), spec, mesh.extent, mesh.names)

    def local(values: Tree) -> Tree:
        return _mapped(part_of, values, [spec for _, _, spec in paired])

    with torch.no_grad():
        return own(spmd(local, mesh)(Replicated(values)))


def unshard(parts: Tree, specs: Tree, mesh: Mesh, shapes: Tree) -> Tree:
    """The whole leaves, in fresh storage: the inverse of ``shard``. On a real mesh each process must call it.

    ``shapes`` has a tuple of sizes, or anything with a ``shape`` (an ArrayInfo), for each leaf. Raises ValueError as
    ``shard`` does, and, naming the leaf and the sizes, where a part is not what its spec makes of the shape.
    """
    paired = _with_specs(parts, specs)
    wholes = [_shape_of(shape) for shape in _flat_shapes(parts, shapes)]
    lead = mesh.shape if mesh.virtual else ()
    for (name, part, spec), shape in zip(paired, wholes, strict=True):
        expected = (*lead, *_local_shape(name, shape, spec, mesh.extent, mesh.names))
        if tuple(part.shape) != expected:
            raise ValueError(
                f"{name or 'the value'}: parts of shape {tuple(part.shape)}, expected {expected}: shape {shape} split "
                f"by {spec} over {mesh}"
            )

    def local(parts: Tree) -> Replicated:
        return Replicated(_mapped(whole_of, parts, [spec for _, _, spec in paired], wholes))

    with torch.no_grad():
        return own(spmd(local, mesh)(parts))


def part_of(x: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
    """This rank's part of a whole leaf; padded with zeros. Runs inside ``spmd``, without communication.

    replicated -> varying. Forward: slice; backward: the cotangent in its place, zeros elsewhere: partial. A shape
    ``(R, C)`` under ``P("a", None)`` becomes ``(ceil(R / size of a), C)``. Raises ValueError for a spec with more
    entries than x has dims, NameError for an axis that nobody declares.
    """
    _local_shape("x", tuple(x.shape), spec, axis_size, ())
    for dim, axes in enumerate(map(_axes, spec)):
        if axes:
            size = x.shape[dim]
            part = _part(size, axis_size(axes))
            padding = part * axis_size(axes) - size
            if padding:
                x = torch.cat([x, x.new_zeros(*x.shape[:dim], padding, *x.shape[dim + 1 :])], dim)
            index = torch.as_tensor(axis_index(axes), dtype=torch.int64, device=x.device).reshape(1)
            x = x.unflatten(dim, (axis_size(axes), part)).index_select(dim, index).squeeze(dim)
    return x


def whole_of(part: torch.Tensor, spec: PartitionSpec, shape: Shape) -> torch.Tensor:
    """The whole leaf of ``shape`` from the parts of all ranks, without padding. Runs inside ``spmd``.

    varying -> replicated. Forward: all_gather along each dim that is split; backward: psum_scatter. Raises ValueError,
    with the sizes, where ``part`` is not what ``part_of`` makes of such a leaf.
    """
    expected = _local_shape("part", shape, spec, axis_size, ())
    if tuple(part.shape) != expected:
        raise ValueError(
            f"part: shape {tuple(part.shape)}, expected {expected}: shape {shape} split by {spec} over "
            + ", ".join(f"{axis}={axis_size(axis)}" for entry in spec for axis in _axes(entry))
        )
    for dim, axes in enumerate(map(_axes, spec)):
        if axes:
            part = all_gather(part, axes, dim=dim).narrow(dim, 0, shape[dim])
    return part


def local_shape(shape: Shape, spec: PartitionSpec, mesh: Mesh) -> Shape:
    """The shape of each rank's part of a leaf of ``shape``, padding included. Raises ValueError as ``shard``."""
    return _local_shape("", shape, spec, mesh.extent, mesh.names)


def _local_shape(
    name: str, shape: Shape, spec: PartitionSpec, extent: Callable[[tuple[str, ...]], int], known: tuple[str, ...]
) -> Shape:
    where = name or "the value"
    if len(spec) > len(shape):
        raise ValueError(f"{where}: {spec} has {len(spec)} entries, but shape {shape} has {len(shape)} dims")
    for axis in (axis for entry in spec for axis in _axes(entry)):
        if known and axis not in known:
            raise ValueError(f"{where}: {spec} names axis {axis!r}, which is not declared: the mesh has {known}")
    split = [extent(_axes(entry)) for entry in spec] + [1] * (len(shape) - len(spec))
    return tuple(_part(size, ranks) for size, ranks in zip(shape, split, strict=True))


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _with_specs(values: Tree, specs: Tree) -> list[tuple[str, Any, PartitionSpec]]:
    """(name, leaf, its spec) of each leaf."""
    leaves, structure = tree.flatten(values)
    names = tree.names(values)
    try:
        given = tree.flatten_up_to(structure, specs)
    except ValueError as error:
        raise ValueError(f"specs: another structure than the values: {error}") from error
    for name, spec in zip(names, given, strict=True):
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"specs: {name or 'the value'}: {spec!r}, expected a PartitionSpec")
    return list(zip(names, leaves, given, strict=True))


def _flat_shapes(parts: Tree, shapes: Tree) -> list[Any]:
    try:
        return tree.flatten_up_to(tree.structure(parts), shapes)
    except ValueError as error:
        raise ValueError(f"shapes: another structure than the parts: {error}") from error


def _shape_of(shape: Any) -> Shape:
    return tuple(getattr(shape, "shape", shape))


def _mapped(fn: Callable[..., torch.Tensor], values: Tree, *rest: list[Any]) -> Tree:
    """``fn`` of each leaf and of what stands for it in the lists."""
    leaves, structure = tree.flatten(values)
    return tree.unflatten(structure, [fn(*each) for each in zip(leaves, *rest, strict=True)])
