"""A stage as flat graphs: F, the forward; B, the gradient of what came in; W, the gradients of the weights.

They are cut from one joint graph: F leaves behind what B and W need, B what W needs of it, and nothing is computed
twice but, in compiled graphs, what is cheaper to compute again than to keep.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import torch
from torch.fx import GraphModule, Node

from functional_booster.kernels import graph as graphs

from .assignment import Assignment, reached

Tensors = list[torch.Tensor]
_compiled: dict[str, graphs.Runnable] = {}  # by content: equal stages share one


@dataclasses.dataclass(frozen=True, eq=False)
class StageGraph:
    """A graph as traced; compiled at its first call, if it is to be."""

    graph: GraphModule
    compiled: bool

    def __call__(self, inputs: Tensors) -> Tensors:
        if not self.compiled:
            return list(self.graph(*inputs))
        name = graphs.fingerprint(self.graph)
        if name not in _compiled:
            _compiled[name] = graphs.compile(self.graph, graphs.examples_of(self.graph))
        return list(_compiled[name](*inputs))


@dataclasses.dataclass(frozen=True, eq=False)
class Half:
    """The first part of a graph that was cut: ``run(inputs)`` -> ``outputs`` results, among more for the second part.

    The second part is given the inputs ``kept`` and the results ``residuals``.
    """

    run: StageGraph
    outputs: int
    kept: tuple[int, ...]
    residuals: tuple[int, ...]

    def __call__(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """The outputs, and what the second part is given."""
        results = self.run(inputs)
        return results[: self.outputs], [inputs[at] for at in self.kept] + [results[at] for at in self.residuals]


@dataclasses.dataclass(frozen=True, eq=False)
class StageGraphs:
    """The graphs of a stage, for microbatches of one signature.

    - ``forward([*parameters, *entries of the microbatch, *received])`` -> what is sent (at the last stage: the
      results), and residuals. ``parameters`` and ``entries`` say which ones; ``received`` and ``sent`` are
      fake tensors.
    - ``backward([*residuals, *received_cotangents])`` -> the sent cotangents, then the terms of the gradients of the
      parameters ``gradients`` (of which one may have several).
    - ``apart``: ``input_grad``, called as ``backward`` -> the sent cotangents, and residuals, and
      ``weight_grad(residuals)`` -> the terms.
    """

    parameters: tuple[int, ...]
    entries: tuple[int, ...]
    received: tuple[torch.Tensor, ...]
    sent: tuple[torch.Tensor, ...]
    received_cotangents: tuple[torch.Tensor, ...]
    sent_cotangents: tuple[torch.Tensor, ...]
    gradients: tuple[int, ...]
    forward: Half
    backward: StageGraph

    @functools.cached_property
    def apart(self) -> tuple[Half, StageGraph]:
        """The backward in two."""
        backward, cotangents = self.backward.graph, len(self.sent_cotangents)
        inputs = [node for node in backward.graph.nodes if node.op == "placeholder"]
        made = next(node for node in backward.graph.nodes if node.op == "output").args[0]
        computed = reached(made[:cotangents], set(inputs))
        halves = graphs.cut(backward, len(inputs), cotangents, lambda node: node in computed)
        compiled = self.backward.compiled
        first = Half(StageGraph(halves.forward, compiled), cotangents, halves.kept, halves.residuals)
        return first, StageGraph(halves.backward, compiled)


def stage_graphs(
    joint: GraphModule,
    assignment: Assignment,
    parameters: Sequence[Node],
    entries: Sequence[Node],
    tangent: Node,
    compiled: bool,
) -> tuple[StageGraphs, ...]:
    """The graphs of all stages, from a joint graph ``(parameters, entries, tangent) -> (results, gradients)``."""
    last = assignment.last
    stages = []
    for stage in range(last + 1):
        received, sent = (
            assignment.going_up(stage - 1),
            assignment.results if stage == last else assignment.going_up(stage),
        )
        down = [tangent] if stage == last else assignment.going_down(stage + 1)
        sent_down = assignment.going_down(stage)
        terms = [(at, node) for at, found in enumerate(assignment.gradients) for made, node in found if made == stage]
        wanted = [*sent, *sent_down, *(node for _, node in terms)]
        needed = reached(wanted, {*received, *down})
        held = [at for at, node in enumerate(parameters) if node in needed]
        read = [at for at, node in enumerate(entries) if node in needed]
        primals = [*(parameters[at] for at in held), *(entries[at] for at in read), *received]
        part = graphs.extract(joint, [*primals, *down], wanted)
        stages.append(
            StageGraphs(
                tuple(held),
                tuple(read),
                _described(received),
                _described(sent),
                _described(down),
                _described(sent_down),
                tuple(at for at, _ in terms),
                *_halves(part, len(primals), len(sent), compiled),
            )
        )
    return tuple(stages)


def _halves(joint: GraphModule, primals: int, outputs: int, compiled: bool) -> tuple[Half, StageGraph]:
    """F and the whole backward of a stage's joint graph."""
    results = next(node for node in joint.graph.nodes if node.op == "output").args[0]
    again = any(node.meta.get("remat") for node in joint.graph.nodes)
    if compiled and len(results) > outputs and not again:
        halves = graphs.min_cut(joint, primals, outputs)
    else:
        halves = graphs.cut(joint, primals, outputs, lambda node: not node.meta.get("remat"))
    first = Half(StageGraph(halves.forward, compiled), outputs, halves.kept, halves.residuals)
    return first, StageGraph(halves.backward, compiled)


def _described(nodes: Iterable[Node]) -> tuple[torch.Tensor, ...]:
    return tuple(node.meta["val"] for node in nodes)
