"""Transformations one after the other, and side by side."""

from __future__ import annotations

from typing import Any

from functional_booster.kernels import tree

from .base import GradientTransformation, Tree, as_transformation, leaf_labels


def chain(*transformations: Any) -> GradientTransformation:
    """Apply transformations in order; the state is the tuple of theirs. (optax: ``chain``.)"""
    txs = tuple(as_transformation(tx) for tx in transformations)

    def init(params: Tree) -> tuple[Any, ...]:
        return tuple(tx.init(params) for tx in txs)

    def update(updates: Tree, state: tuple[Any, ...], params: Tree | None = None) -> tuple[Tree, tuple[Any, ...]]:
        if len(state) != len(txs):
            raise ValueError(f"chain: the state has {len(state)} parts, expected {len(txs)}: it is another chain's")
        states = []
        for tx, part in zip(txs, state, strict=True):
            updates, part = tx.update(updates, part, params)
            states.append(part)
        return updates, tuple(states)

    def groups(abstract: Tree) -> Tree:
        rows = (
            zip(*(leaf_labels(tx, abstract) for tx in txs), strict=True) if txs else [()] * len(tree.leaves(abstract))
        )
        return tree.unflatten(tree.structure(abstract), [None if None in row else row for row in rows])

    return GradientTransformation(init, update, groups)


def named_chain(*transformations: tuple[str, Any]) -> GradientTransformation:
    """``chain`` of ``(name, transformation)`` pairs whose state is {name: state}. (optax: ``named_chain``.)

    Raises ValueError when two have the same name.
    """
    names = [name for name, _ in transformations]
    if len(set(names)) < len(names):
        raise ValueError(f"named_chain: got the names {names}, expected each once")
    chained = chain(*(tx for _, tx in transformations))

    def init(params: Tree) -> dict[str, Any]:
        return dict(zip(names, chained.init(params), strict=True))

    def update(updates: Tree, state: dict[str, Any], params: Tree | None = None) -> tuple[Tree, dict[str, Any]]:
        updates, states = chained.update(updates, tuple(state[name] for name in names), params)
        return updates, dict(zip(names, states, strict=True))

    return GradientTransformation(init, update, chained.groups)


def added(*transformations: Any) -> GradientTransformation:
    """The sum of what transformations make of the same updates; the state is the tuple of theirs."""
    txs = tuple(as_transformation(tx) for tx in transformations)
    joined = chain(*txs)

    def update(updates: Tree, state: tuple[Any, ...], params: Tree | None = None) -> tuple[Tree, tuple[Any, ...]]:
        terms, states = zip(
            *(tx.update(updates, part, params) for tx, part in zip(txs, state, strict=True)), strict=True
        )
        return tree.map(lambda *values: sum(values[1:], values[0]), *terms), states

    return GradientTransformation(joined.init, update, joined.groups)
