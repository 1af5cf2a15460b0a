"""The factors A and B that an adapter begins with, by the names that peft has for them, and what is left of the weight.

Of a table, which has no part in them, all but False are True. (peft: LoraConfig.init_lora_weights.)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch

from functional_booster.kernels import random

from .plan import Site

Factors = dict[str, torch.Tensor]  # {"A": (R, into), "B": (out, R)}
RoundTrip = Callable[[torch.Tensor], torch.Tensor]  # a weight -> what is read where it was quantized

_PRINCIPAL = ("pissa", "olora", "loftq")  # what takes its part out of the weight


def changes_weights(site: Site, how: bool | str) -> bool:
    """Whether the base's weight is another one beside such an adapter."""
    return not site.is_embedding and isinstance(how, str) and how.startswith(_PRINCIPAL)


def is_drawn(site: Site, how: bool | str) -> bool:
    """Whether the factors depend on a key alone."""
    return how != "mica" and not changes_weights(site, how)


def drawn(site: Site, how: bool | str, dtype: torch.dtype, key: torch.Tensor) -> Factors:
    """Factors that depend on a key alone.

    True: A uniform within the bounds of torch's linear layers (He et al. 2015, with a = sqrt(5)), B zero; "gaussian": A
    normal; False: both random; "orthogonal": both random, B's rows in a space orthogonal to that of A's columns. Of a
    table A is zero, and B normal.
    """
    shapes, keys = site.shapes, random.split(key)

    def normal(role: str) -> torch.Tensor:
        return random.normal(keys["AB".index(role)], shapes[role], dtype)

    def uniform(role: str) -> torch.Tensor:
        unit = random.uniform(keys["AB".index(role)], shapes[role], dtype)
        return (2 * unit - 1) / math.sqrt(shapes[role][1])

    def zeros(role: str) -> torch.Tensor:
        return torch.zeros(shapes[role], dtype=dtype, device=key.device)

    if site.is_embedding:
        return {"A": normal("A") if how is False else zeros("A"), "B": normal("B")}
    if how == "orthogonal":
        return _orthogonal(site, dtype, key)
    if how == "gaussian":
        return {"A": normal("A") / site.rank, "B": zeros("B")}
    return {"A": uniform("A"), "B": uniform("B") if how is False else zeros("B")}


def of_weight(
    site: Site, how: bool | str, weight: torch.Tensor, round_trip: RoundTrip, rounds: int
) -> tuple[Factors, torch.Tensor]:
    """(factors that a weight (out, into) determines, what the base has in the place of the weight).

    "pissa": those of its greatest singular values, over the scaling (Meng et al. 2024), "pissa_niter_N" by N subspace
    iterations (Halko et al. 2011); "olora": of its QR decomposition (Büyükakyüz 2024); "mica": B is that of its least
    singular values, A zero; "loftq": of what quantizing loses, in ``rounds`` rounds (Li et al. 2023).
    """
    if how == "mica":
        u, _, _ = torch.linalg.svd(weight, full_matrices=False)
        return {"A": weight.new_zeros(site.shapes["A"]), "B": u[:, -site.rank :]}, weight
    if how == "loftq":
        found, rest = _principal(site, weight - round_trip(weight)), weight
        for _ in range(rounds - 1):
            rest = weight - product(site, found)
            found = _principal(site, weight - round_trip(rest))
        return found, rest
    if how == "olora":
        q, r = torch.linalg.qr(weight)
        found = {"A": r[: site.rank], "B": q[:, : site.rank]}
    else:
        _, _, iterations = str(how).partition("_niter_")
        found = _principal(site, weight, int(iterations) if iterations else None)
    return found, weight - product(site, found)


def product(site: Site, factors: Factors) -> torch.Tensor:
    """What factors add to the weight (out, into)."""
    return site.scaling * factors["B"] @ factors["A"]


def _principal(site: Site, weight: torch.Tensor, iterations: int | None = None) -> Factors:
    """The factors of the product nearest to the weight."""
    u, s, vh = _svd(site, weight, iterations)
    root = (s[: site.rank] / site.scaling).sqrt()
    return {"A": root[:, None] * vh[: site.rank], "B": u[:, : site.rank] * root}


def _svd(site: Site, weight: torch.Tensor, iterations: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if iterations is None:
        return torch.linalg.svd(weight, full_matrices=False)
    # By a key of the module's own, so that a loaded adapter finds the base that it was trained beside.
    start = random.key(zlib.crc32(site.module.encode()), device=weight.device)
    basis, _ = torch.linalg.qr(weight @ random.normal(start, (weight.shape[1], site.rank), weight.dtype))
    for _ in range(iterations):
        other, _ = torch.linalg.qr(weight.t() @ basis)
        basis, _ = torch.linalg.qr(weight @ other)
    u, s, vh = torch.linalg.svd(basis.t() @ weight, full_matrices=False)
    return basis @ u, s, vh


def _orthogonal(site: Site, dtype: torch.dtype, key: torch.Tensor) -> Factors:
    """(datta0.github.io/posts/rethink-lora-init)"""
    (out, into), half = site.size, site.rank // 2
    keys = random.split(key, 3)
    q, _ = torch.linalg.qr(random.normal(keys[0], (site.rank, site.rank), dtype))
    a = random.normal(keys[1], (into, half), dtype) @ q[0::2] / 10
    b = random.normal(keys[2], (out, half), dtype) @ q[1::2] / 10
    return {"A": a.t(), "B": b}
