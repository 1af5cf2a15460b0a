"""Policy: which dtype parameters are stored in, computed in, and reduced in. (DeepMind's jmp.)"""

from __future__ import annotations

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
    gradients summed over microbatches.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    output: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param", "compute", "output", "reduce", "accumulate"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"Policy: {name} is {dtype!r}, expected a floating-point torch.dtype or None")


_named = {
    "fp32": Policy(),
    "bf16": Policy(torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float32),
}


def policy_of(precision: str | Policy | None) -> Policy:
    """The policy by name: None and "fp32" leave every dtype as it is; "bf16" computes in bfloat16 from fp32 masters.

    Raises ValueError for an unknown name, TypeError for another type.
    """
    if precision is None:
        return _named["fp32"]
    if isinstance(precision, Policy):
        return precision
    if not isinstance(precision, str):
        raise TypeError(f"mixed_precision: {type(precision).__name__}, expected a name, a Policy or None")
    if precision not in _named:
        raise ValueError(
            f"mixed_precision: {precision!r} is not known, expected one of {', '.join(map(repr, _named))} or None"
        )
    return _named[precision]


def cast(values: Tree, dtype: torch.dtype | None) -> Tree:
    """The tree with its floating-point tensors in ``dtype``; other leaves, and everything for None, as they are."""
    if dtype is None:
        return values
    return tree.map(lambda leaf: leaf.to(dtype) if _is_float(leaf) else leaf, values)


def cast_arguments(values: Any, dtype: torch.dtype | None) -> Any:
    """``cast`` for what a module takes and returns: any structure that torch's own pytrees know."""
    if dtype is None:
        return values
    return torch_pytree.tree_map(lambda leaf: leaf.to(dtype) if _is_float(leaf) else leaf, values)


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
