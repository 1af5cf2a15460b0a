"""Sequence parallelism: ranks that share the tokens of a row, and what passes between them.

Two ways. *split_gather* (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2): the ranks of a
tensor-parallel group share the tokens between layers, all_gather before columns, psum_scatter after rows.
*all_to_all* (Jacobs et al. 2023, "DeepSpeed Ulysses"): the ranks of an axis of their own share tokens everywhere but in
attention, where they share heads. ``Environment.token_axes`` says over which axes, if any. Without them, columns and
rows are ``enter`` and ``leave``. Shapes: B batch, T tokens of a row, t those of this rank.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_booster.kernels import tree
from functional_booster.precision import fp8

from .collectives import all_gather, all_to_all, axis_index, axis_size, enter, leave, psum_scatter
from .environment import current
from .shards import my_part, placed

Tree = tree.Tree


def token_axes() -> tuple[str, ...]:
    """The axes of several ranks over which tokens are split here."""
    scope = current()
    found = (scope.axis(name) for name in scope.token_axes)
    return tuple(axis.name for axis in found if axis is not None and axis.size > 1)


def columns(x: torch.Tensor, axis: str) -> torch.Tensor:
    """What goes into column-parallel layers over ``axis``: ``enter``, or, where it splits tokens, all_gather of them.

    (B, t, ...) -> (B, T, ...). Transpose: ``rows``.
    """
    return all_gather(x, axis, dim=1) if axis in token_axes() else enter(x, axis)


def rows(x: torch.Tensor, axis: str) -> torch.Tensor:
    """What comes out of row-parallel layers over ``axis``: ``leave``, or, where it splits tokens, psum_scatter to them.

    (B, T, ...) -> (B, t, ...). Transpose: ``columns``.
    """
    return psum_scatter(x, axis, dim=1) if axis in token_axes() else leave(x, axis)


def own_tokens(x: torch.Tensor) -> torch.Tensor:
    """This rank's tokens: (B or 1, T, ...) -> (B or 1, t, ...), varying. No communication.

    Transpose: zeros elsewhere. Raises ValueError where the ranks do not divide T.
    """
    axes = token_axes()
    if not axes:
        return x
    if x.shape[1] % axis_size(axes):
        raise ValueError(
            f"input_ids: {x.shape[1]} tokens a row, expected a multiple of {axis_size(axes)}, the ranks that share "
            f"them over {' x '.join(axes)}: pad the rows"
        )
    tokens = x.movedim(1, 0)
    return my_part(tokens.flatten(), axes).unflatten(0, (-1, *tokens.shape[1:])).movedim(0, 1)


def every_token(x: torch.Tensor) -> torch.Tensor:
    """(B, t, ...) -> (B, T, ...): varying -> invariant. Transpose: ``own_tokens``."""
    axes = token_axes()
    if not axes:
        return x
    shape = x.movedim(1, 0).shape
    whole = leave(placed(x.movedim(1, 0).flatten(), axes), axes)
    return whole.unflatten(0, (-1, *shape[1:])).movedim(0, 1)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks that share tokens: partial -> invariant."""
    return leave(x, token_axes())


def shared(params: Tree, abstract: Tree, axis: str) -> Tree:
    """The leaves as each rank uses them on tokens of its own, so that their gradients are sums over these ranks.

    invariant -> varying. Where ``axis`` splits tokens, those whose spec names it see them all, and stay.
    """
    axes = token_axes()
    if not axes:
        return params
    infos = tree.named_leaves(abstract)

    def entered(name: str, leaf: Any) -> Any:
        seen_by_all = name in infos and axis in infos[name].spec
        return enter(leaf, tuple(one for one in axes if one != axis or not seen_by_all))

    return tree.map_with_name(entered, params, is_leaf=fp8.is_weight)  # it is named as its leaf


def to_heads(x: torch.Tensor, axis: str) -> torch.Tensor:
    """(B, H, t, d) -> (B, H / ranks, T, d). Transpose: ``to_tokens``. Raises ValueError where ranks do not divide H."""
    if axis not in token_axes():
        return x
    if x.shape[1] % axis_size(axis):
        raise ValueError(
            f"{x.shape[1]} heads on a rank, expected a multiple of {axis_size(axis)}, the ranks along {axis!r}"
        )
    return all_to_all(x, axis, split_dim=1, concat_dim=2)


def to_tokens(x: torch.Tensor, axis: str) -> torch.Tensor:
    """(B, T, heads of this rank, d) -> (B, t, H, d). Transpose: ``to_heads``."""
    return all_to_all(x, axis, split_dim=1, concat_dim=2) if axis in token_axes() else x


def first_token(here: int) -> torch.Tensor | int:
    """The place in the row of the first of this rank's ``here`` tokens."""
    axes = token_axes()
    return axis_index(axes) * here if axes else 0
