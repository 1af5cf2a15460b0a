"""The demo's training step against the same model and loop in plain eager PyTorch: ``python -m benchmarks.cpu_demo``.

Bars: jit at least 1.2 times as fast as plain eager PyTorch, the eager functional step at least 0.9 times.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
import tyro

import functional_booster as fb

from . import report, rivals


def main(
    model: Literal["gpt2", "llama"] = "gpt2",
    rounds: int = 20,
    batch: int = 16,
    length: int = 128,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
) -> None:
    """Time the three steps, interleaved; the loss of all of them falls on the same batch."""
    ids = fb.random.randint(fb.random.key(0), (batch, length), 0, 256).long()
    pure, module = build(model, length, width, layers, heads)
    tx = fb.optim.adamw(1e-3, weight_decay=0.1)
    booster = fb.Booster(device="cpu")

    def ours(jit: bool) -> Any:
        step = booster.train_step(pure.loss, tx, max_norm=1.0, jit=jit)
        state = [booster.init(pure, tx, key=fb.random.key(1))]

        def run() -> torch.Tensor:
            state[0], metrics = step(state[0], {"input_ids": ids})
            return metrics["loss"]

        return run

    plain = rivals.eager_step(module, 1e-3, 0.1, 1.0)
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
    sizes = {"batch": batch, "length": length, "width": width, "layers": layers, "heads": heads}
    report.publish(f"cpu_demo_{model}", rows, first_jitted_call_s=round(compile_seconds, 1), **sizes)


def build(family: str, length: int, width: int, layers: int, heads: int) -> tuple[fb.Model, torch.nn.Module]:
    """The model of the demo, ours and as a plain module."""
    if family == "gpt2":
        sizes = {"n_positions": length, "n_embd": width, "n_layer": layers, "n_head": heads}
        ours = fb.models.gpt2(vocab_size=256, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return ours, rivals.GPT(256, length, width, layers, heads)
    inner = -(-width * 8 // 3 // 64) * 64
    ours = fb.models.llama(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    return ours, rivals.Llama(256, width, inner, layers, heads, heads, length, torch.float32)


if __name__ == "__main__":
    tyro.cli(main)
