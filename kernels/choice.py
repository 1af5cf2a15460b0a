"""Which way a kernel is computed: by Triton, by what the compiler makes of plain torch, or by a library's call.

Each was timed against the others on a device: the winner, by size, stands in ``KERNELS``, with the figures beside it. A
person overrides it by ``use``, and sees what was chosen, and why, by ``choices``. A choice is made while Python runs,
so that a traced graph holds it for good: what is traced must be looked up by ``current()``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from . import graph

Way: TypeAlias = Literal["triton", "compiled", "library"]
Choices: TypeAlias = tuple[tuple[str, Way], ...]  # (kernel, way), sorted


@dataclass(frozen=True)
class Kernel:
    """The ``ways`` to compute a kernel, and by device name, "" for all others, the best one from a size in elements on.

    The sizes ascend from 0. Where Triton is the best or is asked for, and cannot serve a call, ``plain`` does.
    """

    ways: tuple[Way, ...]
    plain: Way
    best: dict[str, tuple[tuple[int, Way], ...]] = field(default_factory=dict)

    def winner(self, device: str, size: int) -> tuple[int, Way]:
        """The best way for a size, and the size from which on it is."""
        table = self.best.get(device, self.best.get("", ((0, self.plain),)))
        return max(entry for entry in table if entry[0] <= size)


_H200: dict[str, tuple[tuple[int, Way], ...]] = {"NVIDIA H200": ((0, "triton"),)}

# Measured (benchmarks/results/kernels.json): microseconds forward + backward on an H200, 16384 rows, bfloat16. What has
# not been measured stays plain.
KERNELS: dict[str, Kernel] = {
    # rows of 2048: Triton 37 + 55, library 43 + 123, compiled 41 + 112; of 4096: 74 + 102, 81 + 216, 74 + 263
    "rms_norm": Kernel(("triton", "compiled", "library"), plain="library", best=_H200),
    # rows of 2048: Triton 71 + 71, library 91 + 169, compiled 72 + 121; of 4096: 147 + 136, 177 + 306, 139 + 285
    "add_rms_norm": Kernel(("triton", "compiled", "library"), plain="library", best=_H200),
    # rows of 2048: Triton 37 + 56, library 61 + 142, compiled 48 + 150; of 4096: 75 + 110, 106 + 226, 83 + 248
    "layer_norm": Kernel(("triton", "compiled", "library"), plain="library", best=_H200),
    "add_layer_norm": Kernel(("triton", "compiled", "library"), plain="library"),
    # 32 and 8 heads of 64: Triton 45 + 49, compiled 55 + 58; of 128: 86 + 92, 106 + 107
    "rotary": Kernel(("triton", "compiled"), plain="compiled", best=_H200),
    # rows of 8192, silu: Triton 189 + 315, compiled 190 + 518; gelu by erf: 201 + 312, 217 + 903
    "gated": Kernel(("triton", "compiled"), plain="compiled", best=_H200),
    # rows of 8192, tanh: Triton 148 + 215, compiled 144 + 367; erf: 173 + 206, 208 + 584
    "bias_gelu": Kernel(("triton", "compiled"), plain="compiled", best=_H200),
}


class KernelFallbackWarning(UserWarning):
    """A Triton kernel was asked for, by ``use``, where it cannot serve."""


@dataclass(frozen=True)
class Decision:
    """That ``kernel`` goes ``way`` on ``device`` for tensors of ``dtype`` from ``size`` elements on, and why."""

    kernel: str
    device: str
    dtype: torch.dtype
    size: int
    way: Way
    why: str


_current: ContextVar[Choices] = ContextVar("kernel_choices", default=())
_decided: dict[tuple[object, ...], Decision] = {}  # by all that a decision depends on


def current() -> Choices:
    """The overrides in scope: what a traced graph depends on, hashable."""
    return _current.get()


@contextlib.contextmanager
def use(**ways: Way) -> Generator[None]:
    """Choose how kernels are computed for the length of a with block: ``use(rms_norm="triton", gated="compiled")``.

    "triton": the kernel written here; "compiled": plain torch, which the compiler fuses under ``jit``; "library": a
    single call of torch. A function that is jitted is compiled again under other choices. Where a Triton kernel that is
    asked for cannot serve, a KernelFallbackWarning says so, once, and the next way does. Raises ValueError for a kernel
    or a way that there is none of.
    """
    for kernel, way in ways.items():
        if kernel not in KERNELS:
            raise ValueError(f"{kernel}: no such kernel, expected one of {', '.join(KERNELS)}")
        if way not in KERNELS[kernel].ways:
            raise ValueError(f"{kernel}: {way!r}, expected one of {', '.join(map(repr, KERNELS[kernel].ways))}")
    with restore(tuple(sorted({**dict(current()), **ways}.items()))):
        yield


@contextlib.contextmanager
def restore(choices: Choices) -> Generator[None]:
    """Bind overrides as they were read earlier."""
    token = _current.set(choices)
    try:
        yield
    finally:
        _current.reset(token)


def choices() -> tuple[Decision, ...]:
    """What has been decided so far in this process, each decision once, by kernel, device, dtype and size."""
    found = dict.fromkeys(_decided.values())
    return tuple(sorted(found, key=lambda one: (one.kernel, one.device, str(one.dtype), one.size, one.way, one.why)))


def choose(kernel: str, x: torch.Tensor, lacks: str | None = None) -> Way:
    """How to compute ``kernel`` on its main operand x; ``lacks``: why its Triton kernel cannot, None where it can."""
    device = _device_name(x.device)
    size, best = KERNELS[kernel].winner(device, x.numel())
    asked = dict(current()).get(kernel)
    lacks = (_lacks(x) or lacks) if (asked or best) == "triton" else None
    question = (kernel, device, x.dtype, size, asked, lacks)
    if question not in _decided:
        _decided[question] = _decide(kernel, device, x.dtype, size, asked, best, lacks)
        if asked == "triton" and lacks:
            warnings.warn(
                f"kernels: {kernel} was to be computed by Triton, but {lacks}: it is computed by "
                f"{KERNELS[kernel].plain!r} instead",
                KernelFallbackWarning,
                stacklevel=3,
            )
    return _decided[question].way


def unfit(*tensors: torch.Tensor | None) -> str | None:
    """Why a Triton kernel cannot take tensors of these dtypes, if so."""
    odd = [str(x.dtype) for x in tensors if x is not None and x.dtype not in _FLOATS]
    return f"there is none for {odd[0]}" if odd else None


_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _decide(
    kernel: str, device: str, dtype: torch.dtype, size: int, asked: Way | None, best: Way, lacks: str | None
) -> Decision:
    if lacks:
        return Decision(kernel, device, dtype, size, KERNELS[kernel].plain, f"Triton cannot: {lacks}")
    if asked:
        return Decision(kernel, device, dtype, size, asked, "asked for")
    measured = device in KERNELS[kernel].best or "" in KERNELS[kernel].best
    return Decision(kernel, device, dtype, size, best, "measured" if measured else "nothing was measured")


def _lacks(x: torch.Tensor) -> str | None:
    """What every Triton kernel lacks."""
    if x.device.type != "cuda":
        return f"the tensors are on {x.device.type}"
    if not _has_triton():
        return "triton is not installed"
    return "it has no forward-mode derivative" if "Jvp" in graph.transforms() else None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
