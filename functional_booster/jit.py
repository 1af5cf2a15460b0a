"""jit: run the Python once on fake tensors, compile the graph, and call that from then on. (JAX's jit.)"""

from __future__ import annotations

import functools
import inspect
import os
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from functional_booster.kernels import graph as graphs
from functional_booster.kernels import in_place, tree
from functional_booster.sharding import environment
from functional_booster.sharding.overlap import overlap

from .donation import consume, consumed_by, refuse_aliases, refuse_consumed
from .lowered import Lowered

Tree = tree.Tree


class RecompileWarning(UserWarning):
    """A jitted function was called with arguments of another shape, dtype, structure or static value."""


def jit(
    fn: Callable[..., Tree], *, donate: bool | int | Iterable[int] = (), options: dict[str, Any] | None = None
) -> Jitted:
    """``fn``, traced and compiled once for each structure, shape and dtype of its arguments; equal to ``fn``.

    Arguments are trees; their tensors are inputs, everything else in them is static (hashable, and part of the key).
    ``donate`` names positional arguments (True: the first) whose storage the results take over: they are consumed.
    ``options`` go to Inductor's config. Under grad, vmap, autograd or another jit, ``fn`` itself is run. Raises
    TypeError for an unhashable static leaf, ValueError for a donated tensor that shares storage with another argument,
    DonatedError for an argument that was donated before.
    """
    if not callable(fn):
        raise TypeError(f"fn: {type(fn).__name__}, expected a function")
    if isinstance(fn, Jitted):
        raise TypeError(f"fn: {fn.__name__} is jitted already")
    donated = (
        (0,) if donate is True else () if donate is False else (donate,) if isinstance(donate, int) else tuple(donate)
    )
    return Jitted(fn, donated, options)


@dataclass(eq=False)
class Jitted:
    """A jitted function. ``compiles`` counts its compilations."""

    fn: Callable[..., Tree]
    donate: tuple[int, ...] = ()
    options: dict[str, Any] | None = None
    _entries: dict[Any, _Entry] = field(default_factory=dict, repr=False)
    _last: _Call | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.fn)
        self.__name__ = getattr(self.fn, "__name__", repr(self.fn))

    @property
    def compiles(self) -> int:
        """How many signatures were traced and compiled so far."""
        return len(self._entries)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        leaves, structure = tree.flatten((args, kwargs))
        if graphs.transforms() or graphs.is_tracing() or _wants_autograd(leaves):
            return self.fn(*args, **kwargs)
        key = (structure, environment.current().key, _autocast(), *map(_signature, leaves))
        try:
            entry = self._entries.get(key)
        except TypeError:
            raise self._unhashable(_Call.of(self.fn, args, kwargs)) from None
        if entry is None:
            entry = self._compile(key, args, kwargs)
        return entry(args, leaves, self)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Tree, **kwargs: Tree) -> Lowered:
        """The traced graph of this call, with its FLOPs, memory and collectives; nothing runs or is consumed."""
        return _trace(self, _Call.of(self.fn, args, kwargs))[0]

    def _compile(self, key: Any, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> _Entry:
        call = _Call.of(self.fn, args, kwargs)
        refuse_consumed(call.names, call.leaves)
        refuse_aliases(call.names, call.leaves, _donated(self.donate, args, call))
        if self._last is not None:
            warnings.warn(
                f"jit: {self.__name__} is compiled again (time {self.compiles + 1}): {call.difference(self._last)}",
                RecompileWarning,
                stacklevel=3,
            )
        lowered, outputs = _trace(self, call)
        self._last = call.described()
        self._entries[key] = _Entry(
            lowered.compile(self.options), call.names, call.places, outputs, _donated(self.donate, args, call)
        )
        return self._entries[key]

    def _unhashable(self, call: _Call) -> TypeError:
        for name, leaf in zip(call.names, call.leaves, strict=True):
            try:
                hash(leaf)
            except TypeError:
                return TypeError(
                    f"{name}: {type(leaf).__name__} is no tensor and cannot be hashed, so it can be no static leaf"
                )
        return TypeError(
            "the structure of the arguments cannot be hashed: a registered node has unhashable static fields"
        )


@dataclass(frozen=True)
class _Call:
    """The flattened arguments of one call, with the names that errors use."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: tree.Structure

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> _Call:
        leaves, structure = tree.flatten((args, kwargs))
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = []
        for name in tree.names((args, kwargs)):
            kind, first, *rest = name.split(".")
            known = kind == "0" and int(first) < len(positional)
            names.append(".".join([positional[int(first)] if known else first, *rest]))
        return cls(tuple(names), tuple(leaves), structure)

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(place for place, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))

    def described(self) -> _Call:
        """The call without its tensors, so that they can be freed."""
        return _Call(self.names, tuple(map(_signature, self.leaves)), self.structure)

    def difference(self, before: _Call) -> str:
        now, then = (
            dict(zip(self.names, map(_signature, self.leaves), strict=True)),
            dict(zip(before.names, before.leaves, strict=True)),
        )
        for name in now:
            if name not in then:
                return f"{name} is new ({_show(now[name])})"
            if now[name] != then[name]:
                return f"{name} was {_show(then[name])} and is {_show(now[name])}"
        gone = [name for name in then if name not in now]
        return f"{gone[0]} is gone" if gone else "a static field, or the axis environment, has changed"


@dataclass(frozen=True)
class _Output:
    """Where a leaf of the result comes from: the graph, an input (donated or handed through), a constant."""

    kind: str
    index: int = -1
    value: Any = None


@dataclass(frozen=True)
class _Outputs:
    leaves: tuple[_Output, ...]
    structure: tree.Structure


@dataclass(frozen=True)
class _Entry:
    run: graphs.Runnable
    names: tuple[str, ...]
    places: tuple[int, ...]
    outputs: _Outputs
    donated: tuple[bool, ...]

    def given(self, leaves: list[Any]) -> list[torch.Tensor]:
        """The donated tensors."""
        return [leaf for leaf, give in zip(leaves, self.donated, strict=True) if give]

    def __call__(self, args: tuple[Tree, ...], leaves: list[Any], jitted: Jitted) -> Tree:
        tensors = [leaves[place] for place in self.places]
        if any(map(consumed_by, tensors)):
            refuse_consumed(self.names, leaves)
        if jitted.donate and len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < len(tensors):
            refuse_aliases(self.names, leaves, self.donated)
        results = self.run(*tensors)
        filled = []
        for output in self.outputs.leaves:
            if output.kind == "result":
                filled.append(results[output.index])
            elif output.kind == "input":
                leaf = leaves[output.index]
                filled.append(leaf.detach() if self.donated[output.index] else leaf)
            else:
                filled.append(output.value)
        for index in jitted.donate:
            consume(args[index], self.given(leaves), jitted.__name__)
        return tree.unflatten(self.outputs.structure, filled)


def _trace(jitted: Jitted, call: _Call) -> tuple[Lowered, _Outputs]:
    """The graph of a call, with the writes into donated storage at its end, and where each result leaf comes from."""
    places = call.places
    args, _ = tree.unflatten(call.structure, call.leaves)
    donated = _donated(jitted.donate, args, call)
    recorded: list[_Outputs] = []

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        filled = list(call.leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        fake_args, fake_kwargs = tree.unflatten(call.structure, filled)
        leaves, structure = tree.flatten(jitted.fn(*fake_args, **fake_kwargs))
        outputs, results = _assign(leaves, filled, donated)
        recorded[:] = [_Outputs(tuple(outputs), structure)]
        return results

    try:
        with environment.bind(outline=True):
            traced = in_place.rewrite(overlap(graphs.trace(flat, [call.leaves[place] for place in places])))
    except GuardOnDataDependentSymNode as error:
        raise TypeError(
            f"jit: {jitted.__name__} asks for the value of a tensor{_where(error)}, but it is traced "
            "without values: use torch.where, or jit=False"
        ) from error
    names = tuple(call.names[place] for place in places)
    return Lowered(jitted.__name__, traced, names, tuple(donated[place] for place in places)), recorded[0]


def _where(error: BaseException) -> str:
    """The innermost line that is the user's own: not torch's, nor optree's, nor this package's."""
    ours = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__, optree.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if not frame.filename.startswith(ours)]
    return f" ({os.path.basename(lines[-1].filename)}, line {lines[-1].lineno}: {lines[-1].line})" if lines else ""


def _assign(
    leaves: list[Any], inputs: list[Any], donated: tuple[bool, ...]
) -> tuple[list[_Output], list[torch.Tensor]]:
    """Give each result leaf its place: an input stays it, what fits a donated input is written there at the end."""
    by_identity = {id(leaf): place for place, leaf in enumerate(inputs) if isinstance(leaf, torch.Tensor)}
    free = [place for place, give in enumerate(donated) if give]
    outputs: list[_Output] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            outputs.append(_Output("constant", value=leaf))
        elif id(leaf) in by_identity:
            place = by_identity[id(leaf)]
            outputs.append(_Output("input", place))
            if place in free:
                free.remove(place)
        else:
            outputs.append(_Output("result"))
    writes: list[tuple[torch.Tensor, torch.Tensor]] = []
    results: list[torch.Tensor] = []
    lent = [inputs[place] for place, give in enumerate(donated) if give]
    for number, (leaf, output) in enumerate(zip(leaves, outputs, strict=True)):
        if output.kind != "result":
            continue
        if any(graphs.shares_storage(leaf, donor) for donor in lent):
            leaf = leaf.clone()
        home = next((place for place in free if _signature(inputs[place]) == _signature(leaf)), None)
        if home is None:
            outputs[number] = _Output("result", len(results))
            results.append(leaf)
        else:
            free.remove(home)
            outputs[number] = _Output("input", home)
            writes.append((inputs[home], leaf))
    for donor, value in writes:
        donor.copy_(value)
    return outputs, results


def _donated(donate: tuple[int, ...], args: tuple[Tree, ...], call: _Call) -> tuple[bool, ...]:
    for index in donate:
        if not 0 <= index < len(args):
            raise ValueError(f"donate: argument {index} was not given ({len(args)} positional arguments)")
    flags: list[bool] = []
    for index, arg in enumerate(args):
        flags.extend(isinstance(leaf, torch.Tensor) and index in donate for leaf in tree.leaves(arg))
    return (*flags, *(False,) * (len(call.leaves) - len(flags)))


def _autocast() -> Any:
    """The state of autocast, which is part of what a trace depends on."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return graphs.static_key(leaf)


def _show(signature: Any) -> str:
    if len(signature) == 4:
        shape, stride, dtype, device = signature
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} with strides {list(stride)} on {device}"
    return f"{signature[1]!r}"


def _wants_autograd(leaves: list[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
