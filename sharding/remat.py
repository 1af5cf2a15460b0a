"""remat: trade compute for memory. (jax.checkpoint; Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".)"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from functional_booster.kernels import graph as graphs
from functional_booster.kernels import tree

from . import region
from .environment import current, restore

Tree = tree.Tree
Policy = region.Policy

_library = torch.library.Library("functional_booster_remat", "DEF")
_library.define("barrier(Tensor x, Tensor after) -> Tensor")
_library.impl("barrier", lambda x, after: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("functional_booster_remat::barrier", lambda x, after: torch.empty_like(x))


@torch.library.register_vmap("functional_booster_remat::barrier")
def _barrier_vmap(
    info: Any, dims: tuple[int | None, ...], x: torch.Tensor, after: torch.Tensor
) -> tuple[torch.Tensor, int | None]:
    return torch.ops.functional_booster_remat.barrier(x, after), dims[0]


def everything_saveable(node: Node) -> bool:
    """Save every value that the backward needs: no recomputation."""
    return True


def nothing_saveable(node: Node) -> bool:
    """Save the inputs alone: the whole forward is computed again in the backward. The default."""
    return False


def dots_saveable(node: Node) -> bool:
    """Save the results of matrix products, convolutions and attention; compute everything else again."""
    return node.target in _dots or (node.target is operator.getitem and node.args[0].target in _dots)


def save_only_these_names(*names: str) -> Policy:
    """Save the values marked by ``checkpoint_name(x, name)`` with one of these names; compute the others again."""
    return lambda node: node.meta.get(region.NAME) in names


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """The identity; names a value for ``save_only_these_names``."""
    return region.mark(x, name)


def remat(fn: Callable[..., Tree], policy: Policy = nothing_saveable) -> Callable[..., Tree]:
    """``fn`` whose backward computes again what ``policy`` does not save: the same numbers, less memory.

    ``fn(*trees) -> tree`` must be pure, and take what is differentiated as arguments. Under vmap, jvp or a second grad
    the inputs alone are saved, whatever the policy. Raises TypeError for a policy that cannot be called.
    """
    if not callable(policy):
        raise TypeError(
            f"policy: {policy!r}, expected a function from a graph's node to bool, such as fb.remat.dots_saveable"
        )
    if policy is everything_saveable:
        return fn
    cache: dict[Any, region.Pair] = {}

    def wrapped(*args: Tree) -> Tree:
        environment = current()
        simple = graphs.transforms() in ((), ("Grad",))
        if simple and (environment.outline or policy is not nothing_saveable):
            return region.call(fn, args, cache, policy, environment.outline)
        return _recompute(fn, args)

    return wrapped


def _recompute(fn: Callable[..., Tree], args: tuple[Tree, ...]) -> Tree:
    leaves, structure = tree.flatten(args)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    environment = current()
    structures: list[tree.Structure] = []

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        with restore(environment):
            outputs, out_structure = tree.flatten(fn(*tree.unflatten(structure, filled)))
        structures[:] = [out_structure]
        return tuple(outputs)

    outputs = _recomputing(flat)(*(leaves[place] for place in places))
    return tree.unflatten(structures[0], outputs)


def _recomputing(flat: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """``flat`` as a Function that saves its inputs alone. Its pullback is one, too: so no derivative keeps more."""

    class Recompute(torch.autograd.Function):
        """Forward: ``flat``. Backward: ``flat`` again, and its pullback."""

        generate_vmap_rule = True

        @staticmethod
        def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return flat(*tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            inputs = ctx.saved_tensors
            needed = zip(inputs, ctx.needs_input_grad, strict=True)
            wanted = [place for place, (x, need) in enumerate(needed) if need and x.is_floating_point()]

            def pullback(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
                primals, cotangents = list(values[: len(inputs)]), values[len(inputs) :]
                if graphs.is_tracing():  # else the compiler would find the forward again and keep its values
                    for place in wanted:
                        primals[place] = torch.ops.functional_booster_remat.barrier(primals[place], cotangents[0])

                def of_wanted(*differentiated: torch.Tensor) -> tuple[torch.Tensor, ...]:
                    filled = list(primals)
                    for place, value in zip(wanted, differentiated, strict=True):
                        filled[place] = value
                    return flat(*filled)

                _, pull = torch.func.vjp(of_wanted, *(primals[place] for place in wanted))
                return tuple(pull(cotangents))

            grads: list[torch.Tensor | None] = [None] * len(inputs)
            for place, grad in zip(wanted, _recomputing(pullback)(*inputs, *cotangents), strict=True):
                grads[place] = grad
            return tuple(grads)

    return Recompute.apply


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
