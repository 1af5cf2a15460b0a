"""Learning rate schedules: pure functions of the step.

A schedule maps a step (counted from 0) to a learning rate: an int to a float, an int tensor of any shape to a float32
tensor of that shape on its device. Formulas are evaluated in float64, without a host sync, and are safe under vmap and
tracing. A schedule with ``total_steps`` holds the value it has there for ever. A base rate may be a 0-d tensor, to
which gradients flow.

Warm-up over w steps is ``base * (s + 1) / w`` at step s: the first step already learns, step w - 1 has the full rate.
The functions whose names end in ``_lr`` are Colossal-AI's fourteen schedulers, arguments and defaults included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch

from .optim.base import Scalar, Schedule
from .optim.validate import check_integer, check_real, check_scalar

Anneal: TypeAlias = Literal["linear", "cosine", "sqrt"]


def constant(value: Scalar) -> Schedule:
    """``value`` at every step."""
    check_scalar("value", value)
    return _schedule(lambda s: value + 0.0 * s)


def linear(start: Scalar, end: Scalar, total_steps: int) -> Schedule:
    """From ``start`` in a straight line to ``end`` at ``total_steps``."""
    return polynomial(start, end, total_steps)


def polynomial(start: Scalar, end: Scalar, total_steps: int, power: float = 1.0) -> Schedule:
    """``end + (start - end) * (1 - s / total_steps)^power``."""
    _check(total_steps, start=start, end=end, power=power)
    return _schedule(lambda s: end + (start - end) * (1 - _progress(s, 0, total_steps)) ** power)


def exponential(start: Scalar, gamma: float) -> Schedule:
    """``start * gamma^s``."""
    check_scalar("start", start)
    check_scalar("gamma", gamma)
    return _schedule(lambda s: start * gamma**s)


def step_decay(start: Scalar, gamma: float, every: int) -> Schedule:
    """``start * gamma^floor(s / every)``."""
    check_scalar("start", start)
    check_scalar("gamma", gamma)
    check_integer("every", every, minimum=1)
    return _schedule(lambda s: start * gamma ** (s // every))


def multi_step_decay(start: Scalar, gamma: float, milestones: Sequence[int]) -> Schedule:
    """``start * gamma^(number of milestones at or before s)``."""
    check_scalar("start", start)
    check_scalar("gamma", gamma)
    for milestone in milestones:
        check_integer("milestones", milestone)
    return _schedule(lambda s: start * gamma ** (0 * s + sum((s >= milestone) * 1 for milestone in milestones)))


def cosine_warmup(peak: Scalar, total_steps: int, warmup_steps: int = 0, end: Scalar = 0.0) -> Schedule:
    """Warm-up to ``peak``, then half a cosine down to ``end`` at ``total_steps`` (arXiv 1608.03983)."""
    _check(total_steps, warmup_steps)
    return wsd(peak, total_steps, warmup_steps, total_steps - warmup_steps, end, "cosine")


def wsd(
    peak: Scalar,
    total_steps: int,
    warmup_steps: int,
    decay_steps: int,
    end: Scalar = 0.0,
    decay: Anneal = "linear",
) -> Schedule:
    """Warm-up, stable at ``peak``, decay to ``end`` over the last ``decay_steps`` (WSD; MiniCPM, arXiv 2404.06395).

    ``decay`` is "linear", "cosine" or "sqrt" (1 - sqrt of the progress; arXiv 2405.18392).
    """
    _check(total_steps, warmup_steps, peak=peak, end=end)
    check_integer("decay_steps", decay_steps, maximum=total_steps - warmup_steps)
    shape = _choose("decay", decay, _ANNEAL)

    def fall(s: Any) -> Any:
        return peak + (end - peak) * shape(_progress(s, total_steps - decay_steps, total_steps))

    return _after_warmup(peak, warmup_steps, _schedule(fall))


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other: the next begins, at its step 0, at each boundary. (optax: ``join_schedules``.)"""
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(f"boundaries: got {len(boundaries)} for {len(schedules)} schedules, expected one less")
    if list(boundaries) != sorted(boundaries):
        raise ValueError(f"boundaries: got {list(boundaries)}, expected increasing steps")

    def joined(step: Any) -> Any:
        value = schedules[0](step)
        for boundary, schedule in zip(boundaries, schedules[1:], strict=True):
            value = _where(step < boundary, value, schedule(_maximum(step - boundary, 0)))
        return value

    return joined


def cosine_annealing_lr(base_lr: Scalar, total_steps: int, eta_min: Scalar = 0.0) -> Schedule:
    """``cosine_annealing_warmup_lr`` without warm-up."""
    return cosine_annealing_warmup_lr(base_lr, total_steps, 0, eta_min)


def cosine_annealing_warmup_lr(
    base_lr: Scalar, total_steps: int, warmup_steps: int = 0, eta_min: Scalar = 0.0
) -> Schedule:
    """``cosine_warmup`` by Colossal-AI's name."""
    _check(total_steps, warmup_steps, base_lr=base_lr, eta_min=eta_min)
    return cosine_warmup(base_lr, total_steps, warmup_steps, eta_min)


def flat_annealing_lr(base_lr: Scalar, total_steps: int, pct_start: float = 0.72) -> Schedule:
    """``flat_annealing_warmup_lr`` without warm-up, down to 0."""
    return flat_annealing_warmup_lr(base_lr, total_steps, 0, pct_start)


def flat_annealing_warmup_lr(
    base_lr: Scalar, total_steps: int, warmup_steps: int = 0, pct_start: float = 0.72, eta_min: Scalar = 0.0
) -> Schedule:
    """Warm-up, flat for the fraction ``pct_start`` of what is left, then half a cosine down to ``eta_min``."""
    _check(total_steps, warmup_steps, base_lr=base_lr, eta_min=eta_min)
    _check_fraction(pct_start)
    after = total_steps - warmup_steps
    return wsd(base_lr, total_steps, warmup_steps, after - int(after * pct_start), eta_min, "cosine")


def linear_warmup_lr(base_lr: Scalar, total_steps: int, warmup_steps: int = 0) -> Schedule:
    """Up by ``(s + 1) / (warmup_steps + 1)``, as Colossal-AI has it here alone, then in a straight line to 0."""
    _check(total_steps, warmup_steps, base_lr=base_lr)

    fall = _schedule(lambda s: base_lr * (1 - _progress(s, warmup_steps, total_steps)))
    return _after_warmup(base_lr, warmup_steps, fall, slope=warmup_steps + 1)


def multi_step_lr(
    base_lr: Scalar, total_steps: int, milestones: Sequence[int] | None = None, gamma: float = 0.1
) -> Schedule:
    """``multi_step_decay``; milestones None is none."""
    return multi_step_warmup_lr(base_lr, total_steps, 0, milestones, gamma)


def multi_step_warmup_lr(
    base_lr: Scalar,
    total_steps: int,
    warmup_steps: int = 0,
    milestones: Sequence[int] | None = None,
    gamma: float = 0.1,
) -> Schedule:
    """Warm-up, then ``multi_step_decay``; milestones count from step 0, and those inside the warm-up have no effect."""
    _check(total_steps, warmup_steps, base_lr=base_lr)
    kept = [milestone for milestone in milestones or () if milestone >= warmup_steps]
    return _after_warmup(base_lr, warmup_steps, _hold(multi_step_decay(base_lr, gamma, kept), total_steps))


def one_cycle_lr(
    base_lr: Scalar,
    total_steps: int,
    pct_start: float = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """1cycle (arXiv 1708.07120): from ``base_lr / div_factor`` to ``base_lr``, then to the start / final_div_factor.

    Equal to torch's OneCycleLR with ``max_lr=base_lr``; the least rate is reached at step ``total_steps - 1``.
    """
    check_scalar("base_lr", base_lr)
    for name, factor in (("div_factor", div_factor), ("final_div_factor", final_div_factor)):
        check_real(name, factor, minimum=1.0)
    start = base_lr / div_factor
    return _cycle(start, base_lr, start / final_div_factor, total_steps, pct_start, anneal_strategy)


def one_cycle_momentum(
    total_steps: int,
    pct_start: float = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    base_momentum: float = 0.85,
    max_momentum: float = 0.95,
) -> Schedule:
    """The momentum (beta1) that goes with ``one_cycle_lr``: from ``max_momentum`` to ``base_momentum`` and back."""
    check_scalar("base_momentum", base_momentum, below=1.0)
    check_scalar("max_momentum", max_momentum, below=1.0)
    return _cycle(max_momentum, base_momentum, max_momentum, total_steps, pct_start, anneal_strategy)


def polynomial_lr(base_lr: Scalar, total_steps: int, end_lr: Scalar = 1e-4, power: float = 1.0) -> Schedule:
    """``polynomial`` from ``base_lr`` to ``end_lr``."""
    return polynomial_warmup_lr(base_lr, total_steps, 0, end_lr, power)


def polynomial_warmup_lr(
    base_lr: Scalar, total_steps: int, warmup_steps: int = 0, end_lr: Scalar = 1e-4, power: float = 1.0
) -> Schedule:
    """Warm-up, then ``polynomial`` from ``base_lr`` to ``end_lr`` at ``total_steps``."""
    _check(total_steps, warmup_steps, base_lr=base_lr, end_lr=end_lr, power=power)

    fall = _schedule(lambda s: end_lr + (base_lr - end_lr) * (1 - _progress(s, warmup_steps, total_steps)) ** power)
    return _after_warmup(base_lr, warmup_steps, fall)


def lambda_lr(base_lr: Scalar, total_steps: int, lr_lambda: Callable[[int], float]) -> Schedule:
    """``base_lr * lr_lambda(s)``; the function is called here, with every int from 0 to ``total_steps``."""
    _check(total_steps, base_lr=base_lr)
    factors = _factors(lr_lambda, range(total_steps + 1))
    return _schedule(lambda s: base_lr * _table(factors, s))


def multiplicative_lr(base_lr: Scalar, total_steps: int, lr_lambda: Callable[[int], float]) -> Schedule:
    """``base_lr`` times ``lr_lambda`` of every step from 1 to s; the function is called here, with ints."""
    _check(total_steps, base_lr=base_lr)
    factors = [1.0]
    for factor in _factors(lr_lambda, range(1, total_steps + 1)):
        factors.append(factors[-1] * factor)
    return _schedule(lambda s: base_lr * _table(factors, s))


def step_lr(base_lr: Scalar, total_steps: int, step_size: int = 1, gamma: float = 0.1) -> Schedule:
    """``step_decay`` every ``step_size`` steps."""
    _check(total_steps, base_lr=base_lr)
    check_integer("step_size", step_size, minimum=1)
    return _hold(step_decay(base_lr, gamma, step_size), total_steps)


def exponential_lr(base_lr: Scalar, total_steps: int, gamma: float = 1.0) -> Schedule:
    """``exponential``."""
    _check(total_steps, base_lr=base_lr)
    return _hold(exponential(base_lr, gamma), total_steps)


_ANNEAL: dict[str, Callable[[Any], Any]] = {  # progress in [0, 1] -> the part of the way that is done
    "linear": lambda p: p,
    "cosine": lambda p: (1 - (torch.cos(math.pi * p) if isinstance(p, torch.Tensor) else math.cos(math.pi * p))) / 2,
    "sqrt": lambda p: p**0.5,
}


def _schedule(formula: Callable[[Any], Any]) -> Schedule:
    """The schedule of a formula that takes ``s >= 0`` as an int or a float64 tensor."""

    def schedule(step: Any) -> Any:
        s = step.clamp(min=0).to(torch.float64) if isinstance(step, torch.Tensor) else max(step, 0)
        value = formula(s)
        return value.to(torch.float32) if isinstance(value, torch.Tensor) else float(value)

    return schedule


def _after_warmup(peak: Scalar, warmup_steps: int, schedule: Schedule, slope: int | None = None) -> Schedule:
    """``peak * (s + 1) / slope`` (slope None: warmup_steps), then ``schedule``, which counts from step 0 too."""
    if warmup_steps == 0:
        return schedule
    rise = _schedule(lambda s: peak * ((s + 1) / (slope or warmup_steps)))
    return lambda step: _where(step < warmup_steps, rise(step), schedule(step))


def _hold(schedule: Schedule, total_steps: int) -> Schedule:
    return lambda step: schedule(_minimum(step, total_steps))


def _cycle(
    start: Scalar, turn: Scalar, end: Scalar, total_steps: int, pct_start: float, anneal_strategy: str
) -> Schedule:
    _check(total_steps)
    _check_fraction(pct_start)
    shape = _choose("anneal_strategy", anneal_strategy, {"cos": _ANNEAL["cosine"], "linear": _ANNEAL["linear"]})
    turning_step = pct_start * total_steps - 1

    def formula(s: Any) -> Any:
        there = start + (turn - start) * shape(_progress(s, 0, turning_step))
        back = turn + (end - turn) * shape(_progress(s, turning_step, total_steps - 1))
        return _where(s <= turning_step, there, back)

    return _schedule(formula)


def _progress(s: Any, start: float, end: float) -> Any:
    """How much of the way from ``start`` to ``end`` is done: 0 before, 1 after."""
    if end <= start:
        return (s >= end) * 1.0
    return _minimum(_maximum((s - start) / (end - start), 0.0), 1.0)


def _table(factors: Sequence[float], s: Any) -> Any:
    """``factors[s]``, the last one beyond the end."""
    if not isinstance(s, torch.Tensor):
        return factors[min(s, len(factors) - 1)]
    index = s.clamp(max=len(factors) - 1).long()
    return torch.tensor(factors, dtype=torch.float64, device=s.device).index_select(0, index.reshape(-1)).view(s.shape)


def _factors(lr_lambda: Callable[[int], float], steps: Iterable[int]) -> list[float]:
    if not callable(lr_lambda):
        raise TypeError(f"lr_lambda: got {type(lr_lambda).__name__} {lr_lambda!r}, expected a function step -> factor")
    factors = [float(lr_lambda(step)) for step in steps]
    for factor in factors:
        check_real("lr_lambda", factor)
    return factors


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def _minimum(x: Any, bound: float) -> Any:
    return x.clamp(max=bound) if isinstance(x, torch.Tensor) else min(x, bound)


def _maximum(x: Any, bound: float) -> Any:
    return x.clamp(min=bound) if isinstance(x, torch.Tensor) else max(x, bound)


def _choose(argument: str, given: str, options: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    if given not in options:
        raise ValueError(f"{argument}: got {given!r}, expected one of {sorted(options)}")
    return options[given]


def _check(total_steps: int, warmup_steps: int = 0, **scalars: Scalar) -> None:
    check_integer("total_steps", total_steps, minimum=1)
    check_integer("warmup_steps", warmup_steps, maximum=total_steps)
    for argument, value in scalars.items():
        check_scalar(argument, value)


def _check_fraction(pct_start: float) -> None:
    if not 0.0 <= pct_start <= 1.0:
        raise ValueError(f"pct_start: got {pct_start!r}, expected a number in [0, 1]")
