"""fp8 linear layers against bfloat16, forward and both gradients, casts included: ``python -m benchmarks.fp8_linear``.

Timed as CUDA graphs: the launches of a step are far ahead of the GPU. Bar: at least 1.5 times as fast for the shapes of
Llama-3 8B at 16384 tokens on an H200.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import tyro

import functional_booster as fb
from functional_booster.kernels import fp8

from . import report

LAYERS = {  # (in, out) of each linear layer
    "1B qkv": (2048, 3072),
    "1B o": (2048, 2048),
    "1B gate and up": (2048, 16384),
    "1B down": (8192, 2048),
    "8B qkv": (4096, 6144),
    "8B o": (4096, 4096),
    "8B gate and up": (4096, 28672),
    "8B down": (14336, 4096),
}


def main(tokens: int = 16384, rounds: int = 20, scale: int = 1, device: str = "cuda") -> None:
    """Time each layer in turns; ``scale`` divides the sizes, for a try on a CPU."""
    rows = []
    for name, (size, out) in LAYERS.items():
        x, weight, cotangent = (
            fb.random.normal(fb.random.key(place), shape).to(device, torch.bfloat16)
            for place, shape in enumerate(
                ((tokens // scale, size // scale), (out // scale, size // scale), (tokens // scale, out // scale))
            )
        )
        variants = {
            "bf16": step(F.linear, x, weight, cotangent),
            "fp8, a scale a tensor": step(fp8.linear, x, weight, cotangent),
            "fp8, a scale a row": step(lambda x, w: fp8.linear(x, w, scaling="row"), x, weight, cotangent),
        }
        seconds = report.medians(
            report.interleaved({name: report.captured(run) for name, run in variants.items()}, rounds)
        )
        flops = 6 * x.shape[0] * weight.numel()
        rows += [
            {
                "layer": name,
                "linear": variant,
                "ms": 1e3 * value,
                "TFLOP/s": flops / value / 1e12,
                "times bf16": seconds["bf16"] / value,
            }
            for variant, value in seconds.items()
        ]
    report.publish("fp8_linear", rows, tokens=tokens // scale, scale=scale)


def step(
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    cotangent: torch.Tensor,
) -> Callable[[], object]:
    """A compiled forward and backward of one layer."""

    def both(x: torch.Tensor, weight: torch.Tensor, cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, pull = fb.vjp(linear, x, weight)
        return (out, *pull(cotangent))

    run = fb.jit(both)
    return lambda: run(x, weight, cotangent)


if __name__ == "__main__":
    tyro.cli(main)
