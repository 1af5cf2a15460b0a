"""A rank of ``test_gpu.test_checkpoints_go_from_two_gpus_to_one_and_back``: ``PHASE FOLDER``; exits with 1 on failure.

"first": two GPUs train, save, at once and in the background, and go on; "alone": one GPU reads both checkpoints, writes
what it read and trains as far; "back": two GPUs read that and go on, bitwise as the first did.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import functional_booster as fb

MODEL = fb.models.gpt2(n_layer=3, n_head=2, n_embd=64, vocab_size=101, n_positions=16, resid_pdrop=0.1)
TX = fb.optim.adamw(1e-2, eps=1e-3, weight_decay=0.1)
PLUGINS: dict[str, Any] = {
    "fsdp": fb.TorchFSDPPlugin(),
    "zero-2": fb.LowLevelZeroPlugin(stage=2),
    "gemini, offloaded": fb.GeminiPlugin(offload_optim_frac=1.0),
}


def main(phase: str, folder: Path) -> None:
    """Run one phase for every plugin."""
    if phase != "alone":
        fb.launch_from_torch()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if phase != "alone" else (0, 1)
    whole = torch.randint(101, (8, 16), generator=torch.Generator().manual_seed(0)).cuda()
    for name, plugin in PLUGINS.items():
        booster = fb.Booster(mixed_precision="bf16", plugin=plugin if ranks > 1 else None)
        step = booster.train_step(MODEL.loss, TX, accumulate=4 // ranks, max_norm=0.5, jit=False)

        def trained(state: Any, step: Any = step) -> tuple[Any, list[float]]:
            losses = []
            for _ in range(2):
                state, metrics = step(state, {"input_ids": whole.chunk(ranks)[rank]})
                losses.append(float(metrics["loss"]))
            return state, losses

        like = booster.abstract(MODEL, TX)
        at, note = folder / name, folder / f"{name}.json"
        if phase == "first":
            state, _ = trained(booster.init(MODEL, TX, key=fb.random.key(0)))
            booster.save(at, state)
            saving = booster.save(folder / f"{name} (background)", state, use_async=True)
            _, losses = trained(state)
            assert saving is not None
            saving.result()
            if rank == 0:
                note.write_text(json.dumps(losses))
        elif phase == "alone":
            state = booster.load(at, like=like)
            other = booster.load(folder / f"{name} (background)", like=like)
            for one, two in zip(fb.tree.leaves(state), fb.tree.leaves(other), strict=True):
                assert torch.equal(one, two), f"{name}: what was saved in the background differs"
            booster.save(folder / f"{name} (of one)", state)
            _, losses = trained(state)
            torch.testing.assert_close(losses, json.loads(note.read_text()), rtol=0, atol=2e-2)
        else:
            _, losses = trained(booster.load(folder / f"{name} (of one)", like=like))
            assert losses == json.loads(note.read_text()), f"{name}: {losses}, not as the run that never stopped"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
