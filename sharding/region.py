"""Regions: a function as a pair of flat graphs, forward with residuals and backward, traced once and called many times.

A block that repeats, a remat and a pipeline stage are the same thing: a pure function whose joint graph (forward and
pullback) is traced from abstract shapes, outside all transforms, and cut in two. Inside a jit the two graphs are called
through one opaque op, so that the surrounding graph does not grow with depth and each region is compiled once.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule

from functional_booster.kernels import graph as graphs
from functional_booster.kernels import transforms, tree

from .checkpoint_policies import NAME, Policy
from .environment import bind, current

Tree = tree.Tree
DEVICES = ("cpu", "cuda")  # the types of device that may be here


@dataclass(frozen=True)
class Pair:
    """A region for one signature: the names of its two graphs, and how residuals and results are laid out."""

    forward: str
    backward: str
    outputs: int
    floats: tuple[int, ...]
    kept: tuple[int, ...]
    residuals: tuple[int, ...]
    wanted: tuple[bool, ...]
    structure: tree.Structure
    outline: bool


@dataclass
class Program:
    """A graph by name: as traced, and compiled once somebody asked for it."""

    graph: GraphModule
    compiled: graphs.Runnable | None = None
    results: list[torch.Tensor] = field(default_factory=list)

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return list((self.compiled or self.graph)(*inputs))


programs: dict[str, Program] = {}  # by content, so that equal blocks of two models share one compiled program

_library = torch.library.Library("functional_booster_region", "DEF")
_library.define("call(str name, Tensor[] inputs) -> Tensor[]")
_library.impl("call", lambda name, inputs: programs[name].run(inputs), "CompositeExplicitAutograd")
torch.library.register_fake(
    "functional_booster_region::call",
    lambda name, inputs: [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in programs[name].results
    ],
)
call_op = torch.ops.functional_booster_region.call.default

_library.define("mark(Tensor x, str name) -> Tensor")
_library.impl("mark", lambda x, name: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("functional_booster_region::mark", lambda x, name: torch.empty_like(x))
mark_op = torch.ops.functional_booster_region.mark.default


class _Mark(torch.autograd.Function):
    """Forward and backward: the identity; leaves a named node in a joint graph, which is gone once that is cut."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, name: str) -> torch.Tensor:
        return mark_op(x, name)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cotangent, None


def mark(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x``, named in the joint graph of the region that is being traced, if any."""
    return _Mark.apply(x, name) if current().marks else x


def region(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """``fn(*trees) -> tree``, outlined inside a jit: its forward and backward are traced and compiled once a signature.

    Every tensor must come in as an argument. Outside a jit, and under vmap, jvp or a second grad, it is ``fn`` itself.
    """
    cache: dict[Any, Pair] = {}

    def called(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        return fn(*args, **kwargs)

    def wrapped(*args: Tree, **kwargs: Tree) -> Tree:
        if not outlined():
            return fn(*args, **kwargs)
        refuse_captured(fn)
        return call(called, (args, kwargs), cache, None, outline=True)

    return wrapped


def outlined() -> bool:
    """Whether a region called here is outlined: under autocast, which no graph of its own knows of, it is not."""
    return current().outline and graphs.transforms() in ((), ("Grad",)) and not autocasts()


def autocasts() -> bool:
    """Whether ``torch.autocast`` is on: a graph that is traced apart would be outside of it."""
    return any(map(torch.is_autocast_enabled, DEVICES))


def call(
    fn: Callable[..., Tree], args: tuple[Tree, ...], cache: dict[Any, Pair], policy: Policy | None, outline: bool
) -> Tree:
    """``fn(*args)`` through its two graphs. ``policy`` says what may be saved; None: the least memory traffic."""
    leaves, structure = tree.flatten(args)
    places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    tensors = [leaves[place] for place in places]
    wanted = tuple(transforms.is_differentiable(tensor) and tensor.requires_grad for tensor in tensors)
    others = tuple(graphs.static_key(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
    signature = tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors)
    key = (structure, places, signature, wanted, others, current().key)
    if key not in cache:
        described = [graphs.empty_like_outside(tensor) for tensor in tensors]
        devices = [tensor.device for tensor in tensors]

        def refilled(*values: torch.Tensor) -> Tree:
            filled = list(leaves)
            for place, value in zip(places, values, strict=True):
                filled[place] = value
            return fn(*tree.unflatten(structure, filled))

        cache[key] = graphs.outside_transforms(lambda: _build(refilled, described, devices, wanted, policy, outline))
    pair = cache[key]
    results = _Region.apply(pair, *tensors)
    return tree.unflatten(pair.structure, results[: pair.outputs])


def refuse_captured(fn: Callable[..., Any], depth: int = 3) -> None:
    """Raise ValueError, naming the variable, where ``fn`` closes over a tensor that is being differentiated or traced.

    Its gradient would be lost: what a region or remat computes, it computes from its arguments.
    """
    held: list[tuple[str, Any]] = []
    while isinstance(fn, functools.partial):
        held += [("an argument of functools.partial", value) for value in (*fn.args, *fn.keywords.values())]
        fn = fn.func
    for name, cell in (
        zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True) if hasattr(fn, "__code__") else ()
    ):
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            held.append((name, cell.cell_contents))
    for name, value in held:
        for leaf in tree.leaves(value):
            if isinstance(leaf, torch.Tensor) and (leaf.requires_grad or isinstance(leaf, FakeTensor)):
                raise ValueError(
                    f"{name}: a region or remat closes over it, and its gradient would be lost: pass it as an argument"
                )
            if depth and isinstance(leaf, types.FunctionType | functools.partial):
                refuse_captured(leaf, depth - 1)


def program_names(graph: GraphModule) -> list[str]:
    """The names of the programs that a graph calls, each once, in order."""
    found = dict.fromkeys(node.args[0] for node in graph.graph.nodes if node.target is call_op)
    return list(found)


def _build(
    fn: Callable[..., Tree],
    described: list[torch.Tensor],
    devices: list[torch.device],
    wanted: tuple[bool, ...],
    policy: Policy | None,
    outline: bool,
) -> Pair:
    with FakeTensorMode(allow_non_fake_inputs=True):  # constants
        examples = [
            torch.empty_strided(d.shape, d.stride(), dtype=d.dtype, device=device)
            for d, device in zip(described, devices, strict=True)
        ]
        outputs, structure = tree.flatten(fn(*examples))
        floats = tuple(place for place, out in enumerate(outputs) if transforms.is_differentiable(out))
        tangents = [torch.empty_like(outputs[place]) for place in floats]
    number = len(examples)

    def joint(*leaves: torch.Tensor) -> list[torch.Tensor]:
        primals, cotangents = leaves[:number], leaves[number:]

        def of_wanted(*values: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
            left = iter(values)
            filled = [next(left) if want else value for value, want in zip(primals, wanted, strict=True)]
            every = tuple(tree.leaves(fn(*filled)))
            return tuple(every[place] for place in floats), every

        differentiated = [value for value, want in zip(primals, wanted, strict=True) if want]
        pulled: Any = torch.func.vjp(of_wanted, *differentiated, has_aux=True)
        _, pull, every = pulled
        return [*every, *pull(tuple(cotangents))]

    def forward_only(*leaves: torch.Tensor) -> list[torch.Tensor]:
        return tree.leaves(fn(*leaves))

    if not any(wanted):
        forward = graphs.own_results(graphs.trace(forward_only, examples))
        return Pair(_register(forward), "", len(outputs), floats, (), (), wanted, structure, outline)
    with bind(marks=policy is not None, outline=False):
        traced = _read_marks(graphs.trace(joint, [*examples, *tangents], decompose=policy is None))
    if policy is None:
        halves = graphs.min_cut(traced, number, len(outputs))
    else:
        halves = graphs.cut(traced, number, len(outputs), policy)
    names = _register(halves.forward), _register(halves.backward)
    return Pair(*names, len(outputs), floats, halves.kept, halves.residuals, wanted, structure, outline)


def _read_marks(graph: GraphModule) -> GraphModule:
    """The graph without its marks; a value that was marked has its name in ``node.meta``."""
    for node in list(graph.graph.nodes):
        if node.target is mark_op:
            node.args[0].meta[NAME] = node.args[1]
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return graph


def _register(graph: GraphModule) -> str:
    name = graphs.fingerprint(graph)
    programs.setdefault(name, Program(graph, results=graphs.results_of(graph)))
    return name


def _run(pair: Pair, name: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return call_op(name, inputs) if pair.outline else programs[name].run(inputs)


class _Region(torch.autograd.Function):
    """Forward: the outputs and the residuals; backward: the gradients of the inputs that want one."""

    @staticmethod
    def forward(pair: Pair, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_run(pair, pair.forward, list(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pair, tensors = inputs[0], inputs[1:]
        ctx.pair = pair
        ctx.mark_non_differentiable(*(out for place, out in enumerate(output) if place not in pair.floats))
        ctx.save_for_backward(*(tensors[index] for index in pair.kept), *(output[index] for index in pair.residuals))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pair = ctx.pair
        grads = iter(_RegionBackward.apply(pair, *ctx.saved_tensors, *(cotangents[place] for place in pair.floats)))
        return (None, *(next(grads) if want else None for want in pair.wanted))


class _RegionBackward(torch.autograd.Function):
    """Forward: the gradients, from residuals and cotangents. A Function, so that no tape is kept of what is inside."""

    @staticmethod
    def forward(pair: Pair, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_run(pair, pair.backward, list(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        raise NotImplementedError(
            "a second derivative by autograd through a remat with a policy: take it with fb.grad(fb.grad(fn)), or "
            "remat with nothing_saveable"
        )
