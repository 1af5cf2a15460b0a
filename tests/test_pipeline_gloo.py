"""Pipelines on real processes give the numbers of the plain program."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import run_on_ranks
from test_pipeline import FAMILIES
from test_pipeline_run import assert_equal, found, plain, problem, program

from functional_booster import pipeline
from functional_booster.kernels import tree

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes

Case = tuple[str, int, int]  # family, microbatches, chunks


def on_this_rank(ranks: int, cases: list[Case]) -> list[pipeline.Outcome]:
    """Each case's outcome on this rank, which knows the shapes alone of the parameters of other ranks."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    results = []
    for family, microbatches, chunks in cases:
        schedule = FAMILIES[family](ranks, microbatches, chunks)
        fns, params, batches = problem(schedule.stages, microbatches, seed=microbatches)
        own = [
            one if holder == rank else tree.map(lambda leaf: leaf.to("meta"), one)
            for one, holder in zip(params, schedule.placement, strict=True)
        ]
        transport = pipeline.Processes(group, torch.device("cpu"))
        results.append(pipeline.run_rank(schedule, program(fns, own, batches), rank, transport))
        assert not transport.sent
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_give_the_plain_gradient(ranks: int) -> None:
    cases = [(family, microbatches, 2) for family in FAMILIES for microbatches in (5,)]
    by_rank = run_on_ranks(ranks, on_this_rank, ranks, cases)
    for case, (family, microbatches, chunks) in enumerate(cases):
        schedule = FAMILIES[family](ranks, microbatches, chunks)
        fns, params, batches = problem(schedule.stages, microbatches, seed=microbatches)
        outcomes = [answers[case] for answers in by_rank]
        assert [bool(one.results) for one in outcomes] == [rank == schedule.placement[-1] for rank in range(ranks)]
        assert all(set(one.gradients) <= set(schedule.held_by(rank)) for rank, one in enumerate(outcomes))
        merged = pipeline.Outcome(
            outcomes[schedule.placement[-1]].results,
            {stage: terms for one in outcomes for stage, terms in one.gradients.items()},
        )
        assert_equal(found(merged, params), plain(fns, params, batches))
