"""Attention, forward and backward, against torch's: ``python -m benchmarks.attention``; ``--tune`` tries block sizes.

In bfloat16; calls are queued ahead of the GPU, so that its work alone is timed. A rate counts the products of the
places that are attended to alone, whatever a kernel computes again: 4 D floating-point operations a place forward, 10 D
backward. Bars on an H200, causal, head dim 128, 16k tokens: 450 TFLOP/s forward, 350 backward.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from . import report

REPEATS = 10  # calls in a row: the first launch is not hidden behind the GPU's work


@dataclasses.dataclass(frozen=True)
class Case:
    """B, H, K, T and D, causal; a window of tokens, or documents of this mean length."""

    name: str
    batch: int
    heads: int
    shared_heads: int
    tokens: int
    size: int
    window: int | None = None
    document: int | None = None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key, value as views of one product (B, T, (H + 2K) D), as models have them, and a cotangent."""
        heads = (self.heads, self.shared_heads, self.shared_heads)
        generator = torch.Generator("cuda").manual_seed(0)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        fused = torch.randn(self.batch, self.tokens, sum(heads), self.size, **options)
        query, key, value = (part.transpose(1, 2) for part in fused.split(heads, 2))
        cotangent = torch.randn(self.batch, self.tokens, self.heads, self.size, **options).transpose(1, 2)
        return query, key, value, cotangent

    def documents(self) -> torch.Tensor | None:
        """(B, T) int32, lengths between a half and one and a half times the mean."""
        if self.document is None:
            return None
        generator = torch.Generator().manual_seed(0)
        lengths = self.document // 2 + torch.randint(
            self.document + 1, (self.batch, 2 * self.tokens // self.document + 2), generator=generator
        )
        ends = lengths.cumsum(1)
        places = torch.arange(self.tokens).expand(self.batch, -1).contiguous()
        return torch.searchsorted(ends, places, right=True).int().cuda()

    def places(self) -> int:
        """Of the scores of all heads, how many are attended to."""
        reach = torch.arange(1, self.tokens + 1, device="cuda").expand(self.batch, -1)
        documents = self.documents()
        if documents is not None:
            begins = torch.searchsorted(documents, documents)
            reach = reach - begins
        if self.window is not None:
            reach = reach.clamp(max=self.window)
        return self.heads * int(reach.sum())


CASES = (
    Case("causal, 4k", 4, 32, 8, 4096, 64),
    Case("causal, 16k", 1, 32, 8, 16384, 128),
    Case("window of 4096, 16k", 1, 32, 8, 16384, 128, window=4096),
    Case("documents of 2048, 16k", 1, 32, 8, 16384, 128, document=2048),
)


def main(tune: bool = False, rounds: int = 20) -> None:
    """Time each case, the variants taking turns; with ``tune``, the block sizes of the causal ones."""
    if tune:
        _tune(rounds)
        return
    rows = []
    for case in CASES:
        runs, failures = _variants(case)
        seconds = report.medians(report.interleaved(runs, rounds))
        rows += [_row(case, name, value / REPEATS) for name, value in seconds.items()]
        for failure in failures:
            print(f"{case.name}: {failure}")
    report.publish("attention", rows)


def _row(case: Case, name: str, seconds: float) -> dict[str, Any]:
    operations = (10 if name.endswith("backward") else 4) * case.size * case.places()
    return {"case": case.name, "kernel": name, "ms": 1e3 * seconds, "TFLOP/s": operations / seconds / 1e12}


def _repeated(fn: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        for _ in range(REPEATS):
            fn()

    run()  # what is compiled is compiled here, and what refuses a shape says so
    return run


def _variants(case: Case) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Forward and backward of each kernel that takes the case, and what the others said."""
    from functional_booster.kernels import flash_attention

    query, key, value, cotangent = case.tensors()
    documents = case.documents()
    forwards: dict[str, Callable[..., torch.Tensor]] = {
        "ours": lambda query, key, value: flash_attention.flash_attention(
            query, key, value, is_causal=True, window=case.window, documents=documents
        )[0],
        "flex_attention": _flex(case, documents),
    }
    if case.window is None and documents is None:
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            forwards[name] = functools.partial(_library, backend)
    runs, failures = {}, []
    for name, forward in forwards.items():
        try:
            runs[f"{name}, forward"] = _repeated(functools.partial(forward, query, key, value))
            runs[f"{name}, backward"] = _repeated(_backward(forward, query, key, value, cotangent))
        except Exception as error:  # a library's refusal of a shape is of any type
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    return runs, failures


def _backward(forward: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    *inputs, cotangent = tensors
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = forward(*inputs)
    return lambda: torch.autograd.grad(out, inputs, cotangent, retain_graph=True)


def _library(backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _flex(case: Case, documents: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        mask = i >= j
        if case.window is not None:
            mask = mask & (i - j < case.window)
        if documents is not None:
            mask = mask & (documents[b, i] == documents[b, j])
        return mask

    batch = None if documents is None else case.batch
    blocks = create_block_mask(visible, batch, None, case.tokens, case.tokens, device="cuda")
    return functools.partial(torch.compile(flex_attention), block_mask=blocks, enable_gqa=True)


# Rows owned, rows of the other side, warps and stages, by kernel and head dim.
TRIED: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {
    ("forward", 64): [
        *((128, 64, 4, stages) for stages in (2, 3, 4)),
        *((128, 128, warps, stages) for warps in (4, 8) for stages in (2, 3)),
        *((128, 64, 8, stages) for stages in (3, 4)),
        *((64, 128, 4, stages) for stages in (2, 3)),
        *((64, 64, 4, stages) for stages in (3, 4)),
        *((256, 64, 8, stages) for stages in (2, 3)),
        *((256, 128, 8, stages) for stages in (2, 3)),
    ],
    ("forward", 128): [
        *((128, 64, 8, stages) for stages in (2, 3, 4)),
        *((128, 128, 8, stages) for stages in (2, 3)),
        *((64, 64, 4, stages) for stages in (2, 3)),
        *((64, 128, 4, stages) for stages in (1, 2)),
        *((128, 64, 4, stages) for stages in (2, 3)),
        *((128, 32, 8, stages) for stages in (3, 4)),
        *((256, 64, 8, stages) for stages in (2, 3)),
    ],
    ("keys and values", 64): [
        *((128, 64, 8, stages) for stages in (2, 3)),
        *((128, 64, 4, stages) for stages in (2, 3)),
        *((128, 128, 8, stages) for stages in (1, 2, 3)),
        *((128, 32, 4, stages) for stages in (2, 3, 4)),
        *((64, 64, 4, stages) for stages in (2, 3)),
        *((64, 128, 4, stages) for stages in (1, 2)),
    ],
    ("keys and values", 128): [
        *((128, 64, 8, stages) for stages in (1, 2, 3)),
        *((128, 32, 8, stages) for stages in (2, 3, 4)),
        *((128, 128, 8, stages) for stages in (1, 2)),
        *((64, 64, 4, stages) for stages in (1, 2)),
        *((64, 32, 4, stages) for stages in (2, 3)),
        *((64, 64, 8, stages) for stages in (2, 3)),
        (64, 128, 8, 2),
    ],
    ("queries", 64): [
        *((128, 64, 8, stages) for stages in (2, 3)),
        *((128, 64, 4, stages) for stages in (2, 3)),
        *((128, 128, 8, stages) for stages in (1, 2, 3)),
        *((64, 64, 4, stages) for stages in (2, 3)),
        *((64, 128, 4, stages) for stages in (1, 2)),
        *((128, 32, 4, stages) for stages in (2, 3)),
    ],
    ("queries", 128): [
        *((128, 64, 8, stages) for stages in (1, 2, 3)),
        *((128, 128, 8, stages) for stages in (1, 2)),
        *((128, 32, 8, stages) for stages in (2, 3)),
        *((64, 64, 4, stages) for stages in (1, 2)),
        *((64, 32, 4, stages) for stages in (2, 3)),
        (64, 128, 4, 1),
    ],
}


def _tune(rounds: int) -> None:
    """Each choice of blocks in the causal cases, the fastest first, with its largest error against the library."""
    cases = [case for case in CASES if case.window is None and case.document is None]
    with multiprocessing.get_context("spawn").Pool(12) as pool:  # compiled side by side, kept in Triton's cache
        tasks = [
            (case, kernel, each)
            for case in cases
            for (kernel, size), tried in TRIED.items()
            for each in tried
            if size == case.size
        ]
        pool.starmap(_compile, tasks, chunksize=1)
    rows = []
    for case in cases:
        for kernel in ("forward", "keys and values", "queries"):
            runs: dict[str, Callable[[], Any]] = {}
            for each in TRIED[kernel, case.size]:
                name = "own {}, other {}, warps {}, stages {}".format(*each)
                try:
                    run, error = _kernel(case, kernel, each)
                    repeated = _repeated(run)
                    runs[f"{name}; error {error():.1e}"] = repeated
                except Exception as refusal:  # out of shared memory, or what the compiler cannot do
                    print(f"{case.name}, {kernel}, {name}: {type(refusal).__name__}: {str(refusal)[:120]}")
            seconds = report.medians(report.interleaved(runs, min(rounds, 5), warmup=1))
            # Products of D numbers a place: two forward, four and three backward.
            products = {"forward": 2, "keys and values": 4, "queries": 3}[kernel]
            operations = 2 * products * case.size * case.places()
            for name, value in sorted(seconds.items(), key=lambda item: item[1]):
                value /= REPEATS
                rate = operations / value / 1e12
                rows.append({"case": case.name, "kernel": kernel, "blocks": name, "ms": 1e3 * value, "TFLOP/s": rate})
            del runs
            torch.cuda.empty_cache()
    report.publish("attention_tuning", rows)


def _compile(case: Case, kernel: str, blocks: tuple[int, int, int, int]) -> None:
    try:
        _kernel(dataclasses.replace(case, tokens=512), kernel, blocks)[0]()
        torch.cuda.synchronize()
    except Exception:  # told where it is timed
        return


def _kernel(
    case: Case, kernel: str, blocks: tuple[int, int, int, int]
) -> tuple[Callable[[], None], Callable[[], float]]:
    """One Triton kernel over a case's tensors, and the largest error of its results against the library's."""
    from functional_booster.kernels import flash_attention_backward_triton as backward_kernels
    from functional_booster.kernels import flash_attention_triton as forward_kernels

    chosen = forward_kernels.Blocks(*blocks)
    query, key, value, cotangent = case.tensors()
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    expected = _library(SDPBackend.FLASH_ATTENTION, *leaves)
    mask = forward_kernels.Mask(right=0)
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    scale = case.size**-0.5
    if kernel == "forward":
        run = functools.partial(
            forward_kernels.forward, out, lse, query, key, value, scale=scale, mask=mask, blocks=chosen
        )
        return run, lambda: float((out - expected).abs().max())
    forward_kernels.forward(out, lse, query, key, value, scale=scale, mask=mask)
    references = torch.autograd.grad(expected, leaves, cotangent)
    delta = backward_kernels.delta(out, cotangent, torch.zeros_like(lse))
    arguments = (cotangent, lse, delta, query, key, value)
    if kernel == "queries":
        grads, references = [torch.empty_like(query)], references[:1]
        launch = backward_kernels.grad_of_queries
    else:
        grads, references = [torch.empty_like(key), torch.empty_like(value)], references[1:]
        launch = backward_kernels.grads_of_keys_and_values
    run = functools.partial(launch, *grads, *arguments, scale=scale, mask=mask, blocks=chosen)
    return run, lambda: max(float((a - b).abs().max()) for a, b in zip(grads, references, strict=True))


if __name__ == "__main__":
    tyro.cli(main)
