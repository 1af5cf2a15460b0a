"""Lowered: a traced graph that a person can read, and what it will cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.flop_counter import flop_registry

from functional_booster.kernels import graph as graphs
from functional_booster.sharding import region
from functional_booster.sharding.mesh import Mesh
from functional_booster.sharding.overlap import IN_ORDER, has_collectives


@dataclass(frozen=True)
class Memory:
    """Bytes of a graph by kind; ``temporary`` is the largest sum of values alive at once, arguments left out."""

    arguments: int
    donated: int
    results: int
    temporary: int

    @property
    def peak(self) -> int:
        """Bytes of arguments and temporaries together, at worst."""
        return self.arguments + self.temporary


@dataclass(frozen=True)
class Collective:
    """A kind of collective in a graph: how often it is called, and how many bytes its results have a rank."""

    op: str
    axis: str
    dtype: torch.dtype
    count: int
    bytes: int


@dataclass(frozen=True)
class Lowered:
    """The graph of one call: ``names`` of its tensors, in order, and ``donated``, whose storage is taken over.

    ``mesh``, if it is known: the real mesh whose axes the collectives go over.
    """

    name: str
    module: GraphModule
    names: tuple[str, ...]
    donated: tuple[bool, ...]
    mesh: Mesh | None = None

    @property
    def graph(self) -> Graph:
        """The torch.fx graph of ATen ops: ``print(lowered.graph)``."""
        return self.module.graph

    @property
    def regions(self) -> dict[str, Graph]:
        """The graphs of the regions that this one calls, by name."""
        return {name: region.programs[name].graph.graph for name in region.program_names(self.module)}

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention (a multiply and an add are two)."""
        return _flops(self.module)

    @property
    def calls(self) -> Iterator[tuple[str, str, Node]]:
        """(op, axis, node) of each collective, those of a region at each of its calls.

        The axis is the name of the process group where the mesh is not known.
        """
        axes = {} if self.mesh is None else dict(zip(self.mesh.groups, self.mesh.names, strict=True))
        for module in _modules(self.module):
            for node in module.graph.nodes:
                op: Any = node.target
                if getattr(op, "namespace", "") == "_c10d_functional" and op._opname != "wait_tensor":
                    group = next((arg for arg in reversed(node.args) if isinstance(arg, str)), "")
                    yield op._opname, axes.get(group, group), node

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives by op, axis and dtype, each counted as often as it is called."""
        found: dict[tuple[str, str, torch.dtype], list[int]] = {}
        for op, axis, node in self.calls:
            result = node.meta["val"]
            found.setdefault((op, axis, result.dtype), []).append(nbytes(result))
        return tuple(Collective(*kind, len(sizes), sum(sizes)) for kind, sizes in found.items())

    @property
    def memory(self) -> Memory:
        """An estimate before compilation, which may fuse temporaries away, and reorder."""
        examples = graphs.examples_of(self.module)
        return Memory(
            arguments=sum(map(nbytes, examples)),
            donated=sum(nbytes(x) for x, given in zip(examples, self.donated, strict=True) if given),
            results=sum(nbytes(x) for x in graphs.results_of(self.module) if x is not None),
            temporary=_peak(self.module),
        )

    def compile(self, options: dict[str, Any] | None = None) -> graphs.Runnable:
        """The compiled function of flat tensors; the regions are compiled first, each once in a process."""
        for name in region.program_names(self.module):
            program = region.programs[name]
            if program.compiled is None:
                program.compiled = graphs.compile(program.graph, graphs.examples_of(program.graph), options)
        in_order = IN_ORDER if has_collectives(self.module) else {}
        return graphs.compile(self.module, graphs.examples_of(self.module), {**in_order, **(options or {})} or None)

    def __str__(self) -> str:
        memory = self.memory
        head = (
            f"{self.name}: {len(self.graph.nodes)} nodes, {len(self.regions)} regions, {self.flops / 1e9:.3g} GFLOP, "
            f"{memory.arguments / 2**20:.1f} MiB of arguments, {memory.temporary / 2**20:.1f} MiB of temporaries"
        )
        return f"{head}\n{self.module.code}"


def readable_bytes(count: float) -> str:
    """A number of bytes for people, in units of 1024: "1.50 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{math.ceil(count)} B" if unit == "B" else f"{count:,.2f} {unit}"


def _modules(module: GraphModule) -> Iterator[GraphModule]:
    """The graph, and the graph of a region once for each of its calls."""
    yield module
    for node in module.graph.nodes:
        if node.target is region.call_op:
            yield from _modules(region.programs[str(node.args[0])].graph)


def _flops(module: GraphModule) -> int:
    total = 0
    for part in _modules(module):
        for node in part.graph.nodes:
            formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
            if node.op == "call_function" and formula:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                total += int(formula(*args, **kwargs, out_val=node.meta["val"]))
    return total


def nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all in a list; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


def _peak(module: GraphModule) -> int:
    """The largest sum of bytes of values that are alive at once. A view counts as nothing and keeps its base alive."""
    order = list(module.graph.nodes)
    base: dict[Node, Node] = {}
    for node in order:
        is_view = node.op == "call_function" and getattr(node.target, "is_view", False)
        base[node] = base[node.all_input_nodes[0]] if is_view and node.all_input_nodes else node
    last_use = {base[node]: place for place, node in enumerate(order)}
    for place, node in enumerate(order):
        for parent in node.all_input_nodes:
            last_use[base[parent]] = max(last_use[base[parent]], place)
    ends: dict[int, list[Node]] = {}
    for node, place in last_use.items():
        ends.setdefault(place, []).append(node)
    alive = peak = 0
    for place, node in enumerate(order):
        owns = base[node] is node and node.op == "call_function" and node.target is not torch.ops.aten.copy_.default
        alive += nbytes(node.meta.get("val")) if owns and not _is_part(node) else 0
        peak = max(peak, alive + (_region_peak(node) if node.target is region.call_op else 0))
        for dead in ends.get(place, []):
            if dead.op == "call_function" and dead.target is not torch.ops.aten.copy_.default and not _is_part(dead):
                alive -= nbytes(dead.meta.get("val"))
    return peak


def _is_part(node: Node) -> bool:
    """An element taken out of a list of results, which are counted where they are made."""
    return getattr(node.target, "__name__", "") == "getitem"


def _region_peak(node: Node) -> int:
    return _peak(region.programs[str(node.args[0])].graph)
