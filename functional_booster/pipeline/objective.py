"""A loss function that is cut into the stages of a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from functional_booster.kernels import graph as graphs
from functional_booster.kernels import tree
from functional_booster.kernels.transforms import is_differentiable
from functional_booster.sharding import environment

from .assignment import assign, mark_remat
from .splitting import Split, layer_of
from .stage_graphs import StageGraphs, stage_graphs

Tree = tree.Tree
Loss = Callable[[Tree, Tree], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """An objective for microbatches of one signature: a stage's graphs each, and the structure of the results.

    ``trained``: which of the parameters, by place, have a gradient.
    """

    stages: tuple[StageGraphs, ...]
    structure: tree.Structure
    trained: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """``fn(params, microbatch)`` -> (loss, more): a 0-d sum over the microbatch, and a tree of tensors beside it.

    It is one program, of which each stage computes the part that ``split`` puts there. It is traced once for each
    signature of a microbatch, from shapes alone, so that parameters may be on the meta device. ``trains``: whether
    there is a backward, for the floating-point parameters, or (a set of names) for some. ``compiled``: whether graphs
    are compiled, as jit does, or run as they were traced. ``remat``: the leaves of layers of which the forward keeps
    the input alone, and the backward computes the rest again.
    """

    fn: Loss
    split: Split
    trains: bool | frozenset[str] = True
    compiled: bool = False
    remat: frozenset[str] = frozenset()
    _traces: dict[Hashable, Traced] = dataclasses.field(default_factory=dict, repr=False)

    def traced(self, params: Tree, microbatch: Tree) -> Traced:
        """The graphs for microbatches like this one. Raises TypeError where ``fn`` returns anything else."""
        leaves, structure = tree.flatten((params, microbatch))
        signature = tuple(
            (tuple(leaf.shape), leaf.stride(), leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else graphs.static_key(leaf)
            for leaf in leaves
        )
        device = _device(microbatch)
        key = (structure, signature, device, environment.current().key)
        if key not in self._traces:
            self._traces[key] = self._trace(params, microbatch, device)
        return self._traces[key]

    def _trace(self, params: Tree, microbatch: Tree, device: torch.device) -> Traced:
        names, held = tree.names(params), tree.leaves(params)
        entries, structure = tree.flatten(microbatch)
        places = [at for at, leaf in enumerate(entries) if isinstance(leaf, torch.Tensor)]
        wanted = tuple(at for at, leaf in enumerate(held) if self._is_trained(names[at], leaf))
        tangent = torch.empty((), dtype=torch.float32)
        returned: list[tree.Structure] = []

        def call(values: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
            filled = list(entries)
            for at, value in zip(places, given, strict=True):
                filled[at] = value
            result = self.fn(tree.unflatten(tree.structure(params), list(values)), tree.unflatten(structure, filled))
            loss, more = _require_loss(result)
            leaves, shape = tree.flatten((loss, more))
            returned[:] = [shape]
            return loss, leaves

        def joint(*leaves: torch.Tensor) -> list[torch.Tensor]:
            values, given, seed = leaves[: len(held)], leaves[len(held) : -1], leaves[-1]

            def of_wanted(*floats: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
                filled = list(values)
                for at, value in zip(wanted, floats, strict=True):
                    filled[at] = value
                loss, results = call(filled, given)
                return loss, tuple(results)

            if not wanted:
                return call(values, given)[1]
            loss, pull, results = torch.func.vjp(of_wanted, *(values[at] for at in wanted), has_aux=True)  # type: ignore[misc]
            return [*results, *pull(seed.to(loss.dtype))]

        described = [*held, *(entries[at] for at in places), tangent]
        graph = graphs.outside_transforms(lambda: self._graph(joint, described, device))
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        weights, given, seed = inputs[: len(held)], inputs[len(held) : -1], inputs[-1]
        homes = self.split.anchors()
        anchors = {node: homes[name] for node, name in zip(weights, names, strict=True) if name in homes}
        if self.remat:
            ordered = dict.fromkeys(layer_of(name) for name, _ in self.split.homes if name in homes)
            layer = {name: number for number, name in enumerate(ordered)}
            numbers = {node: layer[layer_of(n)] for node, n in zip(weights, names, strict=True) if n in homes}
            again = {layer[layer_of(name)] for name in self.remat}
            mark_remat(graph.graph, numbers, again, weights, seed)
        of_wanted = [homes.get(names[at]) for at in wanted]
        assignment = assign(graph.graph, anchors, weights, of_wanted, seed, self.split.stages - 1)
        stages = stage_graphs(graph, assignment, weights, given, seed, self.compiled)
        # What a stage reads of a microbatch is said by place among all its entries.
        found = tuple(
            dataclasses.replace(
                stage,
                entries=tuple(places[at] for at in stage.entries),
                gradients=tuple(wanted[at] for at in stage.gradients),
            )
            for stage in stages
        )
        return Traced(found, returned[0], wanted)

    def _graph(self, joint: Callable[..., Any], described: list[torch.Tensor], device: torch.device) -> GraphModule:
        with FakeTensorMode(allow_non_fake_inputs=True):  # constants
            examples = [torch.empty_strided(d.shape, d.stride(), dtype=d.dtype, device=device) for d in described]
        return graphs.trace(joint, examples, decompose=self.compiled)

    def _is_trained(self, name: str, leaf: torch.Tensor) -> bool:
        if isinstance(self.trains, bool):
            return self.trains and is_differentiable(leaf)
        return name in self.trains


def chain(
    stages: Sequence[Callable[[Any, Any], Any]], loss_fn: Callable[[Any, Any], torch.Tensor], params: Sequence[Tree]
) -> Objective:
    """The objective of stages that are functions: ``stages[0](params[0], microbatch)``, ``stages[1](params[1], y)``...

    What a stage returns, a tree of tensors, the next one is given; ``loss_fn(y, microbatch)`` is the 0-d sum of the
    losses of a microbatch.
    """

    def fn(params: Sequence[Tree], microbatch: Tree) -> tuple[torch.Tensor, Tree]:
        y = microbatch
        for stage, own in zip(stages, params, strict=True):
            y = stage(own, y)
        return loss_fn(y, microbatch), ()

    homes = tuple((name, int(name.partition(".")[0])) for name in tree.names(params))
    return Objective(fn, Split(len(stages), homes, frozenset(name for name, _ in homes)))


def _device(microbatch: Tree) -> torch.device:
    found = (leaf.device for leaf in tree.leaves(microbatch) if isinstance(leaf, torch.Tensor))
    return next(found, torch.device("cpu"))


def _require_loss(result: Any) -> tuple[torch.Tensor, Tree]:
    form = "expected (loss, more): a 0-d tensor, the sum over the microbatch, and a tree of tensors"
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"objective: returned {type(result).__name__}, {form}")
    loss, more = result
    if not isinstance(loss, torch.Tensor) or loss.dim():
        given = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn: returned {given}, expected a 0-d tensor, the sum over the microbatch")
    for name, leaf in tree.named_leaves(more).items():
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"objective: the result {name!r} is {type(leaf).__name__}, {form}")
    return loss, more
