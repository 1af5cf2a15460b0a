"""In-place twins: what donation makes of a pure op whose results take over the storage of its arguments.

XLA aliases a donated input with an output of its shape. Here a graph says ``donor.copy_(op(donor, ...))``; where an op
has a twin that writes its arguments, and nobody reads them afterwards, ``rewrite`` calls the twin in its place, and the
copies are gone. Programs are written with the pure op alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from .graph import shares_storage


class Twin(NamedTuple):
    """The mutating op, of the pure one's arguments, and which argument takes the place of each of its results."""

    op: Any
    places: tuple[int, ...]


twins: dict[Any, Twin] = {}


def rewrite(module: GraphModule) -> GraphModule:
    """The graph, changed: twins in place of pure ops, wherever that gives the same numbers."""
    for node in list(module.graph.nodes):
        twin = twins.get(node.target)
        writes = None if twin is None else _writes(node, twin)
        if twin is not None and writes is not None:
            _replace(module, node, twin, writes)
    module.recompile()
    return module


def _writes(node: Node, twin: Twin) -> list[tuple[Node, Node, Node]] | None:
    """(result, donor, copy) of each result of ``node``, if each is written to the argument whose place it takes, and
    nothing else reads that one after the node."""
    found = []
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    for index, place in enumerate(twin.places):
        donor, result = node.args[place], results.get(index)
        if donor is None and (result is None or not result.users):
            continue
        if not isinstance(donor, Node) or donor.op != "placeholder" or result is None:
            return None
        copies = [user for user in result.users if _is_copy(user) and user.args[0] is donor]
        if len(copies) != 1:
            return None
        found.append((result, donor, copies[0]))
    if len({donor for _, donor, _ in found}) < len(found):
        return None
    copies = {copy for _, _, copy in found}
    donors = [donor for _, donor, _ in found]
    return None if any(_reads(later, donors) for later in _after(node) if later not in copies) else found


def _replace(module: GraphModule, node: Node, twin: Twin, writes: list[tuple[Node, Node, Node]]) -> None:
    with module.graph.inserting_before(node):
        mutation = module.graph.call_function(twin.op, node.args)
        mutation.meta["val"] = None
    for result, donor, copy in writes:
        copy.replace_all_uses_with(donor)
        module.graph.erase_node(copy)
        result.replace_all_uses_with(donor)
        module.graph.erase_node(result)
    for user in list(node.users):  # of results that there are not
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _after(node: Node) -> Iterator[Node]:
    while (node := node.next).op != "root":
        yield node


def _reads(node: Node, donors: list[Node]) -> bool:
    """Whether the node has an argument in the memory of a donor; a graph's output is none of its reads."""
    if node.op == "output":
        return any(donor in node.all_input_nodes for donor in donors)
    values = [each.meta.get("val") for each in node.all_input_nodes]
    given = [value for value in values if isinstance(value, torch.Tensor)]
    return any(shares_storage(value, donor.meta["val"]) for value in given for donor in donors)


def _is_copy(node: Node) -> bool:
    return node.target is torch.ops.aten.copy_.default
