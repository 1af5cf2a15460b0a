"""Adapters and weights in one: merged into the base, taken out again, and several adapters made one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from functional_booster.kernels import tree

from .model import LoraModel, attached, with_plan
from .plan import Plan
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


def combine(
    model: LoraModel, params: Tree, weights: Mapping[str, float], name: str, combination_type: str = "cat"
) -> tuple[LoraModel, Tree]:
    """The model and parameters with one more adapter, the active one, that is a weighted sum. (peft:
    add_weighted_adapter.)

    "cat": its product is the sum of the products, its rank that of all together. "linear": its factors are the sums of
    the factors, each times the root of weight and scaling, at the common rank. Raises ValueError for unknown adapters,
    for those that change different modules, or with DoRA or tensors of their own, and for another type.
    """
    if unknown := [one for one in weights if one not in model.plans]:
        raise ValueError(f"weights: {unknown[0]!r} is no adapter of this model, it has {sorted(model.plans)}")
    if combination_type not in ("cat", "linear"):
        raise ValueError(f"combination_type: {combination_type!r}, expected 'cat' or 'linear'")
    if not weights:
        raise ValueError("weights: no adapters to combine")
    plans = [model.plans[one] for one in weights]
    combined = _combined(plans, list(weights), combination_type)
    tensors: dict[str, torch.Tensor] = {}
    for sites in zip(*(plan.sites for plan in plans), strict=True):
        factors = [(params["adapters"][one], weight) for one, weight in weights.items()]
        parts: dict[str, list[torch.Tensor]] = {"A": [], "B": []}
        for site, (own, weight) in zip(sites, factors, strict=True):
            scale = weight * site.scaling
            root = math.sqrt(abs(scale))
            first, second = (scale, 1.0) if combination_type == "cat" else (math.copysign(root, scale), root)
            parts["A"].append(own[site.names["A"]] * first)
            parts["B"].append(own[site.names["B"]] * second)
        for role, dim in (("A", 0), ("B", 1)):
            values = parts[role]
            made = torch.cat(values, dim) if combination_type == "cat" else torch.stack(values).sum(0)
            tensors[sites[0].names[role]] = made
    return with_plan(model, name, combined), {**params, "adapters": {**params["adapters"], name: tensors}}


def _combined(plans: list[Plan], names: list[str], combination_type: str) -> Plan:
    first = plans[0]
    for name, plan in zip(names, plans, strict=True):
        if plan.replaced or any(site.is_dora for site in plan.sites):
            raise ValueError(f"weights: {name!r} has DoRA, or tensors of its own, which are not combined")
        if [site.module for site in plan.sites] != [site.module for site in first.sites]:
            raise ValueError(f"weights: {name!r} changes other modules than {names[0]!r}")
        if combination_type == "linear" and [site.rank for site in plan.sites] != [s.rank for s in first.sites]:
            raise ValueError(f"weights: {name!r} has other ranks than {names[0]!r}: combine them by 'cat'")
    sites = []
    for same in zip(*(plan.sites for plan in plans), strict=True):
        rank = sum(site.rank for site in same) if combination_type == "cat" else same[0].rank
        sites.append(replace(same[0], rank=rank, scaling=1.0, dropout=0.0))
    ranks = {site.module: site.rank for site in sites}
    changes: dict[str, Any] = {
        "r": sites[0].rank,
        "lora_alpha": sites[0].rank,
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
        "target_modules": sorted(ranks),
        "exclude_modules": None,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    return Plan(replace(first.config, **changes), tuple(sites), {})
