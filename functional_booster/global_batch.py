"""A call on one batch, run on the ranks of a mesh: a virtual mesh takes the place of the processes of a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as torch_pytree

from functional_booster.kernels import tree
from functional_booster.sharding.mesh import Replicated, spmd
from functional_booster.sharding.rows import split_rows

from .plugins import Plan

Tree = tree.Tree


def on_ranks(fn: Callable[[Tree, Any], tuple[Any, Tree]], plan: Plan) -> Callable[[Tree, Any], tuple[Any, Tree]]:
    """``fn(values, arguments) -> (outputs, results)`` on every rank: values and results as ``spmd`` has them, arguments
    and outputs structures that torch's own pytrees know.

    On a real mesh, arguments and outputs are this process's own. On a virtual mesh they are those of the global batch:
    tensors are cut along dim 0 over the data ranks (those with one row, or 0-d, go to each), and outputs are joined
    along dim 0; of 0-d outputs there is the mean over ranks, of whole numbers the sum. Raises ValueError where the
    ranks do not divide the rows, or arguments have different numbers of them; of a real one that trains, where it has
    no rows.
    """
    mesh = plan.mesh

    def here(values: Tree, arguments: Any) -> tuple[Any, Tree]:
        if mesh.across and torch.is_grad_enabled():
            _require_rows(arguments)
        kept: list[Any] = []

        def program(values: Tree) -> Tree:
            outputs, results = fn(values, arguments)
            kept.append(outputs)
            return results

        results = spmd(program, mesh)(values)
        return kept[0], results

    def everywhere(values: Tree, arguments: Any) -> tuple[Any, Tree]:
        leaves, structure = torch_pytree.tree_flatten(arguments)
        shape: list[Any] = []

        def program(values: Tree, leaves: list[Any]) -> tuple[list[Any], Tree]:
            outputs, results = fn(values, torch_pytree.tree_unflatten(leaves, structure))
            found, shape[:] = torch_pytree.tree_flatten(outputs)[0], [torch_pytree.tree_structure(outputs)]
            return found, results

        found, results = spmd(program, mesh)(values, _cut(leaves, plan))
        return torch_pytree.tree_unflatten([_joined(leaf, plan) for leaf in found], shape[0]), results

    return everywhere if mesh.virtual else here


def _require_rows(arguments: Any) -> None:
    """Raise ValueError for a batch of no rows: its mean is no number, and would make none of the mean over ranks."""
    tensors = [leaf for leaf in torch_pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if tensors and not any(leaf.shape[0] for leaf in tensors):
        raise ValueError(
            "this rank has no rows in this batch, but gradients are the mean over ranks of what each has: set "
            "drop_last=True, or train by a train_step, which counts rows"
        )


def _cut(leaves: list[Any], plan: Plan) -> list[Any]:
    """The leaves of a call's arguments as ``spmd`` takes them."""
    rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()} - {1}
    if len(rows) > 1:
        raise ValueError(f"the arguments have {sorted(rows)} rows: dim 0 of each tensor is the global batch's rows")

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dim() == 0 or (rows and leaf.shape[0] == 1):
            return Replicated(leaf)
        return split_rows(leaf, plan.mesh, plan.plugin.data_axes)

    return [cut(leaf) for leaf in leaves]


def _joined(leaf: Any, plan: Plan) -> Any:
    """The global value of an output, from those of all ranks (along axes that split no data, of the first)."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    mesh, axes = plan.mesh, plan.plugin.data_axes
    leaf = leaf[tuple(slice(None) if name in axes else 0 for name in mesh.names)]
    ranks = leaf.flatten(0, len(axes) - 1)
    if ranks.dim() > 1:
        return ranks.flatten(0, 1)
    return ranks.mean() if ranks.is_floating_point() or ranks.is_complex() else ranks.sum()
