"""What ``functional-booster train`` is told, and which of it makes no sense."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FREE_ON_RESUME = ("out", "data", "resume", "stop_after", "device", "sample", "profile")

LAYOUT = ("plugin", "virtual_ranks")  # a resumed run's own, unless given

_COUNTS = ("n_layer", "n_embd", "n_head", "batch_size", "steps", "accumulate", "log_every", "eval_every", "save_every")


@dataclass(frozen=True)
class Train:
    """Train a small language model, byte by byte, on text.

    On several processes: torchrun --nproc-per-node 2 -m functional_booster train --plugin torch_fsdp. Plugins split
    each batch over ranks. torch_ddp: every rank holds everything; low_level_zero: optimizer state is split too (ZeRO
    stage 1), low_level_zero_2: and gradients (stage 2); torch_fsdp, gemini: and parameters, gathered where they are
    used, by blocks or by chunks.
    """

    data: Path | None = None
    """A text file or a folder; without it, the source of Python's standard library. --resume may say where it moved."""
    out: Path = Path("runs/gpt")
    """Folder of the run; it must be new, unless --resume is given."""
    resume: bool = False
    """Go on with the run in --out, bit for bit (on another layout, to rounding). Its other settings must stay."""
    model: Literal["llama", "gpt2"] = "llama"
    """Family of the model: a GPT with Llama's blocks (RMSNorm, rotary positions, SwiGLU), or GPT-2's."""
    n_layer: int = 4
    """Number of blocks."""
    n_embd: int = 128
    """Width of the model."""
    n_head: int = 4
    """Attention heads; they divide --n-embd."""
    length: int = 128
    """Bytes in a window of text, and the longest text that the model reads."""
    batch_size: int = 16
    """Windows in a step, of all ranks together."""
    steps: int = 300
    """Steps of the whole run; the learning rate falls until the last."""
    stop_after: int | None = None
    """Stop early, after this many steps of the run; --resume goes on."""
    lr: float = 3e-3
    """Peak learning rate of AdamW: a linear rise, then a cosine."""
    warmup: int | None = None
    """Steps of the rise; None: 20, or a tenth of the steps of a shorter run."""
    weight_decay: float = 0.1
    """On matrices; biases and gains have none."""
    max_norm: float | None = 1.0
    """Norm that gradients are clipped to; --max-norm None does not clip."""
    accumulate: int = 1
    """Parts that a batch is cut into, one after another, to save memory; they and the ranks divide --batch-size."""
    precision: Literal["fp32", "bf16", "fp16", "fp16_apex", "fp16_naive", "fp8"] = "fp32"
    """Of the computation; parameters and optimizer stay in 32 bits."""
    plugin: Literal["none", "torch_ddp", "low_level_zero", "low_level_zero_2", "torch_fsdp", "gemini"] = "none"
    """How the training is spread over the processes of torchrun, or over --virtual-ranks; none: one device."""
    virtual_ranks: int | None = None
    """Ranks of the plugin, run by this one process, to see on one device what many would do."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes the GPU where there is one."""
    jit: bool = True
    """Compile the step; without, the same Python runs eagerly."""
    seed: int = 0
    """Of the parameters, the order of the data, and the sample."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    eval_every: int = 100
    """Steps between two validations."""
    save_every: int = 100
    """Steps between two checkpoints; one is also written at the end, and on Ctrl-C."""
    sample: int = 400
    """Bytes of text that the trained model writes at the end."""
    profile: bool = False
    """Record the eighth to the tenth step of this session with torch.profiler, into profile/trace.json in --out."""

    @property
    def warmup_steps(self) -> int:
        """Steps of the rise, chosen for a run that leaves it open."""
        return min(20, self.steps // 10) if self.warmup is None else self.warmup


def flag(name: str) -> str:
    """The option as it is typed."""
    return "--" + name.replace("_", "-")


def check(config: Train) -> None:
    """Raise ValueError, naming the option, for numbers that make no sense, alone or together."""
    for name in _COUNTS:
        if getattr(config, name) < 1:
            raise ValueError(f"{flag(name)}: {getattr(config, name)}, expected at least 1")
    for name in ("stop_after", "virtual_ranks"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"{flag(name)}: {value}, expected at least 1")
    if config.virtual_ranks is not None and config.plugin == "none":
        raise ValueError(f"--virtual-ranks: {config.virtual_ranks}, but --plugin none has one; choose a plugin")
    if config.sample < 0:
        raise ValueError(f"--sample: {config.sample}, expected a number of bytes")
    if config.length < 2:
        raise ValueError(f"--length: {config.length}, expected at least 2 bytes, one to read and one to predict")
    if config.n_embd % config.n_head:
        raise ValueError(f"--n-head: {config.n_head} does not divide --n-embd {config.n_embd}")
    if config.batch_size % config.accumulate:
        raise ValueError(f"--accumulate: {config.accumulate} does not divide --batch-size {config.batch_size}")
    if not 0 <= config.warmup_steps < config.steps:
        raise ValueError(f"--warmup: {config.warmup}, expected 0 or more, and fewer than --steps {config.steps}")
    for name in ("lr", "max_norm"):
        if (value := getattr(config, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag(name)}: {value}, expected a positive number")
    if not 0 <= config.weight_decay < math.inf:
        raise ValueError(f"--weight-decay: {config.weight_decay}, expected a number that is not negative")
