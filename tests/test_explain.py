"""What explain says is what ranks hold, and what a step on processes moves."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from rich.console import Console

import functional_booster as fb
from functional_booster.explain import Explanation, explain
from functional_booster.kernels import tree
from functional_booster.lowered import readable_bytes
from functional_booster.plugins import GeminiPlugin
from functional_booster.sharding import collectives as c
from functional_booster.sharding.mesh import Mesh, spmd
from functional_booster.testing.laws import traced
from functional_booster.transfers import transfers

_CHUNKS = {"search_range_m": 0.001, "min_chunk_size_m": 0.0001, "hidden_dim": 8}
PLUGINS: dict[str, Any] = {
    "single": None,
    "ddp": fb.TorchDDPPlugin(bucket_cap_mb=0),
    "zero2-replicas": fb.LowLevelZeroPlugin(stage=2, extra_dp_size=2),
    "zero1-16bit": fb.LowLevelZeroPlugin(precision="bf16", master_weights=False, communication_dtype=torch.bfloat16),
    "fsdp": fb.TorchFSDPPlugin(),
    "fsdp-ignored": fb.TorchFSDPPlugin(ignored_modules=["h.1"]),
    "fsdp-once": fb.TorchFSDPPlugin(sharding_strategy="SHARD_GRAD_OP"),
    "gemini-half": GeminiPlugin(**_CHUNKS, shard_param_frac=0.5),
}
everywhere = pytest.mark.parametrize("name", PLUGINS)
BLOCKS, WIDTH, ROWS = 3, 12, 6
TX = fb.optim.adamw(0.01, weight_decay=0.1, mask=fb.optim.matrices)


def _model() -> fb.Model:
    """Blocks, a frozen table, frozen whole numbers, one number, odd sizes, a counter that is not trained."""
    normal = fb.initializers.normal(0.3)
    abstract = {
        "table": fb.ArrayInfo((7, WIDTH), initializer=normal, trainable=False),
        "order": fb.ArrayInfo((WIDTH,), torch.int64, initializer=lambda key, shape, dtype: torch.arange(*shape)),
        "h": [
            {
                "weight": fb.ArrayInfo((WIDTH, WIDTH), initializer=normal),
                "bias": fb.ArrayInfo((WIDTH,), initializer=normal),
            }
            for _ in range(BLOCKS)
        ],
        "scale": fb.ArrayInfo((), initializer=normal),
    }

    def apply(params: Any, x: torch.Tensor) -> torch.Tensor:
        x = params["table"][x][..., params["order"]]
        for layer in params["h"]:
            x = x + torch.tanh(x @ layer["weight"] + layer["bias"])
        return params["scale"] * x

    return fb.Model(
        functools.partial(fb.initialize, abstract), apply, abstract, lambda: {"seen": torch.zeros(3, dtype=torch.int64)}
    )


MODEL = _model()


def loss_fn(params: Any, batch: Any) -> tuple[torch.Tensor, float]:
    return MODEL.apply(params, batch["x"]).square().sum().float(), 1.0


def booster(name: str, ranks: int, precision: str | None = "bf16") -> fb.Booster:
    plugin = PLUGINS[name]
    return fb.Booster("cpu", precision, plugin, mesh=None if plugin is None else fb.virtual_mesh(ranks))


@functools.cache
def explained(name: str, ranks: int) -> Explanation:
    return explain(MODEL, booster(name, ranks), tx=TX)


@functools.cache
def explained_with_loss(name: str, ranks: int, accumulate: int = 1) -> Explanation:
    batch = {"x": fb.ArrayInfo((ROWS * accumulate,), torch.int64)}
    return explain(MODEL, booster(name, ranks), tx=TX, loss_fn=loss_fn, batch=batch, accumulate=accumulate)


def nbytes(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(values))


@everywhere
def test_bytes_are_those_that_init_allocates(name: str) -> None:
    one = booster(name, 8)
    state = one.init(MODEL, TX, key=fb.random.key(0))
    held, ranks = explained(name, 8).held, one.plan.mesh.size
    assert held.parameters * ranks == nbytes(state.storage)
    assert held.frozen * ranks == nbytes(state.frozen)
    assert held.optimizer * ranks == nbytes(state.opt_state)
    assert held.buffers == nbytes(state.buffers)
    assert held.counters == nbytes((state.step, state.position, state.key, state.loss_scale))
    assert held.total == sum((held.parameters, held.frozen, held.optimizer, held.buffers, held.counters))
    assert held.host == 0


def test_a_state_is_explained_as_its_model_is() -> None:
    one = booster("gemini-half", 8)
    state = one.init(MODEL, TX, key=fb.random.key(0))
    assert explain(state, one, tx=TX) == explained("gemini-half", 8)  # which was predicted before there was a state


@everywhere
def test_leaves_and_padding_are_all_that_parameters_are(name: str) -> None:
    found = explained(name, 8)
    assert [leaf.name for leaf in found.leaves] == tree.names(MODEL.abstract)
    assert [leaf.shape for leaf in found.leaves] == [info.shape for info in tree.leaves(MODEL.abstract)]
    assert {leaf.name for leaf in found.leaves if not leaf.trained} == {"order", "table"}
    rest = found.held.parameters + found.held.frozen - sum(leaf.bytes for leaf in found.leaves)
    assert found.held.padding == round(rest)


Moved = list[tuple[Any, ...]]


def listed(collectives: Iterable[Any]) -> Moved:
    return sorted(((one.op, one.axis, one.dtype, one.count, one.bytes) for one in collectives), key=str)


def moved(found: Explanation) -> Moved:
    return listed(found.collectives)


MICROBATCHES = 3
Found = dict[str, tuple[Moved, Moved, Counter[str], int]]


def on_processes(names: list[str]) -> Found:
    """By axis, what the graphs of a step and of a microbatch move on this process, and what really goes between
    processes in a step of microbatches; the bytes that init takes."""
    results: Found = {}
    for name in names:
        one = fb.Booster("cpu", "bf16", PLUGINS[name])
        state = one.init(MODEL, TX, key=fb.random.key(0))
        allocated, batch = nbytes(state), {"x": torch.zeros(ROWS * MICROBATCHES, dtype=torch.int64)}
        step, many = (one.train_step(loss_fn, TX, accumulate=number) for number in (1, MICROBATCHES))
        graphs = step.lower(state, {"x": batch["x"][:ROWS]}), many.lower(state, batch)
        shown = [listed(graph.collectives) for graph in graphs]
        with traced():
            state, _ = many(state, batch)  # traces
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                many(state, batch)
        pairs = [event.name.partition("::")[::2] for event in profile.events() or ()]
        ran = Counter(op for space, op in pairs if space == "_c10d_functional" and op != "wait_tensor")
        results[name] = (shown[0], shown[1], ran, allocated)
    return results


@pytest.mark.xdist_group("ranks")
def test_collectives_are_those_of_a_step_on_processes() -> None:
    names = ["zero1-16bit", "zero2-replicas", "fsdp", "gemini-half"]  # sums over axes that do not split, too
    ranks = run_on_ranks(2, on_processes, names, timeout=240)
    for name in names:
        found, many = explained_with_loss(name, 2), explained_with_loss(name, 2, MICROBATCHES)
        for whole, microbatch, ran, allocated in (rank[name] for rank in ranks):
            assert whole == moved(found), name
            assert microbatch == listed(many.lowered.collectives), name
            assert ran == Counter({op: sum(n for kind, _, _, n, _ in moved(many) if kind == op) for op in ran}), name
            assert ran.keys() == {op for op, *_ in moved(many)}, name
            assert allocated == found.held.total, name


@pytest.mark.parametrize("name", ["ddp", "zero1-16bit", "zero2-replicas", "fsdp", "fsdp-once"])
def test_microbatches_reduce_each_and_synchronize_once(name: str) -> None:
    """Calls and bytes are linear in the number of microbatches; by how much is what the plugin does for each."""
    one, *more = (explained_with_loss(name, 8, number) for number in (2, 3, 5))
    calls = [{(c.op, c.axis, c.dtype): (c.count, c.bytes, c.wire) for c in e.collectives} for e in (one, *more)]
    assert calls[0].keys() == calls[1].keys() == calls[2].keys()
    grown = {kind: tuple(b - a for a, b in zip(calls[0][kind], calls[1][kind], strict=True)) for kind in calls[0]}
    for kind, (first, second) in {kind: (calls[1][kind], calls[2][kind]) for kind in grown}.items():
        assert second == tuple(a + 2 * b for a, b in zip(first, grown[kind], strict=True))
    each = {op: count for (op, _, _), (count, *_) in grown.items() if count}
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    expected = {"ddp": {}, "zero1-16bit": {}, "zero2-replicas": {scatter: 2}, "fsdp-once": {scatter: 7}}
    assert each == expected.get(name, {gather: each.get(gather), scatter: 7})
    assert explained(name, 8).work.gradients == one.work.gradients


def test_the_table_says_how_many_microbatches() -> None:
    found = explain(MODEL, booster("fsdp", 8), tx=TX, accumulate=4)
    assert "8 ranks (dp=1, fsdp=8), 4 microbatches a step" in str(found)
    assert found.accumulate == 4
    with pytest.raises(ValueError, match="accumulate: 0, expected a whole number of microbatches"):
        explain(MODEL, booster("fsdp", 8), tx=TX, accumulate=0)
    batch = {"x": fb.ArrayInfo((ROWS,), torch.int64)}
    with pytest.raises(ValueError, match="batch: 6 rows cannot be split into accumulate=4"):
        explain(MODEL, booster("fsdp", 8), tx=TX, loss_fn=loss_fn, batch=batch, accumulate=4)


@pytest.mark.parametrize(("name", "ranks"), [("zero2-replicas", 2), ("fsdp-once", 8)])
def test_collectives_need_no_loss(name: str, ranks: int) -> None:
    assert moved(explained(name, ranks)) == moved(explained_with_loss(name, ranks))


def test_gathers_for_the_backward_are_at_most_those_of_no_loss() -> None:
    found = explained_with_loss("fsdp", 8).collectives
    (gathers,) = (one for one in found if one.dtype == torch.bfloat16)
    (most,) = (one for one in explained("fsdp", 8).collectives if one.dtype == torch.bfloat16)
    assert 8 < gathers.count <= most.count == 8 + 6  # a weight or more again; at most all that are trained but the last
    assert set(found) - {gathers} == set(explained("fsdp", 8).collectives) - {most}


def test_bytes_on_paper() -> None:
    """A block is a weight that decays and a bias that does not, so two buckets; ``scale`` is one more.

    A leaf takes whole 64s: 192 for a weight (12, 12), 64 for a bias, a number, whole numbers; the table (7, 12) 128. A
    bucket that is split takes whole 64s on each of 8 ranks: 512, or 1024 for three weights in one.
    """

    def of(name: str, op: str, dtype: torch.dtype) -> tuple[int, int, int]:
        (one,) = (one for one in explained(name, 8).collectives if (one.op, one.dtype) == (op, dtype))
        return one.count, one.bytes, one.wire

    gather, scatter, reduce = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    # Each unit's sum, 2 x 7/8 of it on the wire.
    whole = (BLOCKS * (192 + 64) + 64) * 4
    assert of("ddp", reduce, torch.float32) == (7, whole, whole * 2 * 7 // 8)
    # 16-bit parameters of a unit, and the table; 7/8 travel. Of the trained ones all but the last are gathered again
    # for the backward, since three others or more are used in between.
    assert of("fsdp", gather, torch.bfloat16) == (8 + 6, 14 * 512 * 2, 14 * 512 * 2 * 7 // 8)
    # Gradients are summed in 32 bits, a rank gets 1/8.
    assert of("fsdp", gather, torch.int64) == (1, 512 * 8, 512 * 7)
    assert of("fsdp", scatter, torch.float32) == (7, 7 * 64 * 4, 7 * 64 * 4 * 7)
    # The step's sums of loss and weight, and the ranks' norms, in float64.
    assert of("fsdp", reduce, torch.float64) == (1, 2 * 8, 2 * 2 * 7)
    assert of("fsdp", gather, torch.float64) == (1, 8 * 8, 7 * 8)
    # One unit by default: decayed or not, and the table.
    assert of("zero1-16bit", gather, torch.bfloat16) == (3, (1024 + 512 + 512) * 2, 2048 * 2 * 7 // 8)
    assert of("zero1-16bit", scatter, torch.bfloat16) == (2, 1536 * 2 // 8, 1536 * 2 * 7 // 8)


def test_what_a_step_takes_on_top() -> None:
    ddp, fsdp, once, zero2 = (explained(name, 8).work for name in ("ddp", "fsdp", "fsdp-once", "zero2-replicas"))
    trained = BLOCKS * (192 + 64) + 64
    assert (ddp.prepared, ddp.gathered, ddp.largest) == ((trained + 128) * 2, 0, 0)  # 16-bit, the table's too
    assert (ddp.gradients, ddp.kept, ddp.summed) == (trained * 2, trained * 2, trained * 4)
    assert (fsdp.prepared, fsdp.gathered, fsdp.largest) == (0, 8 * 512 * 2 + 512 * 8, 512 * 8)
    assert fsdp.gradients == fsdp.kept == fsdp.summed == 7 * 64 * 4
    assert (once.prepared, once.gathered) == (fsdp.gathered, 0)
    assert (once.gradients, once.kept, once.summed) == (7 * 512 * 2, 7 * 64 * 4, 7 * 64 * 4)
    assert (zero2.gradients, zero2.kept) == ((768 + 256) * 2, (768 + 256) * 4 // 4)
    single = explain(MODEL, booster("single", 1, None), tx=TX).work
    assert (single.prepared, single.gathered) == (0, 0)  # the loss sees the storage itself


def test_a_given_loss_adds_its_flops_and_temporaries() -> None:
    found = explained_with_loss("fsdp", 8)
    products = 3 * BLOCKS - 1  # forward, and two of the backward; the table is frozen
    assert found.lowered.flops == products * 2 * ROWS * WIDTH * WIDTH
    assert f"{readable_bytes(found.lowered.memory.temporary)}\n FLOPs" in str(found)
    assert "FLOPs" not in str(explained("fsdp", 8))


@pytest.mark.parametrize(
    ("collective", "op", "result", "sent"),
    [
        (lambda x: c.all_gather(x, "dp"), "all_gather_into_tensor", 1600, [1200] * 4),
        (lambda x: c.psum_scatter(x, "dp"), "reduce_scatter_tensor", 100, [300] * 4),
        (lambda x: c.psum(x, "dp"), "all_reduce", 400, [600] * 4),
        (lambda x: c.all_to_all(x, "dp", split_dim=0, concat_dim=0), "all_to_all_single", 400, [300] * 4),
        (lambda x: c.broadcast(x, "dp"), "broadcast", 400, [400] * 4),
        # The last one of a chain sends to nobody; one that keeps its own puts nothing on the wire.
        (lambda x: c.ppermute(x, "dp", [(0, 1), (1, 2), (2, 3)]), "all_to_all_single", None, [400, 400, 400, 0]),
        (lambda x: c.ppermute(x, "dp", [(0, 0), (2, 1)]), "all_to_all_single", None, [0, 0, 400, 0]),
    ],
)
def test_bytes_that_each_of_four_ranks_sends(collective: Any, op: str, result: int | None, sent: list[int]) -> None:
    for place, expected in enumerate(sent):
        mesh = Mesh((("pp", 1), ("dp", 4)), (None, "7"), (0, place))
        lowered = spmd(fb.jit(collective).lower, mesh)(torch.ones(4, 25))
        (found,) = transfers([(3, dataclasses.replace(lowered, mesh=mesh))], mesh)
        assert (found.op, found.axis, found.ranks, found.count) == (op, "dp", 4, 3)
        assert found.wire == 3 * expected
        assert result is None or found.bytes == 3 * result


def test_the_table_is_one_that_a_person_reads() -> None:
    found = explained("fsdp", 8)
    assert str(found) == TABLE.strip()
    assert repr(found) == str(found)
    console = Console(width=120, color_system=None)
    with console.capture() as shown:
        console.print(found)
    assert [line.rstrip() for line in shown.get().rstrip().splitlines()] == TABLE.strip().splitlines()
    html = found._repr_html_()
    assert html.startswith("<pre") and "all_gather_into_tensor" in html
    assert "No collectives." in str(explained("single", 1))


def test_names_that_look_like_markup_are_shown() -> None:
    abstract = {"[bold]w": fb.ArrayInfo((3,), initializer=fb.initializers.zeros)}
    odd = fb.Model(functools.partial(fb.initialize, abstract), lambda params, x: x, abstract)
    assert "[bold]w" in str(explain(odd, fb.Booster("cpu"), tx=fb.optim.sgd(0.1)))


@pytest.mark.parametrize(
    ("given", "arguments", "error", "says"),
    [
        (MODEL, {}, ValueError, "tx: missing"),
        (MODEL, {"tx": TX, "loss_fn": loss_fn}, ValueError, "batch: missing"),
        (MODEL, {"tx": TX, "batch": {}}, ValueError, "loss_fn: missing"),
        ("state", {"loss_fn": loss_fn, "batch": {}}, ValueError, "tx: missing"),
        ({"w": torch.ones(2)}, {}, TypeError, "state: dict, expected a TrainState or a fb.Model"),
    ],
)
def test_what_is_missing_is_named(given: Any, arguments: Any, error: type[Exception], says: str) -> None:
    one = booster("single", 1)
    with pytest.raises(error, match=says):
        explain(one.abstract(MODEL, TX) if given == "state" else given, one, **arguments)


TABLE = """\
TorchFSDPPlugin over 8 ranks (dp=1, fsdp=8)
Dtypes: param float32, compute bfloat16, output float32, reduce float32, accumulate float32

 parameter              shape      dtype     split over   bucket      bytes a rank
 ─────────────────────────────────────────────────────────────────────────────────
 h.*.bias         x 3   [12]       float32   fsdp         3 buckets           18 B
 h.*.weight       x 3   [12, 12]   float32   fsdp         3 buckets          216 B
 order (frozen)         [12]       int64     fsdp         int64:0             12 B
 scale                  []         float32   fsdp         float32:6            1 B
 table (frozen)         [7, 12]    float32   fsdp         float32:1           42 B


 after init                        bytes a rank
 ──────────────────────────────────────────────
 trained parameters                    1.75 KiB
 frozen parameters                        768 B
 optimizer state                       3.51 KiB
 buffers                                   24 B
 counters and key                          36 B
 together                              6.07 KiB
   of that padding                     2.22 KiB

 while a step runs, on top
 parameters, gathered where used      12.00 KiB
   the largest bucket of them          4.00 KiB
 gradients of a batch                  1.75 KiB


 collectives of a step    axis       dtype      calls   bytes of results   bytes sent
 ────────────────────────────────────────────────────────────────────────────────────
 all_gather_into_tensor   fsdp (8)   bfloat16      14          14.00 KiB    12.25 KiB
 reduce_scatter_tensor    fsdp (8)   float32        7           1.75 KiB    12.25 KiB
 all_gather_into_tensor   fsdp (8)   int64          1           4.00 KiB     3.50 KiB
 all_gather_into_tensor   fsdp (8)   float64        1               64 B         56 B
 all_reduce               fsdp (8)   int64          1               24 B         42 B
 all_reduce               fsdp (8)   float64        1               16 B         28 B
"""
