"""What a remat saves, as a function from a value of its graph to bool. (jax.checkpoint_policies.)"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.fx import Node

Policy: TypeAlias = Callable[[Node], bool]
NAME = "functional_booster_name"  # the key in node.meta of the name that ``checkpoint_name`` gave to a value

_aten = torch.ops.aten
_dots = {
    op
    for name in (
        "mm addmm bmm baddbmm convolution _scaled_mm _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable"
    ).split()
    if hasattr(_aten, name)
    for op in [getattr(getattr(_aten, name), overload) for overload in getattr(_aten, name).overloads()]
}


def everything_saveable(node: Node) -> bool:
    """Save every value that the backward needs: no recomputation."""
    return True


def nothing_saveable(node: Node) -> bool:
    """Save the inputs alone: the whole forward is computed again in the backward. The default."""
    return False


def dots_saveable(node: Node) -> bool:
    """Save the results of matrix products, convolutions and attention; compute everything else again."""
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    return source.target in _dots


def save_only_these_names(*names: str) -> Policy:
    """Save the values marked by ``checkpoint_name(x, name)`` with one of these names; compute the others again."""
    return lambda node: node.meta.get(NAME) in names
