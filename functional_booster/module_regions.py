"""Regions of a functionalized module: under jit, blocks that repeat are traced and compiled once.

A block's forward becomes a region whose arguments are all that it computes from: its parameters and buffers, its inputs
and a key. Two blocks share a trace if they differ in nothing that the trace has read. What cannot be traced apart, for
whatever reason, runs as it is: its graph is then part of the surrounding one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import TorchFunctionMetadataMode
from torch.nn.modules.module import _has_any_global_hook

from functional_booster.kernels import graph as graphs
from functional_booster.kernels import tree
from functional_booster.precision import fp8
from functional_booster.sharding.region import outlined, region

from .module_mode import ModuleMode
from .skeleton import Skeleton
from .weight_mode import WeightMode, weight_of

log = logging.getLogger(__name__)
Tree = tree.Tree
Attribute = tuple[int, str]  # of the n-th of a block's modules, by name
State = dict[Attribute, Any]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STATIC = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class _NotApartError(Exception):
    """A block depends on, or changes, something besides its arguments."""


def repeated(module: nn.Module) -> list[list[nn.Module]]:
    """The blocks that repeat: children of one ModuleList or Sequential with the same class and tensors, by kind.

    The outermost such blocks alone, and no single layers: in a region of its own, nothing would be fused with them.
    """
    reached = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))

    def search(parent: nn.Module) -> list[list[nn.Module]]:
        kinds: dict[Any, list[nn.Module]] = {}
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            for child in parent.children():
                if reached[id(child)] == 1 and any(True for _ in child.children()):
                    kinds.setdefault(_kind(child), []).append(child)
        groups = [blocks for blocks in kinds.values() if len(blocks) > 1]
        inside = {id(block) for blocks in groups for block in blocks}
        return groups + [found for child in parent.children() if id(child) not in inside for found in search(child)]

    return search(module)


def _kind(block: nn.Module) -> Any:
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return type(block), tuple((name, tuple(value.shape), value.dtype) for name, value in tensors)


def install(groups: Sequence[Sequence[nn.Module]], mode: ModuleMode) -> None:
    """Send the forwards of these blocks through regions, one cache a group, in a call that ``mode`` is for."""
    for blocks in groups:
        traces = _Traces(blocks)
        for block in blocks:
            vars(block)["forward"] = _through(traces, mode, block)


def _through(traces: _Traces, mode: ModuleMode, block: nn.Module) -> Callable[..., Any]:
    forward = block.forward

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode.block():
            if traces.possible and _outlined() and _is_plain((args, kwargs)):
                try:
                    return traces.call(block, forward, mode, args, kwargs)
                except Exception as error:  # its own errors, the forward raises again
                    log.info("%s runs inline, as no region: %s: %s", type(block).__name__, type(error).__name__, error)
                traces.possible = False
            return forward(*args, **kwargs)

    return call


def _outlined() -> bool:
    """Whether a region is one here, and sees all that the block would: no modes of others, no hooks on every module."""
    modes = set(map(type, torch.overrides._get_current_function_mode_stack()))
    own = {ModuleMode, WeightMode, TorchFunctionMetadataMode}
    return outlined() and modes <= own and not _has_any_global_hook()


def _is_plain(values: Tree) -> bool:
    """Whether these are tensors and constants, in tuples, lists and dicts. (A cache of keys and values is not.)"""
    return tree.all(lambda leaf: isinstance(leaf, (torch.Tensor, *_STATIC)), values)


@dataclass
class _Trace:
    """A block's region: ``state`` is the block's, ``unread`` what in it the traces did not ask for."""

    skeleton: Skeleton
    state: State
    region: Callable[..., Any]
    unread: set[Attribute]

    def fits(self, state: State) -> bool:
        """Whether a block in this state would be traced to the same graphs."""
        compared = (state.keys() | self.state.keys()) - self.unread
        return all(state.get(attribute) == self.state.get(attribute) for attribute in compared)


@dataclass
class _Traces:
    """The regions of blocks of one kind, in one call."""

    blocks: Sequence[nn.Module]
    possible: bool = True
    found: list[_Trace] = field(default_factory=list)

    def call(self, block: nn.Module, forward: Callable[..., Any], mode: ModuleMode, args: Tree, kwargs: Tree) -> Any:
        """``forward(*args, **kwargs)`` of the block through a region; raises if it cannot be traced apart."""
        skeleton = Skeleton(block)
        state, held = _state(skeleton), skeleton.read()
        values = {name: weight_of(mode.marked(value)) for name, value in held.items()}
        while True:
            trace = next((trace for trace in self.found if trace.fits(state)), None)
            if trace is None:
                trace = _Trace(skeleton, state, region(functools.partial(_apart, skeleton, forward)), self._vary(state))
                self.found.append(trace)
            # Without modes: what stands for a weight is an argument like any other here.
            with _reading(trace.skeleton, trace.unread), torch._C.DisableTorchFunction():
                outputs, written = trace.region(values, mode.key, args, kwargs)
            if trace.fits(state):  # still: other shapes may have been traced anew
                break
        for name, value in written.items():
            held[name].copy_(value)
        return outputs

    def _vary(self, state: State) -> set[Attribute]:
        """The attributes in which another block differs from one in this state."""
        others = [_state(Skeleton(block)) for block in self.blocks]
        own = {attribute for attribute in state if attribute[1] not in _OF_EVERY_MODULE}
        return {attribute for attribute in own if any(other.get(attribute) != state[attribute] for other in others)}


def _apart(
    skeleton: Skeleton,
    forward: Callable[..., Any],
    values: dict[str, Any],
    key: torch.Tensor | None,
    args: Any,
    kwargs: Any,
) -> tuple[Tree, dict[str, torch.Tensor]]:
    """A forward as a pure function: (outputs, written buffers). Raises _NotApartError where it is none."""
    buffers = skeleton.buffers()
    standing = WeightMode(values)
    held = {name: value.clone() if name in buffers else fp8.plain(value) for name, value in standing.held.items()}
    given, structure = tree.flatten((args, kwargs))
    versions = {id(leaf): leaf._version for leaf in (*held.values(), *given) if isinstance(leaf, torch.Tensor)}
    with standing, skeleton.holding(held), ModuleMode(skeleton.module, key, values) as mode:
        state = _state(skeleton)
        outputs = forward(*args, **kwargs)
        same = _state(skeleton) == state and all(value is held[name] for name, value in skeleton.read().items())
    after, structure_after = tree.flatten((args, kwargs))
    same = same and structure_after == structure and all(a is b for a, b in zip(after, given, strict=True))

    def is_written(value: torch.Tensor) -> bool:
        return value._version != versions[id(value)] or id(value) in mode.written

    written = {name: value for name, value in held.items() if is_written(value)}
    changed = any(is_written(leaf) for leaf in given if isinstance(leaf, torch.Tensor))
    if changed or not same or not written.keys() <= set(buffers):
        raise _NotApartError("the forward changes something besides buffers")
    if not tree.all(lambda leaf: isinstance(leaf, torch.Tensor), outputs):
        raise _NotApartError("the forward returns more than tensors")
    return outputs, written


def _state(skeleton: Skeleton) -> State:
    """All that the forward may depend on besides values: the attributes of the block's modules, comparable.

    Raises _NotApartError where it may depend on tensors or modules that are not the block's, or calls hooks inside.
    """
    own: dict[int, Any] = {id(value): name for name, value in skeleton.read().items()}
    own |= {id(owner): place for place, owner in enumerate(skeleton.owners)}

    def described(value: Any) -> Any:
        if isinstance(value, (torch.Tensor, nn.Module)):
            if id(value) not in own:
                raise _NotApartError(f"a {type(value).__name__} of somebody else")
            return own[id(value)]
        if isinstance(value, _STATIC):
            return graphs.static_key(value)
        if isinstance(value, dict):
            return type(value), tuple((described(key), described(item)) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(described, value))
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(map(described, value))
        return id(value)

    state: State = {}
    for place, owner in enumerate(skeleton.owners):
        if place and any(vars(owner)[hooks] for hooks in _HOOKS):
            raise _NotApartError("hooks inside")
        state[place, ""] = type(owner)
        for name, value in vars(owner).items():
            if place or not (name == "forward" or "_hooks" in name):  # the block's own are outside of the region
                state[place, name] = described(value)
    return state


@contextlib.contextmanager
def _reading(skeleton: Skeleton, unread: set[Attribute]) -> Generator[None]:
    """Take away from ``unread`` what is read of it: meanwhile these attributes are properties of derived classes."""

    def noted(place: int, name: str) -> Any:
        def read(owner: nn.Module) -> Any:
            unread.discard((place, name))
            return vars(owner)[name]

        return property(read)

    classes = [type(owner) for owner in skeleton.owners]
    try:
        for place, (owner, cls) in enumerate(zip(skeleton.owners, classes, strict=True)):
            if watched := {name: noted(place, name) for at, name in unread if at == place}:
                owner.__class__ = type(cls.__name__, (cls,), watched)
        yield
    finally:
        for owner, cls in zip(skeleton.owners, classes, strict=True):
            owner.__class__ = cls
