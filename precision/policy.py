"""Policy: which dtype parameters are stored in, computed in, and reduced in. (DeepMind's jmp.)"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as torch_pytree

from functional_booster.kernels import tree

Tree = tree.Tree


@dataclass(frozen=True)
class Policy:
    """Dtypes of a training step; None means: as it is, no cast.

    ``param``: stored parameters (the master weights); ``compute``: parameters inside the loss, and what a module is
    called with; ``output``: what a boosted module returns; ``reduce``: gradients in collectives; ``accumulate``:
    gradients summed over microbatches. ``wire`` and ``reduce_wire``, float8: the formats in which parameters and
    gradients travel between ranks, in blocks with scales; sums are taken in ``reduce`` all the same.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    output: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    wire: torch.dtype | None = None
    reduce_wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param", "compute", "output", "reduce", "accumulate"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"Policy: {name} is {dtype!r}, expected a floating-point torch.dtype or None")
            if dtype is not None and dtype.itemsize == 1:
                raise ValueError(
                    f"Policy: {name} is {dtype}, expected a wider dtype: float8 is for wire and reduce_wire"
                )
        for name in ("wire", "reduce_wire"):
            if getattr(self, name) not in (None, torch.float8_e4m3fn, torch.float8_e5m2):
                raise TypeError(
                    f"Policy: {name} is {getattr(self, name)!r}, expected torch.float8_e4m3fn, float8_e5m2 or None"
                )


def cast(values: Tree, dtype: torch.dtype | None) -> Tree:
    """The tree with its floating-point tensors in ``dtype``; other leaves, and everything for None, as they are."""
    if dtype is None:
        return values
    return tree.map(lambda leaf: leaf.to(dtype) if is_float(leaf) else leaf, values)


def cast_arguments(values: Any, dtype: torch.dtype | None) -> Any:
    """``cast`` for what a module takes and returns: any structure that torch's own pytrees know."""
    if dtype is None:
        return values
    return torch_pytree.tree_map(lambda leaf: leaf.to(dtype) if is_float(leaf) else leaf, values)


def autocasting(dtype: torch.dtype | None, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """``torch.autocast`` to ``dtype``, None: nothing. What it casts is not remembered, so that it can be traced."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype, cache_enabled=False)


def is_float(leaf: object) -> bool:
    """Whether this is a floating-point tensor."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
