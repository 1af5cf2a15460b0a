"""Adapters and weights in one: merged into the base, and taken out again."""

from __future__ import annotations

from functional_booster.kernels import tree

from .model import LoraModel, attached
from .weight import is_weight, plain

Tree = tree.Tree


def merge(model: LoraModel, params: Tree) -> Tree:
    """Parameters of ``model.base``, dense, that alone compute what the base and the active adapters do."""
    return tree.map(plain, attached(model, params), is_leaf=is_weight)


def unmerge(model: LoraModel, merged: Tree, params: Tree) -> Tree:
    """The base of merged parameters again, to rounding: without the changes of the active adapters of ``params``.

    Raises ValueError for adapters with DoRA, or tensors of their own: then ``params["base"]`` alone has the base.
    """
    for name in model.active:
        if model.plans[name].replaced or any(site.is_dora for site in model.plans[name].sites):
            raise ValueError(f"{name!r} has DoRA, or tensors of its own: the base cannot be told from merged weights")
    twice = tree.named_leaves(tree.map(plain, attached(model, {**params, "base": merged}), is_leaf=is_weight))
    return tree.map_with_name(lambda name, leaf: leaf - (twice[name] - leaf), merged)
