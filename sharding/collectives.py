"""Collectives by axis name: how a program on one rank speaks to the other ranks along a mesh axis. (Names: jax.lax.)

What a value is along an axis: *replicated*, the same number on every rank, each with a copy of its own; *varying*,
another one on each; *partial*, a term of a sum over ranks; *invariant*, one number that all ranks share, whose gradient
every rank holds whole. The drawings show two ranks, the values on the left and their cotangents, which flow back, on
the right.

What ``axis`` means, on one device, a virtual mesh or a real one, is read from the environment when a collective is
called; its backward has it from there. All can be differentiated any number of times, batched and traced.

Some take ``wire`` and ``cotangent_wire``, torch.float8_e4m3fn or torch.float8_e5m2 (None: as they are): the format in
which real floating-point values, and in the backward their cotangents, travel, 32 elements with one scale, 8.25 bits
each (``kernels.block_scale``, which states the error); other tensors are not compressed. Each value is encoded once for
each axis that it travels along, by the rank that has it, for itself too, so that ranks agree; sums are taken in float32
or wider where the terms arrive, and results have the dtype that they have without. An axis of one rank compresses
nothing. A block with a value that is not finite arrives as NaNs.

``x`` is a tensor or a tree of them, ``axis`` a name, or where so annotated a tuple of names that act as one axis, the
first one varying slowest. All raise NameError for an axis that nobody declares (except ``enter`` and ``leave``, which
are the identity there), TypeError for what is no tensor or has a dtype without meaning, ValueError for a dim that the
tensor lacks or that the ranks do not divide.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

from functional_booster.kernels import tree
from functional_booster.kernels.block_scale import FORMATS

from . import collective_primitives as primitives
from . import environment
from .compressed import Wire
from .environment import Axis

Tree = tree.Tree
Axes: TypeAlias = str | tuple[str, ...]
Formats: TypeAlias = tuple[torch.dtype | None, torch.dtype | None]


def enter(x: Tree, axis: Axes) -> Tree:
    """invariant -> varying: where a value that all ranks share goes into work that is split.

        rank 0    a -> a        g + h <- g
        rank 1    a -> a        g + h <- h

    Transpose: leave. Before a column-parallel layer. (Shoeybi et al. 2019, "Megatron-LM", section 3: f.)
    """
    axes = _declared(axis)
    return _map(x, lambda name, leaf: primitives.along(primitives.enter, leaf, axes)) if axes else x


def leave(x: Tree, axis: Axes) -> Tree:
    """partial -> invariant: where the terms of split work become a value that all ranks share.

        rank 0    a -> a + b        g <- g
        rank 1    b -> a + b        g <- g

    Transpose: enter. After a row-parallel layer. (Shoeybi et al. 2019, "Megatron-LM", section 3: g.)
    """
    axes = _declared(axis)
    return _map(x, lambda name, leaf: primitives.along(primitives.leave, _summable(name, leaf), axes)) if axes else x


def psum(x: Tree, axis: Axes, *, wire: torch.dtype | None = None, cotangent_wire: torch.dtype | None = None) -> Tree:
    """varying or partial -> replicated: the sum over ranks.

        rank 0    a -> a + b        g + h <- g
        rank 1    b -> a + b        g + h <- h

    Transpose: psum. Compressed: psum_scatter over all axes and all_gather of the sums, each of which rounds.
    """
    axes, wires = _resolve(axis), _wires(wire, cotangent_wire)
    return _map(x, lambda name, leaf: _sum(_summable(name, leaf), axes, wires))


def pmean(x: Tree, axis: Axes, *, wire: torch.dtype | None = None, cotangent_wire: torch.dtype | None = None) -> Tree:
    """varying -> replicated: the mean over ranks, of floating-point or complex tensors.

        rank 0    a -> (a + b) / 2        (g + h) / 2 <- g
        rank 1    b -> (a + b) / 2        (g + h) / 2 <- h

    Transpose: pmean. Compressed: as psum.
    """
    axes, wires = _resolve(axis), _wires(wire, cotangent_wire)

    def mean(name: str, leaf: torch.Tensor) -> torch.Tensor:
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise TypeError(f"{name}: a mean of {leaf.dtype}, expected floating-point or complex numbers")
        return _sum(leaf, axes, wires) / _size(axes)

    return _map(x, mean)


def pmax(x: Tree, axis: Axes) -> Tree:
    """varying -> replicated: the largest value of any rank. Drawn for a < b:

        rank 0    a -> b        0     <- g
        rank 1    b -> b        g + h <- h

    Backward: psum, onto the ranks that hold the largest value; they share equally, as in torch.amax.
    """
    axes = _resolve(axis)
    return _map(x, lambda name, leaf: primitives.extreme(_ordered(name, leaf), "max", axes))


def pmin(x: Tree, axis: Axes) -> Tree:
    """varying -> replicated: the smallest value of any rank. Drawn for a < b:

        rank 0    a -> a        g + h <- g
        rank 1    b -> a        0     <- h

    Backward: psum, onto the ranks that hold the smallest value; they share equally, as in torch.amin.
    """
    axes = _resolve(axis)
    return _map(x, lambda name, leaf: primitives.extreme(_ordered(name, leaf), "min", axes))


def all_gather(
    x: Tree,
    axis: Axes,
    *,
    dim: int = 0,
    tiled: bool = True,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    wire: torch.dtype | None = None,
    cotangent_wire: torch.dtype | None = None,
) -> Tree:
    """varying -> replicated: the values of all ranks, in order.

        rank 0    [a] -> [a, b]        [g0 + h0] <- [g0, g1]
        rank 1    [b] -> [a, b]        [g1 + h1] <- [h0, h1]

    Tiled: concatenated along ``dim``, which grows by the number of ranks; else stacked along a new dim ``dim``.
    Transpose: psum_scatter. ``dtype`` (None: x's) is that of the result, and of what travels; ``reduce_dtype`` (None:
    x's) is that in which cotangents are cast, sent back and summed, and their sum arrives in x's: bfloat16 weights and
    float32 gradients of float32 masters. Both floating-point and wider than 8 bits, for a floating-point x; raises
    TypeError otherwise. With ``wire`` the dtype is encoded, with ``cotangent_wire`` the sum is taken in float32 or x's.
    """
    axes, wires = _resolve(axis), _wires(wire, cotangent_wire)

    def gathered(name: str, leaf: torch.Tensor) -> torch.Tensor:
        place = _dim(name, "dim", dim, leaf.dim() + (not tiled))
        across, formats = _compression(leaf, axes, wires)
        # Of several axes the last to be gathered casts: sums that pass between axes are rounded nowhere.
        last = _wire(leaf.dtype, formats, *_casts(name, leaf, dtype, reduce_dtype))
        parts = primitives.along(primitives.gather, leaf.reshape(-1), across[:0:-1], *_wire(leaf.dtype, formats))
        parts = primitives.along(primitives.gather, parts, across[:1], *last)
        stacked = parts.reshape(_size(axes), *leaf.shape).movedim(0, place)
        return stacked.flatten(place, place + 1) if tiled else stacked

    return _map(x, gathered)


def psum_scatter(
    x: Tree,
    axis: Axes,
    *,
    dim: int = 0,
    tiled: bool = True,
    wire: torch.dtype | None = None,
    cotangent_wire: torch.dtype | None = None,
) -> Tree:
    """partial -> varying: the sum over ranks, of which each rank gets its part.

        rank 0    [a0, a1] -> [a0 + b0]        [g, h] <- [g]
        rank 1    [b0, b1] -> [a1 + b1]        [g, h] <- [h]

    Tiled: ``dim`` is cut in equal parts, one a rank; else its size is the number of ranks, and it is gone.
    Transpose: all_gather. Compressed: all_to_all of the parts, and a sum on arrival, axis by axis.
    """
    axes, wires = _resolve(axis), _wires(wire, cotangent_wire)

    def scattered(name: str, leaf: torch.Tensor) -> torch.Tensor:
        parts = _parts_first(name, "dim", _summable(name, leaf), dim, axes, tiled)
        across, formats = _compression(leaf, axes, wires)
        rows = parts.reshape(*(one.size for one in across), parts.shape[1:].numel())
        summed = primitives.along(primitives.scatter, rows, across, *_wire(leaf.dtype, formats))
        return summed.reshape(parts.shape[1:])

    return _map(x, scattered)


def all_to_all(
    x: Tree,
    axis: str,
    *,
    split_dim: int,
    concat_dim: int,
    tiled: bool = True,
    wire: torch.dtype | None = None,
    cotangent_wire: torch.dtype | None = None,
) -> Tree:
    """varying -> varying: rank r sends its part j to rank j.

        rank 0    [a0, a1] -> [a0, b0]        [g0, h0] <- [g0, g1]
        rank 1    [b0, b1] -> [a1, b1]        [g1, h1] <- [h0, h1]

    Tiled: ``split_dim`` is cut in equal parts, one a rank, and what arrives is concatenated along ``concat_dim``, in
    the order of ranks. Else the size of ``split_dim`` is the number of ranks, and a new dim ``concat_dim`` replaces it.
    Transpose: the same with the two dims exchanged.
    """
    one, wires = _resolve_one(axis), _wires(wire, cotangent_wire)

    def exchanged(name: str, leaf: torch.Tensor) -> torch.Tensor:
        place = _dim(name, "concat_dim", concat_dim, leaf.dim())
        parts = _parts_first(name, "split_dim", leaf, split_dim, (one,), tiled)
        _, formats = _compression(leaf, (one,), wires)
        rows = parts.reshape(one.size, parts.shape[1:].numel())
        arrived = primitives.along(primitives.exchange, rows, (one,), *_wire(leaf.dtype, formats))
        arrived = arrived.reshape(parts.shape).movedim(0, place)
        return arrived.flatten(place, place + 1) if tiled else arrived

    return _map(x, exchanged)


def ppermute(
    x: Tree,
    axis: str,
    perm: Sequence[tuple[int, int]],
    *,
    wire: torch.dtype | None = None,
    cotangent_wire: torch.dtype | None = None,
) -> Tree:
    """varying -> varying: for each pair (source, destination) of ``perm``, the source's value on the destination.

    A rank that nobody sends to gets zeros. Drawn for ``[(0, 1)]``:

        rank 0    a -> 0        h <- g
        rank 1    b -> a        0 <- h

    Transpose: ppermute the other way. Raises ValueError for a rank that is out of range, or sends or receives twice.
    """
    one, wires = _resolve_one(axis), _wires(wire, cotangent_wire)
    pairs = tuple((operator.index(source), operator.index(destination)) for source, destination in perm)
    for role, ranks in zip(("source", "destination"), zip(*pairs, strict=True), strict=False):
        if any(not 0 <= rank < one.size for rank in ranks) or len(set(ranks)) < len(ranks):
            raise ValueError(
                f"perm: {list(pairs)}, expected pairs (source, destination) in which each of the {one.size} ranks of "
                f"axis {axis!r} is a {role} at most once"
            )

    def permuted(name: str, leaf: torch.Tensor) -> torch.Tensor:
        _, formats = _compression(leaf, (one,), wires)
        moved = primitives.along(primitives.permute, leaf.reshape(-1), (one,), pairs, *_wire(leaf.dtype, formats))
        return moved.reshape(leaf.shape)

    return _map(x, permuted)


def broadcast(x: Tree, axis: str, root: int = 0) -> Tree:
    """varying -> replicated: the value of the rank ``root``.

        rank 0    a -> a        g + h <- g
        rank 1    b -> a        0     <- h

    Transpose: psum onto the root, zero elsewhere. Raises ValueError for a root that is out of range.
    """
    one = _resolve_one(axis)
    if not 0 <= root < one.size:
        raise ValueError(f"root: {root}, expected one of the {one.size} ranks of axis {axis!r}")
    return _map(x, lambda name, leaf: primitives.along(primitives.broadcast, leaf, (one,), root))


def axis_index(axis: Axes) -> torch.Tensor:
    """This rank's place along ``axis``: varying, a 0-d int32 tensor, on the CPU where the mesh is real."""
    axes = _resolve(axis)
    index = functools.reduce(lambda major, one: major * one.size + one.index, axes[1:], axes[0].index if axes else 0)
    return index if isinstance(index, torch.Tensor) else torch.full((), index, dtype=torch.int32)


def axis_size(axis: Axes) -> int:
    """The number of ranks along ``axis``."""
    return _size(_resolve(axis))


def _resolve(axis: Axes) -> tuple[Axis, ...]:
    """The declared axes of these names."""
    found, known = _declared(axis), environment.current().axes
    for name in _names(axis):
        if name not in (one.name for one in found):
            declared = f"the mesh has {tuple(one.name for one in known)}" if known else "no mesh is in scope"
            raise NameError(f"axis {name!r} is not declared: {declared}")
    return found


def _resolve_one(axis: str) -> Axis:
    if not isinstance(axis, str):
        raise TypeError(f"axis: {axis!r}, expected the name of one axis")
    return _resolve(axis)[0]


def _declared(axis: Axes) -> tuple[Axis, ...]:
    """The axes of these names that anybody declares."""
    found = (environment.current().axis(name) for name in _names(axis))
    return tuple(one for one in found if one is not None)


def _names(axis: Axes) -> tuple[str, ...]:
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis: {axis!r}, expected the name of an axis or a tuple of names")
    if len(set(names)) < len(names):
        raise ValueError(f"axis: {axis!r} names one axis twice")
    return names


def _size(axes: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def _map(x: Tree, collective: Callable[[str, torch.Tensor], torch.Tensor]) -> Tree:
    def checked(name: str, leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{name or 'x'}: {type(leaf).__name__}, expected a tensor")
        return collective(name or "x", leaf)

    return checked("x", x) if isinstance(x, torch.Tensor) else tree.map_with_name(checked, x)


def _summable(name: str, x: torch.Tensor) -> torch.Tensor:
    if _is_float8(x.dtype):
        raise TypeError(f"{name}: a sum in {x.dtype}, expected a wider dtype: float8 is one to travel in, a wire")
    if x.dtype == torch.bool:
        raise TypeError(f"{name}: a sum of bools, expected numbers: convert them, or use pmax for any and pmin for all")
    return x


def _ordered(name: str, x: torch.Tensor) -> torch.Tensor:
    if x.is_complex() or _is_float8(x.dtype):
        raise TypeError(f"{name}: {x.dtype} has no order, expected real numbers wider than 8 bits, integers or bools")
    return x


def _sum(x: torch.Tensor, axes: tuple[Axis, ...], wires: Formats) -> torch.Tensor:
    """psum of one tensor."""
    across, formats = _compression(x, axes, wires)
    if not any(formats):
        return primitives.along(primitives.psum, x, axes)
    size, wire = _size(across), _wire(x.dtype, formats)
    rows = pad(x.reshape(-1), (0, -x.numel() % size)).reshape(*(one.size for one in across), -(-x.numel() // size))
    part = primitives.along(primitives.scatter, rows, across, *wire)
    whole = primitives.along(primitives.gather, part, across[::-1], *wire)
    return whole.reshape(rows.numel())[: x.numel()].reshape(x.shape)


def _wires(wire: torch.dtype | None, cotangent_wire: torch.dtype | None) -> Formats:
    """The formats in which values and cotangents are to travel."""
    for argument, given in (("wire", wire), ("cotangent_wire", cotangent_wire)):
        if given is not None and given not in FORMATS:
            known = ", ".join(map(str, FORMATS))
            raise TypeError(f"{argument}: {given!r}, expected a format that numbers can travel in, {known}, or None")
    return wire, cotangent_wire


def _compression(x: torch.Tensor, axes: tuple[Axis, ...], wires: Formats) -> tuple[tuple[Axis, ...], Formats]:
    """The formats in which ``x`` and its cotangent travel, and the axes: without those of one rank, if compressed."""
    several = tuple(axis for axis in axes if axis.size > 1)
    if several and any(wires) and x.is_floating_point() and not _is_float8(x.dtype):
        return several, wires
    return axes, (None, None)


def _casts(
    name: str, x: torch.Tensor, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes of a gather, checked."""
    if dtype is not None or reduce_dtype is not None:
        for given in (x.dtype, dtype or x.dtype, reduce_dtype or x.dtype):
            if not given.is_floating_point or _is_float8(given):
                into = given if given != x.dtype else dtype or x.dtype
                raise TypeError(f"{name}: a gather of {x.dtype} in {into}, expected floating-point dtypes above 8 bits")
    return dtype, reduce_dtype


def _wire(
    given: torch.dtype, formats: Formats, result: torch.dtype | None = None, summed: torch.dtype | None = None
) -> tuple[Wire, ...]:
    """The Wire of a primitive; nothing where numbers travel as they are."""
    if not any((*formats, result, summed)):
        return ()
    return (Wire(given, result or given, summed or given, *formats),)


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _dim(name: str, argument: str, dim: int, number: int) -> int:
    """A dim counted from the front; raises ValueError where there is none."""
    if not -number <= dim < number:
        raise ValueError(f"{argument}: {dim}, but {name} has {number} dims to choose from")
    return dim % number


def _parts_first(
    name: str, argument: str, x: torch.Tensor, dim: int, axes: tuple[Axis, ...], tiled: bool
) -> torch.Tensor:
    """``x`` with the part for each rank along a dim 0 of that size."""
    place, size = _dim(name, argument, dim, x.dim()), _size(axes)
    given = x.shape[place]
    if given % size if tiled else given != size:
        raise ValueError(
            f"{argument}: {dim}, where {name} has size {given}, expected {'a multiple of ' if tiled else ''}{size}, "
            f"the number of ranks of axis {' x '.join(repr(axis.name) for axis in axes)}"
        )
    return (x.unflatten(place, (size, given // size)) if tiled else x).movedim(place, 0)
