"""The laws can fail: plugins with one fault each, caught by the laws that say they find it; ours obey them all."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import functional_booster as fb
from functional_booster import testing
from functional_booster.kernels.flat import Flat
from functional_booster.precision import Policy
from functional_booster.sharding import shards
from functional_booster.sharding.collectives import axis_size, ppermute

SGD = fb.optim.sgd(0.1)


def scaled(flat: Flat, factor: float) -> Flat:
    return fb.tree.map(lambda buffer: buffer * factor, flat)


class Honest(fb.TorchDDPPlugin):
    """No fault: what the others differ from."""


class ForgetsTheSum(fb.TorchDDPPlugin):
    def sync(self, grads: Flat, policy: Policy) -> Flat:
        return grads


class Averages(fb.TorchDDPPlugin):
    def sync(self, grads: Flat, policy: Policy) -> Flat:
        return scaled(super().sync(grads, policy), 1 / axis_size("dp"))


class SumsTwice(fb.TorchDDPPlugin):
    def sync(self, grads: Flat, policy: Policy) -> Flat:
        return super().sync(super().sync(grads, policy), policy)


class ForgetsTheReplicas(fb.LowLevelZeroPlugin):
    def sync(self, grads: Flat, policy: Policy) -> Flat:
        return shards.scatter(grads, policy.reduce)


class TakesTheNextRanksPart(fb.TorchFSDPPlugin):
    def sync(self, grads: Flat, policy: Policy) -> Flat:
        size = axis_size("fsdp")
        return fb.tree.map(
            lambda part: ppermute(part, "fsdp", [(i, (i + 1) % size) for i in range(size)]), super().sync(grads, policy)
        )


class GathersInAnotherOrder(fb.TorchFSDPPlugin):
    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        return fb.tree.map(lambda whole: whole.roll(whole.shape[0] // 2), super().gather(prepared, policy))


class CountsPadding(fb.TorchDDPPlugin):
    """Gradients of padding are not zero: they count in the norm, and the storage's padding moves."""

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        filled = {name: self._filled(grads, name) for name in grads.buffers}
        return super().sync(Flat(filled, grads.layout), policy)

    @staticmethod
    def _filled(grads: Flat, name: str) -> Any:
        pieces = list(grads.buffers[name].split(grads.layout.sections(name)))
        return torch.cat([piece + 1 if place % 2 else piece for place, piece in enumerate(pieces)])


class ClipsEachMicrobatch(fb.TorchDDPPlugin):
    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        return fb.tree.map(lambda buffer: buffer.clamp(-0.05, 0.05), grads)


class AllMicrobatchesWeighAlike(fb.TorchDDPPlugin):
    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        return fb.tree.map(lambda buffer: buffer / (buffer.norm() + 1e-9), grads)


@dataclass(frozen=True)
class KeepsState(fb.TorchDDPPlugin):
    """Counts its own steps, outside of the TrainState and of the graph."""

    counter: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        return scaled(super().sync(grads, policy), 1 / (1 + next(self.counter)))


DP, HYBRID = fb.virtual_mesh(dp=4), fb.virtual_mesh(extra_dp=2, dp=2)
FSDP = fb.virtual_mesh(dp=1, fsdp=4)


@pytest.mark.parametrize(
    ("plugin", "mesh", "law", "message"),
    [
        (ForgetsTheSum(), DP, testing.step_equals_one_device, "grad_norm"),
        (ForgetsTheSum(), DP, testing.replicas_are_equal, "storage"),
        (ForgetsTheSum(), DP, testing.unshard_inverts_shard, "storage"),
        (ForgetsTheSum(), DP, testing.load_inverts_save, "loaded on .* and back"),
        (Averages(), DP, testing.step_equals_one_device, "grad_norm"),
        (SumsTwice(), DP, testing.step_equals_one_device, "grad_norm"),
        (ForgetsTheReplicas(extra_dp_size=2), HYBRID, testing.step_equals_one_device, "grad_norm"),
        (ForgetsTheReplicas(extra_dp_size=2), HYBRID, testing.replicas_are_equal, "storage"),
        (TakesTheNextRanksPart(), FSDP, testing.step_equals_one_device, "grad_norm"),
        (GathersInAnotherOrder(), FSDP, testing.step_equals_one_device, "grad_norm"),
        (CountsPadding(), DP, testing.step_equals_one_device, "grad_norm"),
        (CountsPadding(), DP, testing.unshard_inverts_shard, "storage"),
        (ClipsEachMicrobatch(), DP, testing.step_equals_one_device, "grad_norm"),
        (ClipsEachMicrobatch(), DP, testing.accumulation_equals_whole_batch, "grad_norm"),
        (AllMicrobatchesWeighAlike(), DP, testing.accumulation_equals_whole_batch, "grad_norm"),
        (KeepsState(), DP, testing.jit_equals_eager, "grad_norm"),
        (KeepsState(), DP, testing.resume_equals_never_stopped, "storage"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_fault_is_found(plugin: Any, mesh: fb.Mesh, law: Callable[..., None], message: str) -> None:
    problem = testing.small(8, tx=SGD, max_norm=None)
    with pytest.raises(AssertionError, match=message) as error:
        law(plugin, mesh, problem, accumulate=2)
    for part in (type(plugin).__name__, str(mesh)):
        assert part in str(error.value)


@pytest.mark.parametrize("law", testing.LAWS, ids=lambda law: law.__name__)
def test_an_honest_plugin_passes_where_the_faulty_fail(law: Callable[..., None]) -> None:
    law(Honest(), DP, testing.small(8, tx=SGD, max_norm=None), accumulate=2)


def test_check_plugin_shrinks_to_a_small_example() -> None:
    with pytest.raises(
        AssertionError, match=r"'unshard inverts shard' does not hold for ForgetsTheSum\(\) on mesh\(dp=2;"
    ):
        testing.check_plugin(ForgetsTheSum(), laws=[testing.unshard_inverts_shard], max_ranks=3, tx=SGD, clip=False)


def test_a_plugin_without_a_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="lays out no number of ranks up to 2"):
        testing.check_plugin(fb.LowLevelZeroPlugin(extra_dp_size=3), max_ranks=2)


def test_without_hypothesis_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("functional_booster.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"pip install 'functional_booster\[test\]'"):
        importlib.import_module("functional_booster.testing")
