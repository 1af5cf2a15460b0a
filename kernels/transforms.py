"""grad, vmap and vjp over trees: torch.func by optree's leaves.

torch.func knows torch's own pytrees alone, whose dict order is not optree's. These wrappers flatten with optree, hand
torch.func flat tensors, and put the trees back; leaves that are no floating-point tensors stand still (None in a
gradient).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.func

from . import graph, tree

Tree = tree.Tree


def is_differentiable(leaf: Any) -> bool:
    """Whether gradients flow to this leaf: a floating-point or complex tensor."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def grad_and_value(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """``fn``'s gradient and value: ``(grads, value)``, or ``(grads, (value, aux))`` with ``has_aux``.

    The gradient has the structure of the argument (a tuple of them for a tuple ``argnums``), None where a leaf is not
    differentiable. Raises TypeError when ``fn`` returns no 0-d tensor, ValueError for ``argnums`` out of range or named
    twice.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        wrt = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        for index in wrt:
            if not -len(args) <= index < len(args):
                raise ValueError(f"argnums: {index} is out of range, fn has {len(args)} positional arguments")
        if len({index % len(args) for index in wrt}) < len(wrt):
            raise ValueError(f"argnums: {argnums} names one argument twice")
        leaves, structure = tree.flatten(tuple(args[index] for index in wrt))
        places = [place for place, leaf in enumerate(leaves) if is_differentiable(leaf)]
        aux_structure: list[Any] = []

        def flat(floats: tuple[torch.Tensor, ...]) -> Any:
            filled = list(leaves)
            for place, value in zip(places, floats, strict=True):
                filled[place] = value
            call = list(args)
            for index, value in zip(wrt, tree.unflatten(structure, filled), strict=True):
                call[index] = value
            result = fn(*call, **kwargs)
            if has_aux and not (isinstance(result, tuple) and len(result) == 2):
                raise TypeError(f"fn must return (value, aux) with has_aux=True, got {type(result).__name__}")
            value, aux = result if has_aux else (result, None)
            _require_scalar(value)
            tensors, rebuild = _split_tensors(aux)
            aux_structure[:] = [rebuild]
            return value, tuple(tensors)

        floats = tuple(leaves[place] for place in places)
        grads, (value, tensors) = _on_the_tape(flat, floats) or torch.func.grad_and_value(flat, has_aux=True)(floats)
        filled: list[Any] = [None] * len(leaves)
        for place, gradient in zip(places, grads, strict=True):
            filled[place] = gradient
        by_argument = tree.unflatten(structure, filled)
        result = by_argument[0] if isinstance(argnums, int) else by_argument
        return result, (value, aux_structure[0](tensors)) if has_aux else value

    return wrapped


def grad(fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """``fn``'s gradient: ``grads``, or ``(grads, aux)`` with ``has_aux``."""
    transformed = grad_and_value(fn, argnums, has_aux)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        grads, value = transformed(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def _on_the_tape(flat: Callable[..., Any], floats: tuple[torch.Tensor, ...]) -> Any:
    """The outermost gradient by autograd's tape, None where somebody could differentiate again.

    torch.func keeps what a second derivative would need of every backward: nearly twice the memory. Where no transform,
    trace or outer tape looks on, nobody can ask for one, and the tape frees as it goes. The numbers are the same.
    """
    if graph.transforms() or graph.is_tracing() or torch.is_inference_mode_enabled():
        return None
    watched = torch.is_grad_enabled()
    if watched and any(value.requires_grad for value in floats):
        return None
    leaves = tuple(value.detach().requires_grad_() for value in floats)
    with torch.enable_grad(), graph.on_the_tape():
        value, aux = flat(leaves)
    if watched and not _leaves_of(value) <= set(leaves):
        return None
    if not value.requires_grad or not leaves:
        grads = tuple(torch.zeros_like(leaf, requires_grad=False) for leaf in leaves)
    else:
        found = torch.autograd.grad(value, leaves, allow_unused=True)
        grads = tuple(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True))
    return grads, (value.detach(), tuple(tensor.detach() for tensor in aux))


def _leaves_of(value: torch.Tensor) -> set[torch.Tensor]:
    """The tensors that autograd's tape leads back to."""
    seen, pending, leaves = set(), [value.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
        pending.extend(parent for parent, _ in node.next_functions)
    return leaves


def vjp(fn: Callable[..., Any], *primals: Tree) -> tuple[Tree, Callable[[Tree], tuple[Tree, ...]]]:
    """``fn(*primals)`` and the function from its cotangent to the primals' (None where not differentiable).

    The pullback raises ValueError for a cotangent whose structure is not that of the outputs.
    """
    leaves, structure = tree.flatten(primals)
    places = [place for place, leaf in enumerate(leaves) if is_differentiable(leaf)]
    rebuilt: list[Any] = []

    def flat(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(leaves)
        for place, value in zip(places, floats, strict=True):
            filled[place] = value
        outputs, out_structure = tree.flatten(fn(*tree.unflatten(structure, filled)))
        rebuilt[:] = [out_structure]
        return tuple(outputs)

    outputs, pull = torch.func.vjp(flat, *(leaves[place] for place in places))[:2]

    def pullback(cotangent: Tree) -> tuple[Tree, ...]:
        cotangents, given = tree.flatten(cotangent)
        if given != rebuilt[0]:
            raise ValueError(f"cotangent: structure {given}, expected that of the outputs, {rebuilt[0]}")
        filled: list[Any] = [None] * len(leaves)
        for place, value in zip(places, pull(tuple(cotangents)), strict=True):
            filled[place] = value
        return tree.unflatten(structure, filled)

    return tree.unflatten(rebuilt[0], outputs), pullback


def vmap(
    fn: Callable[..., Any], in_axes: Any = 0, out_axes: int = 0, chunk_size: int | None = None
) -> Callable[..., Any]:
    """``fn`` over a batch: ``in_axes`` is an int, None, or a tuple with a tree (prefix) of them for each argument.

    Leaves that are no tensors are handed through unbatched. Raises TypeError for keyword arguments, ValueError when
    nothing is batched, and, naming the leaves, where a batched dim is missing or two differ in size.
    """
    if not (in_axes is None or isinstance(in_axes, int | tuple | list)):
        raise TypeError(
            f"in_axes: {type(in_axes).__name__}, expected an int, None, or a tuple with one for each argument"
        )

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(
                f"{next(iter(kwargs))}: given by keyword, but in_axes says what is batched by position alone"
            )
        axes = (in_axes,) * len(args) if in_axes is None or isinstance(in_axes, int) else tuple(in_axes)
        if len(axes) != len(args):
            raise ValueError(f"in_axes: {len(axes)} entries for {len(args)} arguments")
        leaves, structure = tree.flatten(args)
        dims = [dim for axis, arg in zip(axes, args, strict=True) for dim in _leaf_axes(axis, arg)]
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        _require_one_batch_size(args, leaves, dims)
        if all(dims[place] is None for place in places):
            raise ValueError(f"in_axes: {in_axes!r} batches no tensor of the {len(args)} arguments")
        rebuilt: list[Any] = []

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            filled = list(leaves)
            for place, value in zip(places, tensors, strict=True):
                filled[place] = value
            outputs, rebuild = _split_tensors(fn(*tree.unflatten(structure, filled)))
            rebuilt[:] = [rebuild]
            return tuple(outputs)

        batched = torch.func.vmap(
            flat, in_dims=tuple(dims[place] for place in places), out_dims=out_axes, chunk_size=chunk_size
        )
        outputs = batched(*(leaves[place] for place in places))
        return rebuilt[0](outputs)

    return wrapped


def _leaf_axes(axis: Any, arg: Tree) -> list[int | None]:
    spread: list[int | None] = []

    def place(entry: Any, subtree: Tree) -> None:
        if not (entry is None or isinstance(entry, int)):
            raise TypeError(f"in_axes: expected int or None, got {entry!r}")
        spread.extend([entry] * len(tree.leaves(subtree)))

    tree.map(place, axis, arg, is_leaf=lambda entry: entry is None)
    return spread


def _require_one_batch_size(args: Tree, leaves: list[Any], dims: list[int | None]) -> None:
    sizes: dict[int, str] = {}
    for name, leaf, dim in zip(tree.names(args), leaves, dims, strict=True):
        if dim is None or not isinstance(leaf, torch.Tensor):
            continue
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(f"in_axes: dim {dim} of argument {name}, which has shape {tuple(leaf.shape)}")
        sizes.setdefault(leaf.shape[dim], name)
    if len(sizes) > 1:
        raise ValueError(
            f"in_axes: the batched dims differ in size: { ({name: size for size, name in sizes.items()}) }"
        )


def _split_tensors(value: Tree) -> tuple[list[torch.Tensor], Callable[[Any], Tree]]:
    """The tensors among the leaves, and the function that rebuilds the tree around (transformed) tensors."""
    leaves, structure = tree.flatten(value)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def rebuild(tensors: Any) -> Tree:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return tree.unflatten(structure, filled)

    return [leaves[place] for place in places], rebuild


def _require_scalar(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"fn must return a 0-d tensor to be differentiated, got {given}")
