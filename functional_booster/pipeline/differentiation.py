"""The forward of a stage, and what its backward needs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.func

from functional_booster.kernels import tree
from functional_booster.kernels.transforms import is_differentiable

Tree = tree.Tree
Stage = Callable[[Tree, Tree], Tree]
WeightGrad = Callable[[], Tree]
InputGrad = Callable[[Tree], tuple[Tree, WeightGrad]]
Backward = Callable[[Tree], tuple[Tree, Tree]]


def whole(stage: Stage, params: Tree, x: Tree, first: bool) -> tuple[Tree, Backward]:
    """``stage(params, x)``, and the function from its cotangent to the gradients of (x, params).

    That of x is None at the ``first`` stage, where nobody waits for it. What the forward saved lives until the function
    is dropped.
    """
    if first:
        y, pull = _vjp(lambda params: stage(params, x), params)
        return y, lambda cotangent: (None, pull(cotangent)[0])
    y, pull = _vjp(lambda x, params: stage(params, x), x, params)

    def backward(cotangent: Tree) -> tuple[Tree, Tree]:
        of_x, of_params = pull(cotangent)
        return of_x, of_params

    return y, backward


def apart(stage: Stage, params: Tree, x: Tree, first: bool) -> tuple[Tree, InputGrad]:
    """``stage(params, x)``, and the function from its cotangent to x's gradient and the function to the weights'.

    The forward keeps what x's gradient needs. The weights' gradient is a second vjp, from x and the cotangent, which
    are all that is kept after the first one: it computes the stage's forward again, and the cotangents inside the stage
    again. So a weight gradient takes the time of forward + input_grad + weight_grad in the terms of ``Costs`` (at the
    ``first`` stage, whose input needs no gradient and whose one tape serves the weights: input_grad + weight_grad).
    """
    if first:
        y, backward = whole(stage, params, x, first)
        return y, lambda cotangent: (None, lambda: backward(cotangent)[1])
    y, pull = _vjp(lambda x: stage(params, x), x)

    def input_grad(cotangent: Tree) -> tuple[Tree, WeightGrad]:
        def weight_grad() -> Tree:
            return _vjp(lambda params: stage(params, x), params)[1](cotangent)[0]

        return pull(cotangent)[0], weight_grad

    return y, input_grad


def _vjp(fn: Callable[..., Tree], *primals: Tree) -> tuple[Tree, Callable[[Tree], tuple[Tree, ...]]]:
    """``fb.vjp`` for what stages hand on: outputs that are not differentiable are legal, primals may have no tensor.

    In cotangents and gradients None stands for a leaf that is not differentiable.
    """
    leaves, structure = tree.flatten(primals)
    places = [place for place, leaf in enumerate(leaves) if is_differentiable(leaf)]
    rebuilt: list[Any] = []

    def flat(*floats: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        outputs, out_structure = tree.flatten(fn(*tree.unflatten(structure, _filled(leaves, places, floats))))
        rebuilt[:] = [out_structure, [is_differentiable(leaf) for leaf in outputs]]
        return tuple(filter(is_differentiable, outputs)), tuple(leaf for leaf in outputs if not is_differentiable(leaf))

    floats = [leaves[place] for place in places]
    if places:
        outputs, pull, others = cast("tuple[Any, Any, Any]", torch.func.vjp(flat, *floats, has_aux=True))
    else:
        (outputs, others), pull = flat(), lambda cotangents: ()
    out_structure, differentiable = rebuilt
    sources = iter(outputs), iter(others)
    y = tree.unflatten(out_structure, [next(sources[0 if one else 1]) for one in differentiable])

    def pullback(cotangent: Tree) -> tuple[Tree, ...]:
        gradients = pull(tuple(tree.leaves(cotangent)))
        return tree.unflatten(structure, _filled([None] * len(leaves), places, gradients))

    return y, pullback


def _filled(leaves: list[Any], places: list[int], values: Any) -> list[Any]:
    filled = list(leaves)
    for place, value in zip(places, values, strict=True):
        filled[place] = value
    return filled
