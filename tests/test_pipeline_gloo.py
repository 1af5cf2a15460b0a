"""Pipelines on real processes give the numbers of the plain program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_on_ranks
from test_pipeline import FAMILIES
from test_pipeline_run import assert_equal, loss_fn, plain, problem

from functional_booster import pipeline
from functional_booster.kernels import tree

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes

Case = tuple[str, int, int]  # family, microbatches, chunks


def on_this_rank(ranks: int, cases: list[Case]) -> list[tuple[torch.Tensor | None, dict[int, Any]]]:
    """Each case's loss and gradients on this rank, which knows the shapes alone of the parameters of other ranks."""
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
        results.append(pipeline.run_rank(schedule, fns, loss_fn, own, batches, rank, transport))
        assert not transport.sent
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_give_the_plain_gradient(ranks: int) -> None:
    cases = [(family, microbatches, 2) for family in FAMILIES for microbatches in (1, 3, 9)]
    by_rank = run_on_ranks(ranks, on_this_rank, ranks, cases)
    for case, (family, microbatches, chunks) in enumerate(cases):
        schedule = FAMILIES[family](ranks, microbatches, chunks)
        loss, grads = plain(*problem(schedule.stages, microbatches, seed=microbatches))
        results = [answers[case] for answers in by_rank]
        assert [found is not None for found, _ in results] == [rank == schedule.placement[-1] for rank in range(ranks)]
        assert_equal(results[schedule.placement[-1]][0], loss)
        assert [sorted(found) for _, found in results] == [list(schedule.held_by(rank)) for rank in range(ranks)]
        assert_equal([results[rank][1][stage] for stage, rank in enumerate(schedule.placement)], grads)
