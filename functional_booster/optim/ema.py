"""Moving averages of parameters. (Polyak and Juditsky 1992.)"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from functional_booster.kernels import tree

from .base import (
    GradientTransformation,
    ScalarOrSchedule,
    Tree,
    at,
    compute_dtype,
    elementwise,
    evaluate,
    require_params,
    zero_count,
)
from .validate import check_dtype, check_scalar


class EmaState(NamedTuple):
    """The average of the parameters so far."""

    count: torch.Tensor  # () int32: updates made
    average: Tree  # like the parameters, float32 at least, or in accumulator_dtype


def ema(decay: ScalarOrSchedule, accumulator_dtype: torch.dtype | None = None) -> GradientTransformation:
    """Hand updates through, and average the parameters that they lead to: the last link of a chain.

    ``average = decay * average + (1 - decay) * (params + updates)``, from the initial parameters on; ``decay`` is a
    number or a schedule. ``averaged(state)`` has the average. (optax's ``ema`` averages updates: ``trace`` here.)
    ``update`` raises ValueError without ``params``.
    """
    check_scalar("decay", decay, below=1.0, schedule=True)
    check_dtype("accumulator_dtype", accumulator_dtype)

    def init(params: Tree) -> EmaState:
        def copied(p: torch.Tensor) -> torch.Tensor:
            return p.to(accumulator_dtype or compute_dtype(p), copy=True)

        return EmaState(zero_count(params), tree.map(copied, params))

    def update(updates: Tree, state: EmaState, params: Tree | None = None) -> tuple[Tree, EmaState]:
        rate = evaluate(decay, state.count)

        def toward(average: torch.Tensor, p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            dtype = compute_dtype(average, p)
            wide, new = average.to(dtype), p.to(dtype) + u.to(dtype)
            return torch.lerp(wide, new, at(1 - rate, new)).to(average.dtype)

        average = tree.map(toward, state.average, require_params(params, "ema"), updates)
        return updates, EmaState(state.count + 1, average)

    return GradientTransformation(init, update, elementwise)


def averaged(opt_state: Tree) -> Tree:
    """The average that ``ema`` keeps in an optimizer's state, laid out like the parameters that it updates.

    ``booster.full_params(state.replace(storage=fb.optim.averaged(state.opt_state)))`` are whole leaves, to evaluate
    with. Raises ValueError where the state has none, or several.
    """

    def is_average(node: Any) -> bool:
        return isinstance(node, EmaState)

    found = [node.average for node in tree.leaves(opt_state, is_leaf=is_average) if is_average(node)]
    if len(found) != 1:
        raise ValueError(f"opt_state: it has {len(found)} averages of fb.optim.ema, expected one")
    return found[0]
