"""What every benchmark needs: interleaved timing, a table on the terminal, JSON with device and versions."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def interleaved(variants: dict[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each call, the variants taking turns, so that a noisy machine is noisy for all of them."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(warmup + rounds):
        for name, run in variants.items():
            _synchronize()
            start = time.perf_counter()
            run()
            _synchronize()
            if index >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def captured(fn: Callable[[], Any]) -> Callable[[], Any]:
    """``fn`` as a CUDA graph, so that what is timed is the GPU's work alone; on a CPU, ``fn`` itself."""
    if not torch.cuda.is_available():
        return fn
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiled and warm before the capture
            fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """The median seconds of each variant."""
    return {name: statistics.median(values) for name, values in times.items()}


def environment() -> dict[str, Any]:
    """Device, threads and versions that a figure belongs to."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else _processor(),
        "gpus": torch.cuda.device_count() if gpu else 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def publish(name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Print the rows as a table and write them to ``results/NAME.json``."""
    table = Table(*rows[0], title=name)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(file=sys.stdout).print(table)
    RESULTS.mkdir(exist_ok=True)
    content = {"benchmark": name, **environment(), **more, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
