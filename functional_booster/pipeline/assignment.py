"""Where each node of a joint graph is computed: the stages of a pipeline, from where its parameters live.

A joint graph computes a loss and its gradient, ``(parameters, microbatch, tangent) -> (results, gradients)``. The
forward goes up the stages and the backward comes down: a node may use what its own stage and lower ones have made of
the microbatch, and what its own stage and higher ones have made of the tangent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The stages of a joint graph's nodes.

    ``forward``: of what depends on the microbatch and on layers; ``backward``: of what depends on the tangent. Any
    other node (a mask, a transposed weight) costs little, and is computed at each stage that needs it.
    ``results``, which the stage ``last`` returns; ``gradients[i]``: (stage, node) of the terms that the i-th gradient
    is the sum of, none where it is zero.
    """

    forward: dict[Node, int]
    backward: dict[Node, int]
    results: tuple[Any, ...]
    gradients: tuple[tuple[tuple[int, Node], ...], ...]
    last: int

    def going_up(self, stage: int) -> list[Node]:
        """What ``stage`` hands to the next one, in the order of the graph."""
        return [node for node, made in self.forward.items() if made <= stage < max(self._users(node), default=made)]

    def going_down(self, stage: int) -> list[Node]:
        """What ``stage`` hands to the one before."""
        return [node for node, made in self.backward.items() if made >= stage > min(self._users(node), default=made)]

    def _users(self, node: Node) -> list[int]:
        stages = [self.backward.get(user, self.forward.get(user)) for user in node.users]
        found = [stage for stage in stages if stage is not None]
        return [*found, self.last] if node in self.results else found


def assign(
    graph: Graph,
    anchors: Mapping[Node, int],
    weights: Sequence[Node],
    homes: Sequence[int | None],
    tangent: Node,
    last: int,
) -> Assignment:
    """The stages of the nodes of a joint graph.

    ``anchors``: the stages of those among the parameters, ``weights``, that are in a layer. The last results are the
    gradients, of leaves of the stages ``homes`` (None: in no layer); those before belong to the stage ``last``, as the
    ``tangent`` does. Raises ValueError where a gradient needs at a stage what only a higher one has.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    number = len(output.args[0]) - len(homes)
    results, gradients = tuple(output.args[0][:number]), tuple(output.args[0][number:])
    forward, of_weights = _forward(graph, anchors, set(weights), tangent)
    for stage in range(last):
        _narrow_forward(graph, forward, set(of_weights), results, stage)
    needed = reached(results, set())
    spare = [node for node in forward if node not in needed]  # for the backward alone
    for node in spare:
        forward[node] = max(forward[each] for each in node.all_input_nodes if each in forward)
    backward = _backward(graph, forward, of_weights, set(spare), tangent, last)
    wanted = {node: home for node, home in zip(gradients, homes, strict=True) if isinstance(node, Node)}
    for stage in range(last, 0, -1):
        _narrow_backward(graph, forward, backward, set(of_weights), wanted, stage)
    for node in reversed(spare):  # computed where it is used
        users = [backward.get(user, forward.get(user, last)) for user in node.users]
        forward[node] = max(forward[node], min(users))
    terms = [_terms(node, backward) if isinstance(node, Node) and node in backward else () for node in gradients]
    return Assignment(forward, backward, results, tuple(terms), last)


def _forward(
    graph: Graph, anchors: Mapping[Node, int], weights: set[Node], tangent: Node
) -> tuple[dict[Node, int], dict[Node, int | None]]:
    """The stages of what is computed from the microbatch and layers; and of what is computed from parameters alone."""
    stages, later = dict[Node, int](), {tangent}
    of_weights: dict[Node, int | None] = {node: anchors.get(node) for node in weights}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op in ("placeholder", "output") or not inputs:
            continue
        if any(each in later for each in inputs):
            later.add(node)
            continue
        known = [stage for each in inputs if (stage := stages.get(each, of_weights.get(each))) is not None]
        if all(each in of_weights for each in inputs):
            of_weights[node] = max(known, default=None)
        elif known:
            stages[node] = max(known)
    return stages, of_weights


def _backward(
    graph: Graph,
    forward: dict[Node, int],
    of_weights: dict[Node, int | None],
    spare: set[Node],
    tangent: Node,
    last: int,
) -> dict[Node, int]:
    """The highest stage that fits: no higher than the cotangents, and where the forward's values are at hand."""
    stages, reach = {tangent: last}, dict[Node, int]()
    for node in graph.nodes:
        if node in spare:
            reach[node] = min(reach[each] for each in node.all_input_nodes if each in reach)
        elif (made := forward.get(node, of_weights.get(node))) is not None:
            reach[node] = max([made, *(forward[user] for user in node.users if user in forward and user not in spare)])
        cotangents = [stages[each] for each in node.all_input_nodes if each in stages]
        if node.op == "output" or not cotangents:
            continue
        known = [each for each in node.all_input_nodes if each in reach]
        floor = max((forward.get(each, of_weights.get(each)) or 0 for each in known), default=0)
        ceiling, near = min(cotangents), min((reach[each] for each in known), default=last)
        if floor > ceiling:
            raise ValueError(
                f"{node}, in the backward of stage {ceiling}, needs what stage {floor} has: the layers are not "
                "computed in the order of the stages"
            )
        stages[node] = max(floor, min(ceiling, near))
    return stages


def _narrow_forward(
    graph: Graph, forward: dict[Node, int], weights: set[Node], results: tuple[Any, ...], stage: int
) -> None:
    """Move up what the next stage can as well compute from less: the least bytes cross the boundary after ``stage``."""
    needed = reached(results, set())
    users = {node: [user for user in node.users if user in forward and user in needed] for node in forward}
    movable = set[Node]()
    for node in reversed(graph.nodes):
        free = forward.get(node) == stage and node in needed and weights.isdisjoint(node.all_input_nodes)
        if free and all(forward[user] > stage or user in movable for user in users[node]):
            movable.add(node)
    crossing = [
        node
        for node, made in forward.items()
        if made <= stage and (node in results or any(forward[user] > stage for user in users[node]))
    ]
    for node in _beyond_least_cut(movable, crossing, forward):
        forward[node] = stage + 1


def _narrow_backward(
    graph: Graph,
    forward: dict[Node, int],
    backward: dict[Node, int],
    weights: set[Node],
    wanted: Mapping[Node, int | None],
    stage: int,
) -> None:
    """Move down what the stage before can as well compute from less, gradients of its own leaves too."""

    def is_below(node: Node) -> bool:
        home = wanted.get(node)
        return home is not None and home < stage and not any(user in backward for user in node.users)

    def below(node: Node, moved: set[Node]) -> bool:
        if node in wanted:
            return is_below(node)
        users = [user for user in node.users if user in backward]
        return bool(users) and all(backward[user] < stage or user in moved for user in users)

    movable = set[Node]()
    for node in reversed(graph.nodes):
        inputs = node.all_input_nodes
        if (
            node.op != "placeholder"
            and backward.get(node) == stage
            and below(node, movable)
            and weights.isdisjoint(inputs)
            and all(forward.get(each, 0) < stage for each in inputs)
        ):
            movable.add(node)
    crossing = (
        node
        for node, made in backward.items()
        if made >= stage and (any(backward.get(user, stage) < stage for user in node.users) or is_below(node))
    )
    for node in _beyond_least_cut(movable, crossing, backward):
        backward[node] = stage - 1


def _beyond_least_cut(movable: set[Node], crossing: Iterable[Node], stages: Mapping[Node, int]) -> list[Node]:
    """The movable nodes that are computed from what crosses, where the least bytes do. (A minimum cut.)"""
    import networkx

    flow: Any = networkx.DiGraph()
    flow.add_nodes_from(("source", "sink"))

    def add(node: Node) -> None:
        if (node, "in") in flow:
            return
        value = node.meta.get("val")
        cost = value.numel() * value.itemsize + 1 if isinstance(value, torch.Tensor) else math.inf
        flow.add_edge((node, "in"), (node, "out"), capacity=cost)

        if node not in movable:
            flow.add_edge("source", (node, "in"), capacity=math.inf)
            return
        for each in node.all_input_nodes:
            if each in stages:
                add(each)
                flow.add_edge((each, "out"), (node, "in"), capacity=math.inf)

    if not movable:
        return []
    for node in crossing:
        add(node)
        flow.add_edge((node, "out"), "sink", capacity=math.inf)
    # Of several least cuts networkx finds the one with the fewest nodes beyond it.
    _, (_, beyond) = networkx.minimum_cut(flow, "source", "sink")
    return [node for node in movable if (node, "in") in beyond]


def mark_remat(
    graph: Graph, layers: Mapping[Node, int], again: set[int], weights: Sequence[Node], tangent: Node
) -> None:
    """Note in ``node.meta["remat"]`` what is computed again in the backward: all inside the layers ``again``.

    ``layers``: {parameter: the number of its layer}. What a layer hands on is kept.
    """
    inside, _ = _forward(graph, layers, set(weights), tangent)
    for node, layer in inside.items():
        leaves = any(user in inside and inside[user] != layer for user in node.users)
        node.meta["remat"] = layer in again and not leaves


def reached(results: Iterable[Any], inputs: set[Node]) -> set[Node]:
    """What ``results`` are computed from, them included, as far back as ``inputs``."""
    found: set[Node] = set()
    pending = [node for node in results if isinstance(node, Node)]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend([] if node in inputs else node.all_input_nodes)
    return found


def _terms(node: Node, backward: dict[Node, int]) -> tuple[tuple[int, Node], ...]:
    """A gradient as the terms of a sum, where these are of different stages: none then waits for those of another.

    A leaf that is used at several stages has such a gradient. The sum itself leaves the assignment.
    """
    stage, parts = backward[node], node.all_input_nodes
    is_sum = node.target is torch.ops.aten.add.Tensor and len(parts) == 2 and not node.kwargs
    is_last = all(user.op == "output" for user in node.users)
    if not (is_sum and is_last and all(part in backward for part in parts)) or len({backward[p] for p in parts}) == 1:
        return ((stage, node),)
    del backward[node]
    return tuple(term for part in parts for term in _terms(part, backward))
