"""One training step of Llama-3.2-1B's shapes on one GPU against torch.compile: ``python -m benchmarks.llama_1b``.

4 x 4096 tokens, bf16 or fp8 with fp32 masters, clipping, AdamW; steps follow one another, as in training. Bar: fp8 at
least 1.2 times as fast as bf16.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import tyro

import functional_booster as fb

from . import report, rivals

STEPS = 4
SIZES = (128256, 2048, 8192, 16, 32, 8)


def ours(ids: torch.Tensor, precision: str) -> Callable[[], torch.Tensor]:
    """The functional step, jitted and donating."""
    vocabulary, width, inner, layers, heads, groups = SIZES
    model = fb.models.llama(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=ids.shape[1],
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    tx = fb.optim.adamw(1e-4, b2=0.95, weight_decay=0.1)
    booster = fb.Booster(device="cuda", mixed_precision=precision)
    step = booster.train_step(model.loss, tx, max_norm=1.0)
    held = [booster.init(model, tx, key=fb.random.key(0))]

    def run() -> torch.Tensor:
        held[0], metrics = step(held[0], {"input_ids": ids})
        return metrics["loss"]

    return run


def compiled(ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """torch.compile of the module, autocast, fused AdamW."""
    with torch.device("cuda"):
        model = rivals.Llama(*SIZES, length=ids.shape[1])
    step = rivals.amp_step(model, torch.compile(model), 1e-4, 0.1, 1.0, torch.bfloat16)
    return lambda: step(ids)


def repeated(run: Callable[[], Any]) -> None:
    """Steps that nobody waits for in between."""
    for _ in range(STEPS):
        run()


def main(batch: int = 4, length: int = 4096, rounds: int = 5) -> None:
    """First three steps cold, peak memory of each alone, then both interleaved."""
    torch.set_float32_matmul_precision("high")
    ids = torch.randint(SIZES[0], (batch, length), device="cuda")
    variants: dict[str, Callable[[], Any]] = {}
    cold, peak, loss = {}, {}, {}
    for name, build in {
        "ours": functools.partial(ours, precision="bf16"),
        "ours, fp8": functools.partial(ours, precision="fp8"),
        "torch.compile, AMP, fused AdamW": compiled,
    }.items():
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        variants[name] = build(ids)
        loss[name] = [float(variants[name]()) for _ in range(3)]
        cold[name] = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        variants[name]()
        torch.cuda.synchronize()
        peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(name, loss[name], f"cold {cold[name]:.1f} s, peak {peak[name]:.1f} GiB", flush=True)
    in_a_row = {name: functools.partial(repeated, run) for name, run in variants.items()}
    seconds = {name: value / STEPS for name, value in report.medians(report.interleaved(in_a_row, rounds)).items()}
    rows = [
        {
            "step": name,
            "ms": 1e3 * s,
            "tokens/s": batch * length / s,
            "peak GiB": peak[name],
            "first 3 steps s": cold[name],
        }
        for name, s in seconds.items()
    ]
    report.publish("llama_1b", rows, batch=batch, length=length, losses=loss)


if __name__ == "__main__":
    tyro.cli(main)
