"""Saving and loading a state: ours, torch.distributed.checkpoint and plain safetensors in turns, and the stall of an
async save: ``python -m benchmarks.checkpoints``.

Bar: not slower than either, though ours alone has checksums, and is on the disk when a save returns; the others are
also measured with an fsync of what they have written. ``ratio``: of a median to that of ours, or of the step alone.

Nobody pays for another's work: at each turn the disk has everything, and the memory that is free was touched a moment
ago. (A virtual machine gives the host back what has been free for seconds; to touch that takes ten times as long.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import tyro
from safetensors.torch import load_file, save_file

import functional_booster as fb
from functional_booster import checkpoint

from . import report

WIDTH = 1024


def main(gib: float = 0.25, rounds: int = 5, folder: Path | None = None, device: str | None = None) -> None:
    """``gib``: GiB in a state, parameters and AdamW's moments in fp32; ``folder``: on the disk to measure; ``device``:
    that the state is on, by default a GPU where there is one."""
    booster = fb.Booster(device=device)
    layers = max(1, round(gib * 2**30 / (3 * 4 * 4 * WIDTH**2)))
    shape = (4 * WIDTH, WIDTH)
    abstract = {f"layer{n:03}": fb.ArrayInfo(shape, initializer=fb.initializers.normal(0.02)) for n in range(layers)}
    model = fb.Model(lambda key: fb.initialize(abstract, key), lambda params, x: x, abstract)
    tx = fb.optim.adamw(1e-3)
    state = booster.init(model, tx, key=fb.random.key(0))
    tensors = {name: leaf.clone() for name, leaf in checkpoint.named_tensors(state).items()}
    size = sum(leaf.nbytes for leaf in tensors.values())
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        rows = _rivals(Path(scratch), booster, state, tensors, size, rounds)
        rows += _stall(Path(scratch), booster, state, size, rounds)
    name = "checkpoints" if booster.device.type == "cpu" else f"checkpoints_{booster.device.type}"
    report.publish(name, rows, bytes=size, rounds=rounds, cpus=os.cpu_count())


def _rivals(
    scratch: Path,
    booster: fb.Booster,
    state: fb.TrainState,
    tensors: dict[str, torch.Tensor],
    size: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Each save goes to a new place; each load comes from the cache of the disk, into new memory, as at a start."""
    homes = {name: scratch / name for name in ("ours", "dcp", "safetensors")}
    file = homes["safetensors"] / "model.safetensors"
    device = str(booster.device)

    def saved_by_safetensors(durable: bool) -> None:
        file.parent.mkdir()
        save_file(tensors, file)
        if durable:
            _sync(file.parent)

    def saved_by_dcp(durable: bool) -> None:
        writer = dcp.FileSystemWriter(homes["dcp"], sync_files=durable)
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)

    def loaded_by_safetensors() -> None:
        found = load_file(file, device=device)
        if device == "cpu":  # views of the file, of which nothing is read until they are copied
            found = {name: leaf.clone() for name, leaf in found.items()}

    def loaded_by_dcp() -> None:
        into = {name: torch.empty_like(leaf) for name, leaf in tensors.items()}
        dcp.load(into, storage_reader=dcp.FileSystemReader(homes["dcp"]), no_dist=True)

    saves: dict[str, tuple[str, Callable[[], Any]]] = {
        "save, ours": ("ours", lambda: checkpoint.save(homes["ours"], state)),
        "save, dcp, fsync": ("dcp", lambda: saved_by_dcp(True)),
        "save, safetensors, fsync": ("safetensors", lambda: saved_by_safetensors(True)),
        "save, dcp, not on the disk": ("dcp", lambda: saved_by_dcp(False)),
        "save, safetensors, not on the disk": ("safetensors", lambda: saved_by_safetensors(False)),
    }
    loads = {
        "load, ours": lambda: checkpoint.load(homes["ours"], state, device),
        "load, dcp": loaded_by_dcp,
        "load, safetensors": loaded_by_safetensors,
    }
    times: dict[str, list[float]] = {name: [] for name in (*saves, *loads)}
    for number in range(rounds + 1):
        for name, (home, save) in saves.items():
            shutil.rmtree(homes[home], ignore_errors=True)
            _settle(size)
            _time(name, save, times, number > 0)
        turn = number % len(loads)
        for name, load in [*loads.items()][turn:] + [*loads.items()][:turn]:
            _settle(size)
            _time(name, load, times, number > 0)
    medians = report.medians(times)
    ours = {name: seconds for name, seconds in medians.items() if name.endswith("ours")}
    return [
        _row(name, seconds, size, seconds / ours[f"{name.partition(',')[0]}, ours"])
        for name, seconds in medians.items()
    ]


def _stall(scratch: Path, booster: fb.Booster, state: fb.TrainState, size: int, rounds: int) -> list[dict[str, Any]]:
    """Until ``save_async`` returns, and how long a step (of a small GPT) takes while it writes, and after."""

    on_gpu = booster.device.type == "cuda"
    rows, tokens, width = (8, 1024, 1024) if on_gpu else (2, 64, 64)
    model = fb.models.gpt2(vocab_size=256, n_positions=tokens, n_embd=width, n_layer=2, n_head=4)
    tx = fb.optim.adamw(1e-3)
    step = booster.train_step(model.loss, tx, jit=on_gpu)
    trained = booster.init(model, tx, key=fb.random.key(0))
    batch = {"input_ids": torch.zeros(rows, tokens, dtype=torch.int64, device=booster.device)}
    stalls, written, during, after = [], [], [], []

    def timed() -> float:
        nonlocal trained
        start = time.perf_counter()
        trained, metrics = step(trained, batch)
        float(metrics["loss"])
        return time.perf_counter() - start

    for _ in range(3):
        timed()
    for number in range(rounds + 1):
        _settle(size)
        start = time.perf_counter()
        saving = checkpoint.save_async(scratch / "async", state)
        returned = time.perf_counter()
        slowed = []
        while not saving.done():
            slowed.append(timed())
        saving.result()
        ended = time.perf_counter()
        if number > 0:  # the first one makes the buffers
            stalls.append(returned - start)
            written.append(ended - start)
            during += slowed
            after += [timed() for _ in slowed]
    stall = _row("async save, until it returns", statistics.median(stalls), size)
    steps, mean, alone = statistics.median(during), statistics.mean(during), statistics.median(after)
    return [
        stall,
        _row("async save, until it is on the disk, between steps", statistics.median(written), size),
        {"what": "step during an async save", "ms": 1e3 * steps, "GiB/s": "", "ratio": steps / alone},
        {
            "what": "step during an async save, mean",
            "ms": 1e3 * mean,
            "GiB/s": "",
            "ratio": mean / statistics.mean(after),
        },
        {"what": "step alone", "ms": 1e3 * alone, "GiB/s": "", "ratio": 1.0},
    ]


def _time(name: str, work: Callable[[], Any], times: dict[str, list[float]], counts: bool) -> None:
    for measured in report.interleaved({name: work}, rounds=1, warmup=0)[name]:
        if counts:
            times[name].append(measured)


def _row(what: str, seconds: float, size: int, ratio: float | str = "") -> dict[str, Any]:
    return {"what": what, "ms": 1e3 * seconds, "GiB/s": size / seconds / 2**30, "ratio": ratio}


def _settle(size: int) -> None:
    """Have everything on the disk, and twice ``size`` bytes of memory that is free and was touched a moment ago.

    The process itself keeps none of it: all get theirs from the system.
    """
    os.sync()
    torch.ones(2 * size, dtype=torch.uint8)
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _sync(directory: Path) -> None:
    """Have a directory and its files on the disk."""
    for path in (*directory.iterdir(), directory):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


if __name__ == "__main__":
    tyro.cli(main)
