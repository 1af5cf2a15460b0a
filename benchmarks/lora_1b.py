"""Fine-tuning Llama-3.2-1B's shapes with LoRA on one GPU: ``python -m benchmarks.lora_1b``.

Adapters of rank 16 on all linear layers; the base in bf16, adapters and AdamW's state in float32. Ours, ours over NF4
(QLoRA), and peft's PeftModel under torch.compile, in turns. ``--no-jit`` and small sizes run anywhere, uncompiled.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
import tyro

import functional_booster as fb
from functional_booster.sharding.abstract import ArrayInfo

from . import report, rivals


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A Llama, and the batch that it sees."""

    vocabulary: int = 128256
    width: int = 2048
    inner: int = 8192
    layers: int = 16
    heads: int = 32
    groups: int = 8
    batch: int = 4
    length: int = 4096
    rank: int = 16


def ours(sizes: Sizes, ids: torch.Tensor, jit: bool, quantize: bool) -> Callable[[], torch.Tensor]:
    """The functional step."""
    base = in_bf16(
        fb.models.llama(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.width,
            intermediate_size=sizes.inner,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.groups,
            max_position_embeddings=sizes.length,
            rope_theta=500000.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    config = peft.LoraConfig(r=sizes.rank, lora_alpha=2 * sizes.rank, target_modules="all-linear")
    model = fb.lora.adapt(base, config, quantize=quantize)
    tx = fb.optim.adamw(1e-4, weight_decay=0.1)
    booster = fb.Booster(device=ids.device)
    step = booster.train_step(model.loss, tx, max_norm=1.0, jit=jit)
    held = [booster.init(model, tx, key=fb.random.key(0))]

    def run() -> torch.Tensor:
        held[0], metrics = step(held[0], {"input_ids": ids})
        return metrics["loss"]

    return run


def in_bf16(model: fb.Model) -> fb.Model:
    """The model with parameters in bfloat16."""

    def half(info: ArrayInfo) -> ArrayInfo:
        return dataclasses.replace(info, dtype=torch.bfloat16)

    def init(key: torch.Tensor) -> Any:
        return fb.tree.map(lambda leaf: leaf.bfloat16(), model.init(key))

    return dataclasses.replace(model, init=init, abstract=fb.tree.map(half, model.abstract))


def theirs(sizes: Sizes, ids: torch.Tensor, jit: bool) -> Callable[[], torch.Tensor]:
    """peft's layers in a module, autocast, fused AdamW."""
    shape = (sizes.vocabulary, sizes.width, sizes.inner, sizes.layers, sizes.heads, sizes.groups)
    with torch.device(ids.device):
        base = rivals.Llama(*shape, length=sizes.length).bfloat16()
        layers = ["q", "k", "v", "o", "gate", "up", "down"]
        config = peft.LoraConfig(r=sizes.rank, lora_alpha=2 * sizes.rank, target_modules=layers)
        model = peft.get_peft_model(base, config)
    forward = torch.compile(model) if jit else model
    step = rivals.amp_step(model, forward, 1e-4, 0.1, 1.0, torch.bfloat16)
    return lambda: step(ids)


def main(sizes: Sizes = Sizes(), rounds: int = 8, jit: bool = True) -> None:
    """First three steps cold, peak memory of each alone, then all interleaved."""
    torch.set_float32_matmul_precision("high")
    on_gpu = torch.cuda.is_available()
    ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length), device="cuda" if on_gpu else "cpu")
    variants: dict[str, Callable[[], Any]] = {}
    cold, peak, loss = {}, {}, {}
    for name, build in {
        "LoRA": functools.partial(ours, sizes, ids, jit, quantize=False),
        "QLoRA, NF4": functools.partial(ours, sizes, ids, jit, quantize=True),
        "peft, torch.compile, AMP, fused AdamW": functools.partial(theirs, sizes, ids, jit),
    }.items():
        gc.collect()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        start = time.perf_counter()
        variants[name] = build()
        loss[name] = [float(variants[name]()) for _ in range(3)]
        cold[name] = time.perf_counter() - start
        peak[name] = (_peak(variants[name]) - before) / 2**30 if on_gpu else float("nan")
        print(name, loss[name], f"cold {cold[name]:.1f} s, peak {peak[name]:.2f} GiB", flush=True)
    seconds = report.medians(report.interleaved(variants, rounds))
    tokens = sizes.batch * sizes.length
    rows = [
        {"step": name, "ms": 1e3 * s, "tokens/s": tokens / s, "peak GiB": peak[name], "first 3 steps s": cold[name]}
        for name, s in seconds.items()
    ]
    report.publish("lora_1b", rows, sizes=dataclasses.asdict(sizes), jit=jit, losses=loss)


def _peak(run: Callable[[], Any]) -> int:
    """Bytes that are allocated at once, at most, in a step."""
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    tyro.cli(main)
