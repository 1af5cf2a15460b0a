"""Weights in Hugging Face's form in the background, and behind URLs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from live_memory import Live
from processes import run_on_ranks
from test_hf_checkpoint import LAYOUTS, assert_equal, boosted, llama_config, started, train

import functional_booster as fb
from functional_booster import booster_io, cli, hf_checkpoint, hf_writing
from functional_booster.checkpoint import background, folders
from functional_booster.kernels import tree
from functional_booster.rank_failure import RankFailure


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Generator[threading.Event]:
    """Nothing is written before this is set."""
    opened, as_bytes = threading.Event(), hf_writing.as_bytes

    def waiting(tensor: torch.Tensor) -> memoryview:
        assert opened.wait(30)
        return as_bytes(tensor)

    monkeypatch.setattr(hf_writing, "as_bytes", waiting)
    yield opened
    opened.set()
    background.settle()


def copied(values: Any) -> Any:
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, values)


# In the background


@pytest.mark.parametrize("layout", ["one device", "zero2", "fsdp", "gemini"])
@pytest.mark.parametrize("shard", [False, True])
def test_training_goes_on_while_it_is_written(layout: str, shard: bool, gate: threading.Event, tmp_path: Path) -> None:
    """What is on the disk at the end is what there was when the save was asked for."""
    first, second = boosted(layout, 0), boosted(layout, 1)
    names = ("m", "o") if shard else ("m.safetensors", "o.safetensors")
    options: dict[str, Any] = {"shard": shard, "size_per_shard": 1e-4, "use_async": True}
    weights, moments = copied(first[0].state_dict()), copied(first[1].state_dict()["state"])
    saving = booster_io.save_model(first[0], tmp_path / names[0], **options)
    assert saving is not None and not saving.done()
    train(first, 1, 5)
    assert not any(tmp_path.rglob("[!.]*.safetensors"))
    gate.set()
    saving.result()
    booster_io.load_model(second[0], tmp_path / names[0])
    assert_equal(second[0].state_dict(), weights)
    gate.clear()
    now = copied(first[1].state_dict()["state"])
    saving = booster_io.save_optimizer(first[1], tmp_path / names[1], **options)
    train(first, 1, 6)
    gate.set()
    booster_io.load_optimizer(second[1], tmp_path / names[1])  # which waits
    assert saving is not None and saving.done()
    assert_equal(second[1].state_dict()["state"], now)
    with pytest.raises(AssertionError):
        assert_equal(moments, now)


def full(tensor: torch.Tensor) -> memoryview:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["save_model", "save_optimizer", "load_model", "load_optimizer", "save", "scheduler"])
def test_an_error_is_raised_by_the_next_call(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, scheduler = boosted("one device", 0)
    booster_io.save_model(model, tmp_path / "m.safetensors")
    booster_io.save_optimizer(optimizer, tmp_path / "o.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    pure = fb.functionalize(torch.nn.Linear(2, 2))
    state = fb.Booster("cpu").init(pure, fb.optim.sgd(0.1), key=fb.random.key(0))
    calls = {
        "save_model": lambda: booster_io.save_model(model, tmp_path / "m.safetensors"),
        "save_optimizer": lambda: booster_io.save_optimizer(optimizer, tmp_path / "o.safetensors", use_async=True),
        "load_model": lambda: booster_io.load_model(model, tmp_path / "m.safetensors"),
        "load_optimizer": lambda: booster_io.load_optimizer(optimizer, tmp_path / "o.safetensors"),
        "save": lambda: fb.Booster("cpu").save(tmp_path / "native", state),
        "scheduler": lambda: booster_io.save_lr_scheduler(scheduler, tmp_path / "s.json"),
    }
    train((model, optimizer, scheduler), 1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(hf_writing, "as_bytes", full)
        saving = booster_io.save_model(model, tmp_path / "m.safetensors", use_async=True)
        while saving is not None and not saving.done():
            pass
    with pytest.raises(OSError, match=r"could not be written .*No space left.*; what was there before is whole"):
        calls[call]()
    assert (tmp_path / "m.safetensors").read_bytes() == before
    calls[call]()  # once is enough
    background.settle()


EXIT = """
import sys, threading, torch
import functional_booster as fb
from functional_booster import booster_io, hf_writing

as_bytes = hf_writing.as_bytes

def late(tensor):
    threading.main_thread().join()  # which is when the interpreter begins to exit
    if sys.argv[2] == "full":
        raise OSError(28, "No space left on device")
    return as_bytes(tensor)

hf_writing.as_bytes = late
model, *_ = fb.Booster("cpu").boost(torch.nn.Linear(2, 2))
booster_io.save_model(model, sys.argv[1], use_async=True)
print("main is over")
"""


def test_exit_waits_and_a_failed_save_is_a_failed_process(tmp_path: Path) -> None:
    for disk in ("well", "full"):
        path = tmp_path / f"{disk}.safetensors"
        ended = subprocess.run(
            [sys.executable, "-c", EXIT, str(path), disk],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert ended.stdout == "main is over\n"
        assert (ended.returncode, path.exists()) == ((0, True) if disk == "well" else (1, False))
        assert ("No space left on device" in ended.stderr) == (disk == "full")


def save_on_ranks(folder: Path) -> str:
    """A save between steps, then one that fails on rank 1; the first one's files stay."""
    booster = fb.Booster("cpu", "fp32", fb.TorchFSDPPlugin())
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Linear(7, 1))
    model, optimizer, *_ = booster.boost(module, torch.optim.AdamW(module.parameters(), lr=0.1))

    def step() -> None:
        optimizer.backward(model(torch.ones(4, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = copied(model.state_dict())
    options: dict[str, Any] = {"shard": True, "size_per_shard": 1e-5, "use_async": True}
    booster_io.save_model(model, folder / "m", **options)
    step()
    optimizer_saving = booster_io.save_optimizer(optimizer, folder / "o", **options)
    step()
    assert optimizer_saving is not None
    optimizer_saving.result(30)
    files = sorted(file.name for file in (folder / "m").iterdir())
    dist.barrier()
    message = ""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(hf_writing, "as_bytes", full)
        saving = booster_io.save_model(model, folder / "m", **options)
        step()
        assert saving is not None
        try:
            saving.result(30)
        except (OSError, RankFailure) as error:
            message = f"{type(error).__name__}: {error}"
    dist.barrier()
    assert sorted(file.name for file in (folder / "m").iterdir()) == files
    booster_io.load_model(model, folder / "m")
    booster_io.load_optimizer(optimizer, folder / "o")
    assert_equal(model.state_dict(), before)
    return message


@pytest.mark.xdist_group("ranks")
def test_processes_train_while_they_save_and_fail_together(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, save_on_ranks, tmp_path)
    assert first.startswith("RankFailure: rank 1 failed in save_model: OSError")
    assert second.startswith("OSError") and "what was there before is whole" in second


# Behind URLs


@pytest.fixture
def memory() -> Generator[str]:
    yield "memory://hf"
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("layout", ["one device", "fsdp"])
def test_a_url_holds_what_a_directory_does(layout: str, memory: str, tmp_path: Path) -> None:
    """The same files, byte for byte, however often they are replaced; and they are read."""
    model = fb.models.llama(llama_config(tied=True))
    booster = LAYOUTS[layout]()
    old, new, none = (started(booster, model, seed) for seed in (1, 2, 3))
    for state, size in ((old, 0.003), (new, 0.003), (old, 1), (new, 0.004), (old, 0.003)):
        hf_checkpoint.save(f"{memory}/x", state, model, size_per_shard=size)
        hf_checkpoint.save(tmp_path / "x", state, model, size_per_shard=size)
        place = folders.folder(f"{memory}/x")
        assert place.names() == sorted(file.name for file in (tmp_path / "x").iterdir())
        for name in place.names():
            with place.open(name) as stream:
                assert stream.read() == (tmp_path / "x" / name).read_bytes()
        for path in (f"{memory}/x", f"{memory}/x/{place.names()[-1]}"):
            assert_equal(hf_checkpoint.load(path, none, model)[0].storage, state.storage)


def test_a_url_is_read_slice_by_slice(memory: str) -> None:
    """As a file is: a slice in memory beside the result."""
    model = fb.models.llama(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    state = started(LAYOUTS["fsdp"](), model)
    largest = max(info.nbytes for info in tree.leaves(model.abstract))
    with Live() as writing:
        hf_checkpoint.save(memory, state, model, size_per_shard=0.1)
    with Live() as reading:
        hf_checkpoint.read_into(memory, hf_checkpoint._entries(model, state, None), lambda name: False, strict=True)
    assert largest <= writing.peak <= 2 * largest and reading.peak <= 2 * largest


def test_a_failed_write_behind_a_url_leaves_the_old_one(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fb.models.llama(llama_config())
    old, new = (started(fb.Booster("cpu"), model, seed) for seed in (1, 2))
    hf_checkpoint.save(memory, old, model, size_per_shard=0.003)
    names = folders.folder(memory).names()
    with monkeypatch.context() as patch:
        patch.setattr(hf_writing, "as_bytes", full)
        with pytest.raises(OSError, match=r"memory://.*could not be written"):
            hf_checkpoint.save(memory, new, model, size_per_shard=0.003)
    assert folders.folder(memory).names() == names
    assert_equal(hf_checkpoint.load(memory, new, model)[0].storage, old.storage)


def test_handles_and_schedulers_behind_urls(memory: str) -> None:
    first, second = boosted("fsdp", 0), boosted("zero1", 1)
    booster_io.save_model(first[0], f"{memory}/run/m", shard=True, size_per_shard=1e-4, use_async=True)
    booster_io.save_optimizer(first[1], f"{memory}/run/o.safetensors")
    booster_io.save_lr_scheduler(first[2], f"{memory}/run/s.json")
    booster_io.load_model(second[0], f"{memory}/run/m")
    booster_io.load_optimizer(second[1], f"{memory}/run/o.safetensors")
    booster_io.load_lr_scheduler(second[2], f"{memory}/run/s.json")
    assert_equal(second[0].state_dict(), first[0].state_dict())
    assert_equal(second[1].state_dict()["state"], first[1].state_dict()["state"])
    assert second[2].state_dict() == first[2].state_dict()
    with pytest.raises(FileExistsError, match="is a directory: expected a file, or shard=True"):
        booster_io.save_model(first[0], f"{memory}/run/m")


def test_convert_and_inspect_behind_urls(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = fb.models.llama(llama_config())
    state = started(fb.Booster("cpu"), model)
    hf_checkpoint.save(f"{memory}/a", state, model)
    assert cli.main(["convert", f"{memory}/a", f"{memory}/b"]) == 0
    assert cli.main(["convert", f"{memory}/b", f"{memory}/c", "--config", f"{memory}/a/config.json"]) == 0
    for each in ("a", "c"):
        capsys.readouterr()
        assert cli.main(["inspect", f"{memory}/{each}", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["totals"]["parameters"] == sum(info.size for info in tree.leaves(model.abstract))
    loaded, _ = hf_checkpoint.load(f"{memory}/c", started(fb.Booster("cpu"), model, 9), model)
    assert_equal(loaded.params, state.params)
