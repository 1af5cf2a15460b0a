"""The imperative loop of Colossal-AI's users, a thin shell over the pure pieces: one TrainState, three handles.

The same loop runs under every plugin: ``imperative_run`` has what the handles share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from functional_booster import optim
from functional_booster.precision import MixedPrecision

from .boosted_model import BoostedModel
from .boosted_optimizer import BoostedOptimizer, optimizer_state
from .functionalize import functionalize
from .imperative_run import guarded, start
from .models.model import Model
from .plugins import Plan
from .state import TrainState
from .torch_optim import from_torch


class BoostedScheduler:
    """A torch scheduler that is held back when the optimizer skipped its step; everything else is the scheduler's."""

    def __init__(self, scheduler: Any, optimizer: BoostedOptimizer) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step of the schedule, unless the optimizer's last step was skipped."""
        skipped = self._optimizer.skipped
        if skipped is None or not bool(skipped):
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._scheduler, name)


def boost(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    lr_scheduler: Any,
    precision: MixedPrecision,
    plan: Plan,
    init: Callable[[Model, optim.GradientTransformation], TrainState],
) -> tuple[BoostedModel, BoostedOptimizer | None, BoostedScheduler | None]:
    """The handles on a new run: model, optimizer and scheduler, None kept. On processes, all start from the first's
    weights."""
    with guarded(plan, "boost"):
        _check(module, optimizer, lr_scheduler)
        model = functionalize(module)
        names = {parameter: name for name, parameter in module.named_parameters()}
        converted = None if optimizer is None else from_torch(optimizer, names)
        run = start(module, model, precision, plan, init)
        if optimizer is None or converted is None:
            return BoostedModel(run), None, None
        run.state = run.state.replace(opt_state=optimizer_state(run, optimizer, converted))
        handle = BoostedOptimizer(run, optimizer, converted)
        return BoostedModel(run), handle, None if lr_scheduler is None else BoostedScheduler(lr_scheduler, handle)


def _check(module: Any, optimizer: Any, lr_scheduler: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"model: {type(module).__name__}, expected an nn.Module")
    if isinstance(module, BoostedModel):
        raise ValueError("model: it is boosted already")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    if lr_scheduler is not None:
        if not hasattr(lr_scheduler, "step") or not hasattr(lr_scheduler, "optimizer"):
            raise TypeError(f"lr_scheduler: {type(lr_scheduler).__name__}, expected a torch scheduler")
        if optimizer is None:
            raise ValueError("lr_scheduler: it belongs to an optimizer, but no optimizer was given")
        if lr_scheduler.optimizer is not optimizer:
            raise ValueError("lr_scheduler: it belongs to another optimizer than the one given")


@contextlib.contextmanager
def no_sync(model: Any, optimizer: Any) -> Generator[None]:
    """A context in which the handles' gradients are added up on each rank, for a later backward to synchronize."""
    for given in (model, optimizer):
        if given is not None and not isinstance(given, (BoostedModel, BoostedOptimizer)):
            raise TypeError(f"no_sync: {type(given).__name__}, expected what boost returned")
    runs = {id(given._run): given._run for given in (model, optimizer) if given is not None}
    if not runs:
        raise TypeError("no_sync: expected the model or the optimizer that boost returned")
    before = [(run, run.holding) for run in runs.values()]
    try:
        for run in runs.values():
            run.holding = True
        yield
    finally:
        for run, holding in before:
            run.holding = holding
