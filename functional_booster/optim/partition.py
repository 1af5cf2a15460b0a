"""Different transformations for different leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from functional_booster.kernels import tree

from .base import (
    GradientTransformation,
    Tree,
    as_transformation,
    broadcast,
    leaf_labels,
    spread,
    stands_for,
)


class MaskedState(NamedTuple):
    """The state of the inner transformation, with None in place of the leaves that are masked out."""

    inner_state: Any


class PartitionState(NamedTuple):
    """{label: state of the label's transformation}, each with None in place of the other labels' leaves."""

    inner_states: dict[Hashable, Any]


def masked(inner: Any, mask: tree.Mask) -> GradientTransformation:
    """Apply ``inner`` where ``mask`` is True and hand the other updates through. (optax: ``masked``.)

    ``mask`` is a tree of bools, a prefix of one, or a function from the tree to one; raises as ``tree.as_mask``.
    """
    tx = as_transformation(inner)

    def init(params: Tree) -> MaskedState:
        return MaskedState(tx.init(_keep(params, _mask(params, mask))))

    def update(updates: Tree, state: MaskedState, params: Tree | None = None) -> tuple[Tree, MaskedState]:
        chosen = _mask(updates, mask)
        updates, inner_state = _update_where(chosen, tx, updates, state.inner_state, params)
        return updates, MaskedState(inner_state)

    def groups(abstract: Tree) -> Tree:
        chosen = tree.as_mask(abstract, mask)
        inside = iter(leaf_labels(tx, _keep(abstract, chosen)))
        labels = [_join(True, next(inside)) if keep else (False,) for keep in tree.leaves(chosen)]
        return tree.unflatten(tree.structure(abstract), labels)

    return GradientTransformation(init, update, groups)


def partition(transforms: Mapping[Any, Any], param_labels: Tree | Callable[[Tree], Tree]) -> GradientTransformation:
    """Apply to each leaf the transformation of its label. (optax: ``partition``, formerly ``multi_transform``.)

    ``param_labels`` is a tree of labels, a prefix of one, or a function from the tree to one. Raises ValueError, naming
    the leaf, at a label that ``transforms`` does not have.
    """
    txs = {label: as_transformation(tx) for label, tx in transforms.items()}

    def labels_of(plain: Tree) -> Tree:
        given = param_labels(plain) if callable(param_labels) else param_labels
        for name, label in tree.named_leaves(given).items():
            if label not in txs:
                raise ValueError(f"param_labels: {name!r} has the label {label!r}, expected one of {list(txs)}")
        return broadcast(given, plain)

    def masks(params: Tree) -> dict[Hashable, Tree]:
        labels = spread(labels_of(stands_for(params)), params)
        return {label: tree.map(lambda other, label=label: other == label, labels) for label in txs}

    def init(params: Tree) -> PartitionState:
        chosen = masks(params)
        return PartitionState({label: tx.init(_keep(params, chosen[label])) for label, tx in txs.items()})

    def update(updates: Tree, state: PartitionState, params: Tree | None = None) -> tuple[Tree, PartitionState]:
        states = {}
        for label, chosen in masks(updates).items():
            inner_state = state.inner_states[label]
            updates, states[label] = _update_where(chosen, txs[label], updates, inner_state, params)
        return updates, PartitionState(states)

    def groups(abstract: Tree) -> Tree:
        labels = labels_of(abstract)
        chosen = {label: tree.map(lambda other, label=label: other == label, labels) for label in txs}
        inside = {label: iter(leaf_labels(tx, _keep(abstract, chosen[label]))) for label, tx in txs.items()}
        joined = [_join(label, next(inside[label])) for label in tree.leaves(labels)]
        return tree.unflatten(tree.structure(abstract), joined)

    return GradientTransformation(init, update, groups)


def _mask(params: Tree, mask: tree.Mask) -> Tree:
    return spread(tree.as_mask(stands_for(params), mask), params)


def _keep(values: Tree, chosen: Tree) -> Tree:
    return tree.map(lambda value, keep: value if keep else None, values, chosen)


def _update_where(
    chosen: Tree, tx: GradientTransformation, updates: Tree, state: Any, params: Tree | None
) -> tuple[Tree, Any]:
    kept = None if params is None else _keep(params, chosen)
    new, state = tx.update(_keep(updates, chosen), state, kept)
    return tree.map(lambda keep, inside, outside: inside if keep else outside, chosen, new, updates), state


def _join(label: Hashable, inner: Hashable | None) -> Hashable | None:
    return None if inner is None else (label, inner)
