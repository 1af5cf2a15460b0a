"""Hyperparameters as state: readable, replaceable, scheduled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, NamedTuple

import torch

from .base import GradientTransformation, Tree, as_transformation, device_of, zero_count


class InjectHyperparamsState(NamedTuple):
    """The hyperparameters of the next update, and the state of the transformation built from them."""

    count: torch.Tensor  # () int32: updates made
    hyperparams: dict[str, torch.Tensor]  # each () float64, so that the number written is the number used
    inner_state: Any


def inject_hyperparams(
    inner_factory: Callable[..., Any], static_args: str | Iterable[str] = ()
) -> Callable[..., GradientTransformation]:
    """``inner_factory`` whose numeric arguments live in the state. (optax: ``inject_hyperparams``.)

    ``inject_hyperparams(adamw)(learning_rate=1e-3)``; then ``state.hyperparams["learning_rate"]`` may be replaced
    between steps. Numbers and 0-d tensors become hyperparameters, functions are schedules evaluated at each update, and
    anything else, bools too, and the arguments named in ``static_args`` go to the factory as they are; so do those that
    it annotates as ``int``, such as muon's ``ns_steps``.
    """
    signature = inspect.signature(inner_factory)
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    counts = {name for name, parameter in signature.parameters.items() if parameter.annotation in (int, "int")}
    if unknown := static - set(signature.parameters):
        raise ValueError(f"static_args: got {sorted(unknown)}, expected names among {list(signature.parameters)}")
    static |= counts

    def injected(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        free = {name: value for name, value in bound.arguments.items() if name not in static}
        numbers = {name: value for name, value in free.items() if _is_scalar(value)}
        schedules = {name: value for name, value in free.items() if callable(value) and name not in numbers}
        fixed = {
            name: value for name, value in bound.arguments.items() if name not in numbers and name not in schedules
        }
        first = {name: _first_value(name, schedule) for name, schedule in schedules.items()}

        def build(hyperparams: dict[str, Any]) -> GradientTransformation:
            return as_transformation(inner_factory(**fixed, **hyperparams))

        def init(params: Tree) -> InjectHyperparamsState:
            device, count = device_of(params), zero_count(params)
            values = numbers | {name: schedule(count) for name, schedule in schedules.items()}
            hyperparams = {name: hyperparameter(values[name], device) for name in sorted(values)}
            return InjectHyperparamsState(count, hyperparams, build(hyperparams).init(params))

        def update(
            updates: Tree, state: InjectHyperparamsState, params: Tree | None = None
        ) -> tuple[Tree, InjectHyperparamsState]:
            values = state.hyperparams | {name: schedule(state.count) for name, schedule in schedules.items()}
            hyperparams = {name: hyperparameter(value, state.count.device) for name, value in values.items()}
            updates, inner_state = build(hyperparams).update(updates, state.inner_state, params)
            return updates, InjectHyperparamsState(state.count + 1, hyperparams, inner_state)

        return GradientTransformation(init, update, build(numbers | first).groups)

    return injected


def hyperparameter(value: Any, device: torch.device) -> torch.Tensor:
    """A number or 0-d tensor as a hyperparameter: 0-d float64, in storage of its own."""
    if isinstance(value, torch.Tensor):
        return value.to(device, torch.float64, copy=True)
    return torch.full((), float(value), dtype=torch.float64, device=device)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, Real) and not isinstance(value, bool))


def _first_value(name: str, schedule: Callable[[Any], Any]) -> Any:
    expectation = f"{name}: got a function, expected a schedule step -> number; name it in static_args if it is none"
    try:
        value = schedule(0)
    except Exception as error:
        raise TypeError(expectation) from error
    if not _is_scalar(value):
        raise TypeError(f"{expectation} (at step 0 it gave {type(value).__name__})")
    return value
