"""The protocol of optimizers: a pair of pure functions, and which leaves they treat alike.

``init(params) -> state`` and ``update(updates, state, params) -> (updates, state)``, as in optax. Both take a plain
tree of tensors or a tree with ``flat.Flat`` nodes; masks and labels are always written for the plain tree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from functional_booster.kernels import flat, tree

Tree: TypeAlias = tree.Tree
Scalar: TypeAlias = float | torch.Tensor
Schedule: TypeAlias = Callable[[Any], Any]  # step -> learning rate: an int to a float, a tensor to a tensor
ScalarOrSchedule: TypeAlias = Scalar | Schedule


class GradientTransformation(NamedTuple):
    """``init(params) -> state``, ``update(updates, state, params=None) -> (updates, state)``, ``groups``, ``fused``.

    ``groups(abstract) -> labels`` gives each leaf of a plain tree a hashable label: leaves of one label may lie side by
    side in one buffer, padded with zeros. None keeps a leaf in its own shape; ``groups=None`` keeps every leaf.

    ``fused``, where there is one, is ``update`` and ``apply_updates`` in one pass over each buffer (optim/fused.py),
    which a step may call instead. What composes a transformation with another one has no use for it, and drops it.
    """

    init: Callable[[Tree], Any]
    update: Callable[..., tuple[Tree, Any]]
    groups: Callable[[Tree], Tree] | None = None
    fused: Callable[..., tuple[Tree, Any]] | None = None


def as_transformation(tx: Any) -> GradientTransformation:
    """``tx`` itself, or a pair ``(init, update)`` as a GradientTransformation; raises TypeError for anything else.

    One that says nothing of groups knows plain trees alone, and is given those.
    """
    if isinstance(tx, GradientTransformation):
        return tx if tx.groups is not None else _of_plain_trees(tx.init, tx.update)
    if isinstance(tx, tuple) and len(tx) == 2 and all(callable(part) for part in tx):
        return _of_plain_trees(*tx)
    raise TypeError(f"a transformation is a GradientTransformation or a pair (init, update), got {type(tx).__name__}")


def _of_plain_trees(init: Callable[..., Any], update: Callable[..., Any]) -> GradientTransformation:
    def plain(values: Tree) -> Tree:
        return tree.map(lambda node: flat.unravel(node) if is_flat(node) else node, values, is_leaf=is_flat)

    def like(values: Tree, other: Tree) -> Tree:
        nodes, structure = tree.flatten(other, is_leaf=is_flat)
        parts = zip(nodes, tree.flatten_up_to(structure, values), strict=True)
        return tree.unflatten(structure, [flat.ravel(v, node.layout) if is_flat(node) else v for node, v in parts])

    def update_plain(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, Any]:
        new, state = update(plain(updates), state, None if params is None else plain(params))
        return like(new, updates), state

    return GradientTransformation(lambda params: init(plain(params)), update_plain)


def elementwise(abstract: Tree) -> Tree:
    """The labels of a transformation that works element by element: one for all leaves."""
    return tree.map(lambda _: (), abstract)


def leaf_labels(tx: GradientTransformation, abstract: Tree) -> list[Any]:
    """``tx``'s label of each leaf of a plain tree, in the order of the leaves."""
    if tx.groups is None:
        return [None] * len(tree.leaves(abstract))
    return tree.structure(abstract).flatten_up_to(tx.groups(abstract))


def stateless(fn: Callable[[Tree, Tree | None], Tree], groups: Callable[[Tree], Tree] | None) -> GradientTransformation:
    """The transformation ``updates -> fn(updates, params)`` that remembers nothing."""
    return GradientTransformation(
        lambda params: (), lambda updates, state, params=None: (fn(updates, params), state), groups
    )


def identity() -> GradientTransformation:
    """The transformation that hands updates through."""
    return stateless(lambda updates, params: updates, elementwise)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """``params + updates`` in the parameters' dtypes; a parameter whose update is None stays as it is."""

    def add(param: torch.Tensor, update: torch.Tensor | None) -> torch.Tensor:
        return param if update is None else (param + update).to(param.dtype)

    return tree.map(add, params, updates)


def is_flat(node: Any) -> bool:
    """Whether a node of a tree is a Flat."""
    return isinstance(node, flat.Flat)


def stands_for(params: Tree) -> Tree:
    """The plain tree that masks and labels are written for: Flats expanded to slots, None where a bucket is None."""

    def expand(node: Any) -> Tree:
        if not isinstance(node, flat.Flat):
            return node
        return tree.map(lambda slot: None if node.buffers[slot.bucket] is None else slot, flat.stands_for(node))

    return tree.map(expand, params, is_leaf=is_flat)


def spread(values: Tree, params: Tree) -> Tree:
    """What holds for each leaf of ``stands_for(params)``, brought to the structure of ``params``."""
    return tree.map(lambda node, value: flat.spread(value, node), params, values, is_leaf=is_flat)


def broadcast(prefix: Tree, plain: Tree) -> Tree:
    """A prefix of ``plain``'s structure, with each of its leaves repeated over the subtree below it."""
    return tree.map(lambda value, below: tree.map(lambda _: value, below), prefix, plain)


def require_params(params: Tree | None, of: str) -> Tree:
    """The parameters; raises ValueError where ``update`` was called without."""
    if params is None:
        raise ValueError(f"params: got None, but {of} needs them: call update(updates, state, params)")
    return params


def evaluate(value: ScalarOrSchedule, count: torch.Tensor) -> Scalar:
    """The schedule's value at step ``count``; a number or tensor is its own value.

    Raises TypeError or ValueError for a schedule that gives anything but one number.
    """
    if isinstance(value, torch.Tensor) or not callable(value):
        return value
    found = value(count)
    if not isinstance(found, torch.Tensor | int | float):
        raise TypeError(f"schedule: it gave {type(found).__name__} at a step, expected a number or a 0-d tensor")
    if isinstance(found, torch.Tensor) and found.dim():
        raise ValueError(f"schedule: it gave a tensor of shape {tuple(found.shape)} at a step, expected a 0-d one")
    return found


def number_of(count: Any) -> Any:
    """The number, from 1 on, of the update after ``count`` others: 0-d float64, or a float for an int."""
    return (count.to(torch.float64) if isinstance(count, torch.Tensor) else float(count)) + 1


def device_of(params: Tree) -> torch.device:
    """The device of the first leaf that is not in the host's memory; CPU for a tree without one."""
    return next((leaf.device for leaf in tree.leaves(params) if leaf.device.type != "cpu"), torch.device("cpu"))


def zero_count(params: Tree) -> torch.Tensor:
    """A step counter at zero: 0-d int32 on the parameters' device."""
    return torch.zeros((), dtype=torch.int32, device=device_of(params))


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype to do arithmetic in: the widest of the tensors', float32 at least (bfloat16 rounds b2=0.999 to 1)."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def at(value: Scalar, like: torch.Tensor) -> Scalar:
    """A 0-d tensor in the dtype and on the device of ``like``; a number as it is."""
    return value.to(like.device, like.dtype) if isinstance(value, torch.Tensor) else value


def is_zero(value: Scalar) -> bool:
    """Whether it is the number 0; of a tensor's value nothing is known."""
    return not isinstance(value, torch.Tensor) and value == 0


def times(tensor: torch.Tensor, factor: Scalar) -> torch.Tensor:
    """``tensor * factor`` in the tensor's dtype, computed in float32 at least."""
    wide = tensor.to(compute_dtype(tensor))
    return (wide * at(factor, wide)).to(tensor.dtype)


def add_scaled(x: torch.Tensor, y: torch.Tensor, factor: Scalar) -> torch.Tensor:
    """``x + factor * y`` in x's dtype, computed in float32 at least, in one pass."""
    dtype = compute_dtype(x, y)
    wide, addend = x.to(dtype), y.to(dtype)
    if isinstance(factor, torch.Tensor):
        return torch.addcmul(wide, addend, factor.to(wide.device, dtype)).to(x.dtype)
    return torch.add(wide, addend, alpha=factor).to(x.dtype)
