"""Schedules against torch's schedulers and closed formulas; the scheduler classes of the imperative loop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from functional_booster import lr_scheduler, schedules
from functional_booster.optim.base import Schedule

TOTAL = 40


def halves(step: int) -> float:
    return 1.0 / (1 + step // 3)


def falling(step: int) -> float:
    return 0.9 if step % 2 else 0.95


# Colossal-AI's fourteen names: the pure function, the class, and arguments beyond total_steps.
FOURTEEN: dict[str, tuple[Callable[..., Schedule], type[lr_scheduler.ScheduledLR], dict[str, Any]]] = {
    "CosineAnnealingLR": (schedules.cosine_annealing_lr, lr_scheduler.CosineAnnealingLR, {"eta_min": 0.001}),
    "CosineAnnealingWarmupLR": (
        schedules.cosine_annealing_warmup_lr,
        lr_scheduler.CosineAnnealingWarmupLR,
        {"warmup_steps": 7},
    ),
    "FlatAnnealingLR": (schedules.flat_annealing_lr, lr_scheduler.FlatAnnealingLR, {}),
    "FlatAnnealingWarmupLR": (
        schedules.flat_annealing_warmup_lr,
        lr_scheduler.FlatAnnealingWarmupLR,
        {"warmup_steps": 7},
    ),
    "LinearWarmupLR": (schedules.linear_warmup_lr, lr_scheduler.LinearWarmupLR, {"warmup_steps": 7}),
    "MultiStepLR": (schedules.multi_step_lr, lr_scheduler.MultiStepLR, {"milestones": [5, 20, 20, 60]}),
    "MultiStepWarmupLR": (
        schedules.multi_step_warmup_lr,
        lr_scheduler.MultiStepWarmupLR,
        {"warmup_steps": 7, "milestones": [5, 20]},
    ),
    "OneCycleLR": (schedules.one_cycle_lr, lr_scheduler.OneCycleLR, {}),
    "PolynomialLR": (schedules.polynomial_lr, lr_scheduler.PolynomialLR, {"power": 2.0}),
    "PolynomialWarmupLR": (schedules.polynomial_warmup_lr, lr_scheduler.PolynomialWarmupLR, {"warmup_steps": 7}),
    "LambdaLR": (schedules.lambda_lr, lr_scheduler.LambdaLR, {"lr_lambda": halves}),
    "MultiplicativeLR": (schedules.multiplicative_lr, lr_scheduler.MultiplicativeLR, {"lr_lambda": falling}),
    "StepLR": (schedules.step_lr, lr_scheduler.StepLR, {"step_size": 6, "gamma": 0.5}),
    "ExponentialLR": (schedules.exponential_lr, lr_scheduler.ExponentialLR, {"gamma": 0.9}),
}
fourteen = pytest.mark.parametrize(("pure", "cls", "options"), FOURTEEN.values(), ids=list(FOURTEEN))

SCHEDULES: dict[str, Schedule] = {
    **{name: pure(0.1, TOTAL, **options) for name, (pure, _, options) in FOURTEEN.items()},
    "constant": schedules.constant(0.1),
    "linear": schedules.linear(0.1, 0.3, TOTAL),
    "polynomial": schedules.polynomial(0.1, 0.01, TOTAL, power=0.5),
    "exponential": schedules.exponential(0.1, 0.8),
    "step_decay": schedules.step_decay(0.1, 0.5, 7),
    "multi_step_decay": schedules.multi_step_decay(0.1, 0.5, []),
    "cosine_warmup": schedules.cosine_warmup(peak=0.1, total_steps=TOTAL, warmup_steps=TOTAL),
    "wsd": schedules.wsd(0.1, TOTAL, 5, 10, end=0.01, decay="sqrt"),
    "one_cycle_momentum": schedules.one_cycle_momentum(TOTAL),
    "join_schedules": schedules.join_schedules(
        [schedules.linear(0.0, 1.0, 10), lambda step: 0.5 / (1 + step), schedules.constant(0.2)], [10, 20]
    ),
}
every = pytest.mark.parametrize("schedule", list(SCHEDULES.values()), ids=list(SCHEDULES))


def make_optimizer(
    cls: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any
) -> torch.optim.Optimizer:
    """Two param groups, of rates 0.1 and 0.03."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.03)]
    return cls(groups, **options)


def trajectory(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[tuple[float, ...]]:
    """What the param groups hold at each step: rate, and momentum or beta1 where there is one."""
    rows = []
    for _ in range(steps):
        rows.append(
            tuple(
                float(value)
                for group in optimizer.param_groups
                for value in (group["lr"], group.get("momentum", 0.0), *group.get("betas", ()))
            )
        )
        optimizer.step()
        scheduler.step()
    return rows


def assert_rows_close(actual: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> None:
    """To rounding; torch's recursive forms drift by some units in the last place of the largest rate."""
    torch.testing.assert_close(
        torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15
    )


@every
def test_tensor_steps_give_the_same_in_float32(schedule: Schedule) -> None:
    steps = [*range(-1, TOTAL + 5), 10_000]
    expected = torch.tensor([schedule(step) for step in steps], dtype=torch.float64).to(torch.float32)
    assert all(type(schedule(step)) is float for step in steps)
    for dtype in (torch.int32, torch.int64):
        batch = torch.tensor(steps, dtype=dtype)
        together = schedule(batch)
        assert together.dtype == torch.float32
        torch.testing.assert_close(together, expected, rtol=2e-7, atol=1e-9)
        torch.testing.assert_close(torch.stack([schedule(step) for step in batch]), together, rtol=2e-7, atol=1e-9)
        torch.testing.assert_close(torch.func.vmap(schedule)(batch), together, rtol=2e-7, atol=1e-9)


@every
def test_one_trace_serves_every_step(schedule: Schedule) -> None:
    graph = make_fx(schedule, tracing_mode="fake")(torch.tensor(0))
    for step in (0, 1, 6, 7, 19, 20, TOTAL, TOTAL + 1):
        assert torch.equal(graph(torch.tensor(step)), schedule(torch.tensor(step)))


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    name=st.sampled_from(list(FOURTEEN)),
    total=st.integers(1, 30),
    base=st.sampled_from([1.0, 1e-3, 0.0]),
)
def test_none_goes_negative_or_moves_after_the_end(data: st.DataObject, name: str, total: int, base: float) -> None:
    pure, _, options = FOURTEEN[name]
    given_options = dict(options)
    if "warmup_steps" in options:
        given_options["warmup_steps"] = data.draw(st.integers(0, total))
    schedule = pure(base, total, **given_options)
    rates = [schedule(step) for step in range(total + 40)]
    assert all(rate >= 0.0 for rate in rates)
    assert set(rates[total:]) == {rates[total]}
    assert max(rates) <= max(base, 1e-3) * (1 + 1e-12)  # 1e-3: the largest eta_min or end_lr


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from([name for name in FOURTEEN if "Warmup" in name]),
    warmup=st.integers(1, 20),
    left=st.integers(0, 20),
)
def test_warm_up_rises_from_the_first_step(name: str, warmup: int, left: int) -> None:
    schedule = FOURTEEN[name][0](0.1, warmup + left, warmup_steps=warmup)
    whole = warmup + 1 if name == "LinearWarmupLR" else warmup  # as Colossal-AI has it
    for step in range(warmup):
        assert schedule(step) == pytest.approx(0.1 * (step + 1) / whole, rel=1e-14)
    if left > 0:
        assert schedule(warmup) == pytest.approx(0.1, rel=1e-14)


def test_the_formulas() -> None:
    cosine = schedules.cosine_warmup(peak=3e-4, total_steps=1000, warmup_steps=100, end=3e-5)
    assert cosine(49) == pytest.approx(1.5e-4)
    assert cosine(325) == pytest.approx(3e-5 + 2.7e-4 * (1 + math.cos(math.pi / 4)) / 2)
    assert cosine(1000) == pytest.approx(3e-5)
    wsd = schedules.wsd(1.0, 100, 10, 20, end=0.2)
    assert [wsd(step) for step in (4, 9, 50, 80, 85, 100, 200)] == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.8, 0.2, 0.2])
    assert schedules.wsd(1.0, 100, 10, 20, decay="sqrt")(85) == pytest.approx(0.5)
    assert schedules.wsd(1.0, 100, 10, 20, decay="cosine")(85) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    flat = schedules.flat_annealing_warmup_lr(1.0, 110, 10, pct_start=0.5)
    assert [flat(step) for step in (0, 9, 59, 60, 85, 110)] == pytest.approx([0.1, 1.0, 1.0, 1.0, 0.5, 0.0])
    polynomial = schedules.polynomial_warmup_lr(1.0, 110, 10, end_lr=0.1, power=2.0)
    assert [polynomial(step) for step in (10, 60, 110)] == pytest.approx([1.0, 0.1 + 0.9 * 0.25, 0.1])
    assert schedules.linear_warmup_lr(1.0, 110, 10)(60) == pytest.approx(0.5)
    assert schedules.one_cycle_lr(1.0, 20, pct_start=0.05)(0) == 1.0  # where torch divides by zero
    joined = SCHEDULES["join_schedules"]
    assert [joined(step) for step in (0, 9, 10, 19, 20, 99)] == pytest.approx([0.0, 0.9, 0.5, 0.05, 0.2, 0.2])


def test_default_milestones_are_none() -> None:
    assert {schedules.multi_step_lr(0.1, 10)(step) for step in range(20)} == {0.1}
    assert schedules.multi_step_warmup_lr(0.1, 10, 2)(0) == pytest.approx(0.05)
    lr_scheduler.MultiStepWarmupLR(make_optimizer(), 10)


def test_gradients_flow_to_the_peak() -> None:
    peak = torch.tensor(0.1)
    for name in ("cosine_warmup", "linear", "one_cycle_lr", "exponential"):
        options = {"linear": (0.0, TOTAL), "exponential": (0.9,)}.get(name, (TOTAL,))
        schedule = getattr(schedules, name)
        gradient = torch.func.grad(lambda value, make=schedule, rest=options: make(value, *rest)(torch.tensor(7)))(peak)
        assert float(gradient) == pytest.approx(schedule(1.0, *options)(7), rel=1e-6)  # each is linear in its peak


TORCH: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "CosineAnnealingLR": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL, eta_min=0.001),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, TOTAL, eta_min=0.001),
    ),
    "StepLR": (lambda o: lr_scheduler.StepLR(o, TOTAL, 6), lambda o: torch.optim.lr_scheduler.StepLR(o, 6)),
    "MultiStepLR": (
        lambda o: lr_scheduler.MultiStepLR(o, TOTAL, [3, 3, 20], gamma=0.3),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 3, 20], gamma=0.3),
    ),
    "ExponentialLR": (
        lambda o: lr_scheduler.ExponentialLR(o, TOTAL, gamma=0.9),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.9),
    ),
    "PolynomialLR": (
        lambda o: lr_scheduler.PolynomialLR(o, TOTAL, end_lr=0.0, power=1.5),
        lambda o: torch.optim.lr_scheduler.PolynomialLR(o, TOTAL, power=1.5),
    ),
    "LambdaLR": (
        lambda o: lr_scheduler.LambdaLR(o, TOTAL, [halves, falling]),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, [halves, falling]),
    ),
    "MultiplicativeLR": (
        lambda o: lr_scheduler.MultiplicativeLR(o, TOTAL, falling),
        lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, falling),
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), TORCH.values(), ids=list(TORCH))
def test_schedulers_equal_torch(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    mine, other = make_optimizer(), make_optimizer()
    assert_rows_close(trajectory(mine, ours(mine), TOTAL), trajectory(other, theirs(other), TOTAL))


@settings(deadline=None, max_examples=25)
@given(
    total=st.integers(4, 30),
    pct_start=st.sampled_from([0.05, 0.3, 0.5, 0.9]),
    anneal=st.sampled_from(["cos", "linear"]),
    cycle=st.booleans(),
    cls=st.sampled_from([torch.optim.SGD, torch.optim.AdamW]),
)
def test_one_cycle_equals_torch(total: int, pct_start: float, anneal: str, cycle: bool, cls: type) -> None:
    assume(pct_start * total != 1.0)  # there torch divides by zero
    options: dict[str, Any] = {
        "pct_start": pct_start, "anneal_strategy": anneal, "cycle_momentum": cycle, "base_momentum": 0.8,
        "max_momentum": 0.9, "div_factor": 10.0, "final_div_factor": 100.0,
    }  # fmt: skip
    momentum = {"momentum": 0.95} if cls is torch.optim.SGD else {}
    mine, other = make_optimizer(cls, **momentum), make_optimizer(cls, **momentum)
    ours = lr_scheduler.OneCycleLR(mine, total, **options)
    theirs = torch.optim.lr_scheduler.OneCycleLR(other, [0.1, 0.03], total_steps=total, **options)
    rows = trajectory(mine, ours, total - 1), trajectory(other, theirs, total - 1)
    assert_rows_close(*rows)
    assert ours.get_last_lr() == pytest.approx(theirs.get_last_lr(), rel=1e-12)


@fourteen
def test_a_class_is_its_pure_schedule_in_each_group(
    pure: Callable[..., Schedule], cls: type, options: dict[str, Any]
) -> None:
    optimizer = make_optimizer()
    scheduler = cls(optimizer, TOTAL, **options)
    expected = [pure(0.1, TOTAL, **options), pure(0.03, TOTAL, **options)]
    for step in range(TOTAL + 5):
        assert scheduler.last_epoch == step
        assert (
            scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [s(step) for s in expected]
        )
        optimizer.step()
        scheduler.step()


@fourteen
@pytest.mark.parametrize("at", [0, 6, 25])
def test_resuming_is_exact(pure: Callable[..., Schedule], cls: type, options: dict[str, Any], at: int) -> None:
    optimizer = make_optimizer(momentum=0.9)
    scheduler = cls(optimizer, TOTAL, **options)
    trajectory(optimizer, scheduler, at)
    saved = json.loads(json.dumps(scheduler.state_dict()))
    expected = trajectory(optimizer, scheduler, TOTAL)
    other = make_optimizer(momentum=0.9)
    resumed = cls(other, TOTAL, **options)
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    assert [group["lr"] for group in other.param_groups] == saved["_last_lr"]
    assert trajectory(other, resumed, TOTAL) == expected


def test_a_tensor_rate_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    scheduler = lr_scheduler.LinearWarmupLR(optimizer, 10)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.09)


def test_a_state_of_another_scheduler_is_refused() -> None:
    scheduler = lr_scheduler.StepLR(make_optimizer(), TOTAL)
    with pytest.raises(ValueError, match="state_dict: got the keys"):
        scheduler.load_state_dict({"last_epoch": 3})
    with pytest.raises(ValueError, match="got 1 base_lrs, expected 2"):
        scheduler.load_state_dict({**scheduler.state_dict(), "base_lrs": [0.1]})
    with pytest.raises(ValueError, match="got 1 schedules, expected one for each of 2 groups"):
        lr_scheduler.LambdaLR(make_optimizer(), TOTAL, [halves])


untyped: Any = schedules  # arguments of wrong types on purpose
untyped_classes: Any = lr_scheduler
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "total_steps": (
        lambda: untyped.cosine_warmup(0.1, 0),
        ValueError,
        "total_steps: got 0, expected an int at least 1",
    ),
    "float steps": (lambda: untyped.step_lr(0.1, 10.0), TypeError, "total_steps: got float 10.0"),
    "warmup": (
        lambda: untyped.cosine_warmup(0.1, 10, 11),
        ValueError,
        r"warmup_steps: got 11, expected an int in \[0, 10\]",
    ),
    "peak": (lambda: untyped.cosine_warmup(-0.1, 10), ValueError, "peak: got -0.1"),
    "base_lr": (lambda: untyped.cosine_annealing_lr(math.inf, 10), ValueError, "base_lr: got inf"),
    "decay_steps": (lambda: untyped.wsd(0.1, 10, 5, 6), ValueError, "decay_steps: got 6"),
    "decay": (lambda: untyped.wsd(0.1, 10, 5, 5, decay="log"), ValueError, "decay: got 'log', expected one of"),
    "pct_start": (lambda: untyped.one_cycle_lr(0.1, 10, 1.5), ValueError, "pct_start: got 1.5"),
    "anneal": (lambda: untyped.one_cycle_lr(0.1, 10, 0.3, "sqrt"), ValueError, "anneal_strategy: got 'sqrt'"),
    "div_factor": (lambda: untyped.one_cycle_lr(0.1, 10, div_factor=0.0), ValueError, "div_factor: got 0.0"),
    "momentum": (lambda: untyped.one_cycle_momentum(10, max_momentum=1.0), ValueError, "max_momentum: got 1.0"),
    "gamma": (lambda: untyped.exponential_lr(0.1, 10, -0.5), ValueError, "gamma: got -0.5"),
    "step_size": (lambda: untyped.step_lr(0.1, 10, 0), ValueError, "step_size: got 0"),
    "step_lr": (lambda: untyped.step_lr(-0.1, 10), ValueError, "base_lr: got -0.1"),
    "exponential_lr": (lambda: untyped.exponential_lr(-0.1, 10), ValueError, "base_lr: got -0.1"),
    "every": (lambda: untyped.step_decay(0.1, 0.5, 0), ValueError, "every: got 0"),
    "milestones": (lambda: untyped.multi_step_lr(0.1, 10, [2.5]), TypeError, "milestones: got float 2.5"),
    "no lambda": (lambda: untyped.lambda_lr(0.1, 10, 0.5), TypeError, "lr_lambda: got float 0.5"),
    "bad lambda": (lambda: untyped.lambda_lr(0.1, 10, lambda step: 5.0 - step), ValueError, "lr_lambda: got -1.0"),
    "boundaries": (
        lambda: untyped.join_schedules([halves, falling], []),
        ValueError,
        "boundaries: got 0 for 2 schedules",
    ),
    "order": (lambda: untyped.join_schedules([halves] * 3, [5, 4]), ValueError, "expected increasing steps"),
    "no optimizer": (lambda: untyped_classes.StepLR(torch.nn.Linear(1, 1), 10), TypeError, "optimizer: got Linear"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=list(BAD))
def test_bad_input_is_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
