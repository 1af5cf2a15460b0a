"""Colossal-AI's fourteen learning rate schedulers for the imperative loop: thin shells over ``schedules``.

Each takes ``(optimizer, total_steps, ...)``, is stepped once a training step, and is a torch LRScheduler. Its rate is
the pure schedule of the step, for each param group from the group's own rate; so its state is a few numbers and
resuming is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from . import schedules
from .optim.base import Schedule

LRLambda = Callable[[int], float]


class ScheduledLR(torch_schedulers.LRScheduler):
    """A scheduler from ``make(base_lr) -> schedule``, or one such function for each param group.

    ``load_state_dict`` also writes the rates into the param groups, so that the next step is the one that was left.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: Callable[[float], Schedule] | Sequence[Callable[[float], Schedule]],
        last_epoch: int = -1,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        makers = [make] * len(optimizer.param_groups) if callable(make) else list(make)
        if len(makers) != len(optimizer.param_groups):
            raise ValueError(
                f"got {len(makers)} schedules, expected one for each of {len(optimizer.param_groups)} groups"
            )
        self._makers = [functools.cache(maker) for maker in makers]
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """The rate of each param group at step ``last_epoch``."""
        rates = zip(self._makers, self.base_lrs, strict=True)
        return [maker(float(base_lr))(self.last_epoch) for maker, base_lr in rates]

    _get_closed_form_lr = get_lr  # torch's name for it, which step(epoch) uses

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: the step, and the groups' base and current rates."""
        return {
            "last_epoch": self.last_epoch,
            "base_lrs": [float(base_lr) for base_lr in self.base_lrs],
            "_step_count": self._step_count,
            "_last_lr": [float(rate) for rate in self._last_lr],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict``; raises ValueError where its keys or its number of param groups are others."""
        if set(state_dict) != set(self.state_dict()):
            raise ValueError(f"state_dict: got the keys {sorted(state_dict)}, expected {sorted(self.state_dict())}")
        given, expected = len(state_dict["base_lrs"]), len(self.base_lrs)
        if given != expected:
            raise ValueError(f"state_dict: got {given} base_lrs, expected {expected}, one a param group")
        self.last_epoch = state_dict["last_epoch"]
        self.base_lrs = list(state_dict["base_lrs"])
        self._step_count = state_dict["_step_count"]
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class CosineAnnealingLR(ScheduledLR):
    """``schedules.cosine_annealing_lr``."""

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, _given(schedules.cosine_annealing_lr, total_steps, eta_min), last_epoch)


class CosineAnnealingWarmupLR(ScheduledLR):
    """``schedules.cosine_annealing_warmup_lr``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(
            optimizer, _given(schedules.cosine_annealing_warmup_lr, total_steps, warmup_steps, eta_min), last_epoch
        )


class FlatAnnealingLR(ScheduledLR):
    """``schedules.flat_annealing_lr``."""

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, _given(schedules.flat_annealing_lr, total_steps, pct_start), last_epoch)


class FlatAnnealingWarmupLR(ScheduledLR):
    """``schedules.flat_annealing_warmup_lr``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            _given(schedules.flat_annealing_warmup_lr, total_steps, warmup_steps, pct_start, eta_min),
            last_epoch,
        )


class LinearWarmupLR(ScheduledLR):
    """``schedules.linear_warmup_lr``."""

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, _given(schedules.linear_warmup_lr, total_steps, warmup_steps), last_epoch)


class MultiStepLR(ScheduledLR):
    """``schedules.multi_step_lr``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, _given(schedules.multi_step_lr, total_steps, milestones, gamma), last_epoch)


class MultiStepWarmupLR(ScheduledLR):
    """``schedules.multi_step_warmup_lr``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(
            optimizer, _given(schedules.multi_step_warmup_lr, total_steps, warmup_steps, milestones, gamma), last_epoch
        )


class OneCycleLR(ScheduledLR):
    """``schedules.one_cycle_lr``, and ``one_cycle_momentum`` for the momentum or beta1 where there is one."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        last_epoch: int = -1,
    ) -> None:
        self._momentum = (
            schedules.one_cycle_momentum(total_steps, pct_start, anneal_strategy, base_momentum, max_momentum)
            if cycle_momentum
            else None
        )
        super().__init__(
            optimizer,
            _given(schedules.one_cycle_lr, total_steps, pct_start, anneal_strategy, div_factor, final_div_factor),
            last_epoch,
        )

    def step(self, epoch: int | None = None) -> None:
        """Write the next rates and momentum into the param groups."""
        super().step(epoch)
        self._write_momentum()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict``, the momentum too."""
        super().load_state_dict(state_dict)
        self._write_momentum()

    def _write_momentum(self) -> None:
        if self._momentum is None:
            return
        momentum = self._momentum(self.last_epoch)
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = momentum


class PolynomialLR(ScheduledLR):
    """``schedules.polynomial_lr``."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, end_lr: float = 1e-4, power: float = 1.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, _given(schedules.polynomial_lr, total_steps, end_lr, power), last_epoch)


class PolynomialWarmupLR(ScheduledLR):
    """``schedules.polynomial_warmup_lr``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 1e-4,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(
            optimizer, _given(schedules.polynomial_warmup_lr, total_steps, warmup_steps, end_lr, power), last_epoch
        )


class LambdaLR(ScheduledLR):
    """``schedules.lambda_lr``; one function, or one for each param group."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: LRLambda | Sequence[LRLambda], last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, _per_group(schedules.lambda_lr, total_steps, lr_lambda), last_epoch)


class MultiplicativeLR(ScheduledLR):
    """``schedules.multiplicative_lr``; one function, or one for each param group."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: LRLambda | Sequence[LRLambda], last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, _per_group(schedules.multiplicative_lr, total_steps, lr_lambda), last_epoch)


class StepLR(ScheduledLR):
    """``schedules.step_lr``."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, _given(schedules.step_lr, total_steps, step_size, gamma), last_epoch)


class ExponentialLR(ScheduledLR):
    """``schedules.exponential_lr``."""

    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, _given(schedules.exponential_lr, total_steps, gamma), last_epoch)


def _given(schedule: Callable[..., Schedule], *rest: Any) -> Callable[[float], Schedule]:
    """``base_lr -> schedule(base_lr, *rest)``."""
    return lambda base_lr: schedule(base_lr, *rest)


def _per_group(
    schedule: Callable[..., Schedule], total_steps: int, lr_lambda: LRLambda | Sequence[LRLambda]
) -> Callable[[float], Schedule] | list[Callable[[float], Schedule]]:
    if isinstance(lr_lambda, Sequence):
        return [_given(schedule, total_steps, each) for each in lr_lambda]
    return _given(schedule, total_steps, lr_lambda)
