"""A rank of ``test_gpu.test_plugins_on_two_gpus``: every plugin over NCCL equals one device; exits with 1 if not."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

import functional_booster as fb

PLUGINS: dict[str, Any] = {
    "ddp": fb.TorchDDPPlugin(),
    "zero-1": fb.LowLevelZeroPlugin(stage=1),
    "zero-2": fb.LowLevelZeroPlugin(stage=2),
    "zero-2, replicated": fb.LowLevelZeroPlugin(stage=2, extra_dp_size=2),
    "zero-2, offloaded": fb.LowLevelZeroPlugin(stage=2, cpu_offload=True),
    "fsdp": fb.TorchFSDPPlugin(),
    "gemini": fb.GeminiPlugin(),
    "gemini, half": fb.GeminiPlugin(shard_param_frac=0.5),
    "gemini, offloaded": fb.GeminiPlugin(offload_optim_frac=1.0),
}
MODEL = fb.models.gpt2(n_layer=3, n_head=2, n_embd=64, vocab_size=101, n_positions=16, resid_pdrop=0.1)
TX = fb.optim.adamw(1e-2, eps=1e-3, weight_decay=0.1)  # a gradient of about zero moves little: its sign is rounding


JITTED = ("ddp", "zero-2", "fsdp")  # a compilation each


def trained(plugin: Any, rows: torch.Tensor, accumulate: int, jit: bool) -> tuple[fb.tree.Tree, list[float]]:
    """The parameters and losses of four steps."""
    booster = fb.Booster(mixed_precision="fp32", plugin=plugin)
    state = booster.init(MODEL, TX, key=fb.random.key(0))
    step = booster.train_step(MODEL.loss, TX, accumulate=accumulate, max_norm=0.5, jit=jit)
    losses = []
    for _ in range(4):
        state, metrics = step(state, {"input_ids": rows})
        losses.append(float(metrics["loss"]))
    return booster.full_params(state), losses


def main(names: list[str]) -> None:
    """Compare each plugin with one device on the whole batch."""
    fb.launch_from_torch()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.randint(101, (4 * ranks, 16), generator=torch.Generator().manual_seed(0)).cuda()
    expected, losses = trained(None, whole, accumulate=2 * ranks, jit=False)
    failed = []
    for name in names or PLUGINS:
        params, got = trained(PLUGINS[name], whole.chunk(ranks)[rank], accumulate=2, jit=name in JITTED)
        apart = max(
            float((a - b).abs().max()) for a, b in zip(fb.tree.leaves(params), fb.tree.leaves(expected), strict=True)
        )
        off = max(abs(a - b) for a, b in zip(got, losses, strict=True))
        if rank == 0:
            print(f"{name}: parameters apart by {apart:.2g}, losses by {off:.2g}", flush=True)
        if not (apart < 1e-4 and off < 1e-4):
            failed.append(name)
    if failed:
        sys.exit(f"differs from one device: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
