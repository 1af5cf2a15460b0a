"""Primitives: raw ops with a derivative and a batching rule.

``torch.library.custom_op`` with a registered derivative is refused by ``torch.func.grad``. A raw op bound in an
``autograd.Function`` is accepted by grad, vmap, vmap(grad), make_fx, torch.compile and plain autograd alike, and each
tracer sees one node. A backward is written in primitives and plain torch ops, so that it can be batched, traced and
differentiated again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

NAMESPACE = "functional_booster"

# (primitive, batch size, batch dim of each argument or None, arguments) -> (outputs, batch dim of the outputs)
BatchingRule: TypeAlias = Callable[[Callable[..., Any], int, tuple[Any, ...], tuple[Any, ...]], tuple[Any, Any]]

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def one_by_one(
    primitive: Callable[..., Any], size: int, dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[Any, int]:
    """The batching rule of any op: call it for each element of the batch and stack the outputs. Right, and slow."""
    outputs = [
        primitive(*(arg if dim is None else arg.select(dim, index) for arg, dim in zip(args, dims, strict=True)))
        for index in range(size)
    ]
    if isinstance(outputs[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*outputs, strict=True)), 0
    return torch.stack(outputs), 0


def leading_dims(
    primitive: Callable[..., Any], size: int, dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[Any, int]:
    """The batching rule of an op whose tensors may all have the same further leading dims: the batch becomes the first.

    A tensor that is not batched is expanded, without a copy.
    """

    def lead(arg: Any, dim: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        return arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)

    return primitive(*(lead(arg, dim) for arg, dim in zip(args, dims, strict=True))), 0


def primitive(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    fake: Callable[..., Any] | None = None,
    batching: BatchingRule = one_by_one,
    residuals: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None,
    backward: Callable[..., tuple[Any, ...]] | None = None,
) -> Callable[..., Any]:
    """Register the raw op ``functional_booster::name`` and return the differentiable function that calls it.

    ``schema`` is that of torch.library without the name: ``"(Tensor x, float eps) -> (Tensor, Tensor)"``; tensors stand
    at the top level, not in lists. ``reference`` is the op in plain torch, for every device; ``cuda`` takes its place
    there (import triton in it, not above it). ``fake`` makes empty outputs of the right shape, dtype and strides; by
    default the reference runs on fake tensors. Outputs are fresh storage, and no input is written.

    ``backward(residuals, *cotangents) -> gradients`` gives a gradient or None for each input, and calls only primitives
    and plain torch ops; ``residuals(inputs, outputs)`` chooses what it gets (by default the inputs). Without a backward
    the op is not differentiable: NotImplementedError where a gradient would flow; integer outputs are constants.
    """
    qualified = f"{NAMESPACE}::{name}"
    _library.define(name + schema)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    if cuda is not None:
        _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(qualified, fake or reference, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    class Primitive(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            kept = () if backward is None else inputs if residuals is None else residuals(inputs, output)
            ctx.save_for_backward(*(value for value in kept if isinstance(value, torch.Tensor)))
            ctx.kept = [None if isinstance(value, torch.Tensor) else (value,) for value in kept]

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
            if backward is None:
                raise NotImplementedError(f"{qualified} has no derivative")
            tensors = iter(ctx.saved_tensors)
            return backward(tuple(next(tensors) if static is None else static[0] for static in ctx.kept), *cotangents)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
            dims = tuple(dim if isinstance(arg, torch.Tensor) else None for arg, dim in zip(args, in_dims, strict=True))
            return batching(Primitive.apply, info.batch_size, dims, args)

    # torch binds the arguments at every call; asking for the signature of a plain function is the slow part of that.
    forward: Any = Primitive.forward
    forward.__signature__ = inspect.signature(forward)
    Primitive.__name__ = Primitive.__qualname__ = name

    def call(*args: Any) -> Any:
        # Dynamo traces no variadic forward, and no Function in a backward, unless it differentiates that Function;
        # where nothing is differentiated or batched, the op is all that there is to the Function.
        if torch.compiler.is_dynamo_compiling() and not _is_transformed(args):
            return op(*args)
        return Primitive.apply(*args)

    call.__name__ = call.__qualname__ = name
    return call


def _is_transformed(args: tuple[Any, ...]) -> bool:
    """Whether a transform of torch.func, or autograd, looks at this call."""
    if torch._C._are_functorch_transforms_active():  # as torch.autograd.Function.apply asks
        return True
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
