"""The memory-bound kernels against torch, the compiler and Liger, as fractions of the rate of a copy.

``python -m benchmarks.kernels``; ``--sweep-plans`` times the norms under other plans instead, to choose theirs by.
Timed as CUDA graphs of many calls, each of which streams more than the cache holds. Bars on an H200 in bfloat16: 85%
forward, 75% backward. What wins goes into ``kernels/choice.py``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro

import functional_booster as fb
from functional_booster.kernels import bias_gelu, gated, layer_norm, rms_norm, rotary

from . import report

EPS = 1e-5
REPEATS = 20  # calls in a graph, so that its launch costs nothing
COPIED = 2**29  # elements of 2 bytes of the copy that gives the ceiling
Run = Callable[[], Any]


@dataclass(frozen=True)
class Variant:
    """One way: ``forward``, and ``backward`` or, for what autograd differentiates, ``both`` in a row."""

    forward: Run
    backward: Run | None = None
    both: Run | None = None


@dataclass(frozen=True)
class Case:
    """A kernel at a size: ``build(device)`` makes its variants; ``forward`` and ``backward`` are bytes to be moved."""

    name: str
    size: str
    build: Callable[[str], dict[str, Variant]]
    forward: int
    backward: int = 0


def drawn(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Normal numbers in bfloat16."""
    return [
        fb.random.normal(fb.random.key(place), shape).to(device, torch.bfloat16) for place, shape in enumerate(shapes)
    ]


def by_autograd(fn: Callable[..., Any], *args: torch.Tensor, dy: torch.Tensor | tuple[torch.Tensor, ...]) -> Variant:
    """A function as PyTorch users call it."""
    leaves = [arg.detach().requires_grad_() for arg in args]

    def both() -> Any:
        with torch.enable_grad():
            out = fn(*leaves)
            return torch.autograd.grad(out, leaves, dy)

    def forward() -> Any:
        with torch.no_grad():
            return fn(*args)

    return Variant(forward, both=both)


def jitted(fn: Callable[..., Any], *args: torch.Tensor) -> Run:
    """What the compiler makes of a function of tensors."""
    run = fb.jit(fn)
    return lambda: run(*args)


def liger(module: str, name: str) -> Any:
    """A Function of liger-kernel, None where that is not installed."""
    with contextlib.suppress(ImportError):
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
    return None


def norm(rows: int, size: int, centered: bool, device: str) -> dict[str, Variant]:
    """RMSNorm, or LayerNorm."""
    x, dy, w, b = drawn(device, (rows, size), (rows, size), (size,), (size,))
    if not centered:
        variants = {
            "triton": Variant(lambda: rms_norm.by_triton(x, w, EPS), lambda: rms_norm._pullback(dy, x, w, None, EPS)),
            "library": by_autograd(lambda x, w: F.rms_norm(x, (size,), w, EPS), x, w, dy=dy),
            "compiled": Variant(
                jitted(lambda x, w: rms_norm.by_torch(x, w, EPS), x, w),
                jitted(lambda dy, x, w: rms_norm._backward_by_torch(dy, x, w, None, EPS), dy, x, w),
            ),
        }
        if (function := liger("rms_norm", "LigerRMSNormFunction")) is not None:
            variants["liger"] = by_autograd(lambda x, w: function.apply(x, w, EPS), x, w, dy=dy)
        return variants
    variants = {
        "triton": Variant(
            lambda: layer_norm.by_triton(x, w, b, EPS), lambda: layer_norm._pullback(dy, x, w, b, None, EPS)
        ),
        "library": by_autograd(lambda x, w, b: F.layer_norm(x, (size,), w, b, EPS), x, w, b, dy=dy),
        "compiled": Variant(
            jitted(lambda x, w, b: layer_norm.by_torch(x, w, b, EPS), x, w, b),
            jitted(lambda dy, x, w, b: layer_norm._backward_by_torch(dy, x, w, b, None, EPS), dy, x, w, b),
        ),
    }
    if (function := liger("layer_norm", "LigerLayerNormFunction")) is not None:
        variants["liger"] = by_autograd(lambda x, w, b: function.apply(x, w, b, EPS), x, w, b, dy=dy)
    return variants


def add_norm(rows: int, size: int, device: str) -> dict[str, Variant]:
    """RMSNorm of a sum."""
    x, residual, dy, more, w = drawn(device, *[(rows, size)] * 4, (size,))

    def by_library(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return F.rms_norm(total, (size,), w, EPS), total

    return {
        "triton": Variant(
            lambda: rms_norm.sum_by_triton(x, residual, w, EPS), lambda: rms_norm._pullback(dy, x, w, more, EPS)
        ),
        "library": by_autograd(by_library, x, residual, w, dy=(dy, more)),
        "compiled": Variant(
            jitted(lambda x, residual, w: rms_norm._sum_by_torch(x, residual, w, EPS), x, residual, w),
            jitted(lambda dy, x, w, more: rms_norm._backward_by_torch(dy, x, w, more, EPS), dy, x, w, more),
        ),
    }


def turned(batch: int, tokens: int, heads: int, keys: int, size: int, device: str) -> dict[str, Variant]:
    """Rotary positions on views of a fused product."""
    (product,) = drawn(device, (batch, tokens, (heads + 2 * keys) * size))
    parts = product.split([heads * size, keys * size, keys * size], dim=-1)
    q, k = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts[:2])
    angles = torch.rand(1, 1, tokens, size // 2, device=device)
    cos, sin = angles.cos(), angles.sin()

    def plain(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rotary.turned(q, cos, sin), rotary.turned(k, cos, sin)

    dq, dk = rotary.by_triton(q, k, cos, sin, False)
    variants = {
        "triton": Variant(
            lambda: rotary.by_triton(q, k, cos, sin, False), lambda: rotary.by_triton(dq, dk, cos, sin, True)
        ),
        "eager": by_autograd(lambda q, k: plain(q, k, cos, sin), q, k, dy=(dq, dk)),
        "compiled": Variant(
            jitted(plain, q, k, cos, sin), jitted(lambda q, k, c, s: plain(q, k, c, -s), dq, dk, cos, sin)
        ),
    }
    if (function := liger("rope", "LigerRopeFunction")) is not None:
        twice = [torch.cat([table, table], -1).squeeze(1).bfloat16() for table in (cos, sin)]
        variants["liger"] = by_autograd(lambda q, k: function.apply(q, k, *twice), q, k, dy=(dq, dk))
    return variants


def glu(rows: int, size: int, activation: str, device: str) -> dict[str, Variant]:
    """Gate and up, halves of one product."""
    x, dy = drawn(device, (rows, 2 * size), (rows, size))
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}[activation]

    def eager(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return act(gate) * up

    variants = {
        "triton": Variant(lambda: gated.by_triton(x, activation), lambda: gated._pullback(dy, x, activation)),
        "eager": by_autograd(eager, x, dy=dy),
        "compiled": Variant(
            jitted(lambda x: gated.by_torch(x, activation), x),
            jitted(lambda dy, x: gated._backward_by_torch(dy, x, activation), dy, x),
        ),
    }
    found = {"silu": ("swiglu", "LigerSiLUMulFunction"), "gelu_tanh": ("geglu", "LigerGELUMulFunction")}
    if activation in found and (function := liger(*found[activation])) is not None:
        # It takes no views with gaps: gate and up apart, whose gradients it writes over them.
        gate, up = (part.contiguous() for part in x.chunk(2, -1))
        variants["liger, apart"] = by_autograd(function.apply, gate, up, dy=dy)
    return variants


def biased(rows: int, size: int, approximate: str, device: str) -> dict[str, Variant]:
    """Bias and GELU."""
    x, dy, b = drawn(device, (rows, size), (rows, size), (size,))
    return {
        "triton": Variant(
            lambda: bias_gelu.by_triton(x, b, approximate), lambda: bias_gelu._pullback(dy, x, b, approximate)
        ),
        "eager": by_autograd(lambda x, b: F.gelu(x + b, approximate=approximate), x, b, dy=dy),
        "compiled": Variant(
            jitted(lambda x, b: bias_gelu.by_torch(x, b, approximate), x, b),
            jitted(lambda dy, x, b: bias_gelu._backward_by_torch(dy, x, b, approximate), dy, x, b),
        ),
    }


def cases(rows: int) -> Generator[Case]:
    """All cases; another kernel is another ``Case`` here."""
    for size in (2048, 4096):
        one, shape = 2 * rows * size, f"({rows}, {size})"
        yield Case("rms_norm", shape, functools.partial(norm, rows, size, False), 2 * one, 3 * one)
        yield Case("layer_norm", shape, functools.partial(norm, rows, size, True), 2 * one, 3 * one)
        yield Case("add_rms_norm", shape, functools.partial(add_norm, rows, size), 4 * one, 4 * one)
    for heads, keys, size in ((32, 8, 64), (32, 8, 128)):
        moved = 4 * rows * (heads + keys) * size
        build = functools.partial(turned, 4, rows // 4, heads, keys, size)
        yield Case("rotary", f"(4, {heads} and {keys}, {rows // 4}, {size})", build, moved, moved)
    size = 8192
    one, shape = 2 * rows * size, f"({rows}, {size})"
    for activation in ("silu", "gelu_tanh", "gelu"):
        yield Case(f"gated, {activation}", shape, functools.partial(glu, rows, size, activation), 3 * one, 5 * one)
    for approximate in ("tanh", "none"):
        build = functools.partial(biased, rows, size, approximate)
        yield Case(f"bias_gelu, {approximate}", shape, build, 2 * one, 3 * one)


def timed(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Seconds of one call of each, by graphs of ``REPEATS`` calls that take turns."""

    def repeated(run: Run) -> None:
        for _ in range(REPEATS):
            run()

    graphs = {name: report.captured(functools.partial(repeated, run)) for name, run in runs.items()}
    return {name: seconds / REPEATS for name, seconds in report.medians(report.interleaved(graphs, rounds)).items()}


def table_of(case: Case, device: str, rounds: int, copied: int) -> list[dict[str, Any]]:
    """A row for each variant and direction. A backward that is timed with its forward is what it takes longer."""
    source = torch.zeros(copied // 2, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    variants = case.build(device)
    runs: dict[str, Run] = {"copy": lambda: torch.neg(source, out=target)}  # a plain copy is left to a slower engine
    for name, variant in variants.items():
        runs |= {f"{name} forward": variant.forward}
        runs |= {f"{name} backward": variant.backward} if variant.backward else {}
        runs |= {f"{name} both": variant.both} if variant.both else {}
    seconds = timed(runs, rounds)
    ceiling = 4 * copied / seconds["copy"]
    rows = []
    for name in variants:
        forward = seconds[f"{name} forward"]
        backward = seconds.get(f"{name} backward", seconds.get(f"{name} both", 0.0) - forward)
        for direction, value, moved in (("forward", forward, case.forward), ("backward", backward, case.backward)):
            if moved:
                rate = moved / value
                rows.append(
                    {
                        "kernel": case.name,
                        "size": case.size,
                        "direction": direction,
                        "variant": name,
                        "microseconds": 1e6 * value,
                        "TB/s": rate / 1e12,
                        "of a copy": rate / ceiling,
                    }
                )
    return rows


def sweep(rows: int, rounds: int, device: str) -> list[dict[str, Any]]:
    """RMSNorm under plans around its own."""
    from functional_booster.kernels import norm_triton

    found = []
    for size, backward in itertools.product((2048, 4096), (False, True)):
        x, dy, w = drawn(device, (rows, size), (rows, size), (size,))
        out, dw = torch.empty_like(x), torch.empty_like(w)
        runs: dict[str, Run] = {}
        plans = itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4, 8) if backward else (0, 2, 4, 8), (1, 2, 4))
        for warps, tall, per_sm, stages in plans:
            if not 8 <= size * tall // (32 * warps) <= (32 if backward else 64) or (per_sm == 0 and stages > 1):
                continue  # a thread has too few elements, or too many
            plan = norm_triton.Plan(warps, tall, per_sm, stages)
            if backward:
                run = functools.partial(norm_triton.backward, out, (dw,), dy, x, w, None, EPS, False, plan)
            else:
                run = functools.partial(norm_triton.forward, out, None, x, None, w, None, EPS, False, plan)
            runs[str(plan)] = run
        seconds = timed(runs, rounds)
        moved = (6 if backward else 4) * rows * size
        found += [
            {"size": size, "direction": "backward" if backward else "forward", "plan": plan, "TB/s": moved / s / 1e12}
            for plan, s in sorted(seconds.items(), key=lambda item: item[1])[:8]
        ]
    return found


def main(
    rows: int = 16384, rounds: int = 10, device: str = "cuda", copied: int = COPIED, sweep_plans: bool = False
) -> None:
    """``rows`` tokens; ``copied`` elements of the copy; ``sweep_plans``: the norms under other plans instead."""
    if sweep_plans:
        report.publish("kernels_sweep", sweep(rows, rounds, device), tokens=rows)
        return
    found = [row for case in cases(rows) for row in table_of(case, device, rounds, copied)]
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    report.publish("kernels", found, tokens=rows, liger="installed" if has_liger else "absent")


if __name__ == "__main__":
    tyro.cli(main)
