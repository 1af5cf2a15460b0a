"""The order in which a step's collectives run beside its compute, read off the traced graph of one rank."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

import functional_booster as fb
from functional_booster.kernels import graph as graphs
from functional_booster.plugins import Plan
from functional_booster.sharding import environment, overlap
from functional_booster.sharding.collectives import psum
from functional_booster.sharding.mesh import Mesh, spmd
from functional_booster.sharding.region import call_op

LAYERS = 3
MODEL = fb.models.gpt2(n_layer=LAYERS, n_head=2, n_embd=8, vocab_size=16, n_positions=4)
TX = fb.optim.adamw(1e-3)
BATCH = {"input_ids": torch.zeros(2, 4, dtype=torch.int64)}
PLUGINS = {
    "ddp": fb.TorchDDPPlugin(bucket_cap_mb=0.001),
    "zero": fb.LowLevelZeroPlugin(reduce_bucket_size_in_m=0.0001),
    "fsdp": fb.TorchFSDPPlugin(),
    "ddp, fp8": fb.TorchDDPPlugin(bucket_cap_mb=0.001, fp8_communication=True),  # a sum is two collectives
    "fsdp, fp8": fb.TorchFSDPPlugin(fp8_communication=True),
}


def traced(name: str) -> GraphModule:
    """A copy of one rank's train step on four ranks, as traced: collectives where the Python called them."""
    return copy.deepcopy(_traced(name))


@functools.cache
def _traced(name: str) -> GraphModule:
    virtual = fb.Booster(device="cpu", mixed_precision="fp32", plugin=PLUGINS[name], mesh=fb.virtual_mesh(4))
    axes = virtual.mesh.axes
    groups = tuple(axis if size > 1 else None for axis, size in axes)
    plan = Plan(PLUGINS[name], Mesh(axes, groups, (0,) * len(axes)))
    stacked = virtual.init(MODEL, TX, key=fb.random.key(0))
    mine: Any = {
        part: fb.tree.map(lambda leaf: leaf[(0,) * len(axes)], getattr(stacked, part))
        for part in ("storage", "opt_state")
    }
    state = replace(stacked, plan=plan, **mine)
    step = replace(virtual.train_step(MODEL.loss, TX, max_norm=1.0, jit=False, donate=False), plan=plan)
    leaves, structure = fb.tree.flatten((state, BATCH))
    with environment.bind(outline=True):
        return graphs.trace(lambda *given: fb.tree.leaves(step(*fb.tree.unflatten(structure, given))), leaves)


def kinds(graph: GraphModule) -> list[str]:
    """The collectives, their waits and the blocks, in order: gather, reduce, wait gather, wait reduce, block."""

    def kind(node: Node) -> str | None:
        if node.target is call_op:
            return "block"
        name = str(node.target)
        if "wait_tensor" in name:
            (start,) = node.all_input_nodes
            return f"wait {kind(start)}"
        if "all_gather" in name:
            return "gather"
        reductions = ("all_reduce", "reduce_scatter", "all_to_all")  # the last one for compressed sums
        return "reduce" if any(reduction in name for reduction in reductions) else None

    return [found for node in graph.graph.nodes if (found := kind(node)) is not None]


@pytest.mark.parametrize("name", PLUGINS)
def test_the_graph_computes_the_same(name: str) -> None:
    before, after = traced(name), traced(name)
    overlap.overlap(after)
    after.graph.lint()  # each node stands behind what it needs
    again = sum(kind == "gather" for kind in kinds(after)) - sum(kind == "gather" for kind in kinds(before))
    assert again == (LAYERS if name.startswith("fsdp") else 0)  # all blocks but the last, and the tied embedding

    def described(graph: GraphModule) -> dict[str, Any]:
        """What each result is made of, by content: ops and constants down to the inputs."""
        made: dict[Node, Any] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                made[node] = node.name
            elif node.target is not overlap._transient_op:
                inputs = [made[parent] for parent in node.all_input_nodes]
                constants = torch.fx.node.map_arg((node.args, node.kwargs), lambda parent: None)
                made[node] = hash((str(node.target), repr(constants), *inputs))
            else:
                made[node] = made[node.all_input_nodes[0]]
        return made[next(node for node in graph.graph.nodes if node.op == "output")]

    assert described(after) == described(before)


@pytest.mark.parametrize("name", ["fsdp", "fsdp, fp8"])
def test_blocks_are_asked_for_one_ahead_and_let_go(name: str) -> None:
    graph = traced(name)
    assert kinds(graph)[: 2 * LAYERS : 2] == ["gather"] * LAYERS  # as traced: all at once, each waited for
    order = kinds(overlap.overlap(graph))
    flying = held = 0
    for kind in order[: len(order) - order[::-1].index("block")]:
        flying += (kind == "gather") - (kind == "wait gather")
        held = max(held, flying)
    assert held == 2  # the one that is needed now and the next
    forward = order[: order.index("reduce")]
    first, last = forward.index("block"), len(forward) - forward[::-1].index("block")
    assert forward[first:last] == [*["block", "gather", "wait gather"] * (LAYERS - 1), "block"]


@pytest.mark.parametrize("name", PLUGINS)
def test_gradients_are_summed_beside_the_backward(name: str) -> None:
    order = kinds(overlap.overlap(traced(name)))
    blocks = [place for place, kind in enumerate(order) if kind == "block"]
    backward = blocks[LAYERS:]
    for place, following in itertools.pairwise(backward):
        assert "reduce" in order[place:following]  # started before the next block's backward
    assert "wait reduce" not in order[: backward[-1]]  # and not waited for until all are done


def test_a_graph_without_collectives_stays() -> None:
    model = fb.models.gpt2(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=4)
    step = fb.Booster(device="cpu").train_step(model.loss, TX)
    state = fb.Booster(device="cpu").init(model, TX, key=fb.random.key(0))
    module = step.lower(state, BATCH).module
    before = [node.name for node in module.graph.nodes]
    assert [node.name for node in overlap.overlap(module).graph.nodes] == before
    assert not overlap.has_collectives(module)


def test_what_reads_the_old_value_stays_before_the_write() -> None:
    """Donated storage is written in place at the graph's end; the graph is run, on one process of one group.

    "a" is written first, and the others are made of what it was.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        mesh = Mesh((("dp", 1),), (group.group_name,), (0,))

        def fn(held: Any) -> Any:
            x = held["a"]
            return {"a": x - 0.1 * psum(x * x, "dp"), "before": x.to(torch.float64), "square": x.view(2, 2)}

        def local(held: Any) -> Any:
            module = fb.jit(fn, donate=0).lower(held).module
            module(*fb.tree.leaves(held))
            return held

        held = {"a": torch.arange(4.0), "before": torch.zeros(4, dtype=torch.float64), "square": torch.zeros(2, 2)}
        expected = spmd(fn, mesh)({"a": torch.arange(4.0)})
        got = spmd(local, mesh)(held)
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
    finally:
        dist.destroy_process_group()
