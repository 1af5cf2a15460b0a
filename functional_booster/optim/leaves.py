"""Leaf by leaf, however leaves lie: for optimizers that are not elementwise.

In a step a rank may hold a part of a flat buffer, cut wherever the number of ranks cuts it, also in the middle of a
leaf. What such an optimizer needs of a leaf is one of three things. ``norms`` and ``sums`` are reductions, completed
over the ranks that hold the leaf; ``expand`` brings what they gave back to the elements that this rank holds;
``transformed`` is a function of whole leaves, which ranks do in turns. Each takes plain trees and trees with Flats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from functional_booster.kernels import flat, tree
from functional_booster.kernels.flat import ALIGNMENT, Flat
from functional_booster.sharding import shards
from functional_booster.sharding.collectives import all_to_all, axis_size, psum

from .base import Tree, compute_dtype, is_flat, stands_for

Axes: TypeAlias = tuple[str, ...]
Terms: TypeAlias = list[tuple[Axes, torch.Tensor]]  # terms of sums over the ranks along axes
Leafwise: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def norms(*values: Tree) -> list[Tree]:
    """The Euclidean norm of each leaf, 0-d float64, as a plain tree, for each of ``values``: one psum for all."""
    totals = iter(_totals([term for each in values for term in _squares(each)]))
    return [tree.map(lambda _: next(totals).sqrt(), stands_for(each)) for each in values]


def sums(fns: Sequence[Leafwise], values: Tree) -> list[Tree]:
    """For each of ``fns``, a plain tree of what it makes of each leaf: one psum for all.

    A function gets a leaf in its own shape, zeros in place of the elements that other ranks hold, and must be a sum
    over elements which zeros add nothing to, as ``lambda leaf: leaf.square().sum(-1)``.
    """
    terms: Terms = []
    for node in tree.leaves(values, is_leaf=is_flat):
        if not is_flat(node):
            terms += [((), fn(node)) for fn in fns]
            continue
        found: dict[str, Terms] = {}
        for bucket, buffer, axes in _buckets(node):
            for slot, leaf in _in_shape(node.layout, bucket, shards.placed(buffer, axes)):
                found[slot.name] = [(axes, fn(leaf)) for fn in fns]
        terms += [term for slot in node.layout.slots for term in found.get(slot.name, [])]
    totals = _totals(terms)
    structure = tree.structure(stands_for(values))
    return [tree.unflatten(structure, totals[place :: len(fns)]) for place in range(len(fns))]


def expand(numbers: Tree, like: Tree) -> Tree:
    """A plain tree of tensors that broadcast to their leaves' shapes, laid out like ``like``, float32 at least.

    Padding is zero. No communication, but a rank makes whole buffers, one after the other, and keeps its part.
    """
    return _laid_out(numbers, like, _joined)


def scaled(values: Tree, factors: Tree) -> Tree:
    """Each leaf times its number, 0-d and finite, in the leaf's dtype. No communication."""

    def product(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return (value.to(factor.dtype) * factor).to(value.dtype)

    return tree.map(product, values, _laid_out(factors, values, _repeated))


def transformed(fn: Leafwise, values: Tree) -> Tree:
    """``fn`` of each whole leaf: it takes leaves of one shape, stacked ``(K, *shape)``, and returns the same.

    Buckets that hold the same shapes, as those of blocks that repeat, are dealt out to the ranks that hold parts of
    them, whole, by one all_to_all, and come back by another: R ranks share the work, and of N elements each sends
    N / R twice. Leaves that every rank holds are done on each: replicas agree to the bit where their products do.
    """

    def of_node(node: Any) -> Any:
        return _of_flat(fn, node) if is_flat(node) else fn(node.unsqueeze(0)).squeeze(0)

    return tree.map(of_node, values, is_leaf=is_flat)


def to_wire(x: torch.Tensor) -> torch.Tensor:
    """What lives in the host's memory where collectives can reach it: on the GPU, if processes speak by NCCL."""
    by_nccl = dist.is_initialized() and "nccl" in dist.get_backend()
    return x.to("cuda") if by_nccl and x.device.type == "cpu" else x


def _squares(values: Tree) -> Iterator[tuple[Axes, torch.Tensor]]:
    """The sum of each leaf's squares, over what this rank holds of it."""
    for node in tree.leaves(values, is_leaf=is_flat):
        if not is_flat(node):
            yield (), _norm(node.reshape(1, -1)).square().squeeze(0)
            continue
        found: dict[str, tuple[Axes, torch.Tensor]] = {}
        for bucket, buffer, axes in _buckets(node):
            slots = node.layout.buckets[bucket]
            if slots[0].offset is None:
                found[slots[0].name] = (), _norm(buffer.reshape(1, -1)).square().squeeze(0)
                continue
            # Leaves and parts begin at multiples of the alignment: the sums of lines are 64 times less to place.
            lines = shards.placed(_norm(buffer.view(-1, ALIGNMENT)).square(), axes)
            for slot, line in zip(slots, lines.split(_lines(node.layout, bucket)), strict=True):
                found[slot.name] = axes, line.sum()
        yield from (found[slot.name] for slot in node.layout.slots if slot.name in found)


def _norm(rows: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def _in_shape(layout: flat.Layout, bucket: str, buffer: torch.Tensor) -> Iterator[tuple[flat.Slot, torch.Tensor]]:
    """The leaves of a whole buffer."""
    slots = layout.buckets[bucket]
    pieces = [buffer] if slots[0].offset is None else buffer.split(layout.sections(bucket))[::2]
    for slot, piece in zip(slots, pieces, strict=True):
        yield slot, piece.reshape(slot.shape)


def _buckets(node: Flat) -> Iterator[tuple[str, torch.Tensor, Axes]]:
    """The buffers that there are, with the axes over which this rank holds a part."""
    for bucket, buffer in node.buffers.items():
        if buffer is not None:
            axes = node.layout.axes[bucket]
            yield bucket, buffer, () if not axes or shards.is_whole(node, bucket) else axes


def _totals(terms: Terms) -> list[torch.Tensor]:
    """The sums over ranks: one psum for all that are split over the same axes."""
    totals = [term for _, term in terms]
    together: dict[Any, list[int]] = {}
    for place, (axes, term) in enumerate(terms):
        if axes:
            together.setdefault((axes, term.device, term.dtype), []).append(place)
    for (axes, device, _), places in together.items():
        joined = torch.cat([totals[place].reshape(-1) for place in places])
        pieces = psum(to_wire(joined), axes).to(device).split([totals[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            totals[place] = piece.reshape(totals[place].shape)
    return totals


def _lines(layout: flat.Layout, bucket: str) -> list[int]:
    """How many lines of the alignment each leaf of a flat bucket takes, padding included."""
    sections = layout.sections(bucket)
    return [(leaf + padding) // ALIGNMENT for leaf, padding in zip(sections[::2], sections[1::2], strict=True)]


def _laid_out(numbers: Tree, like: Tree, join: Callable[..., torch.Tensor]) -> Tree:
    """``join(layout, bucket, the numbers of its leaves, the axes that split it)`` for each buffer of ``like``."""

    def of_node(node: Any, given: Any) -> Any:
        if not is_flat(node):
            return given.to(node.device, compute_dtype(node)).expand(node.shape)
        values = tree.flatten_up_to(node.layout.structure, given)
        by_name = {slot.name: value for slot, value in zip(node.layout.slots, values, strict=True)}
        buffers: dict[str, Any] = dict.fromkeys(node.buffers)
        for bucket, buffer, axes in _buckets(node):
            slots = node.layout.buckets[bucket]
            own = [by_name[slot.name].to(buffer.device, compute_dtype(buffer)) for slot in slots]
            alone = slots[0].offset is None
            buffers[bucket] = own[0].expand(slots[0].shape) if alone else join(node.layout, bucket, own, axes)
        return Flat(buffers, node.layout)

    return tree.map(of_node, like, numbers, is_leaf=is_flat)


def _joined(layout: flat.Layout, bucket: str, numbers: list[torch.Tensor], axes: Axes) -> torch.Tensor:
    """This rank's part of a buffer of leaves that the numbers are broadcast to."""
    pieces = []
    for slot, value, padding in zip(layout.buckets[bucket], numbers, layout.sections(bucket)[1::2], strict=True):
        pieces += [value.expand(slot.shape).reshape(-1), value.new_zeros(padding)]
    return shards.my_part(torch.cat(pieces), axes)


def _repeated(layout: flat.Layout, bucket: str, numbers: list[torch.Tensor], axes: Axes) -> torch.Tensor:
    """The same of a number for each leaf, which stands in the leaf's padding as well: line by line."""
    lines = torch.cat([value.expand(n) for value, n in zip(numbers, _lines(layout, bucket), strict=True)])
    return shards.my_part(lines, axes).unsqueeze(1).expand(-1, ALIGNMENT).reshape(-1)


def _of_flat(fn: Leafwise, node: Flat) -> Flat:
    """``transformed`` of a Flat."""
    buffers, alike = dict(node.buffers), {}
    for bucket, buffer, axes in _buckets(node):
        slots = node.layout.buckets[bucket]
        if slots[0].offset is None:
            buffers[bucket] = fn(buffer.unsqueeze(0)).squeeze(0)
        else:
            kind = (tuple((slot.shape, slot.offset) for slot in slots), axes, buffer.dtype, buffer.device)
            alike.setdefault(kind, []).append(bucket)
    for (_, axes, _, device), buckets in alike.items():
        stack = torch.stack([node.buffers[bucket] for bucket in buckets])
        whole = _of_stack(fn, node.layout, buckets[0], _dealt(to_wire(stack), axes) if axes else stack)
        done = _returned(whole, axes).to(device)[: len(buckets)] if axes else whole
        buffers.update(zip(buckets, done.unbind(), strict=True))
    return Flat(buffers, node.layout)


def _of_stack(fn: Leafwise, layout: flat.Layout, bucket: str, stack: torch.Tensor) -> torch.Tensor:
    """``fn`` of the leaves in whole buffers (K, N) that are laid out like ``bucket``."""
    pieces = list(stack.split(layout.sections(bucket), dim=1))
    for place, slot in enumerate(layout.buckets[bucket]):
        leaves = pieces[2 * place].reshape(stack.shape[0], *slot.shape)
        pieces[2 * place] = fn(leaves).reshape(stack.shape[0], slot.size)
    return torch.cat(pieces, dim=1)


def _dealt(parts: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Parts (K, N / R) of K buffers, K rounded up to a multiple of R: this rank's K / R of them, whole (K / R, N)."""
    missing = -parts.shape[0] % axis_size(axes)
    parts = torch.cat([parts, parts.new_zeros(missing, parts.shape[1])])
    for axis in reversed(axes):  # the last axis varies fastest in a buffer
        parts = all_to_all(parts, axis, split_dim=0, concat_dim=1)
    return parts


def _returned(whole: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The inverse of ``_dealt``, but for what rounding added."""
    for axis in axes:
        whole = all_to_all(whole, axis, split_dim=1, concat_dim=0)
    return whole
