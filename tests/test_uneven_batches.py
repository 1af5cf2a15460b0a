"""Steps on batches that ranks and microbatches do not divide: one device's, whatever the loss returns."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_on_ranks

import functional_booster as fb
from functional_booster import testing
from functional_booster.plugins import GeminiPlugin
from functional_booster.precision import DynamicScaling, MixedPrecision
from functional_booster.sharding.rows import StandIn, portion

PLUGINS: dict[str, Any] = {
    "ddp": fb.TorchDDPPlugin(),
    "zero1": fb.LowLevelZeroPlugin(stage=1),
    "zero2": fb.LowLevelZeroPlugin(stage=2),
    "fsdp": fb.TorchFSDPPlugin(),
    "gemini": GeminiPlugin(),
}
KEY = fb.random.key(3)
LINEAR = fb.functionalize(torch.nn.Linear(3, 4, dtype=torch.float64))


@pytest.fixture(autouse=True)
def _sizes_are_compiled_apart() -> Generator[None]:
    with warnings.catch_warnings(), testing.traced():
        warnings.simplefilter("ignore", fb.RecompileWarning)
        yield


def booster_of(plugin: Any, ranks: int, precision: Any = "fp32") -> fb.Booster:
    mesh = None if plugin is None else fb.virtual_mesh(ranks)
    return fb.Booster("cpu", mixed_precision=precision, plugin=plugin, mesh=mesh)


def first(batch: Any, rows: int) -> Any:
    return fb.tree.map(lambda leaf: leaf[:rows], batch)


def close(got: Any, expected: Any) -> None:
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), got, expected)


def mean_of_rows(params: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(LINEAR.apply(params, batch["x"]), batch["y"])


def stepped(booster: fb.Booster, batch: Any, loss_fn: Any = mean_of_rows, accumulate: int = 1, **options: Any) -> Any:
    """(parameters, metrics) after a step of the linear model, on a batch of its own kind."""
    tx = fb.optim.sgd(0.1)
    step = booster.train_step(loss_fn, tx, accumulate=accumulate, **{"jit": False, **options})
    state, metrics = step(booster.init(LINEAR, tx, key=KEY), batch)
    return booster.full_params(state), metrics


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([*PLUGINS.values()]), st.integers(1, 5), st.integers(1, 7), st.integers(1, 3))
def test_a_mean_counts_the_rows_of_each_rank(plugin: Any, ranks: int, rows: int, accumulate: int) -> None:
    batch = testing.small(rows).batch | {"y": torch.arange(rows) % 4}
    got = stepped(booster_of(plugin, ranks), batch, accumulate=accumulate)
    close(got, stepped(booster_of(None, 1), batch))
    close(got[1]["tokens"], torch.tensor(float(rows), dtype=torch.float64))


@pytest.mark.parametrize(("rows", "accumulate"), [(1, 1), (3, 2), (5, 1), (7, 3)])
def test_rows_have_the_key_of_their_microbatch(rows: int, accumulate: int) -> None:
    """Dropout of each rank's microbatches, computed one by one."""
    problem, ranks = testing.small(rows, seed=2), 4
    booster = booster_of(fb.TorchFSDPPlugin(), ranks)
    state = booster.init(problem.model, problem.tx, key=problem.key)
    params, stream = booster.full_params(state), fb.random.fold_in(state.key, 0)
    _, metrics = booster.train_step(problem.loss_fn, problem.tx, accumulate=accumulate, jit=False)(state, problem.batch)
    loss, weight = torch.zeros((), dtype=torch.float64), 0.0
    for rank, index in itertools.product(range(ranks), range(accumulate)):
        if slot := portion(portion(range(rows), ranks, rank), accumulate, index):
            part = fb.tree.map(lambda leaf, slot=slot: leaf[slot.start : slot.stop], problem.batch)
            key = fb.random.fold_in(stream, rank * accumulate + index)
            more, labels, _ = problem.loss_fn(params, part, key)
            loss, weight = loss + more, weight + labels
    close(metrics["loss"], loss / weight)


@pytest.mark.parametrize(("name", "jit"), [*((name, False) for name in PLUGINS), ("fsdp", True)])
def test_an_eval_step_equals_one_device(name: str, jit: bool) -> None:
    problem, booster, alone = testing.small(11), booster_of(PLUGINS[name], 4), booster_of(None, 1)
    state, other = (each.init(problem.model, problem.tx, key=KEY) for each in (booster, alone))
    evaluate = booster.eval_step(problem.loss_fn, jit=jit)
    expected = alone.eval_step(problem.loss_fn, jit=False)
    for rows in (11,) if jit else (3, 11):  # shares of 3 rows and of 2; ranks without rows
        batch = first(problem.batch, rows)
        close(evaluate(state, batch), expected(other, batch))


def test_gradients_of_a_scaled_loss_are_weighed_alike() -> None:
    precision = MixedPrecision(scaling=DynamicScaling(initial_scale=2.0**10))
    batch = testing.small(5).batch
    for rows, accumulate in ((1, 2), (3, 1), (5, 2)):
        got = stepped(
            booster_of(fb.LowLevelZeroPlugin(stage=2), 2, precision), first(batch, rows), labelled, accumulate
        )
        close(got, stepped(booster_of(None, 1, precision), first(batch, rows), labelled))


def labelled(params: Any, batch: Any) -> Any:
    return fb.losses.cross_entropy(LINEAR.apply(params, batch["x"]), batch["y"])


def test_what_stands_in_is_finite_where_the_batch_is() -> None:
    """A mean over labels is no number for a row without one: where that row has others beside it, all is well."""
    batch = testing.small(3).batch | {"y": torch.tensor([-100, 1, 2])}
    params, metrics = stepped(booster_of(fb.TorchDDPPlugin(), 2), batch)
    assert all(leaf.isfinite().all() for leaf in params.values())
    start = LINEAR.init(KEY)
    two, one = (mean_of_rows(start, fb.tree.map(lambda leaf, at=at: leaf[at], batch)) for at in (slice(2), slice(2, 3)))
    close(metrics["loss"], (2 * two + one) / 3)


def test_microbatches_of_one_device_may_differ_too() -> None:
    batch = testing.small(5).batch
    for accumulate in (2, 5, 8):
        close(stepped(booster_of(None, 1), batch, labelled, accumulate), stepped(booster_of(None, 1), batch, labelled))


def test_a_batch_without_labels_changes_nothing() -> None:
    batch = first(testing.small(3).batch, 1) | {"y": torch.tensor([-100])}
    params, metrics = stepped(booster_of(fb.TorchFSDPPlugin(), 3), batch, labelled, accumulate=2)
    close(params, LINEAR.init(KEY))
    assert float(metrics["tokens"]) == float(metrics["loss"]) == float(metrics["grad_norm"]) == 0


ROWS = torch.utils.data.TensorDataset(*testing.small(9, seed=4).batch.values())


def fitted(plugin: Any, mesh: Any, share: int) -> Any:
    """An epoch, with the whole tail, and a batch of the next: 4, 4 and 1 rows, and 4."""
    problem = testing.small(1)
    booster = fb.Booster("cpu", mixed_precision="fp32", plugin=plugin, mesh=mesh)
    prepare = fb.prepare_dataloader if plugin is None else plugin.prepare_dataloader
    loader = prepare(ROWS, share, shuffle=True, **({} if plugin is None else {"mesh": booster.mesh}))

    def loss_fn(params: Any, batch: Any) -> Any:
        return problem.loss_fn(params, dict(zip("xy", batch, strict=True)), None)

    state = booster.init(problem.model, problem.tx, key=KEY)
    step = booster.train_step(loss_fn, problem.tx, accumulate=2, max_norm=0.1, jit=False)
    history: list[Any] = []
    state = fb.fit(step, state, loader.batches(), steps=4, hooks=[lambda n, state, metrics: history.append(metrics)])
    return booster.full_params(state), history


def fitted_on_a_process(name: str) -> Any:
    return fitted(PLUGINS[name], None, 2)


@pytest.mark.xdist_group("ranks")
def test_fit_trains_on_every_row_once_an_epoch() -> None:
    """On virtual ranks and on processes, one of which has no row in the tail."""
    expected = fitted(None, None, 4)
    close(fitted(PLUGINS["zero2"], fb.virtual_mesh(2), 2), expected)
    for found in run_on_ranks(2, fitted_on_a_process, "zero2"):
        close(found, expected)


@pytest.mark.parametrize(("length", "ok"), [(8, True), (10, True), (9, False)])
def test_boost_refuses_a_dataloader_whose_tail_the_ranks_do_not_divide(length: int, ok: bool) -> None:
    plugin, module = fb.TorchDDPPlugin(), torch.nn.Linear(3, 2)
    booster = fb.Booster("cpu", plugin=plugin, mesh=fb.virtual_mesh(2))
    loader = plugin.prepare_dataloader(torch.ones(length, 3), 2, mesh=booster.mesh)
    if ok:
        assert booster.boost(module, dataloader=loader)[3] is loader
        return
    with pytest.raises(ValueError, match="dataloader: an epoch's last batch has 1 rows for 2 data-parallel ranks"):
        booster.boost(module, dataloader=loader)
    assert booster.boost(module, dataloader=[1])[3] == [1]


def forward_of_the_tail(kind: str) -> str:
    """What a boosted model raises on each rank, where the second has no row; nothing here is work of both."""
    plugin, module = fb.TorchDDPPlugin(), torch.nn.Linear(3, 2, dtype=torch.float64)
    model, *_ = fb.Booster("cpu", plugin=plugin).boost(module, torch.optim.SGD(module.parameters(), 0.1))
    *_, tail = plugin.prepare_dataloader(torch.ones(3, 3, dtype=torch.float64), 1)
    try:
        model(tail.batch[:0] if kind == "no rows" and isinstance(tail, StandIn) else tail[:])
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no rows", "ValueError: this rank has no rows in this batch, but gradients are the mean over ranks"),
        ("a stand-in", "TypeError: this rank has no row in this global batch, but a StandIn"),
    ],
)
def test_an_imperative_loop_refuses_a_rank_without_rows(kind: str, message: str) -> None:
    others, without = run_on_ranks(2, forward_of_the_tail, kind)
    assert without.startswith(message) and not others


def normalized() -> Any:
    """A module with batch normalization, and its loss."""
    torch.manual_seed(0)
    model = fb.functionalize(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double())

    def loss_fn(params: Any, batch: Any, buffers: Any) -> Any:
        outputs, new = model.apply(params, batch, buffers=buffers, mutable=True, train=True)
        return outputs.square().cumsum(1).sum(), len(batch), {"buffers": new}

    return model, loss_fn


def normalized_step(plugin: Any, mesh: Any, batch: Any) -> Any:
    model, loss_fn = normalized()
    booster, tx = fb.Booster("cpu", mixed_precision="fp32", plugin=plugin, mesh=mesh), fb.optim.sgd(0.1)
    state = booster.init(model, tx, key=KEY, params=model.init(KEY))
    state, metrics = booster.train_step(loss_fn, tx, jit=False)(state, batch)
    return booster.full_params(state), state.buffers, metrics


def of_a_process(rows: int) -> Any:
    batch = testing.small(rows).batch["x"]
    mine = portion(range(rows), dist.get_world_size(), dist.get_rank())
    part = batch[mine.start : mine.stop] if mine else StandIn(batch[:1])
    return normalized_step(fb.TorchFSDPPlugin(), None, part)


@pytest.mark.xdist_group("ranks")
def test_a_rank_without_rows_is_none_of_a_batch_norms() -> None:
    expected = normalized_step(None, None, testing.small(2).batch["x"])
    for found in run_on_ranks(3, of_a_process, 2):
        close(found, expected)
    with pytest.raises(ValueError, match="batch normalization is over all ranks' rows, of which virtual ranks must"):
        normalized_step(fb.TorchFSDPPlugin(), fb.virtual_mesh(3), testing.small(4).batch["x"])
