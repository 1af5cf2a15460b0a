"""Under every plugin, on processes, the imperative loop is that of torch's own DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import functional_booster as fb
from functional_booster import plugins

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes

EXACT = {"rtol": 1e-10, "atol": 1e-12}
PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": plugins.TorchDDPPlugin,
    "zero1": plugins.LowLevelZeroPlugin,
    "zero2": lambda: plugins.LowLevelZeroPlugin(stage=2, extra_dp_size=2),
    "fsdp": plugins.TorchFSDPPlugin,
    "gemini": lambda: plugins.GeminiPlugin(shard_param_frac=0.5),
}


class Net(nn.Module):
    """A tied, a frozen, an unused weight, one for some calls, one number, odd sizes; a buffer that counts its rows."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, bias=False)
        self.norm = nn.BatchNorm1d(5, momentum=0.3) if norm else nn.Identity()
        self.middle = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.middle.weight
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: torch.Tensor, more: bool = False) -> torch.Tensor:
        if self.training:
            self.average.lerp_(x.detach().mean(), 0.1)
        x = self.norm(self.first(x))
        if more:
            x = x + self.sometimes(x)
        return self.scale * self.tied(torch.tanh(self.middle(self.frozen(x)))).sum(-1)


def make(seed: int, norm: bool = False) -> Net:
    torch.manual_seed(seed)
    return Net(norm).double()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups; ``scale`` is in none."""
    named = dict(module.named_parameters())
    first = named.pop("first.weight")
    named.pop("scale")
    return torch.optim.AdamW([{"params": [first], "lr": 0.02}, {"params": [*named.values()]}], lr=0.05)


def local_batch(number: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(-1).cos()


def boosted(plugin: str, module: nn.Module) -> tuple[fb.Booster, Any, Any]:
    booster = fb.Booster(device="cpu", mixed_precision="fp32", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(module, adamw(module))
    return booster, model, optimizer


def stored(booster: fb.Booster, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a whole tensor: all of it, or its part along the last axis, padded with zeros."""
    if value.shape == like.shape:
        return value
    whole = torch.zeros(like.numel() * booster.mesh.shape[-1], dtype=value.dtype)
    whole[: value.numel()] = value.reshape(-1)
    return whole.view(-1, like.numel())[booster.mesh.place[-1]]


def assert_same_gradients(booster: fb.Booster, ddp: Any, model: nn.Module) -> None:
    for (name, theirs), ours in zip(ddp.module.named_parameters(), model.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, stored(booster, theirs.grad, ours), **EXACT)


def assert_same_weights(expected: nn.Module, model: nn.Module) -> None:
    ours = model.state_dict()
    for name, value in expected.state_dict().items():
        if name != "average":
            torch.testing.assert_close(ours[name], value, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def train_beside_ddp(plugin: str) -> None:
    rank = dist.get_rank()
    module = make(rank).train()  # every process has other weights: those of the first count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(make(rank), find_unused_parameters=True)
    theirs = adamw(ddp.module)
    booster, model, ours = boosted(plugin, module)
    average = 0.0

    def backward(number: int, rows: int = 4, more: bool = False) -> None:
        nonlocal average
        x, y = local_batch(number, rows)
        losses = [F.mse_loss(each(x, more), y) for each in (ddp, model)]
        torch.testing.assert_close(losses[1], losses[0], **EXACT)
        losses[0].backward()
        booster.backward(losses[1], ours)
        mean = x.mean() / dist.get_world_size()
        dist.all_reduce(mean)
        average += 0.1 * (mean.item() - average)

    for step in range(5):
        if step in (1, 4):
            with ddp.no_sync(), booster.no_sync(model, ours):
                backward(10 + step, more=step == 4 and rank == 1)
                backward(20 + step)
        if step == 3:
            backward(30 + step)
            assert_same_gradients(booster, ddp, model)
        # Other numbers of rows on each rank; a weight that one rank alone reaches, then none, then all.
        backward(step, rows=2 + rank, more=(step == 2 and rank == 0) or step == 4)
        assert_same_gradients(booster, ddp, model)
        if step != 1:
            members = [p for group in theirs.param_groups for p in group["params"]]
            norm = nn.utils.clip_grad_norm_(members, 0.3)
            torch.testing.assert_close(ours.get_grad_norm(), norm, **EXACT)
            torch.testing.assert_close(ours.clip_grad_by_norm(0.3), norm, **EXACT)
            assert_same_gradients(booster, ddp, model) if step else None
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        assert not ours.skipped
    assert_same_weights(ddp.module, model)
    assert model.state_dict()["average"].item() == pytest.approx(average, rel=1e-12)


@pytest.mark.parametrize(("plugin", "ranks"), [*((plugin, 2) for plugin in PLUGINS), ("zero2", 4), ("gemini", 4)])
def test_the_loop_is_that_of_ddp(plugin: str, ranks: int) -> None:
    """Loss, gradients after each backward, norms, weights: accumulation with and without no_sync, unused weights."""
    run_on_ranks(ranks, train_beside_ddp, plugin)


def normalize_over_ranks(plugin: str) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    alone, module = make(0, norm=True), make(0, norm=True)
    theirs = adamw(alone)
    booster, model, ours = boosted(plugin, module)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(3 * ranks, 3, generator=generator, dtype=torch.float64)
        y = x.sum(-1).cos()
        F.mse_loss(alone(x), y).backward()
        booster.backward(F.mse_loss(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]), ours)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(alone, model)
    torch.testing.assert_close(model.eval()(x), alone.eval()(x), **EXACT)


def test_batch_statistics_are_those_of_the_whole_batch() -> None:
    run_on_ranks(2, normalize_over_ranks, "fsdp")


def go_on_under(plugin: str, other: str) -> tuple[dict[str, Any], dict[str, Any]]:
    booster, model, optimizer = boosted(plugin, make(0))
    train(booster, model, optimizer, range(2))
    saved = model.state_dict(), optimizer.state_dict()
    again, second, handle = boosted(other, make(1))
    train(again, second, handle, range(5, 6))
    second.load_state_dict(saved[0])
    handle.load_state_dict(saved[1])
    for loop in ((booster, model, optimizer), (again, second, handle)):
        train(*loop, range(2, 4))
    assert_same_weights(model.unwrap(), second)
    for one, two in zip(*(fb.tree.leaves(each.state_dict()["state"]) for each in (optimizer, handle)), strict=True):
        torch.testing.assert_close(one, two, **EXACT)
    return second.state_dict(), handle.state_dict()["state"]


def train(booster: fb.Booster, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        x, y = local_batch(step)
        booster.backward(F.mse_loss(model(x, more=step == 1), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("plugin", "other"), [("zero2", "fsdp"), ("fsdp", "zero1"), ("gemini", "ddp")])
def test_state_dicts_are_whole_and_go_from_plugin_to_plugin(plugin: str, other: str) -> None:
    first, second = run_on_ranks(2, go_on_under, plugin, other)
    for one, two in zip(fb.tree.leaves(first), fb.tree.leaves(second), strict=True):
        assert torch.equal(one, two)
    assert {name: value.shape for name, value in first[0].items()} == {
        name: value.shape for name, value in make(0).state_dict().items()
    }


def test_parameters_that_some_ranks_froze_are_an_error_on_all() -> None:
    told = run_on_ranks(2, freezes_for_itself)
    assert told == ["ranks train different parameters: middle.weight (1 of 2 ranks)"] * 2


def freezes_for_itself() -> str:
    booster, model, optimizer = boosted("zero1", make(0))
    train(booster, model, optimizer, range(1))
    dict(model.named_parameters())["middle.weight"].requires_grad_(dist.get_rank() == 0)
    with pytest.raises(RuntimeError) as caught:
        train(booster, model, optimizer, range(1))
    return str(caught.value)


def test_a_device_mesh_over_some_of_the_processes_is_refused_on_all() -> None:
    """The watchdog, for one, is that of all."""
    assert run_on_ranks(2, lays_out_alone) == ["mesh: the DeviceMesh holds ranks [0] of 2 processes, expected all"] * 2


def lays_out_alone() -> str:
    with pytest.raises(ValueError, match="DeviceMesh") as caught:
        fb.Booster(device="cpu", plugin=PLUGINS["ddp"](), mesh=DeviceMesh("cpu", [0], mesh_dim_names=("dp",)))
    return str(caught.value)


def test_a_rank_without_a_batch_is_an_error_on_all() -> None:
    told = run_on_ranks(2, steps_without_a_batch)
    assert told[0] == told[1]
    assert "1 of 2 ranks ran no forward since the last step, while others have gradients" in told[0]


def steps_without_a_batch() -> str:
    booster, model, optimizer = boosted("ddp", make(0).eval())
    train(booster, model, optimizer, range(1))
    x, y = local_batch(0)
    if dist.get_rank() == 0:
        F.mse_loss(model(x), y).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_a_backward_of_before_the_last_step_is_an_error(plugin: str) -> None:
    for told in run_on_ranks(2, late_backward, plugin):
        assert "before the last step" in told or "modified by an inplace operation" in told


def late_backward(plugin: str) -> str:
    booster, model, optimizer = boosted(plugin, make(0))
    late = model(local_batch(9)[0]).sum()
    train(booster, model, optimizer, range(1))
    with pytest.raises(RuntimeError) as caught:
        late.backward()
    train(booster, model, optimizer, range(1, 2))
    return str(caught.value)
