"""The demo's training step against the same model and loop in plain eager PyTorch: ``python -m benchmarks.cpu_demo``.

Bars: jit at least 1.2 times as fast as plain eager PyTorch, the eager functional step at least 0.9 times.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import tyro

import functional_booster as fb

from . import report, rivals


def main(rounds: int = 20, batch: int = 16, length: int = 128, width: int = 128, layers: int = 4, heads: int = 4) -> None:
    """Time the three steps, interleaved; the loss of all of them falls on the same batch."""
    ids = fb.random.randint(fb.random.key(0), (batch, length), 0, 256).long()
    sizes = {"n_positions": length, "n_embd": width, "n_layer": layers, "n_head": heads}
    model = fb.models.gpt2(vocab_size=256, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    tx = fb.optim.adamw(1e-3, weight_decay=0.1)
    booster = fb.Booster(device="cpu")

    def ours(jit: bool) -> Any:
        step = booster.train_step(model.loss, tx, max_norm=1.0, jit=jit)
        state = [booster.init(model, tx, key=fb.random.key(1))]

        def run() -> torch.Tensor:
            state[0], metrics = step(state[0], {"input_ids": ids})
            return metrics["loss"]

        return run

    plain = rivals.eager_step(rivals.GPT(256, length, width, layers, heads), 1e-3, 0.1, 1.0)
    jitted = ours(jit=True)
    start = time.perf_counter()
    jitted()
    compile_seconds = time.perf_counter() - start
    variants = {"plain eager PyTorch": lambda: plain(ids), "ours, eager": ours(jit=False), "ours, jit": jitted}
    seconds = report.medians(report.interleaved(variants, rounds))
    base = seconds["plain eager PyTorch"]
    rows = [
        {"step": name, "ms": 1e3 * value, "tokens/s": batch * length / value, "times plain": base / value}
        for name, value in seconds.items()
    ]
    report.publish("cpu_demo", rows, first_jitted_call_s=round(compile_seconds, 1), batch=batch, length=length, **sizes)


if __name__ == "__main__":
    tyro.cli(main)
