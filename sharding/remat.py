"""remat: trade compute for memory. (jax.checkpoint; Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost".)"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch

from functional_booster.kernels import choice, transforms, tree
from functional_booster.kernels import graph as graphs

from . import region
from .checkpoint_policies import Policy, everything_saveable, nothing_saveable
from .environment import current, restore

Tree = tree.Tree

_library = torch.library.Library("functional_booster_remat", "DEF")
_library.define("barrier(Tensor x, Tensor after) -> Tensor")
_library.impl("barrier", lambda x, after: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("functional_booster_remat::barrier", lambda x, after: torch.empty_like(x))


def _barrier_vmap(
    info: Any, dims: tuple[int | None, ...], x: torch.Tensor, after: torch.Tensor
) -> tuple[torch.Tensor, int | None]:
    return torch.ops.functional_booster_remat.barrier(x, after), dims[0]


torch.library.register_vmap("functional_booster_remat::barrier", _barrier_vmap)


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """The identity; names a value for ``save_only_these_names``."""
    return region.mark(x, name)


def remat(fn: Callable[..., Tree], policy: Policy = nothing_saveable) -> Callable[..., Tree]:
    """``fn`` whose backward computes again what ``policy`` does not save: the same numbers, less memory.

    ``fn(*trees, **trees) -> tree`` must be pure, and take what is differentiated as arguments. Under vmap, jvp or a
    second grad the inputs alone are saved, whatever the policy. Raises TypeError for a policy that cannot be called,
    and, at the call, ValueError where ``fn`` closes over a tensor that is differentiated.
    """
    if not callable(fn):
        raise TypeError(f"fn: {type(fn).__name__}, expected a function")
    if not callable(policy):
        raise TypeError(f"policy: {policy!r}, expected one of fb.checkpoint_policies, such as dots_saveable")
    if policy is everything_saveable:
        return fn
    cache: dict[Any, region.Pair] = {}

    def called(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        return fn(*args, **kwargs)

    def wrapped(*args: Tree, **kwargs: Tree) -> Tree:
        region.refuse_captured(fn)
        environment = current()
        simple = graphs.transforms() in ((), ("Grad",)) and not region.autocasts()
        if simple and (environment.outline or policy is not nothing_saveable):
            return region.call(called, (args, kwargs), cache, policy, environment.outline)
        return _recompute(called, (args, kwargs))

    return wrapped


def _recompute(fn: Callable[..., Tree], args: tuple[Tree, ...]) -> Tree:
    leaves, structure = tree.flatten(args)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    environment, same_dtypes, kernels = current(), _autocast_now(), choice.current()
    indices = environment.indices  # operands, as every batched tensor must be
    structures: list[tree.Structure] = []

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors[len(indices) :], strict=True):
            filled[place] = tensor
        with restore(environment.at(tensors[: len(indices)])), same_dtypes(), choice.restore(kernels):
            outputs, out_structure = tree.flatten(fn(*tree.unflatten(structure, filled)))
        structures[:] = [out_structure]
        return tuple(outputs)

    outputs = _recomputing(flat)(*indices, *(leaves[place] for place in places))
    return tree.unflatten(structures[0], outputs)


def _autocast_now() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The present autocast, as a context in which a backward computes what the forward did."""
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in region.DEVICES if torch.is_autocast_enabled(kind)}

    @contextlib.contextmanager
    def again() -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    return again


def _recomputing(flat: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """``flat`` as a Function that saves its inputs alone. Its pullback is one, too: so no derivative keeps more."""

    class Recompute(torch.autograd.Function):
        """Forward: ``flat``. Backward: ``flat`` again, and its pullback."""

        @staticmethod
        def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return flat(*tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
            ctx.save_for_backward(*inputs)
            ctx.floats = [place for place, out in enumerate(output) if transforms.is_differentiable(out)]
            ctx.mark_non_differentiable(*(out for place, out in enumerate(output) if place not in ctx.floats))

        @staticmethod
        def backward(ctx: Any, *every: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            inputs, floats = ctx.saved_tensors, ctx.floats
            cotangents = tuple(every[place] for place in floats)
            needed = zip(inputs, ctx.needs_input_grad, strict=True)
            wanted = [place for place, (x, need) in enumerate(needed) if need and transforms.is_differentiable(x)]

            def pullback(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
                primals, cotangents = list(values[: len(inputs)]), values[len(inputs) :]
                if graphs.is_tracing():  # else the compiler would find the forward again and keep its values
                    for place in wanted:
                        primals[place] = torch.ops.functional_booster_remat.barrier(primals[place], cotangents[0])

                def of_wanted(*differentiated: torch.Tensor) -> tuple[torch.Tensor, ...]:
                    filled = list(primals)
                    for place, value in zip(wanted, differentiated, strict=True):
                        filled[place] = value
                    results = flat(*filled)
                    return tuple(results[place] for place in floats)

                _, pull = torch.func.vjp(of_wanted, *(primals[place] for place in wanted))[:2]
                return tuple(pull(cotangents))

            grads: list[torch.Tensor | None] = [None] * len(inputs)
            for place, grad in zip(wanted, _recomputing(pullback)(*inputs, *cotangents), strict=True):
                grads[place] = grad
            return tuple(grads)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: torch.Tensor) -> tuple[Any, Any]:
            # A gradient taken outside of this level is that of the whole batch: its members may speak to each other.
            batched = torch.func.vmap(flat, in_dims=in_dims, randomness=info.randomness)
            outputs = _recomputing(batched)(*tensors)
            return outputs, (0,) * len(outputs)

    return Recompute.apply
