"""Training curves in each precision against float32's: ``python -m benchmarks.precision_curves``, on two virtual ranks,
or on as many processes as ``torchrun -m benchmarks.precision_curves`` starts.

Band: the mean loss of the last 50 of 300 steps within 2% of float32's, under DDP and FSDP.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
import tyro

import functional_booster as fb

from . import report

PLUGINS = {"ddp": fb.TorchDDPPlugin, "fsdp": fb.TorchFSDPPlugin}
PRECISIONS = ("fp32", "bf16", "fp16", "fp16_apex", "fp16_naive", "fp8")
BAND = 0.02
TAIL = 50  # the last steps, whose mean is compared


def main(steps: int = 300, batch: int = 16, length: int = 64, width: int = 64, layers: int = 2) -> None:
    """Train a small GPT on the standard library's source once for each plugin and precision, on the same batches."""
    real = "RANK" in os.environ
    if real:
        fb.launch_from_torch(backend="gloo")
    text = fb.data.bytes_of(fb.data.text_files())
    batch_at = fb.data.batches(text, batch, length, 0, "cpu")
    sizes = {"n_positions": length, "n_embd": width, "n_layer": layers, "n_head": 4}
    model = fb.models.gpt2(vocab_size=fb.data.VOCABULARY, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    rows = []
    for plugin in PLUGINS:
        losses = {name: curve(model, plugin, name, batch_at, steps, real) for name in PRECISIONS}
        base = statistics.fmean(losses["fp32"][-TAIL:])
        for name, values in losses.items():
            last = statistics.fmean(values[-TAIL:])
            apart = max(abs(a - b) for a, b in zip(smooth(values), smooth(losses["fp32"]), strict=True))
            rows.append(
                {
                    "plugin": plugin,
                    "precision": name,
                    "first loss": values[0],
                    "last loss": last,
                    "against fp32": last / base - 1,
                    "furthest apart": apart,
                    "within band": abs(last / base - 1) <= BAND,
                }
            )
    if not real or dist.get_rank() == 0:
        where = f"{dist.get_world_size()} processes" if real else "2 virtual ranks"
        options = {"steps": steps, "batch": batch, "length": length, "width": width, "layers": layers}
        report.publish(f"precision_curves_{'processes' if real else 'virtual'}", rows, ranks=where, **options)
    if real:
        dist.destroy_process_group()


def curve(model: fb.Model, plugin: str, precision: str, batch_at: Any, steps: int, real: bool) -> list[float]:
    """The loss of each step; those of skipped steps too."""
    booster = fb.Booster("cpu", precision, PLUGINS[plugin](), None if real else fb.virtual_mesh(2))
    tx = fb.optim.adamw(1e-3, weight_decay=0.1)
    state = booster.init(model, tx, key=fb.random.key(0))
    step = booster.train_step(model.loss, tx, max_norm=1.0, jit=False)
    losses = []
    for position in range(steps):
        rows = batch_at(position)
        if real:
            rows = fb.tree.map(lambda leaf: leaf.chunk(dist.get_world_size())[dist.get_rank()], rows)
        state, metrics = step(state, rows)
        losses.append(metrics["loss"].item())
    return losses


def smooth(values: list[float]) -> list[float]:
    """Means over ``TAIL`` steps."""
    return [statistics.fmean(values[place : place + TAIL]) for place in range(0, len(values), TAIL)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)
