"""Finding what went wrong: the leaf with a NaN, and runs that repeat bit for bit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any

import torch

from functional_booster.kernels import tree

Tree = tree.Tree

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def first_nonfinite(values: Tree) -> str | None:
    """The dotted name of the first leaf, in the tree's order, that holds a NaN or an infinity; None where all is well.

    Waits for the device once.
    """
    checked = {name: leaf for name, leaf in tree.named_leaves(values).items() if _is_float(leaf)}
    bad = [~torch.isfinite(leaf).all() for leaf in checked.values()]
    return next((name for name, found in zip(checked, _fetch(bad), strict=True) if found), None)


def check_finite(values: Tree, what: str = "tree") -> None:
    """Raise FloatingPointError where ``values`` (called ``what``) holds a NaN or an infinity: which leaf, how many."""
    if (name := first_nonfinite(values)) is None:
        return
    leaf = tree.named_leaves(values)[name]
    nans, infinities = torch.isnan(leaf).sum().item(), torch.isinf(leaf).sum().item()
    where = f"{what}.{name}" if name else what
    raise FloatingPointError(f"{where}: {nans} NaN and {infinities} infinite of {leaf.numel()} elements")


@contextlib.contextmanager
def deterministic(seed: int | None = None) -> Generator[None]:
    """Inside the with block torch repeats itself bit for bit, or raises where an operation cannot.

    ``seed`` also seeds torch's global generators for code that draws from them (this package draws by key and needs
    none). Everything is put back on leaving, the generators too. cuBLAS reads its workspace setting once, when CUDA
    starts: enter before the first CUDA call.
    """
    cudnn = torch.backends.cudnn
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.deterministic, cudnn.benchmark
    workspace = os.environ.get(_CUBLAS)
    devices = range(torch.cuda.device_count()) if seed is not None and torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices, enabled=seed is not None):
        try:
            os.environ[_CUBLAS] = ":4096:8"
            torch.use_deterministic_algorithms(True)
            cudnn.deterministic, cudnn.benchmark = True, False
            if seed is not None:
                torch.manual_seed(seed)
            yield
        finally:
            torch.use_deterministic_algorithms(was_enabled, warn_only=warned_only)
            cudnn.deterministic, cudnn.benchmark = flags
            if workspace is None:
                os.environ.pop(_CUBLAS, None)
            else:
                os.environ[_CUBLAS] = workspace


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _fetch(flags: list[torch.Tensor]) -> list[bool]:
    if len({flag.device for flag in flags}) == 1:
        return torch.stack(flags).tolist()  # one wait for all
    return [bool(flag) for flag in flags]
