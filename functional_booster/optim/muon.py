"""Muon: momenta of matrices, orthogonalized. (Jordan et al. 2024, kellerjordan.github.io/posts/muon.)"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from functional_booster.kernels import tree

from . import leaves
from .adam import adamw
from .base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    Tree,
    at,
    compute_dtype,
    elementwise,
    is_zero,
    stands_for,
)
from .combine import chain
from .decay import decayed
from .partition import partition
from .scaling import scale_by_learning_rate
from .validate import check_dtype, check_integer, check_length, check_scalar

NS_COEFFS = (3.4445, -4.7750, 2.0315)  # of Newton and Schulz's iteration: steep at 0, within 0.7 to 1.2 after 5 steps


class ScaleByMuonState(NamedTuple):
    """The momentum."""

    mu: Tree  # like the parameters, in mu_dtype


def scale_by_muon(
    ns_coeffs: tuple[float, float, float] = NS_COEFFS,
    ns_steps: int = 5,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = True,
    ns_dtype: torch.dtype | None = torch.bfloat16,
    adjust_lr_fn: str | None = "original",
) -> GradientTransformation:
    """The momentum of each matrix (R, C), with its singular values brought to about 1, times a factor of its shape.

    ``mu = beta * mu + (1 - beta) * g``; ``nesterov``: ``beta * mu + (1 - beta) * g`` once more. The iteration runs in
    ``ns_dtype`` (None: the update's). ``adjust_lr_fn``: "original" (also None) is ``sqrt(max(1, R / C))``,
    "match_rms_adamw" ``0.2 * sqrt(max(R, C))`` (Liu et al. 2025, arXiv 2502.16982). Of leaves of more dims the last two
    are matrices. Raises ValueError, naming it, for a leaf of fewer. (optax: ``contrib.scale_by_muon``; torch: Muon.)

    Matrices that lie across ranks are dealt out to them, whole: see ``leaves.transformed``.
    """
    check_integer("ns_steps", ns_steps, minimum=1, maximum=99)
    check_scalar("beta", beta, below=1.0)
    check_scalar("eps", eps)
    check_length("ns_coeffs", ns_coeffs, 3)
    check_dtype("mu_dtype", mu_dtype)
    check_dtype("ns_dtype", ns_dtype)
    if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn: got {adjust_lr_fn!r}, expected 'original', 'match_rms_adamw' or None")

    def smoothed(g: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        dtype = compute_dtype(g, m)
        return torch.lerp(m.to(dtype), g.to(dtype), at(1 - beta, g.to(dtype)))

    def step(stack: torch.Tensor) -> torch.Tensor:
        solved = orthogonalized(stack.to(ns_dtype or stack.dtype), ns_coeffs, ns_steps, eps)
        return solved.to(stack.dtype) * _factor(adjust_lr_fn, *stack.shape[-2:])

    def init(params: Tree) -> ScaleByMuonState:
        for name, leaf in tree.named_leaves(stands_for(params)).items():
            if len(leaf.shape) < 2:
                raise ValueError(
                    f"{name or 'the leaf'}: Muon takes matrices, got shape {tuple(leaf.shape)}: use fb.optim.muon, "
                    "which has AdamW for the rest, or a partition"
                )
        return ScaleByMuonState(tree.map(lambda p: torch.zeros_like(p, dtype=mu_dtype), params))

    def update(updates: Tree, state: ScaleByMuonState, params: Tree | None = None) -> tuple[Tree, ScaleByMuonState]:
        mu = tree.map(smoothed, updates, state.mu)
        ahead = tree.map(smoothed, updates, mu) if nesterov else mu
        new = tree.map(lambda u, g: u.to(g.dtype), leaves.transformed(step, ahead), updates)
        return new, ScaleByMuonState(tree.map(lambda m, past: m.to(past.dtype), mu, state.mu))

    return GradientTransformation(init, update, elementwise)


def muon(
    learning_rate: ScalarOrSchedule,
    ns_coeffs: tuple[float, float, float] = NS_COEFFS,
    ns_steps: int = 5,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    mask: tree.Mask | None = None,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = True,
    ns_dtype: torch.dtype | None = torch.bfloat16,
    adjust_lr_fn: str | None = "original",
    muon_mask: tree.Mask | None = None,
    adam_learning_rate: ScalarOrSchedule | None = None,
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.999,
    adam_eps: Scalar = 1e-8,
    adam_weight_decay: Scalar = 0.0,
) -> GradientTransformation:
    """Orthogonalized momenta for matrices, AdamW for the rest. (Jordan et al. 2024; optax: ``contrib.muon``.)

    ``muon_mask``: the matrices, by default all leaves of two dims; embeddings and heads do better with AdamW, as with
    ``tree.by_name("attn|mlp")``. ``mask`` says where weights decay. Other arguments: ``scale_by_muon``'s; the ``adam_``
    ones are AdamW's, with ``learning_rate`` if it has none of its own.
    """

    def labels(abstract: Tree) -> Tree:
        return tree.map(lambda keep: "muon" if keep else "adam", tree.as_mask(abstract, muon_mask or _two_dims))

    matrix = chain(
        scale_by_muon(
            ns_coeffs,
            ns_steps,
            beta,
            eps,
            mu_dtype,
            nesterov=nesterov,
            ns_dtype=ns_dtype,
            adjust_lr_fn=adjust_lr_fn,
        ),
        decayed(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
    rest = adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        adam_b1,
        adam_b2,
        adam_eps,
        weight_decay=adam_weight_decay,
        mask=mask if not is_zero(adam_weight_decay) else None,
    )
    return partition({"muon": matrix, "adam": rest}, labels)


def orthogonalized(x: torch.Tensor, coeffs: tuple[float, float, float], steps: int, eps: Scalar) -> torch.Tensor:
    """x (..., R, C) with singular values near 1, by Newton and Schulz's quintic iteration, in x's dtype."""
    a, b, c = coeffs
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    x = x.reshape(math.prod(shape[:-2]), *shape[-2:])
    x = x.mT if tall else x  # the smaller square is the cheaper one
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=at(eps, x))
    for _ in range(steps):
        square = x @ x.mT
        bend = torch.baddbmm(square, square, square, beta=b, alpha=c)  # one rounding where a sum of products has two
        x = torch.baddbmm(x, bend, x, beta=a)
    return (x.mT if tall else x).reshape(shape)


def _factor(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(columns, 1)))


def _two_dims(abstract: Tree) -> Tree:
    return tree.map(lambda leaf: len(leaf.shape) == 2, abstract)
