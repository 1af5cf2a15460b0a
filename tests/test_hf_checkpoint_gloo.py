"""Weights in Hugging Face's form on processes: all of them write, a leaf travels to its writer, a failure is all's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from live_memory import Live
from processes import run_on_ranks

import functional_booster as fb
from functional_booster import booster_io, hf_checkpoint, hf_writing, plugins
from functional_booster.kernels import random
from functional_booster.rank_failure import RankFailure

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes

PLUGINS: dict[str, Callable[[int], Any]] = {  # of a number of ranks
    "ddp": lambda ranks: plugins.TorchDDPPlugin(),
    "zero1": lambda ranks: plugins.LowLevelZeroPlugin(),
    "zero2": lambda ranks: plugins.LowLevelZeroPlugin(stage=2, extra_dp_size=ranks // 2),
    "fsdp": lambda ranks: plugins.TorchFSDPPlugin(),
    "gemini": lambda ranks: plugins.GeminiPlugin(
        offload_optim_frac=0.5, min_chunk_size_m=0.001, search_range_m=0.001, extra_dp_size=max(1, ranks // 2)
    ),
}
SIZE = 0.02  # MB


def model_of() -> Any:
    return fb.models.gpt2(vocab_size=50, n_positions=16, n_embd=36, n_layer=3, n_head=3)


def booster_of(plugin: str) -> fb.Booster:
    if plugin == "none":
        return fb.Booster("cpu")
    return fb.Booster("cpu", "fp32", plugin=PLUGINS[plugin](dist.get_world_size()))


def started(booster: fb.Booster, seed: int) -> Any:
    return booster.init(model_of(), fb.optim.adamw(1e-3), key=random.key(seed))


def same(got: Any, expected: Any) -> None:
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), got, expected)


def write(plugin: str, folder: Path) -> tuple[int, int]:
    """(bytes that this rank wrote, the most that it held meanwhile)."""
    state, written, as_bytes = started(booster_of(plugin), seed=1), 0, hf_writing.as_bytes

    def counted(tensor: torch.Tensor) -> memoryview:
        nonlocal written
        written += tensor.nbytes
        return as_bytes(tensor)

    with mock.patch.object(hf_writing, "as_bytes", counted), Live() as live:
        hf_checkpoint.save(folder, state, model_of(), size_per_shard=SIZE)
    return written, live.peak


def read(plugin: str, folder: Path) -> int:
    """The most bytes that this rank held beside the result."""
    booster, model = booster_of(plugin), model_of()
    before = started(booster, seed=2)
    with Live() as live:
        state, report = hf_checkpoint.load(folder, before, model)
    assert not report
    same(booster.full_params(state), started(fb.Booster("cpu"), seed=1).params)
    result = {"storage": state.storage, "frozen": state.frozen}
    return live.peak - sum(buffer.nbytes for buffer in fb.tree.leaves(result))


@pytest.mark.parametrize(("plugin", "ranks"), [*((plugin, 2) for plugin in PLUGINS), ("zero2", 4)])
def test_each_process_writes_and_reads_a_share(plugin: str, ranks: int, tmp_path: Path) -> None:
    sizes = [info.nbytes for info in fb.tree.leaves(model_of().abstract)]
    total, bound = sum(sizes), 4 * max(sizes)  # a tensor, of q, k and v, and a leaf
    shares = run_on_ranks(ranks, write, plugin, tmp_path)
    assert sum(share for share, _ in shares) == total
    assert max(share for share, _ in shares) < 1.5 * total / ranks
    assert max(held for _, held in shares) <= bound < total / 2
    assert max(run_on_ranks(ranks, read, plugin, tmp_path)) <= 2 * max(sizes)
    run_on_ranks(1, read, "none", tmp_path)
    run_on_ranks(2, read, "fsdp", tmp_path)


def fail(folder: Path, plugin: str) -> tuple[str, str]:
    """What each rank raises where rank 1's disk is full; the ranks then go on, and read what was there before."""
    booster, model = booster_of(plugin), model_of()
    old, new = started(booster, 1), started(booster, 2)
    hf_checkpoint.save(folder, old, model, size_per_shard=SIZE)
    names = sorted(file.name for file in folder.iterdir())
    dist.barrier()

    as_bytes = hf_writing.as_bytes

    def full(tensor: torch.Tensor) -> memoryview:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return as_bytes(tensor)

    with mock.patch.object(hf_writing, "as_bytes", full), pytest.raises((OSError, RankFailure)) as caught:
        hf_checkpoint.save(folder, new, model, size_per_shard=SIZE)
    dist.barrier()
    assert sorted(file.name for file in folder.iterdir()) == names
    state, _ = hf_checkpoint.load(folder, new, model)
    same(booster.full_params(state), booster.full_params(old))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_a_rank_that_cannot_write_is_an_error_on_all(plugin: str, tmp_path: Path) -> None:
    first, second = run_on_ranks(2, fail, tmp_path / "x", plugin)
    assert second[0] == "OSError" and "what was there before is whole" in second[1]
    assert first[0] == "RankFailure" and "No space left" in first[1]


def astray(folder: Path) -> str:
    booster, model = booster_of("fsdp"), model_of()
    state = started(booster, 1)
    hf_checkpoint.save(folder, state, model)
    with pytest.raises((FileNotFoundError, RankFailure)) as caught:
        hf_checkpoint.load(folder if dist.get_rank() == 0 else folder / "nowhere", state, model)
    return type(caught.value).__name__


def test_a_rank_that_cannot_read_is_an_error_on_all(tmp_path: Path) -> None:
    assert run_on_ranks(2, astray, tmp_path / "x") == ["RankFailure", "FileNotFoundError"]


def handles(plugin: str, seed: int, steps: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    model, optimizer, _, _, scheduler = booster_of(plugin).boost(module, optimizer, lr_scheduler=scheduler)
    train(model, optimizer, scheduler, steps)
    return model, optimizer, scheduler


def train(model: Any, optimizer: Any, scheduler: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.backward(model(torch.randn(4, 3, generator=generator, dtype=torch.float64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def resume(writer: str, reader: str, folder: Path, shard: bool) -> None:
    first, second = handles(writer, 0, steps=2), handles(reader, 1, steps=3)
    booster_io.save_model(first[0], folder / "m", shard=shard, size_per_shard=1e-4)
    booster_io.save_optimizer(first[1], folder / "o", shard=shard, size_per_shard=1e-4)
    booster_io.save_lr_scheduler(first[2], folder / "s")
    booster_io.load_model(second[0], folder / "m")
    booster_io.load_optimizer(second[1], folder / "o")
    booster_io.load_lr_scheduler(second[2], folder / "s")
    same(second[0].state_dict(), first[0].state_dict())
    same(second[1].state_dict()["state"], first[1].state_dict()["state"])
    for each in (first, second):
        train(*each, steps=2)
    for name, value in first[0].state_dict().items():
        torch.testing.assert_close(second[0].state_dict()[name], value, rtol=1e-10, atol=1e-12)
    assert [group["lr"] for group in second[1].param_groups] == [group["lr"] for group in first[1].param_groups]


@pytest.mark.parametrize(
    ("writer", "reader", "shard"),
    [("fsdp", "ddp", True), ("ddp", "gemini", False), ("gemini", "zero1", True), ("zero2", "fsdp", False)],
)
def test_handles_resume_under_another_plugin(writer: str, reader: str, shard: bool, tmp_path: Path) -> None:
    run_on_ranks(2, resume, writer, reader, tmp_path, shard)
