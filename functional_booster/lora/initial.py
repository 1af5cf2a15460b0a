"""How adapters are born: by key and name, and by the rules that peft has names for."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from functional_booster.kernels import random, tree
from functional_booster.sharding.abstract import ArrayInfo

from .nf4_weight import Nf4Weight
from .plan import Plan, Site

Tree = tree.Tree
PRINCIPAL = ("pissa", "olora")  # what starts as a part of the weight


def described(adapter: Plan, base: Mapping[str, Any]) -> dict[str, ArrayInfo]:
    """{name: what the tensor is} of an adapter beside the base's leaves; half precision is trained in float32, as peft
    does it."""
    found = {}
    for site in adapter.sites:
        dtype = torch.promote_types(base[site.places[0][0]].dtype, torch.float32)
        found |= {site.names[role]: ArrayInfo(shape, dtype) for role, shape in site.shapes.items()}
    for name, places in adapter.replaced.items():
        leaf, source = places[0]
        dtype = torch.promote_types(base[leaf].dtype, torch.float32)
        found[name] = ArrayInfo(source.shape(tuple(base[leaf].shape)), dtype)
    return found


def born(adapter: Plan, base: Mapping[str, Any], key: torch.Tensor) -> dict[str, torch.Tensor]:
    """An adapter's tensors beside the base's leaves, by name."""
    infos, how = described(adapter, base), adapter.config.init_lora_weights
    tensors: dict[str, torch.Tensor] = {}
    for site in adapter.sites:
        weight = whole(site, base).to(infos[site.names["A"]].dtype)
        parts = _factors(site, how, weight, random.fold_in(key, zlib.crc32(site.module.encode()) >> 1))
        if site.is_dora:
            product = 0 if how in PRINCIPAL else site.scaling * parts["B"] @ parts["A"]
            parts["magnitude"] = torch.linalg.norm(weight + product, dim=1)
        tensors |= {name: parts[role].contiguous() for role, name in site.names.items()}
    for name, places in adapter.replaced.items():
        ordered = [dense(base[leaf]) for leaf, _ in sorted(places, key=lambda place: place[1].part)]
        stored = torch.cat(ordered).mT if places[0][1].transposed else torch.cat(ordered)
        tensors[name] = stored.to(infos[name].dtype, copy=True).contiguous()
    return tensors


def without_principal(adapter: Plan, base: Mapping[str, Any]) -> dict[str, Any]:
    """The base's leaves less what an adapter that is born as a part of the weights, has of them."""
    leaves = dict(base)
    for site in adapter.sites:
        if not site.is_embedding:
            weight = whole(site, base)
            wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
            parts = _principal(site, adapter.config.init_lora_weights, wide)
            rest = (wide - site.scaling * parts["B"] @ parts["A"]).to(weight.dtype)
            leaves |= {leaf: rest[rows].t() if site.is_transposed else rest[rows] for leaf, rows in site.rows.items()}
    return leaves


def whole(site: Site, base: Mapping[str, Any]) -> torch.Tensor:
    """The weight of a site, (out, into); of a table its transpose, (D, V)."""
    rows = [dense(base[leaf]) for leaf in site.rows]
    weight = torch.cat(rows) if len(rows) > 1 else rows[0]
    return weight.t() if site.is_transposed or site.is_embedding else weight


def dense(leaf: Any) -> torch.Tensor:
    """A leaf of the base as a plain tensor."""
    return leaf.dense() if isinstance(leaf, Nf4Weight) else leaf


def _factors(site: Site, how: bool | str, weight: torch.Tensor, key: torch.Tensor) -> dict[str, torch.Tensor]:
    """A and B; for True and False the bounds are those of torch's linear layers (He et al. 2015, with a = sqrt(5))."""
    shapes, dtype, keys = site.shapes, weight.dtype, random.split(key)
    if how in PRINCIPAL and not site.is_embedding:
        return _principal(site, how, weight)

    def normal(role: str) -> torch.Tensor:
        return random.normal(keys["AB".index(role)], shapes[role], dtype)

    def uniform(role: str) -> torch.Tensor:
        unit = random.uniform(keys["AB".index(role)], shapes[role], dtype)
        return (2 * unit - 1) / math.sqrt(shapes[role][1])

    zeros = {role: weight.new_zeros(shapes[role]) for role in "AB"}
    if site.is_embedding:
        return {"A": normal("A") if how is False else zeros["A"], "B": normal("B")}
    if how == "gaussian":
        return {"A": normal("A") / site.rank, "B": zeros["B"]}
    return {"A": uniform("A"), "B": uniform("B") if how is False else zeros["B"]}


def _principal(site: Site, how: bool | str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A and B of the greatest singular values, over the scaling (PiSSA, Meng et al. 2024), or of a QR decomposition
    (OLoRA, Büyükakyüz 2024)."""
    if how == "olora":
        q, r = torch.linalg.qr(weight)
        return {"A": r[: site.rank], "B": q[:, : site.rank]}
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    root = (s[: site.rank] / site.scaling).sqrt()
    return {"A": root[:, None] * vh[: site.rank], "B": u[:, : site.rank] * root}
