"""Scaling of updates: by a number, a schedule, a learning rate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from functional_booster.kernels import tree

from .base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    Schedule,
    Tree,
    device_of,
    elementwise,
    evaluate,
    stateless,
    times,
    zero_count,
)
from .validate import check_scalar


class ScaleByScheduleState(NamedTuple):
    """How many updates were made."""

    count: torch.Tensor  # () int32


class ScaleByLearningRateState(NamedTuple):
    """How many updates were made, and the learning rate of the last one (before the first: of the first)."""

    count: torch.Tensor  # () int32
    learning_rate: torch.Tensor  # () float32


def scale(step_size: Scalar) -> GradientTransformation:
    """Multiply updates by a number or 0-d tensor. (optax: ``scale``.)"""
    check_scalar("step_size", step_size, minimum=-float("inf"))
    return stateless(lambda updates, params: tree.map(lambda u: times(u, step_size), updates), elementwise)


def ascent(maximize: bool, descent: GradientTransformation) -> GradientTransformation:
    """A descent, or the ascent with its state, if it is to be one."""
    if not maximize:
        return descent

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, Any]:
        return descent.update(tree.map(torch.neg, updates), state, params)

    return GradientTransformation(descent.init, update, descent.groups)


def set_to_zero() -> GradientTransformation:
    """Zero updates: what it is applied to is frozen. (optax: ``set_to_zero``.)"""
    return stateless(lambda updates, params: tree.map(torch.zeros_like, updates), elementwise)


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Multiply updates by ``step_size_fn(count)``. (optax: ``scale_by_schedule``.)"""
    if not callable(step_size_fn):
        raise TypeError(
            f"step_size_fn: got {type(step_size_fn).__name__} {step_size_fn!r}, expected a function of the step"
        )

    def init(params: Tree) -> ScaleByScheduleState:
        return ScaleByScheduleState(zero_count(params))

    def update(updates: Tree, state: ScaleByScheduleState, params: Tree | None = None) -> tuple[Tree, Any]:
        factor = step_size_fn(state.count)
        return tree.map(lambda u: times(u, factor), updates), ScaleByScheduleState(state.count + 1)

    return GradientTransformation(init, update, elementwise)


def scale_by_learning_rate(learning_rate: ScalarOrSchedule, *, flip_sign: bool = True) -> GradientTransformation:
    """Multiply updates by minus the learning rate, and record it. (optax: ``scale_by_learning_rate``.)

    ``learning_rate`` is a number, a 0-d tensor (gradients flow to it) or a schedule ``step -> learning rate``.
    """
    check_scalar("learning_rate", learning_rate, schedule=True)

    def record(count: torch.Tensor, value: Scalar, device: torch.device) -> ScaleByLearningRateState:
        if isinstance(value, torch.Tensor):
            return ScaleByLearningRateState(count, value.detach().to(device, torch.float32, copy=True))
        return ScaleByLearningRateState(count, torch.full((), value, dtype=torch.float32, device=device))

    def init(params: Tree) -> ScaleByLearningRateState:
        count = zero_count(params)
        return record(count, evaluate(learning_rate, count), device_of(params))

    def update(updates: Tree, state: ScaleByLearningRateState, params: Tree | None = None) -> tuple[Tree, Any]:
        value = evaluate(learning_rate, state.count)
        factor = -value if flip_sign else value
        return tree.map(lambda u: times(u, factor), updates), record(state.count + 1, value, state.count.device)

    return GradientTransformation(init, update, elementwise)


def learning_rate(state: Tree) -> torch.Tensor | None:
    """The learning rate that an optimizer's state records, 0-d float32: the first of several; None without one."""

    def is_record(node: Any) -> bool:
        return isinstance(node, ScaleByLearningRateState)

    return next((node.learning_rate for node in tree.leaves(state, is_leaf=is_record) if is_record(node)), None)
