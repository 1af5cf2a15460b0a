"""Overlap: the order of a traced graph in which its collectives run beside the compute.

A trace has each collective where the Python called it, with its wait right behind. This pass moves nodes, and computes
the same: what a gather brings is waited for at its first use, and asked for one gather ahead (prefetch); a reduction
starts as soon as its gradients are there, and is waited for where the update needs it. Buffers that are ``transient``
are gathered a second time for the backward, so that they need not live until then. (FSDP: Zhao et al. 2023, 3.3 and 4;
torchtitan: Liang et al. 2024, 2.1.)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from functional_booster.kernels import block_scale  # noqa: F401 (registers its ops)

from .environment import current

_aten = torch.ops.aten
_CHEAP = {  # what may stand between a parameter and its gather, or between gradients and their reduction
    _aten._to_copy.default,
    _aten.add.Tensor,
    _aten.cat.default,
    _aten.clone.default,
    _aten.constant_pad_nd.default,
    _aten.full.default,
    _aten.new_zeros.default,
    _aten.zeros.default,
    torch.ops.functional_booster.block_scale_encode.default,
    torch.ops.functional_booster.block_scale_decode_sum.default,
}

_library = torch.library.Library("functional_booster_overlap", "DEF")
_library.define("transient(Tensor x) -> Tensor")
_library.impl("transient", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("functional_booster_overlap::transient", lambda x: torch.empty_like(x))
_transient_op = torch.ops.functional_booster_overlap.transient.default


class _Transient(torch.autograd.Function):
    """Forward and backward: the identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return _transient_op(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return cotangent


def transient(x: torch.Tensor) -> torch.Tensor:
    """``x``, of which a jit on a real mesh gathers the whole anew for the backward, rather than keep it."""
    scope = current()
    return _Transient.apply(x) if scope.outline and any(axis.group for axis in scope.axes) else x


# The compiler's own reorderings would undo this one.
IN_ORDER = {"reorder_for_peak_memory": False, "reorder_for_locality": False}


def has_collectives(graph: GraphModule) -> bool:
    """Whether a graph moves tensors between processes."""
    return any(_is_wait(node) for node in graph.graph.nodes)


def overlap(graph: GraphModule, prefetch: int = 1) -> GraphModule:
    """The graph in that order, changed in place; ``prefetch`` is how many gathers are asked for ahead of their use."""
    again = _read_marks(graph)
    if has_collectives(graph):
        _gather_again(graph, again)
        _reorder(graph, prefetch)
    graph.recompile()
    return graph


def _read_marks(graph: GraphModule) -> set[Node]:
    """Take the marks out; returns the nodes that were marked."""
    marked = set()
    for node in list(graph.graph.nodes):
        if node.target is _transient_op:
            marked.add(node.args[0])
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return marked


def _gather_again(graph: GraphModule, marked: set[Node]) -> None:
    """A second gather of each marked buffer for its uses after the widest gap, if other such buffers are used in it."""
    nodes = list(graph.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    light = _light(nodes)
    uses: dict[Node, list[Node]] = {}
    for wait in (node for node in nodes if _is_wait(node) and node in light):
        if marked & _above(wait):
            uses[wait] = sorted(_users(wait, light), key=place.__getitem__)
    for wait, users in uses.items():
        gaps = [(place[later] - place[earlier], later) for earlier, later in itertools.pairwise(users)]
        _, resumed = max(gaps, default=(0, None), key=operator.itemgetter(0))
        if resumed is None:
            continue
        before = users[users.index(resumed) - 1]
        between = [
            other
            for other, theirs in uses.items()
            if other is not wait and any(place[before] < place[use] < place[resumed] for use in theirs)
        ]
        if len(between) > 2:  # with fewer in between (the final norm, the head), it would come back while it goes
            _copy_for(graph, wait, [user for user in users if place[user] >= place[resumed]], light)


def _copy_for(graph: GraphModule, wait: Node, users: list[Node], light: set[Node]) -> None:
    copies: dict[Node, Node] = {}
    below = _chain(wait, light)

    def copy(node: Node) -> Node:
        if node.op in ("placeholder", "get_attr"):
            return node
        if node not in copies:
            for parent in node.all_input_nodes:
                copy(parent)
            copies[node] = graph.graph.node_copy(node, lambda parent: copies.get(parent, parent))
        return copies[node]

    with graph.graph.inserting_before(users[0]):
        for user in users:
            for parent in user.all_input_nodes:
                if parent in below:
                    user.replace_input_with(parent, copy(parent))


def _reorder(graph: GraphModule, prefetch: int) -> None:
    nodes = list(graph.graph.nodes)
    light = _light(nodes)
    eager = _towards_reductions(nodes, light)
    lazy = {node for node in nodes if node not in eager and (node in light or _is_wait(node) or _is_view(node))}
    gathers = [node for node in _order(nodes, lazy, eager, []) if _is_wait(node) and node in light]
    made_of = {wait: _above(wait) & set(gathers) for wait in gathers}
    ahead: dict[Node, list[Node]] = {}
    for place, wait in enumerate(gathers):  # one that needs a gather to come cannot be asked for before it
        later, following = set(gathers[place:]), gathers[place + 1 : place + 1 + prefetch]
        ahead[wait] = [other for other in following if made_of[other] & later == {other}]
    first = [wait for wait in gathers[:prefetch] if made_of[wait] == {wait}]
    ordered = _order(nodes, lazy, eager, [start for wait in first for start in wait.all_input_nodes], ahead)
    cursor = nodes[0]
    for node in ordered[1:]:
        cursor.append(node)
        cursor = node
    needed = set(ordered)
    for node in reversed(nodes):
        if node not in needed:  # nobody asked for it
            graph.graph.erase_node(node)


def _order(
    nodes: list[Node],
    lazy: set[Node],
    eager: set[Node],
    first: list[Node],
    ahead: dict[Node, list[Node]] | None = None,
) -> list[Node]:
    """The nodes: lazy ones where they are needed, eager ones when what they need is there, others as they were.

    ``first``: starts of gathers to begin with; ``ahead``: for each wait, those whose start stands before it.
    """
    inputs = [node for node in nodes if node.op in ("placeholder", "get_attr")]
    ordered = dict.fromkeys(inputs)
    ready: dict[int, list[Node]] = {}
    last = dict.fromkeys(inputs, -1)  # the place of the last compute that a node depends on
    for index, node in enumerate(nodes):
        if node not in last:
            last[node] = max((last[parent] for parent in node.all_input_nodes), default=-1)
            if node not in lazy and node not in eager:
                last[node] = index
        if node in eager:
            ready.setdefault(last[node], []).append(node)

    def emit(node: Node) -> None:
        if node in ordered:
            return
        for parent in node.all_input_nodes:
            emit(parent)
        for wait in (ahead or {}).get(node, ()):
            for start in wait.all_input_nodes:
                emit(start)
        ordered[node] = None

    for start in first:
        emit(start)
    for index, node in enumerate(nodes):
        if _writes(node):  # what reads the old value stays before it: all that stood there and is of use
            for earlier in nodes[:index]:
                if earlier.users:
                    emit(earlier)
        if node not in lazy and node not in eager:
            emit(node)
        for now in ready.get(index, ()):
            emit(now)
    return list(ordered)


def _light(nodes: Iterable[Node]) -> set[Node]:
    """What is made of inputs by cheap ops and collectives alone: gathers, and what comes before and of them."""
    light: set[Node] = set()
    for node in nodes:
        fits = _is_cheap(node) or _is_collective(node)
        if node.op in ("placeholder", "get_attr") or (fits and all(parent in light for parent in node.all_input_nodes)):
            light.add(node)
    return light


def _towards_reductions(nodes: list[Node], light: set[Node]) -> set[Node]:
    """The starts of reductions, and the cheap ops that bring gradients to them; not those of what another reduction
    brings first, which would be waited for at once."""
    behind: set[Node] = set()
    for node in nodes:
        if (_is_wait(node) and node not in light) or any(parent in behind for parent in node.all_input_nodes):
            behind.add(node)
    eager: set[Node] = set()
    for node in reversed(nodes):
        towards = any(user in eager for user in node.users) and _is_cheap(node)
        if node not in light and node not in behind and (_is_start(node) or towards):
            eager.add(node)
    return eager


def _above(node: Node) -> set[Node]:
    """A node and all that it is made of."""
    found, pending = set(), [node]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _chain(wait: Node, light: set[Node]) -> set[Node]:
    """The wait, and the views of what it brought."""
    chain, pending = set(), [wait]
    while pending:
        node = pending.pop()
        if node not in chain:
            chain.add(node)
            pending.extend(user for user in node.users if user in light)
    return chain


def _users(wait: Node, light: set[Node]) -> set[Node]:
    """The nodes that compute with what a wait brought."""
    return {user for node in _chain(wait, light) for user in node.users if user not in light}


def _is_start(node: Node) -> bool:
    return _is_collective(node) and not _is_wait(node)


def _is_wait(node: Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def _is_collective(node: Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    return getattr(node.target, "is_view", False)


def _writes(node: Node) -> bool:
    """Whether the node changes an input in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_cheap(node: Node) -> bool:
    return node.target in _CHEAP or _is_view(node)
