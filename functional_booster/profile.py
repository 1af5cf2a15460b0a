"""How fast is it: the work of a token, the device's peak, memory, and a trace to look at."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from functional_booster.kernels import tree

if TYPE_CHECKING:
    from .models.model import Model

# Dense peaks in FLOP/s from the vendors' data sheets, by a part of the device's name, the more special name first.
# float32 is the plain unit, without TF32.
_PEAKS: tuple[tuple[str, dict[torch.dtype, float]], ...] = (
    (r"B200|GB200", {torch.bfloat16: 2250e12, torch.float16: 2250e12, torch.float32: 75e12}),
    (r"H100 PCIe", {torch.bfloat16: 756e12, torch.float16: 756e12, torch.float32: 51e12}),
    (r"H100 NVL", {torch.bfloat16: 835e12, torch.float16: 835e12, torch.float32: 60e12}),
    (r"H100|H200|GH200", {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12}),
    (r"A100|A800", {torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12}),
    (r"L40S", {torch.bfloat16: 362e12, torch.float16: 362e12, torch.float32: 91.6e12}),
    (r"L4\b", {torch.bfloat16: 121e12, torch.float16: 121e12, torch.float32: 30.3e12}),
    (r"V100", {torch.float16: 125e12, torch.float32: 15.7e12}),
    (r"T4\b", {torch.float16: 65e12, torch.float32: 8.1e12}),
    (r"MI300X", {torch.bfloat16: 1307e12, torch.float16: 1307e12, torch.float32: 163.4e12}),
)
_LOOKED_UP = re.compile(r"(^|\.)(wte|wpe|embed_tokens|lm_head)(\.|$)")


def peak_flops(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """The dense peak of a device in FLOP/s for matrix products of ``dtype``; None for a CPU or an unknown device."""
    device = torch.device(device)
    return peak_flops_of(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_flops_of(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """``peak_flops`` by the device's name, such as "NVIDIA H100 80GB HBM3"."""
    return next((peaks.get(dtype) for pattern, peaks in _PEAKS if re.search(pattern, name)), None)


def flops_per_token(model: Model, length: int) -> float:
    """FLOPs of training on one token of a sequence of ``length`` tokens: 6 N + 12 L D T.

    N counts the parameters that multiply: every one but the embedding tables, and the head's V x D once, tied or not. L
    layers, D model width, T tokens; attention counts in full, masked or not, and recomputation does not count (PaLM,
    appendix B, https://arxiv.org/abs/2204.02311). Raises ValueError for a model whose config does not say its sizes.
    """
    layers, width, vocabulary = _sizes(model)
    inner = sum(leaf.size for name, leaf in tree.named_leaves(model.abstract).items() if not _LOOKED_UP.search(name))
    return 6.0 * (inner + vocabulary * width) + 12.0 * layers * width * length


def peak_memory(device: torch.device | str) -> int | None:
    """The most bytes that tensors have taken on a CUDA device since the program began; None elsewhere."""
    device = torch.device(device)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


@contextlib.contextmanager
def trace(folder: str | os.PathLike[str], name: str = "trace") -> Generator[torch.profiler.profile]:
    """Record what runs inside the with block into ``folder``/``name``.json, for chrome://tracing or Perfetto."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as recorded:
        yield recorded
    recorded.export_chrome_trace(os.fspath(Path(folder) / f"{name}.json"))


def _sizes(model: Model) -> tuple[int, int, int]:
    def of(*names: str) -> int:
        for name in names:
            if isinstance(value := getattr(model.config, name, None), int):
                return value
        raise ValueError(f"{model.name}: its config has none of {', '.join(names)}, needed to count FLOPs")

    return of("num_hidden_layers", "n_layer"), of("hidden_size", "n_embd"), of("vocab_size")
