"""Loss scaling: gradients of a float16 loss are taken of the loss times a factor, so that small ones are not lost.
(Micikevicius et al. 2018, Mixed Precision Training, 3.2.)

``DynamicScaling`` and ``ConstantScaling`` are pairs of pure functions over a ``LossScale``: ``init`` and ``update``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from functional_booster.kernels import tree

from .numbers import check_number

FLOAT32 = (2.0**-126, torch.finfo(torch.float32).max)  # what a factor may be


@dataclass(frozen=True)
class LossScale:
    """``factor`` (float32): what the loss is multiplied by; ``good`` (int32): steps without an overflow since the last
    overflow or growth; ``overflows`` (int32): those counted towards the next backoff. All 0-d."""

    factor: Any
    good: Any
    overflows: Any


tree.register(LossScale, ("factor", "good", "overflows"))


@dataclass(frozen=True)
class ConstantScaling:
    """The same factor at every step; a step that overflows is skipped all the same."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number("scale", self.scale, *FLOAT32)

    def init(self, device: torch.device | str | None = None) -> LossScale:
        """The scale to begin with."""
        return _new(self.scale, device)

    def update(self, state: LossScale, finite: torch.Tensor) -> LossScale:
        """The scale after a step whose gradients were ``finite`` (0-d bool): the same."""
        return state


@dataclass(frozen=True)
class DynamicScaling:
    """A factor that overflows push down and good steps pull up, from ``min_scale`` to ``max_scale``.

    After ``growth_interval`` good steps in a row it is multiplied by ``growth_factor``. At the ``hysteresis``-th
    overflow, and at every one that follows before that many good steps have passed, it is multiplied by
    ``backoff_factor``. Raises TypeError or ValueError for what is out of range.
    """

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    hysteresis: int = 2

    def __post_init__(self) -> None:
        for name in ("initial_scale", "min_scale", "max_scale"):
            check_number(name, getattr(self, name), *FLOAT32)
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale: {self.initial_scale}, expected one from min_scale={self.min_scale} to "
                f"max_scale={self.max_scale}"
            )
        check_number("growth_factor", self.growth_factor, 1.0)
        check_number("backoff_factor", self.backoff_factor, math.ulp(0.0), 1.0)
        for name in ("growth_interval", "hysteresis"):
            check_number(name, getattr(self, name), 1)
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"{name}: {getattr(self, name)!r}, expected a whole number")

    def init(self, device: torch.device | str | None = None) -> LossScale:
        """The scale to begin with."""
        return _new(self.initial_scale, device)

    def update(self, state: LossScale, finite: torch.Tensor) -> LossScale:
        """The scale after a step whose gradients were ``finite`` (0-d bool); decided on the device."""
        good = torch.where(finite, state.good + 1, 0)
        grows = good >= self.growth_interval
        overflows = torch.where(finite, torch.where(grows, 0, state.overflows), state.overflows + 1)
        backs_off = ~finite & (overflows >= self.hysteresis)
        factor = torch.where(grows, state.factor * self.growth_factor, state.factor)
        factor = torch.where(backs_off, state.factor * self.backoff_factor, factor)
        return LossScale(
            factor.clamp(self.min_scale, self.max_scale),
            torch.where(grows, 0, good).to(state.good.dtype),
            overflows.clamp_max(self.hysteresis).to(state.overflows.dtype),
        )


Scaling = DynamicScaling | ConstantScaling


def resumed(scaling: Scaling | None, saved: LossScale) -> LossScale:
    """The scale to go on with after a load: the saved one, unless either run has none of its own."""
    fresh = (scaling or ConstantScaling()).init(saved.factor.device)
    if not isinstance(scaling, DynamicScaling):
        return fresh
    unscaled = (saved.factor == 1) & (saved.good == 0) & (saved.overflows == 0)  # what a run without a scale has
    return tree.map(lambda new, old: torch.where(unscaled, new, old), fresh, saved)


def scale_gradient(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``x``, whose cotangents are multiplied by ``factor`` (0-d), in their own dtype."""
    return _ScaleGradient.apply(x, factor)


class _ScaleGradient(torch.autograd.Function):
    """Forward: the identity; backward: times the factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        (factor,) = ctx.saved_tensors
        wide = torch.promote_types(cotangent.dtype, factor.dtype)
        return (cotangent.to(wide) * factor.to(wide)).to(cotangent.dtype), None


def _new(scale: float, device: torch.device | str | None) -> LossScale:
    def counter() -> torch.Tensor:
        return torch.zeros((), dtype=torch.int32, device=device)

    return LossScale(torch.full((), float(scale), dtype=torch.float32, device=device), counter(), counter())
