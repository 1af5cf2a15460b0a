"""Model: a pair of pure functions over a parameter tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from functional_booster.kernels import tree

Tree = tree.Tree


@dataclass(frozen=True)
class Model:
    """``init(key) -> params`` and ``apply(params, *inputs, key=None, train=False, ...) -> outputs``, and what they need.

    ``abstract`` is the tree of ArrayInfo that the parameters fill. ``buffers()`` gives the state that is not trained
    (batch statistics, position tables), in fresh storage; ``apply(..., buffers=tree, mutable=True)`` returns
    ``(outputs, new buffers)``. Language models also have ``hidden(params, input_ids, key=, train=) -> (B, T, D)`` and
    ``head(params) -> (V, D)``, whose product is what ``apply`` returns, and ``loss(params, batch, key) -> (sum, weight)``
    fused over the two.
    """

    init: Callable[[torch.Tensor], Tree]
    apply: Callable[..., Any]
    abstract: Tree
    buffers: Callable[[], Tree] = dict
    hidden: Callable[..., torch.Tensor] | None = None
    head: Callable[[Tree], torch.Tensor] | None = None
    loss: Callable[..., Any] | None = None
    config: Any = None
    name: str = "model"
