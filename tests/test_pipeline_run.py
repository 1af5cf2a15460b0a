"""A pipeline computes what its stages do one after the other: the loss and the gradients, whatever the schedule."""

from __future__ import annotations

import dataclasses
import random
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
from functional_booster.pipeline import Schedule

sizes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 2))


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
    shapes = [(choose.randint(1, 3), choose.randint(1, 4)) for _ in range(2)]
    for _ in range(microbatches):
        rows, tokens = choose.choice(shapes)
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


def program(fns: list[Any], params: list[Any], batches: list[Any], loss: Any = loss_fn) -> pipeline.Program:
    return pipeline.Program(pipeline.chain(fns, loss, params), params, batches)


def found(outcome: pipeline.Outcome, params: list[Any]) -> tuple[torch.Tensor, list[Any]]:
    """The summed loss, and the gradients in the form of the parameters, zeros where there is no term."""
    loss = torch.stack([loss for loss, _ in outcome.results.values()]).sum()
    grads = tree.map(lambda leaf: torch.zeros_like(leaf) if leaf.is_floating_point() else None, params)
    named = tree.named_leaves(grads)
    for terms in outcome.gradients.values():
        for name, term in terms.items():
            named[name] += term
    return loss, grads


def check_run(schedule: Schedule, seed: int) -> None:
    fns, params, batches = problem(schedule.stages, schedule.microbatches, seed)
    outcome = pipeline.run(schedule, program(fns, params, batches))
    assert_equal(found(outcome, params), plain(fns, params, batches))


@families
@given(sizes=sizes, seed=seeds)
@settings(max_examples=4)
def test_a_family_gives_the_plain_gradient(family: str, sizes: Sizes, seed: int) -> None:
    check_run(FAMILIES[family](*sizes), seed)


@given(seed=seeds)
@settings(max_examples=10)
def test_any_legal_schedule_gives_the_plain_gradient(seed: int) -> None:
    check_run(any_schedule(seed), seed)


@families
def test_forwards_alone_give_the_loss(family: str) -> None:
    schedule = FAMILIES[family](2, 3, 2)
    fns, params, batches = problem(schedule.stages, 3, 0)
    outcome = pipeline.run(schedule.forwards(), program(fns, params, batches))
    assert_equal(found(outcome, params)[0], plain(fns, params, batches)[0])
    assert not outcome.gradients


def test_parameters_that_autograd_knows_are_left_alone() -> None:
    fns, params, batches = problem(3, 2, 1)
    tracked = tree.map(lambda leaf: leaf.clone().requires_grad_(leaf.is_floating_point()), params)
    outcome = pipeline.run(pipeline.one_f_one_b(3, 2), program(fns, tracked, batches))
    loss, grads = found(outcome, params)
    assert_equal((loss, grads), plain(fns, params, batches))
    assert not loss.requires_grad and not any(leaf.requires_grad for leaf in tree.leaves(grads))
    assert all(leaf.grad is None for leaf in tree.leaves(tracked))


def products(graph: torch.fx.GraphModule) -> int:
    return sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes)


def test_nothing_is_computed_twice() -> None:
    """Three products a layer, the gradient of the first input apart: one in F, one in B, one in W."""

    def layers(params: Any, x: Any) -> Any:
        for weight in params:
            x = torch.tanh(x @ weight)
        return x

    params = [[torch.randn(4, 4, dtype=torch.float64) for _ in range(2)] for _ in range(3)]
    batch = torch.randn(5, 4, dtype=torch.float64)
    objective = pipeline.chain([layers] * 3, lambda y, batch: y.sum(), params)
    for place, stage in enumerate(objective.traced(params, batch).stages):
        of_inputs = 2 if place else 1
        assert products(stage.forward.run.graph) == 2
        assert products(stage.backward.graph) == 2 + of_inputs
        first, second = stage.apart
        # The first stage has no input to differentiate: all of its backward is the weights'.
        assert (products(first.run.graph), products(second.graph)) == ((2, 2) if place else (0, 3))
        assert [tuple(one.shape) for one in stage.received] == ([(5, 4)] if place else [])
        assert [tuple(one.shape) for one in stage.sent_cotangents] == ([(5, 4)] if place else [])


NUMBERS = 1000


def wide(params: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A scalar from a scalar, whose backward needs NUMBERS numbers."""
    return (params * x).expand(NUMBERS).exp().mean()


def peak(schedule: Schedule) -> float:
    """The most that is alive at once, in activations of ``wide``."""
    params, batches = [torch.ones(())] * schedule.stages, [torch.ones(())] * schedule.microbatches
    made = program([wide] * schedule.stages, params, batches, lambda y, batch: y * 1.0)
    pipeline.run(schedule, made)  # traced before it is measured
    with Live() as live:
        pipeline.run(schedule, made)
    return live.peak / (4 * NUMBERS)


@families
def test_activations_live_as_long_as_the_schedule_says(family: str) -> None:
    """On one rank, what is alive beside them does not depend on the number of microbatches."""
    few, many = (FAMILIES[family](1, number, 2) for number in (3, 8))
    (less,), (more,) = pipeline.simulate(few).live, pipeline.simulate(many).live
    assert peak(many) - peak(few) == pytest.approx(more - less, abs=0.1)


def test_a_run_is_measured() -> None:
    schedule = pipeline.one_f_one_b(2, 3)
    outcome = pipeline.run(schedule, program(*problem(2, 3, 0)), measure=True)
    assert outcome.timeline is not None
    rows = schedule.without_transfers().actions
    assert [[span.action for span in spans] for spans in outcome.timeline.spans] == [list(row) for row in rows]
    assert all(span.start <= span.end for spans in outcome.timeline.spans for span in spans)


def test_what_does_not_fit_is_refused() -> None:
    schedule = pipeline.gpipe(2, 3)
    fns, params, batches = problem(2, 3, 0)
    with pytest.raises(ValueError, match="stages: 1, expected 2, as GPipe has"):
        pipeline.run(schedule, program(fns[:1], params[:1], batches))
    with pytest.raises(ValueError, match="microbatches: 2, expected 3, as GPipe has"):
        pipeline.run(schedule, program(fns, params, batches[:2]))
    with pytest.raises(ValueError, match="GPipe: rank 0 lacks"):
        pipeline.run(
            dataclasses.replace(schedule, actions=(schedule.actions[0][:-1], schedule.actions[1])),
            program(fns, params, batches),
        )
    with pytest.raises(TypeError, match=r"loss_fn: returned \(\d+, \d+\), expected a 0-d tensor"):
        pipeline.run(schedule, program(fns, params, batches, lambda y, batch: y["h"].mean(-1)))
