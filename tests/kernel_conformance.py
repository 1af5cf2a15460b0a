"""What every kernel must do: the same suite for plain torch on a CPU, Triton interpreted on it, and Triton on a GPU.

A kernel equals its definition in float64 to rounding, forward and backward; so do its members under vmap, its traced
graph and its remat; outputs are written whole; the same call gives the same bits; second derivatives are right.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import functional_booster as fb
from functional_booster.kernels import primitive

Draw = Callable[[st.SearchStrategy[Any]], Any]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A kernel and what it is held against.

    ``kernel(*tensors)`` is the primitive; ``definition(*tensors)`` the same by torch's own functions;
    ``arguments(draw, dtype)`` draws tensors on the CPU, of odd shapes and strides; ``cuda`` are the implementations
    for a GPU of the raw ops that it calls, by their names; ``wanted``: the arguments that have gradients.
    """

    kernel: Callable[..., Any]
    definition: Callable[..., Any]
    arguments: Callable[[Draw, torch.dtype], tuple[torch.Tensor, ...]]
    cuda: dict[str, Callable[..., Any]]
    wanted: tuple[int, ...]


def numbers(draw: Draw, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, whose rows may have gaps between them, or which may lie transposed."""
    layout = draw(st.sampled_from(["contiguous", "gaps", "transposed"])) if len(shape) > 1 else "contiguous"
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    if layout == "transposed":
        return normal(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    return normal(*shape[:-1], shape[-1] + 3)[..., : shape[-1]] if layout == "gaps" else normal(*shape)


def check(case: Case, draw: Draw, dtype: torch.dtype, device: str = "cpu") -> None:
    """All laws on drawn arguments."""
    args = tuple(_moved(arg, device) for arg in case.arguments(draw, dtype))
    with _poisoned():
        check_values(case, draw, args, dtype)
        check_transforms(case, args, dtype)


def check_values(case: Case, draw: Draw, args: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    """Outputs and gradients are those of the definition in float64, twice to the same bits, and under vmap."""
    got = with_grads(case, case.kernel, args)
    assert_close(got, with_grads(case, case.definition, _exact(args)), dtype)
    for mine, again in zip(got, with_grads(case, case.kernel, args), strict=True):
        assert torch.equal(mine, again)
    check_vmap(case, draw, args, dtype)


def check_transforms(case: Case, args: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    """A traced graph, in the strides that it was traced with, and a remat equal the kernel; second derivatives."""
    got = with_grads(case, case.kernel, args)
    graph = make_fx(lambda *args: with_grads(case, case.kernel, args), tracing_mode="fake")(*args)
    assert set(case.cuda) <= {getattr(node.target, "_opname", "") for node in graph.graph.nodes}
    results = graph(*args)
    assert_close(results, got, dtype)
    described = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    for mine, again, node in zip(got, results, described, strict=True):
        assert mine.stride() == again.stride() == node.meta["val"].stride()
    assert_close(with_grads(case, fb.remat(case.kernel), args), got, dtype)
    if dtype == torch.float64:
        assert_close(_second(case, case.kernel, args), _second(case, case.definition, args), dtype)


def check_vmap(case: Case, draw: Draw, args: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    """Members of a batch, values and gradients, equal each alone; arguments are batched, or one for all of them."""
    batched = draw(st.lists(st.booleans(), min_size=len(args), max_size=len(args)))
    if not any(batched):
        return
    several = [torch.stack([arg, arg.flip(0)], 1) if one else arg for arg, one in zip(args, batched, strict=True)]
    dims = tuple(1 if one else None for one in batched)
    together = torch.func.vmap(lambda *args: with_grads(case, case.kernel, args), in_dims=dims)(*several)
    for member in range(2):
        alone = [arg.select(1, member) if one else arg for arg, one in zip(several, batched, strict=True)]
        expected = with_grads(case, case.definition, _exact(tuple(alone)))
        assert_close([part[member] for part in together], expected, dtype)


def with_grads(case: Case, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The outputs, and the gradients of their sum, each element with a weight of its own."""

    def outputs(*wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(args)
        for place, value in zip(case.wanted, wanted, strict=True):
            filled[place] = value
        out = fn(*filled)
        return out if isinstance(out, tuple) else (out,)

    out, pull = torch.func.vjp(outputs, *(args[place] for place in case.wanted))[:2]
    return [*out, *pull(tuple(_weights(part) for part in out))]


def _second(case: Case, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The gradient of a number made of the first gradients, which depends on all of them."""

    def number(*args: torch.Tensor) -> torch.Tensor:
        return torch.stack([(part * _weights(part)).sum().sin() for part in with_grads(case, fn, args)]).sum()

    grads = torch.func.grad(number, argnums=case.wanted)(*args)
    return list(grads)


def _weights(part: torch.Tensor) -> torch.Tensor:
    """A cotangent that is the same number in every dtype."""
    count = torch.arange(part.numel(), device=part.device)
    return ((count * 7 % 11 - 5).double() / 4).to(part.dtype).view(part.shape)


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Equal to the rounding of ``dtype``, a few times."""
    rounding = {torch.float64: 1e-11, torch.float32: 1e-5}.get(dtype, 4 * torch.finfo(dtype).eps)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=rounding, atol=rounding)


def _exact(args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(arg.double() for arg in args)


def _moved(arg: torch.Tensor, device: str) -> torch.Tensor:
    """On a device, in the same strides, gaps too."""
    size = sum((length - 1) * stride for length, stride in zip(arg.shape, arg.stride(), strict=True)) + 1
    storage = torch.zeros(size if arg.numel() else 0, dtype=arg.dtype, device=device)
    return torch.as_strided(storage, arg.shape, arg.stride()).copy_(arg)


@contextlib.contextmanager
def _poisoned() -> Generator[None]:
    """Memory that nobody wrote to holds NaN (torch.utils.deterministic.fill_uninitialized_memory)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def on_gpu(case: Case, dtype: torch.dtype, examples: int = 10) -> None:
    """``check`` with Triton, for real."""

    @_settings(examples)
    @hypothesis.given(data=st.data())
    def run(data: st.DataObject) -> None:
        check(case, data.draw, dtype, "cuda")

    run()


def compare_sums(case: Case, args: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    """Outputs and gradients of large arguments, and twice to the same bits. Sums over rows may round once a row."""
    with _poisoned():
        got, again = with_grads(case, case.kernel, args), with_grads(case, case.kernel, args)
    expected = with_grads(case, case.definition, _exact(args))
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 4 * torch.finfo(dtype).eps)
    for mine, same, theirs in zip(got, again, expected, strict=True):
        assert torch.equal(mine, same)
        assert (mine.double() - theirs).abs().max() <= rounding * theirs.abs().max()


def interpreted(module: str, examples: int = 4) -> None:
    """``check`` every case of a test module by Triton's interpreter, on the CPU, in a process of its own."""
    if sys.platform != "linux":
        pytest.skip("triton is made for Linux alone")
    code = f"import kernel_conformance; kernel_conformance.run_interpreted({module!r}, {examples})"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-W", "error", "-W", "ignore:.*torch.jit.script.*:DeprecationWarning", "-c", code]
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run_interpreted(module: str, examples: int) -> None:
    """As ``interpreted``, in this process."""
    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=2)  # type: ignore[assignment]
    cases: dict[str, Case] = importlib.import_module(module).CASES
    for op, implementation in {op: cuda for case in cases.values() for op, cuda in case.cuda.items()}.items():
        primitive._library.impl(op, implementation, "CPU")
    for name, case in cases.items():
        for dtype in (
            torch.float32,
            torch.float16,
            torch.float64,
        ):  # it cuts numbers to bfloat16, where it should round
            try:
                _run(case, dtype, examples)
            except BaseException as error:
                error.add_note(f"kernel {name}, {dtype}")
                raise


def _run(case: Case, dtype: torch.dtype, examples: int) -> None:
    @_settings(examples)
    @hypothesis.given(data=st.data())
    def run(data: st.DataObject) -> None:
        args = case.arguments(data.draw, dtype)
        with _poisoned():
            check_values(case, data.draw, args, dtype)
            if dtype == torch.float32:
                check_transforms(case, args, dtype)

    run()


def _settings(examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
