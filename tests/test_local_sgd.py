"""A plugin of one's own, held to the laws: local SGD, in which ranks train apart and agree every few steps.

(Stich 2018, "Local SGD Converges Fast and Communicates Little".) It reads as documentation: a plugin is a frozen
dataclass with the methods of ``fb.plugins.Plugin``, and three lines hold it to the laws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from processes import run_on_ranks

import functional_booster as fb
from functional_booster import testing
from functional_booster.kernels import flat
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.precision import Policy
from functional_booster.sharding import shards
from functional_booster.sharding.collectives import axis_size, pmean, psum


@dataclass(frozen=True)
class LocalSGD:
    """Every rank updates its own parameters by its own gradient; every ``every`` updates they become their mean.

    A gradient is scaled up to stand for the sum over ranks, whose mean it is in expectation: ``grad_norm``, and
    clipping by it, are each rank's own. A graph does not branch: jitted, the mean is taken at each step, and used when
    it is due.
    """

    every: int = 1
    data_axes: tuple[str, ...] = ("dp",)

    def axes(self, ranks: int) -> dict[str, int]:
        return {"dp": ranks}

    def layout(self, abstract: Any, labels: Any, mesh: fb.Mesh) -> Layout:
        return flat.plan(abstract, labels)  # every rank holds everything

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        return shards.join(storage, policy.compute)

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        return prepared

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        return grads

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        # All that ranks tell each other is 0, or NaN: they skip a step together.
        broken = psum(sum((buffer.sum() * 0 for buffer in fb.tree.leaves(grads)), torch.zeros(())), "dp")
        return fb.tree.map(lambda buffer: buffer * axis_size("dp") + broken.to(buffer.dtype), grads)

    def settle(self, storage: Flat, step: torch.Tensor) -> Flat:
        return fb.tree.map(lambda buffer: torch.where(step % self.every == 0, pmean(buffer, "dp"), buffer), storage)


SGD = fb.optim.sgd(0.1)


PROBLEM = testing.small(8, tx=SGD, max_norm=None)
APART = ["grad_norm"]


@pytest.mark.parametrize("law", testing.LAWS, ids=lambda law: law.__name__)
def test_with_a_mean_at_every_step_it_is_plain_sgd(law: Any) -> None:
    law(LocalSGD(every=1), fb.virtual_mesh(dp=4), replace(PROBLEM, apart=frozenset(APART)))


def test_it_is_so_on_drawn_meshes_models_and_splits() -> None:
    laws = [testing.step_equals_one_device, testing.accumulation_equals_whole_batch]
    testing.check_plugin(LocalSGD(every=1), laws=laws, tx=SGD, clip=False, apart=APART, max_examples=3)


def loss_fn(params: Any, batch: Any) -> Any:
    return PROBLEM.loss_fn(params, batch, None)


def trained(steps: int, every: int) -> list[fb.TrainState]:
    """The state after each step."""
    booster = fb.Booster(device="cpu", mixed_precision="fp32", plugin=LocalSGD(every), mesh=fb.virtual_mesh(2))
    states = [booster.init(PROBLEM.model, SGD, key=PROBLEM.key)]
    step = booster.train_step(loss_fn, SGD, jit=False, donate=False)
    for _ in range(steps):
        states.append(step(states[-1], PROBLEM.batch)[0])
    return states[1:]


def test_ranks_part_and_agree_when_it_is_due() -> None:
    apart = [
        any(not torch.equal(*buffer) for buffer in state.storage.buffers.values()) for state in trained(6, every=3)
    ]
    assert apart == [True, True, False, True, True, False]


def test_between_means_each_rank_is_a_run_of_its_own() -> None:
    """Two steps of rank r are those of one device on r's rows, at a rate for their share of the weight."""
    state = trained(2, every=3)[-1]
    weights = [int((rows != -100).sum()) for rows in PROBLEM.batch["y"].chunk(2)]
    for rank, weight in enumerate(weights):
        own = {name: leaf.chunk(2)[rank] for name, leaf in PROBLEM.batch.items()}
        tx = fb.optim.sgd(0.1 * 2 * weight / sum(weights))
        alone = fb.Booster(device="cpu")
        expected = alone.init(PROBLEM.model, tx, key=PROBLEM.key)
        step = alone.train_step(loss_fn, tx, jit=False)
        for _ in range(2):
            expected, _ = step(expected, own)
        for name, buffer in expected.storage.buffers.items():
            torch.testing.assert_close(state.storage.buffers[name][rank], buffer, rtol=1e-10, atol=1e-12)


def a_rank_with_a_nan() -> bool:
    booster = fb.Booster(device="cpu", mixed_precision="fp32", plugin=LocalSGD(2))
    state = booster.init(PROBLEM.model, SGD, key=PROBLEM.key)
    rows = PROBLEM.batch["x"].chunk(2)[booster.plan.mesh.place[0]].clone()
    if booster.plan.mesh.place == (1,):
        rows[0, 0] = torch.nan
    batch = {"x": rows, "y": torch.zeros(4, dtype=torch.int64)}
    state, metrics = booster.train_step(loss_fn, SGD, jit=False)(state, batch)
    return bool(metrics["skipped"]) and int(state.step) == 0


def test_ranks_skip_together() -> None:
    assert run_on_ranks(2, a_rank_with_a_nan) == [True, True]


def equals_virtual_ranks() -> None:
    testing.virtual_equals_real(LocalSGD(1), None, replace(PROBLEM, apart=frozenset(APART)))


def test_on_processes() -> None:
    run_on_ranks(2, equals_virtual_ranks)
