"""Several adapters made one, as peft's ``add_weighted_adapter`` does it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from peft.utils import merge_utils

from functional_booster.kernels import random, tree

from .model import LoraModel, with_plan
from .plan import Plan

Tree = tree.Tree

_ON_FACTORS = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
_ON_PRODUCTS = ("svd", "ties_svd", "dare_linear_svd", "dare_ties_svd", "magnitude_prune_svd")
_TYPES = ("cat", *_ON_FACTORS, *_ON_PRODUCTS)


def combine(
    model: LoraModel,
    params: Tree,
    weights: Mapping[str, float],
    name: str,
    combination_type: str = "cat",
    *,
    svd_rank: int | None = None,
    svd_clamp: float | None = None,
    density: float | None = None,
    majority_sign_method: str = "total",
    key: torch.Tensor | None = None,
) -> tuple[LoraModel, Tree]:
    """The model and parameters with one more adapter, the active one, that is a weighted sum. (peft:
    add_weighted_adapter.)

    "cat": its product is the sum of the products, its rank that of all together. "svd": the best approximation of that
    sum at ``svd_rank``, by default the largest rank, with factors clamped to their ``svd_clamp`` quantile. "linear":
    its factors are the sums of the factors, each times the root of weight and scaling, at the common rank. In place of
    these sums, of factors or, with "_svd" behind, of products: "magnitude_prune" keeps the share ``density`` of each
    tensor's elements, the greatest; "dare_linear" random ones by ``key``, scaled up (Yu et al. 2023); "ties" the
    greatest, and adds those up that have the sign of the majority, by ``majority_sign_method`` "total" or "frequency"
    (Yadav et al. 2023); "dare_ties" random ones, likewise.

    Raises ValueError for unknown adapters, for those that change different modules, or with DoRA or tensors of their
    own, and for another type or an argument that a type lacks.
    """
    if unknown := [one for one in weights if one not in model.plans]:
        raise ValueError(f"weights: {unknown[0]!r} is no adapter of this model, it has {sorted(model.plans)}")
    if not weights:
        raise ValueError("weights: no adapters to combine")
    _check(combination_type, density, majority_sign_method, key)
    kind = combination_type.removesuffix("_svd")
    plans = [model.plans[one] for one in weights]
    combined = _combined(plans, list(weights), combination_type, svd_rank)
    tensors: dict[str, torch.Tensor] = {}
    for number, (site, *same) in enumerate(zip(combined.sites, *(plan.sites for plan in plans), strict=True)):
        own = zip(same, (params["adapters"][one] for one in weights), strict=True)
        factors = [(ours[one.names["A"]], ours[one.names["B"]]) for one, ours in own]
        scales = [weight * one.scaling for one, weight in zip(same, weights.values(), strict=True)]
        keys = (None, None) if key is None else random.split(random.fold_in(key, number))

        def merged(values: list[torch.Tensor], by: list[float], role: int, keys: Any = keys) -> torch.Tensor:
            return _merged(values, by, kind, density, majority_sign_method, keys[role])

        if combination_type == "cat":
            scaled = [a * scale for (a, _), scale in zip(factors, scales, strict=True)]
            made = torch.cat(scaled), torch.cat([b for _, b in factors], 1)
        elif combination_type in _ON_FACTORS:
            roots = [math.sqrt(abs(scale)) for scale in scales]
            signed = [math.copysign(root, scale) for root, scale in zip(roots, scales, strict=True)]
            made = merged([a for a, _ in factors], signed, 0), merged([b for _, b in factors], roots, 1)
        else:
            products = [b @ a * one.scaling for (a, b), one in zip(factors, same, strict=True)]
            made = _factored(merged(products, list(weights.values()), 0), site.rank, svd_clamp)
        tensors |= {site.names[role]: value.contiguous() for role, value in zip("AB", made, strict=True)}
    return with_plan(model, name, combined), {**params, "adapters": {**params["adapters"], name: tensors}}


def _check(combination_type: str, density: float | None, majority_sign_method: str, key: Any) -> None:
    if combination_type not in _TYPES:
        raise ValueError(f"combination_type: {combination_type!r}, expected one of {', '.join(map(repr, _TYPES))}")
    prunes = combination_type.startswith(("ties", "dare", "magnitude_prune"))
    if prunes and (density is None or not 0 < density <= 1):
        raise ValueError(f"density: {density!r}, expected a number above 0, up to 1, for {combination_type!r}")
    if majority_sign_method not in ("total", "frequency"):
        raise ValueError(f"majority_sign_method: {majority_sign_method!r}, expected 'total' or 'frequency'")
    if combination_type.startswith("dare") and key is None:
        raise ValueError(f"key: missing; {combination_type!r} draws which elements it keeps")


def _merged(
    values: list[torch.Tensor], weights: list[float], kind: str, density: Any, method: Any, key: Any
) -> torch.Tensor:
    """The weighted sum of tensors of one shape, by peft's rules; "dare" draws by key in place of torch's generator."""
    if kind.startswith("dare"):
        kept = random.bernoulli(key, density, (len(values), *values[0].shape)).to(values[0].dtype)
        values = [value * mask / density for value, mask in zip(values, kept, strict=True)]
    elif kind in ("ties", "magnitude_prune"):
        values = [merge_utils.magnitude_based_pruning(value, density) for value in values]
    by = torch.tensor(weights, dtype=values[0].dtype, device=values[0].device)
    if not kind.endswith("ties"):
        return merge_utils.task_arithmetic(values, by)
    stacked = torch.stack(values)
    signs = merge_utils.calculate_majority_sign_mask(stacked, method)
    return merge_utils.disjoint_merge(merge_utils.reshape_weight_task_tensors(stacked, by) * stacked, signs)


def _factored(product: torch.Tensor, rank: int, clamp: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of the best approximation of a product (out, into)."""
    u, s, vh = torch.linalg.svd(product, full_matrices=False)
    a, b = vh[:rank], u[:, :rank] * s[:rank]
    if clamp is not None:
        limit = torch.quantile(torch.cat([b.flatten(), a.flatten()]), clamp)
        a, b = a.clamp(-limit, limit), b.clamp(-limit, limit)
    return a, b


def _combined(plans: list[Plan], names: list[str], combination_type: str, svd_rank: int | None) -> Plan:
    first = plans[0]
    for name, plan in zip(names, plans, strict=True):
        if plan.replaced or any(site.is_dora for site in plan.sites):
            raise ValueError(f"weights: {name!r} has DoRA, or tensors of its own, which are not combined")
        if [site.module for site in plan.sites] != [site.module for site in first.sites]:
            raise ValueError(f"weights: {name!r} changes other modules than {names[0]!r}")
        if combination_type in _ON_FACTORS and [site.rank for site in plan.sites] != [s.rank for s in first.sites]:
            raise ValueError(f"weights: {name!r} has other ranks than {names[0]!r}: combine them by 'cat' or 'svd'")
    sites = []
    for same in zip(*(plan.sites for plan in plans), strict=True):
        ranks = [site.rank for site in same]
        rank = sum(ranks) if combination_type == "cat" else max(ranks)
        if combination_type in _ON_PRODUCTS:
            rank = min(svd_rank or rank, *same[0].size)
        sites.append(replace(same[0], rank=rank, scaling=1.0, dropout=0.0))
    by_module = {site.module: site.rank for site in sites}
    changes: dict[str, Any] = {
        "r": sites[0].rank,
        "lora_alpha": sites[0].rank,
        "rank_pattern": by_module,
        "alpha_pattern": by_module,
        "target_modules": sorted(by_module),
        "exclude_modules": None,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    return Plan(replace(first.config, **changes), tuple(sites), {})
