"""How adapters are born: by key and name, and by the rules that peft has names for, beside a base that comes leaf by
leaf."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from functional_booster.kernels import random
from functional_booster.sharding.abstract import ArrayInfo

from . import factors, tensor_parallel
from .plan import BITS, Places, Plan, Site, loftq_of
from .quantized_weight import QuantizedWeight


def described(adapter: Plan, base: Mapping[str, ArrayInfo]) -> dict[str, ArrayInfo]:
    """{name: what the tensor is} of an adapter beside the base's leaves; half precision is trained in float32, as peft
    does it."""
    found = {}
    for site in adapter.sites:
        leaf = base[site.places[0][0]]
        dtype = torch.promote_types(leaf.dtype, torch.float32)
        infos = {role: tensor_parallel.described(site, role, leaf, dtype) for role in site.names}
        if adapter.config.init_lora_weights == "mica":
            infos["B"] = replace(infos["B"], trainable=False)
        found |= {site.names[role]: info for role, info in infos.items()}
    for name, places in adapter.replaced.items():
        leaf = base[places[0][0]]
        found[name] = tensor_parallel.copied(places, leaf, torch.promote_types(leaf.dtype, torch.float32))
    return found


def streamed(
    plans: Mapping[str, Plan],
    base: Iterable[tuple[str, Any]],
    keys: Mapping[str, torch.Tensor],
    given: Mapping[str, Mapping[str, torch.Tensor]],
    codecs: Mapping[str, str],
) -> Iterator[tuple[str, Any]]:
    """(name, value) of base and adapters, each as soon as the leaves that it is made of have come.

    ``base``: (name, value), one at a time; a value that lies in a file comes unread, and goes unread where nothing is
    made of it. ``given``: adapters that are taken as they are; the others are born by their key. ``codecs``: {leaf of
    the base: how it is quantized}.
    """
    for adapter, tensors in given.items():
        yield from ((f"adapters.{adapter}.{name}", value) for name, value in tensors.items())
    together, waiting = _together(plans), {}
    for name, value in base:
        waiting[name] = value
        group = together.get(name, frozenset({name}))
        if group <= waiting.keys():
            yield from _born(plans, {leaf: waiting.pop(leaf) for leaf in group}, keys, given, codecs)


def _together(plans: Mapping[str, Plan]) -> dict[str, frozenset[str]]:
    """{leaf: the leaves that some tensor of an adapter is made of together with it, itself among them}."""
    groups: dict[str, frozenset[str]] = {}
    for plan in plans.values():
        for places in (*(site.places for site in plan.sites), *plan.replaced.values()):
            leaves = [leaf for leaf, _ in places]
            joined = frozenset(leaves).union(*(groups.get(leaf, ()) for leaf in leaves))
            groups |= dict.fromkeys(joined, joined)
    return groups


def _born(
    plans: Mapping[str, Plan],
    leaves: dict[str, Any],
    keys: Mapping[str, torch.Tensor],
    given: Mapping[str, Any],
    codecs: Mapping[str, str],
) -> Iterator[tuple[str, Any]]:
    """What is made of leaves of the base that belong together, adapter by adapter, and what is left of them."""
    sites = {name: [site for site in plan.sites if site.rows.keys() <= leaves.keys()] for name, plan in plans.items()}
    own = {name: [n for n, places in plan.replaced.items() if places[0][0] in leaves] for name, plan in plans.items()}
    device = next(iter(keys.values())).device
    for adapter, plan in plans.items():
        how = plan.config.init_lora_weights
        if own[adapter] or any(site.is_dora or not factors.is_drawn(site, how) for site in sites[adapter]):
            leaves = {name: _loaded(leaf, device) for name, leaf in leaves.items()}
        made: dict[str, torch.Tensor] = {}
        for site in sites[adapter]:
            if adapter in given and not factors.changes_weights(site, how):
                continue
            key = random.fold_in(keys[adapter], zlib.crc32(site.module.encode()) >> 1)
            parts, changed = _at(site, plan.config, leaves, key, codecs)
            made |= {name: parts[role].contiguous() for role, name in site.names.items()}
            leaves = {**leaves, **changed}
        if adapter not in given:
            made |= {name: _copied(leaves, plan.replaced[name]) for name in own[adapter]}
            yield from ((f"adapters.{adapter}.{name}", tensor) for name, tensor in made.items())
    for name, leaf in leaves.items():
        if name in codecs and not isinstance(leaf, QuantizedWeight):
            leaf = QuantizedWeight.of(_loaded(leaf, device), codecs[name])
        yield f"base.{name}", leaf


def _at(
    site: Site, config: Any, leaves: Mapping[str, Any], key: torch.Tensor, codecs: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(the tensors of an adapter by role, the leaves of the base that it changes)."""
    how, loftq = config.init_lora_weights, loftq_of(config)
    dtype = torch.promote_types(leaves[site.places[0][0]].dtype, torch.float32)
    is_drawn, changes = factors.is_drawn(site, how), factors.changes_weights(site, how)
    parts = factors.drawn(site, how, dtype, key) if is_drawn else {}
    if is_drawn and not site.is_dora:
        return parts, {}

    def quantized(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codec = BITS[loftq["loftq_bits"]]
        return {n: QuantizedWeight.of(leaf, codec).dense() for n, leaf in _parted(site, weight, leaves).items()}

    rest = weight = _whole(site, leaves).to(dtype)
    if not is_drawn:
        rounds = loftq["loftq_iter"]
        parts, rest = factors.of_weight(site, how, weight, lambda x: _whole(site, quantized(x)).to(dtype), rounds)
    if site.is_dora:
        adapted = weight if changes else weight + factors.product(site, parts)
        parts["magnitude"] = torch.linalg.norm(adapted, dim=1)
    if not changes:
        return parts, {}
    changed = _parted(site, rest, leaves)
    if how == "loftq":  # what is not stored in few bits, has the values that it would have
        changed |= {leaf: value for leaf, value in quantized(rest).items() if leaf not in codecs}
    return parts, changed


def _whole(site: Site, base: Mapping[str, Any]) -> torch.Tensor:
    """The weight of a site, (out, into); of a table its transpose, (D, V)."""
    rows = [_dense(base[leaf]) for leaf in site.rows]
    weight = torch.cat(rows) if len(rows) > 1 else rows[0]
    return weight.t() if site.is_transposed or site.is_embedding else weight


def _parted(site: Site, weight: torch.Tensor, base: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The leaves of a site's weight, in their dtypes: the inverse of ``_whole`` for what is no table."""
    parts = {leaf: weight[rows].to(base[leaf].dtype) for leaf, rows in site.rows.items()}
    return {leaf: (part.t() if site.is_transposed else part).contiguous() for leaf, part in parts.items()}


def _copied(base: Mapping[str, Any], places: Places) -> torch.Tensor:
    """An adapter's own copy of a tensor of the base."""
    ordered = [_dense(base[leaf]) for leaf, _ in sorted(places, key=lambda place: place[1].part)]
    stored = torch.cat(ordered).mT if places[0][1].transposed else torch.cat(ordered)
    return stored.to(torch.promote_types(stored.dtype, torch.float32), copy=True).contiguous()


def _loaded(leaf: Any, device: torch.device) -> Any:
    """A leaf of the base, on ``device`` if it lay in a file."""
    return leaf if isinstance(leaf, (torch.Tensor, QuantizedWeight)) else leaf.read().to(device)


def _dense(leaf: Any) -> torch.Tensor:
    """A leaf of the base as a plain tensor."""
    return leaf.dense() if isinstance(leaf, QuantizedWeight) else leaf
