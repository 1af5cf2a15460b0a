"""Plugins: whatever the layout, a step is the step of one device. Models with all that layouts stumble over."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import functional_booster as fb
from functional_booster import booster as booster_module
from functional_booster import initial, step, testing
from functional_booster.kernels.flat import Flat
from functional_booster.plugins import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from functional_booster.sharding import chunks, shards, units
from functional_booster.sharding.collectives import all_gather, axis_index
from functional_booster.sharding.mesh import Replicated, spmd, virtual_mesh

WIDTH, CLASSES, ROWS = 5, 3, 16
SMALL = {"min_chunk_size_m": 0, "search_range_m": 0, "hidden_dim": 1}  # the smallest chunks: one a block
PLUGINS: dict[str, tuple[Plugin, dict[str, int]]] = {
    "ddp": (TorchDDPPlugin(), {"dp": 4}),
    "ddp, a bucket a block": (TorchDDPPlugin(bucket_cap_mb=0), {"dp": 2}),
    "zero1": (LowLevelZeroPlugin(), {"extra_dp": 1, "dp": 4}),
    "zero1, small buckets, replicas, host": (
        LowLevelZeroPlugin(reduce_bucket_size_in_m=0, extra_dp_size=2, cpu_offload=True),
        {"extra_dp": 2, "dp": 2},
    ),
    "zero2": (LowLevelZeroPlugin(stage=2), {"extra_dp": 1, "dp": 2}),
    "zero2, replicas": (LowLevelZeroPlugin(stage=2, extra_dp_size=2), {"extra_dp": 2, "dp": 2}),
    "fsdp": (TorchFSDPPlugin(), {"dp": 1, "fsdp": 8}),
    "fsdp, host": (TorchFSDPPlugin(cpu_offload=True), {"dp": 1, "fsdp": 2}),
    "fsdp, hybrid": (TorchFSDPPlugin(sharding_strategy="HYBRID_SHARD"), {"dp": 2, "fsdp": 2}),
    "fsdp, hybrid, once": (TorchFSDPPlugin(sharding_strategy="_HYBRID_SHARD_ZERO2"), {"dp": 2, "fsdp": 2}),
    "fsdp, once": (TorchFSDPPlugin(sharding_strategy="SHARD_GRAD_OP"), {"dp": 1, "fsdp": 2}),
    "fsdp, whole": (TorchFSDPPlugin(sharding_strategy="NO_SHARD"), {"dp": 2, "fsdp": 1}),
    "fsdp, some ignored": (TorchFSDPPlugin(ignored_modules=["h.*.b", "wte"]), {"dp": 2, "fsdp": 2}),
    "fsdp, wrapped": (TorchFSDPPlugin(auto_wrap_policy={"h"}), {"dp": 1, "fsdp": 2}),
    "gemini": (GeminiPlugin(), {"extra_dp": 1, "dp": 2}),
    "gemini, chunks": (GeminiPlugin(**SMALL, shard_param_frac=0.5), {"extra_dp": 1, "dp": 4}),
    "gemini, once, host": (
        GeminiPlugin(**SMALL, shard_param_frac=0.0, offload_optim_frac=0.4, extra_dp_size=2),
        {"extra_dp": 2, "dp": 2},
    ),
}
EACH = pytest.mark.parametrize(("plugin", "axes"), PLUGINS.values(), ids=PLUGINS)
KINDS = ("ddp", "zero1", "zero2, replicas", "fsdp, hybrid", "gemini, chunks")
EACH_KIND = pytest.mark.parametrize(("plugin", "axes"), [PLUGINS[kind] for kind in KINDS], ids=KINDS)


def model(dtype: torch.dtype = torch.float64) -> fb.Model:
    """Blocks, one of them used twice; a tied head; scalars, one element, an empty leaf; frozen and unused leaves."""
    normal = fb.initializers.normal(0.5)

    def info(*shape: int, trainable: bool = True) -> fb.ArrayInfo:
        return fb.ArrayInfo(shape, dtype, initializer=normal, trainable=trainable)

    abstract = {
        "h": [{"w": info(WIDTH, WIDTH), "b": info(WIDTH), "gain": info()} for _ in range(2)],
        "one": info(1),
        "none": info(0),
        "frozen": {"b": info(WIDTH, trainable=False), "w": info(70, trainable=False)},
        "unused": info(3),
        "wte": {"w": info(CLASSES, WIDTH)},
    }

    def apply(params: Any, tokens: torch.Tensor, *, key: Any = None) -> torch.Tensor:
        h = params["wte"]["w"][tokens]
        for place, block in enumerate((*params["h"], params["h"][0])):
            branch = torch.tanh(h @ block["w"] + block["b"])
            branch = branch if key is None else fb.random.dropout(branch, 0.3, fb.random.fold_in(key, place))
            h = h + block["gain"] * branch
        return (h * params["one"] + params["frozen"]["b"] + params["frozen"]["w"][-1]) @ params["wte"]["w"].T

    return fb.Model(init=lambda key: fb.initialize(abstract, key), apply=apply, abstract=abstract)


MODEL = model()


def loss_fn(params: Any, batch: Any, key: Any = None) -> Any:
    """A mean over the rows that count, and a metric beside it."""
    logits = MODEL.apply(params, batch["x"], key=key)
    total, weight = fb.losses.cross_entropy(logits, batch["y"])
    return total, weight, {"largest": logits.square().mean()}


def sum_of_rows(params: Any, batch: Any, key: Any = None) -> Any:
    """The same without the metric, which is no sum over rows."""
    return loss_fn(params, batch, key)[:2]


def rows(number: int = ROWS, seed: int = 1) -> dict[str, torch.Tensor]:
    """Tokens and labels, of which every third does not count."""
    key = fb.random.key(seed)
    labels = fb.random.randint(fb.random.fold_in(key, 1), (number,), 0, CLASSES).long()
    return {
        "x": fb.random.randint(key, (number,), 0, CLASSES).long(),
        "y": torch.where(torch.arange(number) % 3 == 0, -100, labels),
    }


def by_dims(tree: Any) -> Any:
    return fb.tree.map(lambda leaf: "matrix" if len(leaf.shape) > 1 else "vector", tree)


ADAMW = fb.optim.adamw(1e-2, eps=1e-5, weight_decay=0.1)  # an eps that does not blow up rounding errors
OPTIMIZERS = {
    "groups": fb.optim.chain(  # clipped inside, decay masked, and two groups: buckets of several labels a block
        fb.optim.clip_by_global_norm(0.05),
        fb.optim.partition(
            {
                "matrix": fb.optim.adamw(1e-2, eps=1e-5, weight_decay=0.1, mask=fb.optim.matrices),
                "vector": fb.optim.sgd(0.1, momentum=0.9),
            },
            by_dims,
        ),
    ),
    "plain pair": (fb.optim.sgd(0.1, momentum=0.9).init, fb.optim.sgd(0.1, momentum=0.9).update),
}


def boosters(plugin: Plugin, axes: dict[str, int], **options: Any) -> tuple[fb.Booster, fb.Booster]:
    """One under the plugin, and one on one device."""
    options = {"mixed_precision": "fp32", **options}
    return fb.Booster("cpu", plugin=plugin, mesh=virtual_mesh(**axes), **options), fb.Booster("cpu", **options)


def close(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance), got, expected)


class TestOneDevice:
    """Loss, norm, weight, aux, parameters and optimizer state, over steps, dropout included."""

    @EACH
    def test_steps(self, plugin: Plugin, axes: dict[str, int]) -> None:
        problem = testing.Problem(MODEL, loss_fn, OPTIMIZERS["groups"], rows())
        testing.step_equals_one_device(plugin, virtual_mesh(**axes), problem)

    @EACH_KIND
    def test_an_optimizer_that_sees_whole_leaves(self, plugin: Plugin, axes: dict[str, int]) -> None:
        problem = testing.Problem(MODEL, loss_fn, OPTIMIZERS["plain pair"], rows())
        testing.step_equals_one_device(plugin, virtual_mesh(**axes), problem)

    @EACH_KIND
    def test_any_split_of_a_batch(self, plugin: Plugin, axes: dict[str, int]) -> None:
        problem = testing.Problem(MODEL, sum_of_rows, ADAMW, rows(), 0.1)
        testing.accumulation_equals_whole_batch(plugin, virtual_mesh(**axes), problem, accumulate=2)

    @settings(max_examples=3, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def test_up_to_64_ranks(self, data: st.DataObject) -> None:
        named = {name: each for name, each in PLUGINS.items() if name != "fsdp, wrapped"}  # whose names are MODEL's
        plugin, _ = data.draw(st.sampled_from(list(named.values())))
        mesh = virtual_mesh(**plugin.axes(4 * data.draw(st.integers(1, 16))))
        problem = data.draw(testing.problems(mesh.size))
        testing.accumulation_equals_whole_batch(plugin, mesh, problem)

    @EACH_KIND
    def test_evaluation(self, plugin: Plugin, axes: dict[str, int]) -> None:
        (state, metrics), (_, expected) = (
            (state := one.init(MODEL, ADAMW, key=fb.random.key(0)), one.eval_step(loss_fn, jit=False)(state, rows()))
            for one in boosters(plugin, axes)
        )
        assert metrics.keys() == {"loss", "tokens", "largest"}
        # The aux of a rank is weighed by its tokens: one device has the mean over all rows.
        weights = (rows()["y"] != -100).view(state.plan.mesh.extent(plugin.data_axes), -1).sum(1).double()
        logits = MODEL.apply(MODEL.init(fb.random.key(0)), rows()["x"]).square().view(len(weights), -1).mean(1)
        close(metrics["largest"], (logits * weights).sum() / weights.sum())
        close({**metrics, "largest": 0.0}, {**expected, "largest": 0.0})

    @EACH_KIND
    def test_buffers_are_those_of_the_whole_batch(self, plugin: Plugin, axes: dict[str, int]) -> None:
        def fresh() -> dict[str, torch.Tensor]:
            return {"mean": torch.zeros(WIDTH, dtype=torch.float64), "calls": torch.zeros((), dtype=torch.int64)}

        def loss(params: Any, batch: Any, buffers: Any) -> Any:
            total, weight = fb.losses.cross_entropy(MODEL.apply(params, batch["x"]), batch["y"])
            seen = params["wte"]["w"][batch["x"]].detach().mean(0)
            new = {"mean": (buffers["mean"] + seen) / 2, "calls": buffers["calls"] + 1}
            return total, weight, {"buffers": new}

        with_buffers, results = dataclasses.replace(MODEL, buffers=fresh), []
        for one in boosters(plugin, axes):
            state = one.init(with_buffers, ADAMW, key=fb.random.key(0))
            train = one.train_step(loss, ADAMW, jit=False)
            for _ in range(2):
                state, _ = train(state, rows())
            results.append(state.buffers)
        close(*results)
        assert int(results[0]["calls"]) == 2


@EACH_KIND
def test_gradients_of_1e20_are_clipped_right(plugin: Plugin, axes: dict[str, int]) -> None:
    """Their squares, and the sum over ranks of their squares, are beyond float32."""
    small = model(torch.float32)

    def loss(params: Any, batch: Any) -> Any:
        return params["wte"]["w"].sum() * 1e20 * batch["x"].shape[0], batch["x"].shape[0]

    booster, _ = boosters(plugin, axes)
    tx = fb.optim.sgd(1.0)
    state = booster.init(small, tx, key=fb.random.key(0))
    before = booster.full_params(state)["wte"]["w"]
    state, metrics = booster.train_step(loss, tx, max_norm=0.5, jit=False)(state, rows())
    elements = CLASSES * WIDTH
    close(metrics["grad_norm"], torch.tensor(1e20 * elements**0.5), 1e-6)
    moved = before - booster.full_params(state)["wte"]["w"]
    close(moved, torch.full_like(moved, 0.5 / elements**0.5), 1e-6)
    assert metrics["skipped"] == 0


@EACH_KIND
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(plugin: Plugin, axes: dict[str, int]) -> None:
    def loss(params: Any, batch: Any) -> Any:
        total, weight, _ = loss_fn(params, batch)
        return total * torch.where(batch["bad"].any(), torch.nan, 1.0), weight

    booster, _ = boosters(plugin, axes)
    state = booster.init(MODEL, ADAMW, key=fb.random.key(0))
    train = booster.train_step(loss, ADAMW, jit=False, donate=False)
    new, metrics = train(state, {**rows(), "bad": torch.arange(ROWS) == 5})
    assert metrics["skipped"] == 1
    close((new.storage, new.opt_state), (state.storage, state.opt_state), 0)
    assert (int(new.step), int(new.position)) == (0, 1)


class TestPrecision:
    @EACH_KIND
    def test_bf16_is_close_to_one_device_and_keeps_masters(self, plugin: Plugin, axes: dict[str, int]) -> None:
        small = model(torch.float32)
        seen: list[torch.dtype] = []

        def loss(params: Any, batch: Any) -> Any:
            seen.extend(leaf.dtype for leaf in fb.tree.leaves(params))
            logits = small.apply(params, batch["x"])
            return fb.losses.cross_entropy(logits.float(), batch["y"])

        tx, results = fb.optim.sgd(0.1), []
        for one in boosters(plugin, axes, mixed_precision="bf16"):
            state = one.init(small, tx, key=fb.random.key(0))
            state, metrics = one.train_step(loss, tx, jit=False)(state, rows())
            assert {leaf.dtype for leaf in fb.tree.leaves(one.full_params(state))} == {torch.float32}
            begun = small.init(fb.random.key(0))
            moved = fb.tree.map(torch.sub, one.full_params(state), begun)
            results.append((torch.cat([leaf.flatten() for leaf in fb.tree.leaves(moved)]), metrics))
        assert set(seen) == {torch.bfloat16}
        # A rank rounds the gradients of its rows to bfloat16 (8 bits) where one device rounds their sum. Compared is by
        # what parameters moved, which is small beside them.
        (got, metrics), (expected, alone) = results
        assert (got - expected).norm() < 2**-7 * expected.norm()
        close(metrics["loss"], alone["loss"], tolerance=2**-8)
        close(metrics["grad_norm"], alone["grad_norm"], tolerance=2**-7)

    @pytest.mark.parametrize("plugin", [LowLevelZeroPlugin(master_weights=False), GeminiPlugin(master_weights=False)])
    def test_without_masters_parameters_are_updated_as_they_are_computed_with(self, plugin: Plugin) -> None:
        booster = fb.Booster("cpu", "bf16", plugin, virtual_mesh(4))
        state = booster.init(model(torch.float32), ADAMW, key=fb.random.key(0))
        stored, moments = (
            {leaf.dtype for leaf in fb.tree.leaves(part) if leaf.dim() > 2} for part in (state.storage, state.opt_state)
        )
        assert stored == {torch.bfloat16} and moments == {torch.bfloat16, torch.float32}  # the second moment's

    @pytest.mark.parametrize("plugin", [TorchFSDPPlugin(), GeminiPlugin()])
    @given(ranks=st.integers(1, 64), seed=st.integers(0, 99))
    @settings(max_examples=6)
    def test_a_sum_over_ranks_loses_nothing_to_bf16(self, plugin: Plugin, ranks: int, seed: int) -> None:
        """Whole numbers up to 256 are bfloat16's; their sum over 64 ranks is float32's, but not bfloat16's."""
        mesh = virtual_mesh(**plugin.axes(ranks))
        policy = fb.Booster("cpu", "bf16", plugin, mesh).policy
        terms = fb.random.randint(fb.random.key(seed), (ranks, 7), -256, 257).float()
        layout = plugin.layout({"w": fb.ArrayInfo((7,))}, {"w": ()}, mesh)
        bucket = next(iter(layout.buckets))

        def local(mine: torch.Tensor) -> Replicated:
            storage = shards.part(Flat({bucket: torch.zeros(layout.size(bucket))}, layout))

            def loss(prepared: Flat) -> torch.Tensor:
                whole = plugin.gather(prepared, policy).buffers[bucket]
                assert whole.dtype == torch.bfloat16
                return (whole[:7] * mine.bfloat16()).float().sum()

            grads = plugin.sync(plugin.reduce(fb.grad(loss)(plugin.prepare(storage, policy)), policy), policy)
            assert grads.buffers[bucket].dtype == torch.float32
            return Replicated(shards.join(grads).buffers[bucket])

        got = spmd(local, mesh)(terms.view(*mesh.shape, 7))
        assert torch.equal(got[:7], terms.sum(0))


@given(ranks=st.integers(1, 9), dim=st.integers(0, 1), tiled=st.booleans())
@settings(max_examples=8)
def test_gathers_may_cast(ranks: int, dim: int, tiled: bool) -> None:
    """Over two axes: the result and what travels in one dtype, the sum of cotangents in another, back in x's own."""
    x, mesh = torch.randn(2, ranks, 2, 3), virtual_mesh(a=2, b=ranks)
    options: dict[str, Any] = {"dim": dim, "tiled": tiled}

    def gathered(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kinds = {"dtype": torch.bfloat16, "reduce_dtype": torch.float64}
        low = all_gather(part, ("a", "b"), **options, **kinds)
        factor = axis_index(("a", "b")).to(torch.float64) + 1  # 1, 2, ... are summed over ranks

        def weighed(part: torch.Tensor) -> torch.Tensor:
            return (all_gather(part, ("a", "b"), **options, **kinds) * factor.bfloat16()).double().sum()

        return low, fb.grad(weighed)(part)

    low, gradient = spmd(gathered, mesh)(x)
    plain = spmd(lambda part: all_gather(part, ("a", "b"), **options), mesh)(x)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, plain.bfloat16())
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full_like(x, ranks * (2 * ranks + 1)))


def test_gathers_of_integers_do_not_cast() -> None:
    whole = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"x: a gather of torch\.int64 in torch\.bfloat16, expected floating-point"):
        spmd(lambda x: all_gather(x, "a", dtype=torch.bfloat16), virtual_mesh(a=2))(whole)


class TestLayouts:
    def layout(self, plugin: Plugin, axes: dict[str, int]) -> Any:
        return boosters(plugin, axes)[0].init(MODEL, ADAMW, key=fb.random.key(0)).storage.layout

    def homes(self, plugin: Plugin, axes: dict[str, int]) -> set[frozenset[str]]:
        """Which leaves share a bucket."""
        layout = self.layout(plugin, axes)
        return {frozenset(slot.name for slot in slots) for slots in layout.buckets.values()}

    blocks = tuple(frozenset(f"h.{block}.{name}" for name in ("b", "gain", "w")) for block in range(2))

    @pytest.mark.parametrize(
        "kind", ["ddp, a bucket a block", "zero1, small buckets, replicas, host", "fsdp", "gemini, chunks"]
    )
    def test_a_bucket_a_block(self, kind: str) -> None:
        homes = {home - {"none"} for home in self.homes(*PLUGINS[kind])}  # an empty leaf fits into any chunk
        assert homes >= set(self.blocks)

    @pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "gemini"])
    def test_small_models_are_one_bucket(self, kind: str) -> None:
        assert len(self.homes(*PLUGINS[kind])) == 1

    def test_wrapping_says_what_a_unit_is(self) -> None:
        rest = frozenset({"one", "none", "unused", "wte.w"})
        axes = {"dp": 1, "fsdp": 8}
        assert self.homes(TorchFSDPPlugin(auto_wrap_policy={"h"}), axes) == {self.blocks[0] | self.blocks[1], rest}
        assert self.homes(TorchFSDPPlugin(auto_wrap_policy={"h.*"}), axes) == {*self.blocks, rest}
        by_leaf = self.homes(TorchFSDPPlugin(auto_wrap_policy=lambda name: name), axes)
        assert all(len(names) == 1 for names in by_leaf)

    def test_what_is_ignored_is_whole_on_every_rank(self) -> None:
        layout = self.layout(TorchFSDPPlugin(ignored_modules=["h.*.b", "wte"]), {"dp": 1, "fsdp": 4})
        whole = {slot.name for slot in layout.slots if not layout.axes[slot.bucket]}
        assert whole == {"h.0.b", "h.1.b", "wte.w"}

    @EACH
    def test_a_rank_holds_its_share(self, plugin: Plugin, axes: dict[str, int]) -> None:
        booster, _ = boosters(plugin, axes)
        state = booster.init(MODEL, ADAMW, key=fb.random.key(0))
        mesh, layout = booster.plan.mesh, state.storage.layout
        for values in (state.storage, *(node for node in fb.tree.leaves(state.opt_state, _is_flat) if _is_flat(node))):
            for bucket, buffer in values.buffers.items():
                assert buffer[(0,) * len(mesh.axes)].numel() == layout.size(bucket) // mesh.extent(layout.axes[bucket])
        if isinstance(plugin, LowLevelZeroPlugin | GeminiPlugin):
            assert set(layout.axes.values()) == {("dp",)}


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=12).map(tuple),
    st.integers(0, 300),
    st.integers(0, 200),
    st.integers(1, 50),
)
@settings(max_examples=20)
def test_the_search_finds_the_fullest_chunks(sizes: tuple[int, ...], least: int, span: int, interval: int) -> None:
    found = chunks.search(sizes, least, span, interval)
    if sum(sizes) <= least:
        assert found == sum(sizes)
        return
    spread = torch.tensor(sizes, dtype=torch.float64)
    usual = [size for size in sizes if size <= spread.mean() + 3 * spread.std(correction=0)]
    names = [str(place) for place in range(len(usual))]

    def unused(capacity: int) -> int:
        return len(set(units.packed(names, usual, capacity))) * capacity - sum(usual)

    start = -(-max(least, *usual) // interval) * interval
    wastes = {capacity: unused(capacity) for capacity in range(start, start + span + 1, interval)}
    assert found == min(wastes, key=lambda capacity: (wastes[capacity], capacity))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=9), st.floats(0, 1), st.integers(1, 8))
@settings(max_examples=20)
def test_the_first_chunks_make_up_a_fraction(sizes: list[int], fraction: float, ranks: int) -> None:
    abstract = {f"{place}.w": fb.ArrayInfo((size,)) for place, size in enumerate(sizes)}
    plugin = GeminiPlugin(**SMALL, offload_optim_frac=fraction)
    layout = plugin.layout(abstract, fb.tree.map(lambda _: (), abstract), virtual_mesh(**plugin.axes(ranks)))
    chosen = chunks.leading(layout, fraction)
    firsts = list(dict.fromkeys(slot.bucket for slot in layout.slots))
    held = [layout.size(bucket) for bucket in firsts if bucket in chosen]
    assert layout.host == tuple(bucket for bucket in layout.buckets if bucket in chosen)
    assert sum(held) >= fraction * sum(map(layout.size, layout.buckets))
    assert not chosen or sum(held[:-1]) < fraction * sum(map(layout.size, layout.buckets))
    assert set(itertools.takewhile(chosen.__contains__, firsts)) == chosen


@pytest.mark.parametrize(("tx", "precision"), [("groups", "bf16"), ("plain pair", "fp32")])
@pytest.mark.parametrize(
    "plugin",
    [
        LowLevelZeroPlugin(cpu_offload=True),
        LowLevelZeroPlugin(cpu_offload=True, stage=2),
        TorchFSDPPlugin(cpu_offload=True),
        GeminiPlugin(**SMALL, offload_optim_frac=0.4),
    ],
    ids=["zero1", "zero2", "fsdp", "gemini"],
)
def test_what_is_offloaded_stays_on_the_host(
    plugin: Plugin, precision: str, tx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is none: fake tensors raise where an op meets tensors of two devices."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(booster_module, "device_of", lambda device: gpu)
    monkeypatch.setattr(initial, "fill", lambda *_: None)  # copies from a GPU that is none are not faked
    booster = fb.Booster("cuda", precision, plugin)
    recipe = step.Recipe(loss_fn, fb.optim.as_transformation(OPTIMIZERS[tx]), booster.precision, max_norm=1.0)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        params = fb.tree.map(lambda info: torch.empty(info.shape, dtype=info.dtype, device=gpu), MODEL.abstract)
        key = torch.empty(2, dtype=torch.int32, device=gpu)
        state = booster.init(MODEL, OPTIMIZERS[tx], key=key, params=params)

        def update(state: fb.TrainState) -> tuple[fb.TrainState, Any, Any]:
            prepared = step.prepare(booster.policy, state)
            seen = step.gathered(booster.precision, plugin, prepared)
            grads = plugin.reduce(fb.tree.map(torch.zeros_like, prepared.trained), booster.policy)
            one = torch.ones((), device=gpu)
            new, metrics = step.update(recipe, state, step.Sums(grads, one, one.double(), {}, {}))
            return new, metrics, (prepared, seen)

        new, metrics, used = spmd(update, booster.plan.mesh)(state)
        full = booster.full_params(new)
    layout = state.storage.layout
    assert bool(layout.host) == (tx != "plain pair")  # which knows of no buckets
    for node in (new.storage, *(node for node in fb.tree.leaves(new.opt_state, _is_flat) if _is_flat(node))):
        homes = {bucket: buffer.device.type for bucket, buffer in node.buffers.items() if buffer is not None}
        assert homes == {bucket: "cpu" if bucket in layout.host else "cuda" for bucket in homes}
    assert [leaf.device for leaf in fb.tree.leaves(new)] == [leaf.device for leaf in fb.tree.leaves(state)]
    assert {leaf.device for leaf in fb.tree.leaves((used, full))} == {gpu}
    assert metrics["loss"].device == metrics["grad_norm"].device == gpu


def _is_flat(node: Any) -> bool:
    return isinstance(node, Flat)


@pytest.mark.parametrize("plugin", [fb.TorchDDPPlugin(), fb.LowLevelZeroPlugin(stage=2), fb.TorchFSDPPlugin()])
def test_gradients_flow_through_the_layout(plugin: Plugin) -> None:
    """``shard`` and ``full_params`` are the ways in and out of a state by the parameter tree."""
    booster = fb.Booster("cpu", "fp32", plugin=plugin, mesh=virtual_mesh(4))
    model = fb.models.gpt2(n_layer=1, n_head=1, n_embd=4, vocab_size=5, n_positions=3)
    state = booster.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))

    def there_and_back(params: fb.tree.Tree) -> torch.Tensor:
        back = booster.full_params(booster.shard(params, like=state))
        return torch.stack([leaf.square().sum() / 2 for leaf in fb.tree.leaves(back)]).sum()

    params = booster.full_params(state)
    for got, leaf in zip(fb.tree.leaves(fb.grad(there_and_back)(params)), fb.tree.leaves(params), strict=True):
        torch.testing.assert_close(got, leaf)


def test_buffers_that_no_rank_changed_stay_to_the_bit() -> None:
    """On three ranks, whose mean of equal numbers is not always that number; what was changed becomes the mean."""
    constant = torch.cat([torch.rand(64, generator=torch.Generator().manual_seed(0)), torch.tensor([-torch.inf, 0.0])])
    old = {"constant": constant, "count": torch.tensor(3), "mean": torch.zeros(2), "complex": torch.tensor([1 + 2j])}

    def local(old: fb.tree.Tree) -> Replicated:
        rank = axis_index("dp")
        new = {**old, "count": old["count"] + 1, "mean": old["mean"] + torch.stack([rank * 1.0, rank * 2.0])}
        new["complex"] = old["complex"] + rank * (1 + 3j)
        return Replicated(step.agreed(new, old, ("dp",)))

    got = spmd(local, virtual_mesh(dp=3))(Replicated(old))
    assert torch.equal(got["constant"], constant)
    assert (got["count"].item(), got["mean"].tolist(), got["complex"].tolist()) == (4, [1.0, 2.0], [2 + 5j])
