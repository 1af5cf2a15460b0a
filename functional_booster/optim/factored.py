"""Second moments in factored form: of a matrix (R, C), R + C numbers. (Shazeer and Stern 2018, "Adafactor".)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functional_booster.kernels import tree

from . import leaves
from .base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    Tree,
    at,
    compute_dtype,
    evaluate,
    spread,
    stands_for,
    zero_count,
)
from .validate import check_integer, check_scalar


class FactoredState(NamedTuple):
    """Moving averages of squares: of a leaf (..., R, C) the means over columns and over rows, of others all of them.

    Each tree has None in place of the leaves that it does not describe.
    """

    count: torch.Tensor  # () int32: updates made
    row: Tree  # plain: (..., R, 1)
    col: Tree  # plain: (..., 1, C)
    full: Tree  # like the parameters


class Factored(NamedTuple):
    """Averages of squares, and what multiplies by the inverse of their root."""

    init: Callable[[Tree], FactoredState]
    update: Callable[[Tree, FactoredState], FactoredState]  # with values whose squares enter the averages
    inverse_root: Callable[[FactoredState, Tree], tuple[Tree, Tree]]  # laid out like a tree: (factored, the others)
    is_factored: Callable[[Tree], Tree]  # a plain tree of bools, from a plain tree of shapes


def factored(
    decay: ScalarOrSchedule, eps: Scalar, min_dim_size_to_factor: int, floor: float | Callable[..., float] | None
) -> Factored:
    """Moving averages, in float32 at least, of the squares of what ``update`` is given, plus ``eps``.

    ``decay`` may depend on the number of updates made before. With ``floor`` (a number, or a function of a leaf's
    dtype) the mean of the rows is kept above it, and what is inverted above its square.
    """

    def is_factored(abstract: Tree) -> Tree:
        def has_sides(leaf: Any) -> bool:
            return len(leaf.shape) > 1 and min(leaf.shape[-2:]) >= min_dim_size_to_factor

        return tree.map(has_sides, abstract)

    def init(params: Tree) -> FactoredState:
        plain = stands_for(params)
        chosen, device = is_factored(plain), zero_count(params).device

        def zeros(shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Tree:
            def zero(leaf: Any, keep: bool) -> torch.Tensor | None:
                dtype = torch.promote_types(leaf.dtype, torch.float32)
                return torch.zeros(shape(tuple(leaf.shape)), dtype=dtype, device=device) if keep else None

            return tree.map(zero, plain, chosen)

        full = tree.map(
            lambda p, keep: None if keep else torch.zeros_like(p, dtype=compute_dtype(p)),
            params,
            spread(chosen, params),
        )
        return FactoredState(
            zero_count(params),
            zeros(lambda shape: (*shape[:-1], 1)),
            zeros(lambda shape: (*shape[:-2], 1, shape[-1])),
            full,
        )

    def update(values: Tree, state: FactoredState) -> FactoredState:
        rate, chosen = evaluate(decay, state.count), spread(is_factored(stands_for(values)), values)
        sides, rest = tree.partition(values, chosen)

        def averaged(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            new = new.to(past.device, past.dtype)
            return torch.lerp(past, new, at(1 - rate, new))

        def mean(dim: int) -> leaves.Leafwise:
            return lambda leaf: leaf.to(compute_dtype(leaf)).square().sum(dim, keepdim=True) / max(leaf.shape[dim], 1)

        def raised(mean: torch.Tensor) -> torch.Tensor:
            return mean + at(eps, mean)

        rows, cols = (tree.map(raised, means) for means in leaves.sums((mean(-1), mean(-2)), sides))
        each = tree.map(lambda _: torch.as_tensor(eps, dtype=torch.float64), stands_for(rest))
        added = leaves.expand(each, rest)  # nothing to padding
        squares = tree.map(lambda v, e: v.to(e.dtype).square() + e, rest, added)
        full = _where(squares, averaged, state.full)
        return FactoredState(
            state.count + 1, tree.map(averaged, state.row, rows), tree.map(averaged, state.col, cols), full
        )

    def least(leaf: torch.Tensor) -> float:
        return floor(leaf.dtype) if callable(floor) else floor or 0.0

    def inverse_root(state: FactoredState, like: Tree) -> tuple[Tree, Tree]:
        sides, rest = tree.partition(like, spread(is_factored(stands_for(like)), like))

        def inverted(row: torch.Tensor, col: torch.Tensor, leaf: Any) -> torch.Tensor:
            mean = row.mean(-2, keepdim=True)
            if floor is None:  # in this order no product leaves the range of float32
                return (row / mean).rsqrt() * col.rsqrt()
            return (row * col / mean.clamp(min=least(leaf))).clamp(min=least(leaf) ** 2).rsqrt()

        def inverted_full(full: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
            tiny = torch.finfo(full.dtype).tiny  # padding is zero, and times it stays so
            return full.clamp(min=max(least(leaf) ** 2, tiny)).rsqrt()

        whole = tree.map(inverted, state.row, state.col, stands_for(sides))
        return leaves.expand(whole, sides), _where(rest, inverted_full, state.full)

    return Factored(init, update, inverse_root, is_factored)


def _where(rest: Tree, fn: Callable[..., torch.Tensor], full: Tree) -> Tree:
    """``fn(full, rest)`` of each leaf; where there is none, ``full`` may lack the nodes that ``rest`` has."""
    return tree.map(fn, full, rest) if tree.leaves(rest) else rest


def multiplied(factors: tuple[Tree, Tree], values: Tree, chosen: Tree) -> Tree:
    """``values`` times what ``inverse_root`` gave, in the dtypes of ``values``; ``chosen``: where it is factored."""
    sides, rest = tree.partition(values, chosen)

    def product(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return (value.to(factor.dtype) * factor).to(value.dtype)

    return tree.combine(tree.map(product, sides, factors[0]), tree.map(product, rest, factors[1]))


def scale_by_factored_rms(
    decay: ScalarOrSchedule,
    eps: Scalar = 1e-30,
    min_dim_size_to_factor: int = 128,
    *,
    floor: float | Callable[..., float] | None = None,
) -> GradientTransformation:
    """Divide by the root of a moving average of squares, factored over the last two dims where both are large.

    ``v = decay * v + (1 - decay) * (g^2 + eps)``; ``decay`` is a number or a schedule, as ``adafactor_decay(0.8)``.
    Leaves of fewer than two dims, or with a last one below ``min_dim_size_to_factor``, keep all of v. ``floor``: as in
    torch.optim.Adafactor, which adds no eps, the mean of the rows is kept above the floor and v above its square.
    (optax: ``scale_by_factored_rms``, which takes the largest two dims.)
    """
    check_scalar("decay", decay, schedule=True)
    check_scalar("eps", eps)
    check_integer("min_dim_size_to_factor", min_dim_size_to_factor, minimum=1)
    moments = factored(decay, eps, min_dim_size_to_factor, floor)

    def update(updates: Tree, state: FactoredState, params: Tree | None = None) -> tuple[Tree, FactoredState]:
        state = moments.update(updates, state)
        chosen = spread(moments.is_factored(stands_for(updates)), updates)
        return multiplied(moments.inverse_root(state, updates), updates, chosen), state

    return GradientTransformation(moments.init, update, moments.is_factored)
