"""One training step of Llama-3.2-1B's shapes on several GPUs against DDP and FSDP2, compiled.

``torchrun --nproc-per-node 2 -m benchmarks.data_parallel``: 4 x 4096 tokens a GPU, bf16 with fp32 masters, clipping,
AdamW. ``one GPU`` is each process on its own, at the same time: scaling is measured against it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import functional_booster as fb

from . import report, rivals

Step = Callable[[torch.Tensor], torch.Tensor]
LLAMA_1B = (128256, 2048, 8192, 16, 32, 8)
TINY = (512, 64, 128, 3, 4, 2)
RATE, DECAY, MAX_NORM = 1e-4, 0.1, 1.0


def ours(plugin: Any, sizes: tuple[int, ...], length: int, device: torch.device) -> Step:
    """The functional step under a plugin (None: each process on its own)."""
    vocabulary, width, inner, layers, heads, groups = sizes
    model = fb.models.llama(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=length,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    tx = fb.optim.adamw(RATE, weight_decay=DECAY)
    booster = fb.Booster(device=device, mixed_precision="bf16", plugin=plugin)
    step = booster.train_step(model.loss, tx, max_norm=MAX_NORM)
    held = [booster.init(model, tx, key=fb.random.key(0))]

    def run(ids: torch.Tensor) -> torch.Tensor:
        held[0], metrics = step(held[0], {"input_ids": ids})
        return metrics["loss"]

    return run


def ddp(sizes: tuple[int, ...], length: int, device: torch.device) -> Step:
    """DistributedDataParallel, torch.compile, autocast, fused AdamW."""
    with device:
        model = rivals.Llama(*sizes, length=length)
    index = None if device.index is None else [device.index]
    wrapped = DistributedDataParallel(model, device_ids=index, gradient_as_bucket_view=True)
    return rivals.amp_step(model, torch.compile(wrapped), RATE, DECAY, MAX_NORM, torch.bfloat16)


def fsdp2(sizes: tuple[int, ...], length: int, device: torch.device) -> Step:
    """fully_shard and torch.compile a block, gradients reduced in bf16, fused AdamW."""
    with device:
        model = rivals.Llama(*sizes, length=length)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def run(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run


VARIANTS: dict[str, Callable[..., Step]] = {
    "TorchFSDPPlugin": lambda *args: ours(fb.TorchFSDPPlugin(), *args),
    "FSDP2, compiled blocks": fsdp2,
    "DDP, torch.compile": ddp,
    "LowLevelZeroPlugin": lambda *args: ours(fb.LowLevelZeroPlugin(stage=2), *args),
    "TorchDDPPlugin": lambda *args: ours(fb.TorchDDPPlugin(), *args),
    "one GPU": lambda *args: ours(None, *args),
}


def measured_cold(build: Callable[..., Step], args: tuple[Any, ...], ids: torch.Tensor) -> tuple[Step, dict[str, Any]]:
    """The step, built and run three times; seconds that took, losses, and the peak GiB of a further step."""
    gpu = ids.is_cuda
    gc.collect()
    before = torch.cuda.memory_allocated() if gpu else 0
    start = time.perf_counter()
    step = build(*args)
    losses = [float(step(ids)) for _ in range(3)]
    cold = time.perf_counter() - start
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    losses.append(float(step(ids)))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if gpu else float("nan")
    return step, {"first 3 steps s": cold, "peak GiB": peak, "losses": losses}


def main(
    batch: int = 4,
    length: int = 4096,
    rounds: int = 10,
    tiny: bool = False,
    variants: tuple[str, ...] = tuple(VARIANTS),
) -> None:
    """First three steps cold and peak memory of each variant, then all interleaved."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(device_id=device if gpu else None)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_float32_matmul_precision("high")
    sizes = TINY if tiny else LLAMA_1B
    ids = torch.randint(sizes[0], (batch, length), generator=torch.Generator().manual_seed(rank)).to(device)
    steps: dict[str, Step] = {}
    cold: dict[str, dict[str, Any]] = {}
    for name in variants:
        steps[name], cold[name] = measured_cold(VARIANTS[name], (sizes, length, device), ids)
        if rank == 0:
            print(name, cold[name], flush=True)
    seconds = report.medians(
        report.interleaved({name: lambda step=step: step(ids) for name, step in steps.items()}, rounds)
    )
    rows = [
        {
            "step": name,
            "ms": 1e3 * s,
            "tokens/s": batch * length * ranks / s,
            **{key: value for key, value in cold[name].items() if key != "losses"},
        }
        for name, s in seconds.items()
    ]
    if rank == 0:
        losses = {name: cold[name]["losses"] for name in variants}
        report.publish(f"data_parallel_{ranks}", rows, ranks=ranks, batch=batch, length=length, losses=losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main)
