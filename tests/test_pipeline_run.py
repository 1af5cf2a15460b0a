"""A pipeline computes what its stages do one after the other: the loss and the gradients, whatever the schedule."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_memory import Live
from test_pipeline import FAMILIES, Sizes, any_schedule, families, seeds

import functional_booster as fb
from functional_booster import pipeline
from functional_booster.kernels import tree
from functional_booster.pipeline import Kind, Schedule

sizes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))


def linear(params: Any, x: Any) -> Any:
    """A stage of another width; what x has beside is handed through."""
    return {**x, "h": torch.tanh(x["h"] @ params["w"]) + params["b"]}


def first(params: Any, batch: Any) -> Any:
    """From tokens (B, T) to h (B, T, D), with their integer positions."""
    positions = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
    return {"h": params["table"][batch["tokens"]], "positions": positions}


def positional(params: Any, x: Any) -> Any:
    """A stage that uses the integers that reach it, and has one of its own."""
    return {**x, "h": x["h"] + params["scale"] * (x["positions"] % params["period"])[..., None]}


def bare(params: Any, x: Any) -> Any:
    """A stage without parameters."""
    return {**x, "h": x["h"].sin()}


def loss_fn(y: Any, batch: Any) -> torch.Tensor:
    return (y["h"].mean(-1) - batch["labels"]).square().sum()


def problem(stages: int, microbatches: int, seed: int) -> tuple[list[Any], list[Any], list[Any]]:
    """So many stages, their parameters, and microbatches of sizes that differ; float64."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    width = choose.randint(1, 4)
    fns: list[Any] = [first]
    params: list[Any] = [{"table": normal(5, width)}]
    for _ in range(stages - 1):
        fns.append(choose.choice([linear, linear, positional, bare]))
        if fns[-1] is linear:
            wide = choose.randint(1, 4)
            params.append({"w": normal(width, wide), "b": normal(wide)})
            width = wide
        else:
            params.append({"scale": normal(), "period": torch.tensor(3)} if fns[-1] is positional else {})
    batches = []
    for _ in range(microbatches):
        rows, tokens = choose.randint(1, 3), choose.randint(1, 4)
        ids = torch.randint(5, (rows, tokens), generator=generator)
        batches.append({"tokens": ids, "labels": normal(rows, tokens)})
    return fns, params, batches


def plain(fns: list[Any], params: list[Any], batches: list[Any]) -> tuple[torch.Tensor, list[Any]]:
    """The loss and the gradients without a pipeline."""

    def total(params: list[Any]) -> torch.Tensor:
        losses = []
        for batch in batches:
            y = batch
            for fn, own in zip(fns, params, strict=True):
                y = fn(own, y)
            losses.append(loss_fn(y, batch))
        return torch.stack(losses).sum()

    grads, loss = fb.grad_and_value(total)(params)
    return loss, grads


def assert_equal(found: Any, expected: Any) -> None:
    assert tree.structure(found) == tree.structure(expected)
    for one, other in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def check_run(schedule: Schedule, seed: int) -> None:
    fns, params, batches = problem(schedule.stages, schedule.microbatches, seed)
    loss, grads = pipeline.run(schedule, fns, loss_fn, params, batches)
    assert_equal((loss, grads), plain(fns, params, batches))


@families
@given(sizes=sizes, seed=seeds)
@settings(max_examples=15)
def test_a_family_gives_the_plain_gradient(family: str, sizes: Sizes, seed: int) -> None:
    check_run(FAMILIES[family](*sizes), seed)


@given(seed=seeds)
@settings(max_examples=40)
def test_any_legal_schedule_gives_the_plain_gradient(seed: int) -> None:
    check_run(any_schedule(seed), seed)


@families
def test_forwards_alone_give_the_loss(family: str) -> None:
    schedule = FAMILIES[family](2, 3, 2)
    evaluation = dataclasses.replace(
        schedule,
        actions=tuple(
            tuple(one for one in row if one.kind in (Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION))
            for row in schedule.actions
        ),
    )
    fns, params, batches = problem(schedule.stages, 3, 0)
    loss, grads = pipeline.run(evaluation, fns, loss_fn, params, batches)
    assert_equal(loss, plain(fns, params, batches)[0])
    assert grads == [None] * schedule.stages


def test_parameters_that_autograd_knows_are_left_alone() -> None:
    fns, params, batches = problem(3, 2, 1)
    tracked = tree.map(lambda leaf: leaf.clone().requires_grad_(leaf.is_floating_point()), params)
    loss, grads = pipeline.run(pipeline.one_f_one_b(3, 2), fns, loss_fn, tracked, batches)
    assert_equal((loss, grads), plain(fns, params, batches))
    assert not loss.requires_grad and not any(leaf.requires_grad for leaf in tree.leaves(grads))
    assert all(leaf.grad is None for leaf in tree.leaves(tracked))


@families
def test_what_is_computed_twice(family: str) -> None:
    """With whole backwards nothing; else each stage but the first goes forward once more for its weights."""
    schedule = FAMILIES[family](2, 5, 2)
    fns, params, batches = problem(schedule.stages, 5, 2)
    calls = Counter[int]()

    def counted(stage: int) -> Any:
        def call(params: Any, x: Any) -> Any:
            calls[stage] += 1
            return fns[stage](params, x)

        return call

    pipeline.run(schedule, [counted(stage) for stage in range(schedule.stages)], loss_fn, params, batches)
    again = family == "zbv"
    assert calls == {stage: 10 if again and stage else 5 for stage in range(schedule.stages)}


NUMBERS = 1000


def wide(params: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A scalar from a scalar, whose backward needs NUMBERS numbers."""
    return (params * x).expand(NUMBERS).exp().mean()


def peak(schedule: Schedule) -> float:
    """The most that is alive at once, in activations of ``wide``."""
    params, batches = [torch.ones(())] * schedule.stages, [torch.ones(())] * schedule.microbatches
    with Live() as live:
        pipeline.run(schedule, [wide] * schedule.stages, lambda y, batch: y, params, batches)
    return live.peak / (4 * NUMBERS)


@families
def test_activations_live_as_long_as_the_schedule_says(family: str) -> None:
    """On one rank, what is alive beside them does not depend on the number of microbatches."""
    few, many = (FAMILIES[family](1, number, 2) for number in (3, 8))
    (less,), (more,) = pipeline.simulate(few).live, pipeline.simulate(many).live
    assert peak(many) - peak(few) == pytest.approx(more - less, abs=0.1)


def test_what_does_not_fit_is_refused() -> None:
    schedule = pipeline.gpipe(2, 3)
    fns, params, batches = problem(2, 3, 0)
    with pytest.raises(ValueError, match="stages: 1, expected 2, as GPipe has"):
        pipeline.run(schedule, fns[:1], loss_fn, params, batches)
    with pytest.raises(ValueError, match="params: 3, expected 2, as GPipe has"):
        pipeline.run(schedule, fns, loss_fn, [*params, {}], batches)
    with pytest.raises(ValueError, match="microbatches: 2, expected 3, as GPipe has"):
        pipeline.run(schedule, fns, loss_fn, params, batches[:2])
    with pytest.raises(ValueError, match="GPipe: rank 0 lacks"):
        pipeline.run(
            dataclasses.replace(schedule, actions=(schedule.actions[0][:-1], schedule.actions[1])),
            fns,
            loss_fn,
            params,
            batches,
        )
    with pytest.raises(TypeError, match=r"loss_fn: returned \(\d+, \d+\), expected a 0-d tensor"):
        pipeline.run(schedule, fns, lambda y, batch: y["h"].mean(-1), params, batches)
    with pytest.raises(TypeError, match=r"stages\[0\]: the output 'name' is str, expected a tensor"):
        pipeline.run(schedule, [lambda params, x: {**first(params, x), "name": "h"}, linear], loss_fn, params, batches)
