"""Updates, norm, softmax and dropout against torch and torch.compile: ``python -m benchmarks.optimizer_kernels``.

Each is bound by memory: bytes that must move over the time it takes, as a fraction of what a copy reaches in the same
run. Bars: AdamW at least 92%, softmax 85% forward and 75% backward, none slower than a rival.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro

import functional_booster as fb
from functional_booster.kernels import adamw, elementwise_update, global_norm, graph, lion, random, sgd_momentum
from functional_booster.kernels import scaled_masked_softmax as softmax
from functional_booster.kernels.dropout_residual import dropout_residual

from . import report

Run = Callable[[], Any]
OPS = torch.ops.functional_booster
REPEATS = 5  # calls of a variant in a row, so that starting them does not count
SIZE = 150_000_000  # parameters: an eighth of 1.2e9
LEAVES = 98
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """What is timed: ``build`` makes the inputs and gives the variants, ``bytes`` must be moved by each call."""

    name: str
    build: Callable[[], dict[str, Run]]
    bytes: int


def cases(size: int = SIZE, compiled: bool = True, tune: bool = False) -> Iterator[Case]:
    """Every case; ``size`` is the number of elements of each, to rounding."""
    build = functools.partial(_adamw, size, compiled=compiled, tune=tune)
    yield Case("adamw, one buffer", functools.partial(build, leaves=1), 28 * size)
    yield Case(f"adamw, {LEAVES} leaves", functools.partial(build, leaves=LEAVES), 28 * size)
    yield Case("adamw and a bfloat16 copy", functools.partial(build, leaves=1, copy=torch.bfloat16), 30 * size)
    yield Case("momentum", functools.partial(_momentum, size, compiled), 20 * size)
    yield Case("lion", functools.partial(_lion, size, compiled), 20 * size)
    yield Case("norm", functools.partial(_norm, size, compiled), 4 * size)
    length = max(8, min(2048, int(size**0.5)))
    rows = max(1, size // length**2)
    count = rows * length**2
    masked = functools.partial(_softmax, rows, length, compiled)
    yield Case("masked softmax", functools.partial(masked, "mask"), 4 * count + length**2)
    yield Case("causal softmax", functools.partial(masked, "causal"), 3 * count)
    yield Case("softmax, backward", functools.partial(masked, "backward"), 6 * count)
    yield Case("dropout + residual", functools.partial(_dropout, size, compiled, False), 6 * size)
    yield Case("dropout + residual, backward", functools.partial(_dropout, size, compiled, True), 4 * size)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def _adamw(
    size: int, leaves: int, compiled: bool, tune: bool = False, copy: torch.dtype | None = None
) -> dict[str, Run]:
    count = torch.ones((), dtype=torch.int32, device=DEVICE)
    coefs = elementwise_update.stacked(
        adamw.coefficients(count, 1e-4, weight_decay=0.1, factor=0.5), torch.device(DEVICE)
    )
    keep = torch.ones((), dtype=torch.bool, device=DEVICE)

    def buffers(numel: int) -> list[Any]:
        low = None if copy is None else drawn(numel, dtype=copy)
        return [drawn(numel), drawn(numel), drawn(numel), drawn(numel).square(), low]

    one = buffers(size)
    variants: dict[str, Run] = {"ours, in place": lambda: OPS.adamw_(*one, coefs, keep, None, True)}
    if copy is not None:
        key = random.key(0, DEVICE)
        variants["ours, rounded by chance"] = lambda: OPS.adamw_(*one, coefs, keep, key, True)
        return variants
    parts = [buffers(size // leaves) for _ in range(leaves)]
    if leaves > 1:
        variants["ours, in place, leaf by leaf"] = lambda: [
            OPS.adamw_(*part, coefs, keep, None, True) for part in parts
        ]
    variants["torch.optim fused"] = _torch_optim(torch.optim.AdamW, parts, lr=1e-4, weight_decay=0.1)
    if compiled:
        variants["the chain, compiled"] = _chain(fb.optim.adamw(1e-4, weight_decay=0.1), parts)
    if tune:
        for block, warps in ((512, 4), (1024, 2), (1024, 8), (2048, 4), (2048, 8), (4096, 8)):
            variants[f"ours, blocks of {block}, {warps} warps"] = _tuned(block, warps, variants["ours, in place"])
    return variants


def _tuned(block: int, warps: int, run: Run) -> Run:
    """The run with other tiles: a captured graph keeps those that it was captured with."""
    from functional_booster.kernels import elementwise_update_triton as kernels

    def other() -> None:
        before = kernels._BLOCK, kernels._WARPS
        kernels._BLOCK, kernels._WARPS = block, warps
        run()
        kernels._BLOCK, kernels._WARPS = before

    return other


def _torch_optim(kind: Callable[..., torch.optim.Optimizer], parts: list[list[Any]], **options: Any) -> Run:
    params = [part[0].clone().requires_grad_() for part in parts]
    for param, part in zip(params, parts, strict=True):
        param.grad = part[1]
    if kind is torch.optim.AdamW:
        options["capturable"] = DEVICE == "cuda"
    return kind(params, fused=True, **options).step


def _chain(tx: fb.optim.GradientTransformation, parts: list[list[Any]]) -> Run:
    """The transformation and the application of its updates, compiled, with everything donated."""
    params, grads = {}, {}
    for number, part in enumerate(parts):
        params[str(number)], grads[str(number)] = part[0].clone(), part[1]
    leaves, structure = fb.tree.flatten((params, tx.init(params), grads))

    def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
        params, state, grads = fb.tree.unflatten(structure, list(tensors))
        updates, new_state = tx.update(fb.tree.map(lambda g: g * 0.5, grads), state, params)
        new = fb.tree.leaves((fb.optim.apply_updates(params, updates), new_state))
        for donor, value in zip(tensors, new, strict=False):
            donor.copy_(value)
        return []

    module = graph.trace(step, leaves)
    run = graph.compile(module, graph.examples_of(module))
    return lambda: run(*leaves)


def _momentum(size: int, compiled: bool) -> dict[str, Run]:
    count = torch.ones((), dtype=torch.int32, device=DEVICE)
    coefs = elementwise_update.stacked(sgd_momentum.coefficients(count, 1e-4), torch.device(DEVICE))
    one = [drawn(size), drawn(size), drawn(size), None, None]
    variants: dict[str, Run] = {"ours, in place": lambda: OPS.sgd_momentum_(*one, coefs, None, None, False)}
    variants["torch.optim fused"] = _torch_optim(torch.optim.SGD, [one], lr=1e-4, momentum=0.9)
    return variants | ({"the chain, compiled": _chain(fb.optim.sgd(1e-4, 0.9), [one])} if compiled else {})


def _lion(size: int, compiled: bool) -> dict[str, Run]:
    coefs = elementwise_update.stacked(lion.coefficients(1e-4, weight_decay=0.1), torch.device(DEVICE))
    one = [drawn(size), drawn(size), drawn(size), None, None]
    variants: dict[str, Run] = {"ours, in place": lambda: OPS.lion_(*one, coefs, None, None, True)}
    tx = fb.optim.lion(1e-4, weight_decay=0.1)
    return variants | ({"the chain, compiled": _chain(tx, [one])} if compiled else {})


def _norm(size: int, compiled: bool) -> dict[str, Run]:
    x = drawn(size)
    variants: dict[str, Run] = {
        "ours": lambda: global_norm.norm(x),
        "torch, float64 sums": lambda: global_norm.by_torch(x),
        "torch, float32 sums": lambda: torch.linalg.vector_norm(x),
    }
    return variants | _compiled(compiled, "torch.compile, float64 sums", global_norm.by_torch, x)


def _softmax(rows: int, length: int, compiled: bool, kind: str) -> dict[str, Run]:
    x = drawn(rows, length, length, dtype=torch.bfloat16)
    keep = torch.rand(length, length, device=DEVICE) > 0.1
    causal = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
    if kind == "backward":
        y, dy = torch.softmax(x, -1), drawn(rows, length, length, dtype=torch.bfloat16)
        variants: dict[str, Run] = {
            "ours": lambda: OPS.scaled_masked_softmax_backward(y, dy, 0.125),
            "torch, no mask, no scale": lambda: torch._softmax_backward_data(dy, y, -1, y.dtype),
        }
        return variants | _compiled(compiled, "torch.compile", softmax.backward_by_torch, y, dy, 0.125)

    def by_torch(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x * 0.125).masked_fill(~mask, -1e4), -1)

    mask = keep if kind == "mask" else causal
    own: Run = lambda: softmax.scaled_masked_softmax(x, keep, 0.125)  # noqa: E731
    variants = {
        "ours": own if kind == "mask" else lambda: softmax.scaled_causal_softmax(x, 0.125),
        "torch": lambda: by_torch(x, mask),
        "torch, no mask, no scale": lambda: torch.softmax(x, -1),
    }
    return variants | _compiled(compiled, "torch.compile", by_torch, x, mask)


def _dropout(size: int, compiled: bool, backward: bool) -> dict[str, Run]:
    width = min(size, 8192)
    x, residual = (drawn(size // width, width, dtype=torch.bfloat16) for _ in range(2))
    key, dropped = random.key(0, DEVICE), round(0.1 * 2**16)
    if backward:
        mask = torch.rand(x.shape, device=DEVICE) > 0.1
        variants: dict[str, Run] = {
            "ours, drawn again": lambda: OPS.dropout_residual(x, None, key, dropped),
            "torch, a mask kept": lambda: torch.ops.aten.native_dropout_backward(x, mask, 1 / 0.9),
        }
        return variants

    def by_torch(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + F.dropout(x, 0.1)

    def by_key(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + random.dropout(x, 0.1, key)

    variants = {
        "ours": lambda: dropout_residual(x, residual, 0.1, key),
        "torch": lambda: by_torch(x, residual),
        "random.dropout": lambda: by_key(x, residual),
    }
    return (
        variants
        | _compiled(compiled, "torch.compile", by_torch, x, residual)
        | _compiled(compiled, "random.dropout, torch.compile", by_key, x, residual)
    )


def _compiled(compiled: bool, name: str, fn: Callable[..., Any], *args: Any) -> dict[str, Run]:
    if not compiled:
        return {}
    torch.compiler.reset()  # what was compiled for another case is no reason to give up on this one
    run = torch.compile(fn, dynamic=False)
    return {name: lambda: run(*args)}


def _repeated(run: Run) -> None:
    for _ in range(REPEATS):
        run()


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """A row for each variant, and for a copy of as many bytes (1 GiB at most), all interleaved."""
    source = torch.zeros(max(1, min(case.bytes // 8, 2**27)), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    moved = {"copy": 8 * source.numel()}
    runs = {"copy": report.captured(lambda: torch.neg(source, out=target))}  # a plain copy is left to a slower engine
    with torch.no_grad():
        for name, run in case.build().items():
            runs[name], moved[name] = report.captured(run), case.bytes
        in_a_row = {name: functools.partial(_repeated, run) for name, run in runs.items()}
        seconds = {name: s / REPEATS for name, s in report.medians(report.interleaved(in_a_row, rounds)).items()}
    rate = {name: moved[name] / s for name, s in seconds.items()}
    return [
        {
            "case": case.name,
            "variant": name,
            "us": 1e6 * s,
            "TB/s": rate[name] / 1e12,
            "of copy": rate[name] / rate["copy"],
        }
        for name, s in seconds.items()
    ]


def main(size: int = SIZE, rounds: int = 15, compiled: bool = True, tune: bool = False, only: str = "") -> None:
    """Measure every case whose name has ``only`` in it; ``tune`` tries other tiles of the AdamW kernel, too."""
    rows = []
    for case in cases(size, compiled, tune):
        if only in case.name:
            rows += measure(case, rounds)
            print(*(f"{row['case']}: {row['variant']}: {row['of copy']:.1%} of copy" for row in rows[-9:]), sep="\n")
    report.publish("optimizer_kernels", rows, elements=size)


if __name__ == "__main__":
    tyro.cli(main)
