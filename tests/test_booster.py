"""The functional train step: laws of accumulation, weighting, clipping and skipping, and every form of a loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster.kernels import graph

WIDTH, CLASSES = 5, 3
TX = fb.optim.adamw(0.01, weight_decay=0.1)


@pytest.fixture(autouse=True)
def _traced_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "compile", lambda traced, examples, options=None: traced)


def mlp(dtype: torch.dtype = torch.float64) -> fb.Model:
    """A two-layer classifier whose second bias is frozen."""
    normal = fb.initializers.normal(0.5)
    abstract = {
        "in": {"w": fb.ArrayInfo((WIDTH, 7), dtype, initializer=normal)},
        "out": {
            "b": fb.ArrayInfo((CLASSES,), dtype, initializer=normal, trainable=False),
            "w": fb.ArrayInfo((7, CLASSES), dtype, initializer=normal),
        },
    }

    def apply(params: Any, x: torch.Tensor, *, key: Any = None, train: bool = False) -> torch.Tensor:
        h = torch.tanh(x @ params["in"]["w"])
        if train and key is not None:
            h = fb.random.dropout(h, 0.3, key)
        return h @ params["out"]["w"] + params["out"]["b"]

    return fb.Model(init=lambda key: fb.initialize(abstract, key), apply=apply, abstract=abstract)


MODEL = mlp()


def loss_fn(params: Any, batch: Any, key: Any = None) -> Any:
    return fb.losses.cross_entropy(MODEL.apply(params, batch["x"]), batch["y"])


def rows(number: int, seed: int = 1, ignored: float = 0.0) -> dict[str, torch.Tensor]:
    key = fb.random.key(seed)
    labels = fb.random.randint(fb.random.fold_in(key, 1), (number,), 0, CLASSES).long()
    drop = fb.random.bernoulli(fb.random.fold_in(key, 2), ignored, (number,))
    return {
        "x": fb.random.normal(key, (number, WIDTH), dtype=torch.float64),
        "y": torch.where(drop, -100, labels),
    }


def close(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance), got, expected)


@pytest.fixture
def booster() -> fb.Booster:
    return fb.Booster(device="cpu")


@pytest.fixture
def state(booster: fb.Booster) -> fb.TrainState:
    return booster.init(MODEL, TX, key=fb.random.key(0))


class TestInit:
    def test_parameters_are_the_models(self, state: fb.TrainState) -> None:
        close(state.params, MODEL.init(fb.random.key(0)), 0)

    def test_given_parameters_are_copied(self, booster: fb.Booster) -> None:
        params = MODEL.init(fb.random.key(7))
        state = booster.init(MODEL, TX, key=fb.random.key(0), params=params)
        params["in"]["w"].zero_()
        close(state.params, MODEL.init(fb.random.key(7)), 0)

    def test_full_params_and_shard_are_inverse(self, booster: fb.Booster, state: fb.TrainState) -> None:
        params = booster.full_params(state)
        again = booster.shard(params, like=booster.init(MODEL, TX, key=fb.random.key(5)))
        close(again.params, state.params, 0)
        params["in"]["w"].zero_()
        close(state.params, MODEL.init(fb.random.key(0)), 0)

    def test_abstract_describes_the_state(self, booster: fb.Booster, state: fb.TrainState) -> None:
        described = booster.abstract(MODEL, TX)
        fits = fb.tree.map(lambda i, leaf: (i.shape, i.dtype) == (tuple(leaf.shape), leaf.dtype), described, state)
        assert fb.tree.all(bool, fits)
        assert fb.tree.structure(described) == fb.tree.structure(state)

    def test_every_problem_of_the_params_is_named(self, booster: fb.Booster) -> None:
        params = {"in": {"w": torch.zeros(2, 7)}, "out": {"w": 3, "extra": torch.zeros(1)}}
        with pytest.raises(ValueError, match="do not fit") as error:
            booster.init(MODEL, TX, key=fb.random.key(0), params=params)
        for line in ("in.w: shape (2, 7), expected (5, 7)", "out.b: missing", "out.extra: unexpected", "out.w: int"):
            assert line in str(error.value)

    def test_a_state_made_in_inference_mode_trains(self, booster: fb.Booster) -> None:
        with torch.inference_mode():
            state = booster.init(MODEL, TX, key=fb.random.key(0))
        _, metrics = booster.train_step(loss_fn, TX, jit=False)(state, rows(4))
        assert metrics["grad_norm"].item() > 0

    def test_elementwise_optimizers_see_one_buffer(self, state: fb.TrainState) -> None:
        assert len(state.storage.buffers) == 1
        assert state.frozen is not None
        assert [slot.shape for slot in state.frozen.layout.slots] == [(CLASSES,)]


class TestStep:
    @pytest.mark.parametrize("jit", [False, True])
    def test_equals_torch(self, jit: bool, booster: fb.Booster, state: fb.TrainState) -> None:
        """Ten steps with clipping against torch.optim.AdamW and torch's own clipping."""
        params = fb.tree.map(lambda leaf: leaf.clone().requires_grad_(), booster.full_params(state))
        trained = [params["in"]["w"], params["out"]["w"]]
        optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
        step = booster.train_step(loss_fn, TX, max_norm=0.5, jit=jit)
        for index in range(10):
            batch = rows(8, seed=index)
            expected = torch.nn.functional.cross_entropy(MODEL.apply(params, batch["x"]), batch["y"])
            optimizer.zero_grad()
            expected.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
            optimizer.step()
            state, metrics = step(state, batch)
            close((metrics["loss"], metrics["grad_norm"]), (expected.detach(), norm))
        close(state.params, fb.tree.map(torch.Tensor.detach, params))
        assert int(state.step) == int(state.position) == 10
        assert metrics["lr"].item() == pytest.approx(0.01)

    @given(
        st.integers(1, 4),
        st.integers(1, 4),
        st.sampled_from([0.0, 0.4, 1.0]),
        st.booleans(),
        st.sampled_from([None, 0.1]),
    )
    def test_any_split_of_a_batch_agrees(
        self, parts: int, size: int, ignored: float, jit: bool, clip: float | None
    ) -> None:
        booster, batch = fb.Booster(device="cpu"), rows(parts * size, seed=3, ignored=ignored)
        results = []
        for accumulate in (1, parts):
            state = booster.init(MODEL, TX, key=fb.random.key(0))
            step = booster.train_step(loss_fn, TX, accumulate=accumulate, max_norm=clip, jit=jit)
            results.append(step(*step(state, batch)[:1], batch))
        close(results[0][0], results[1][0], 1e-9)
        close(results[0][1], results[1][1], 1e-9)

    def test_all_ignored_is_zero_and_no_nan(self, booster: fb.Booster) -> None:
        tx = fb.optim.sgd(0.1)
        state = booster.init(MODEL, tx, key=fb.random.key(0))
        before = booster.full_params(state)
        state, metrics = booster.train_step(loss_fn, tx, jit=False)(state, rows(4, ignored=1.0))
        assert (metrics["loss"].item(), metrics["grad_norm"].item(), metrics["tokens"].item()) == (0, 0, 0)
        close(state.params, before, 0)

    def test_forms_of_a_loss(self, booster: fb.Booster) -> None:
        """A mean over rows, (sum, weight), with aux, with and without a key: the same step."""

        def mean(params: Any, batch: Any) -> torch.Tensor:
            total, weight = loss_fn(params, batch)
            return total / weight

        def with_aux(params: Any, batch: Any, key: Any) -> Any:
            return (*loss_fn(params, batch), {"rows": batch["x"].shape[0] / 4, "total": loss_fn(params, batch)[0]})

        batch, outcomes = rows(8), []
        for form in (loss_fn, mean, with_aux):
            state = booster.init(MODEL, TX, key=fb.random.key(0))
            outcomes.append(booster.train_step(form, TX, accumulate=2, jit=False)(state, batch))
        close(outcomes[0][0], outcomes[1][0])
        close(outcomes[0][0], outcomes[2][0])
        assert outcomes[2][1]["rows"].item() == pytest.approx(1.0)  # 4 rows a microbatch

    def test_the_key_reaches_the_loss(self, booster: fb.Booster) -> None:
        def dropped(params: Any, batch: Any, key: Any) -> Any:
            return fb.losses.cross_entropy(MODEL.apply(params, batch["x"], key=key, train=True), batch["y"])

        def losses(seed: int) -> list[float]:
            tx = fb.optim.set_to_zero()
            state = booster.init(MODEL, tx, key=fb.random.key(seed), params=MODEL.init(fb.random.key(0)))
            step = booster.train_step(dropped, tx, jit=False)
            found = []
            for _ in range(3):
                state, metrics = step(state, rows(8))
                found.append(metrics["loss"].item())
            return found

        assert losses(0) == losses(0)
        assert len({*losses(0), *losses(1)}) == 6  # each step and each seed draws anew

    def test_functional_without_donation(self, booster: fb.Booster, state: fb.TrainState) -> None:
        step = booster.train_step(loss_fn, TX, donate=False)
        first, second = step(state, rows(4)), step(state, rows(4))
        close(first, second, 0)

    @pytest.mark.parametrize("jit", [False, True])
    def test_a_donated_state_is_refused(self, jit: bool, booster: fb.Booster, state: fb.TrainState) -> None:
        step = booster.train_step(loss_fn, TX, jit=jit)
        step(state, rows(4))
        for use in (
            lambda: step(state, rows(4)),
            lambda: state.params,
            lambda: booster.full_params(state),
            lambda: state.step,
        ):
            with pytest.raises(fb.DonatedError, match="donated to train_step"):
                use()

    @pytest.mark.parametrize("jit", [False, True])
    def test_what_shares_storage_with_a_donated_state_is_refused_too(
        self, jit: bool, booster: fb.Booster, state: fb.TrainState, tmp_path: Path
    ) -> None:
        fork, step = state.replace(key=fb.random.key(9)), booster.train_step(loss_fn, TX, jit=jit)
        step(state, rows(4))
        for use in (lambda: fork.params, lambda: step(fork, rows(4)), lambda: booster.save(tmp_path / "never", fork)):
            with pytest.raises(fb.DonatedError, match="was donated to train_step"):
                use()
        assert "donated to train_step" in repr(state)

    @pytest.mark.parametrize("jit", [False, True])
    def test_the_batch_is_never_written(self, jit: bool, booster: fb.Booster, state: fb.TrainState) -> None:
        """A weight that is a view of the batch, under accumulation."""

        def weighted(params: Any, batch: Any) -> Any:
            return loss_fn(params, batch)[0], batch["w"][0]

        batch = {**rows(6), "w": torch.arange(1.0, 7.0, dtype=torch.float64)}
        state, metrics = booster.train_step(weighted, TX, accumulate=3, jit=jit)(state, batch)
        assert torch.equal(batch["w"], torch.arange(1.0, 7.0, dtype=torch.float64))
        assert metrics["tokens"].item() == 1 + 3 + 5

    def test_compiled_graphs_are_counted_and_shown(self, booster: fb.Booster, state: fb.TrainState) -> None:
        one, two = booster.train_step(loss_fn, TX), booster.train_step(loss_fn, TX, accumulate=2)
        assert "train_step:" in str(one.lower(state, rows(4)))
        assert "microbatch:" in str(two.lower(state, rows(4)))
        assert (one.compiles, two.compiles) == (0, 0)
        state, _ = one(state, rows(4))
        two(state, rows(4))
        assert (one.compiles, two.compiles) == (1, 2)  # the microbatch and the update

    def test_how_a_loss_takes_its_key(self, booster: fb.Booster) -> None:
        """As a third argument of any name, by keyword, or through **kwargs."""

        def third(params: Any, batch: Any, rng: Any) -> Any:
            return fb.losses.cross_entropy(MODEL.apply(params, batch["x"], key=rng, train=True), batch["y"])

        def keyword(params: Any, batch: Any, *, key: Any) -> Any:
            return third(params, batch, key)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return keyword(*args, **kwargs)

        losses = set()
        for form in (third, keyword, wrapped):
            state = booster.init(MODEL, TX, key=fb.random.key(0))
            losses.add(booster.train_step(form, TX, jit=False)(state, rows(8))[1]["loss"].item())
        assert len(losses) == 1
        assert losses != {loss_fn(MODEL.init(fb.random.key(0)), rows(8))[0].item() / 8}

    def test_a_loop_drags_no_tape(self, booster: fb.Booster, state: fb.TrainState) -> None:
        teacher = torch.nn.Linear(WIDTH, CLASSES).double()
        step = booster.train_step(lambda p, b: fb.losses.mse(MODEL.apply(p, b["x"]), teacher(b["x"])), TX, jit=False)
        for _ in range(2):
            state, metrics = step(state, rows(4))
        assert not any(leaf.requires_grad for leaf in fb.tree.leaves((state, metrics)))

    def test_plain_pairs_see_the_plain_tree(self, booster: fb.Booster) -> None:
        """An optimizer in optax's style, a pair of functions, gets the model's tree with its names."""

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return {
                **fb.tree.map(torch.zeros_like, updates),
                "out": fb.tree.map(lambda u: -0.1 * u, updates["out"]),
            }, state

        pair = (lambda params: {"names": len(params["in"])}, update)
        state = booster.init(MODEL, pair, key=fb.random.key(0))
        before = booster.full_params(state)
        after, _ = booster.train_step(loss_fn, pair, jit=False)(state, rows(4))
        assert torch.equal(after.params["in"]["w"], before["in"]["w"])
        assert not torch.equal(after.params["out"]["w"], before["out"]["w"])

    def test_another_optimizers_state(self, booster: fb.Booster, state: fb.TrainState) -> None:
        with pytest.raises(ValueError, match=r"state\.opt_state is not one of the optimizer"):
            booster.train_step(loss_fn, fb.optim.sgd(0.1, momentum=0.9), jit=False)(state, rows(4))


class TestSkip:
    @pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
    def test_a_weight_that_is_no_weight(self, weight: float, booster: fb.Booster) -> None:
        """No weight: no gradient; a negative one or NaN: the step is skipped. Never NaN in the parameters."""
        tx = fb.optim.sgd(0.1)
        state = booster.init(MODEL, tx, key=fb.random.key(0))
        before = booster.full_params(state)
        step = booster.train_step(lambda p, b: (0.01 * p["in"]["w"].square().sum(), weight), tx, jit=False)
        state, metrics = step(state, rows(4))
        close(state.params, before, 0)
        assert metrics["skipped"].item() == (weight != 0)

    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    def test_a_step_that_is_not_finite_changes_nothing(self, jit: bool, poison: float, booster: fb.Booster) -> None:
        tx = fb.optim.adamw(fb.schedules.linear(0.1, 0.0, 10))
        state = booster.init(MODEL, tx, key=fb.random.key(0))
        step = booster.train_step(loss_fn, tx, jit=jit, donate=False)
        state, first = step(state, rows(4))
        bad = rows(4)
        bad["x"][1, 2] = poison
        after, metrics = step(state, bad)
        assert metrics["skipped"].item() == 1
        close((after.params, after.opt_state, after.step), (state.params, state.opt_state, state.step), 0)
        assert int(after.position) == int(state.position) + 1
        _, resumed = step(after, rows(4))
        assert (first["skipped"].item(), resumed["skipped"].item()) == (0, 0)
        assert resumed["lr"].item() == pytest.approx(0.09)

    def test_large_gradients_are_no_overflow(self, booster: fb.Booster) -> None:
        model, tx = mlp(torch.float32), fb.optim.sgd(0.1)
        state = booster.init(model, tx, key=fb.random.key(0))

        def huge(params: Any, batch: Any) -> Any:
            return 1e20 * sum(leaf.sum() for leaf in fb.tree.leaves(params))

        _, metrics = booster.train_step(huge, tx, max_norm=1.0, jit=False)(state, {"x": torch.ones(1)})
        elements = WIDTH * 7 + 7 * CLASSES
        assert metrics["grad_norm"].item() == pytest.approx(1e20 * elements**0.5, rel=1e-6)
        assert metrics["skipped"].item() == 0


class TestBuffers:
    def model(self) -> tuple[torch.nn.Module, fb.Model]:
        module = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, CLASSES)
        ).double()
        return module, fb.functionalize(module)

    @pytest.mark.parametrize("jit", [False, True])
    def test_batch_statistics_are_the_modules(self, jit: bool, booster: fb.Booster) -> None:
        module, model = self.model()

        def loss(params: Any, batch: Any, buffers: Any) -> Any:
            logits, new = model.apply(params, batch["x"], buffers=buffers, train=True, mutable=True)
            return (*fb.losses.cross_entropy(logits, batch["y"]), {"buffers": new})

        tx = fb.optim.sgd(0.1)
        state = booster.init(model, tx, key=fb.random.key(0))
        step = booster.train_step(loss, tx, jit=jit)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for seed in range(3):
            batch = rows(8, seed)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(batch["x"]), batch["y"]).backward()
            optimizer.step()
            state, _ = step(state, batch)
        close(state.params, {name: p.detach() for name, p in module.named_parameters()})
        close(state.buffers, dict(module.named_buffers()))

    def test_forgetting_them_is_an_error(self, booster: fb.Booster) -> None:
        _, model = self.model()

        def loss(params: Any, batch: Any) -> Any:
            return fb.losses.cross_entropy(model.apply(params, batch["x"], train=True), batch["y"])

        state = booster.init(model, TX, key=fb.random.key(0))
        with pytest.raises(ValueError, match=r"1\.running_mean"):
            booster.train_step(loss, TX, jit=False)(state, rows(4))


class TestPrecision:
    def test_bf16_computes_low_and_keeps_masters(self) -> None:
        booster, model, seen = fb.Booster("cpu", "bf16"), mlp(torch.float32), []

        def loss(params: Any, batch: Any) -> Any:
            seen.extend(leaf.dtype for leaf in fb.tree.leaves(params))
            return fb.losses.cross_entropy(model.apply(params, batch["x"].bfloat16()), batch["y"])

        state = booster.init(model, TX, key=fb.random.key(0))
        state, _ = booster.train_step(loss, TX, jit=False)(state, rows(4))
        assert set(seen) == {torch.bfloat16}
        assert {leaf.dtype for leaf in fb.tree.leaves(state.params)} == {torch.float32}

    @pytest.mark.parametrize("jit", [False, True])
    def test_modules_with_float_inputs_and_batch_norm(self, jit: bool) -> None:
        """Inputs are cast for the module, targets are not; batch statistics stay in float32."""
        module = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        model, booster, tx = fb.functionalize(module), fb.Booster("cpu", "bf16"), fb.optim.sgd(0.1)

        def loss(params: Any, batch: Any, key: Any, buffers: Any) -> Any:
            out, new = model.apply(params, batch["x"], key=key, train=True, buffers=buffers, mutable=True)
            assert out.dtype == torch.bfloat16
            assert batch["y"].dtype == torch.float32
            return (*fb.losses.mse(out[:, 0], batch["y"]), {"buffers": new})

        batch = {"x": rows(8)["x"].float(), "y": rows(8)["x"].float().sum(1)}
        state = booster.init(model, tx, key=fb.random.key(0))
        before = booster.eval_step(loss, jit=jit)(state, batch)["loss"].item()
        step = booster.train_step(loss, tx, jit=jit)
        for _ in range(10):
            state, _ = step(state, batch)
        assert booster.eval_step(loss, jit=jit)(state, batch)["loss"].item() < 0.7 * before
        assert {leaf.dtype for leaf in fb.tree.leaves((state.params, state.buffers))} == {torch.float32, torch.int64}

    def test_unknown_names(self) -> None:
        with pytest.raises(
            ValueError, match="mixed_precision: 'half' is not known, expected one of 'fp32', 'bf16', 'fp16'"
        ):
            fb.Booster(mixed_precision="half")
        with pytest.raises(ValueError, match="device: 'gpu'"):
            fb.Booster(device="gpu")
        with pytest.raises(TypeError, match="plugin: 'ddp'"):
            fb.Booster(plugin="ddp")  # type: ignore[arg-type]


class TestBadInput:
    @pytest.mark.parametrize(
        ("batch", "error", "message"),
        [
            ({}, ValueError, "batch: no tensors"),
            ({"x": [1.0], "y": torch.zeros(1)}, TypeError, r"batch\.x\.0: float, expected a torch.Tensor"),
            ({"x": torch.zeros(2, 5), "y": torch.zeros(3)}, ValueError, r"batch\.x has 2 rows and batch\.y has 3"),
            ({"x": torch.zeros(0, 5), "y": torch.zeros(0)}, ValueError, "batch: no rows"),
            ({"x": torch.zeros(2, 5, device="meta")}, ValueError, r"batch\.x is on meta, the state on cpu"),
        ],
    )
    def test_batches(self, batch: Any, error: Any, message: str, booster: fb.Booster, state: fb.TrainState) -> None:
        with pytest.raises(error, match=message):
            booster.train_step(loss_fn, TX)(state, batch)
        assert int(state.step) == 0  # not consumed

    def test_a_missing_key_says_what_is_there(self, booster: fb.Booster, state: fb.TrainState) -> None:
        with pytest.raises(KeyError, match=r"loss_fn looked for 'y', which is not in the batch: it has \['x'\]"):
            booster.train_step(loss_fn, TX, jit=False)(state, {"x": rows(2)["x"]})

    def test_a_loss_of_another_model_says_what_the_parameters_are(
        self, booster: fb.Booster, state: fb.TrainState
    ) -> None:
        message = r"looked for 'head', .* it has \['x', 'y'\]; nor is it in params: they have \['in', 'out'\]"
        with pytest.raises(KeyError, match=message):
            booster.train_step(lambda params, batch: params["head"].sum(), TX, jit=False)(state, rows(2))

    def test_a_state_of_another_booster(self, booster: fb.Booster) -> None:
        step, eval_step = booster.train_step(loss_fn, TX), booster.eval_step(loss_fn)
        plugin, mesh = fb.TorchDDPPlugin(), fb.virtual_mesh(2)
        for other, message in (
            (fb.Booster("cpu", "bf16"), r"mixed_precision\.policy: Policy\(.*bfloat16.*, expected Policy\("),
            (fb.Booster("cpu", "fp16"), r"mixed_precision\.scaling: DynamicScaling\(.*, expected None"),
            (
                fb.Booster("cpu", None, plugin, mesh),
                r"plugin: TorchDDPPlugin\(\), expected SingleDevice.*\n.*mesh: mesh\(dp=2",
            ),
        ):
            state = other.init(MODEL, TX, key=fb.random.key(0))
            for run in (step, eval_step):
                with pytest.raises(ValueError, match=rf"(?s)state: not one of the step's Booster .*{message}"):
                    run(state, rows(4))
            assert int(state.step) == 0  # not consumed
        same = fb.Booster("cpu", "fp32").init(MODEL, TX, key=fb.random.key(0))
        assert eval_step(same, rows(4))["tokens"] == 4
        assert int(step(same, rows(4))[0].step) == 1

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (lambda p: p["in"]["w"], r"a torch.float64 tensor of shape \(5, 7\)"),
            (lambda p: 1.0, "float"),
            (lambda p: (p["in"]["w"].sum(), torch.ones(2)), r"a weight of shape \(2,\)"),
            (lambda p: (p["in"]["w"].sum(), 1, 2), "aux of type int"),
            (lambda p: (p["in"]["w"].sum(), 1, {"a": torch.ones(2)}), r"aux\['a'\] of shape \(2,\)"),
            (lambda p: (p["in"]["w"].sum(), {"a": 1}), r"a weight of type dict, expected a 0-d mean, \(sum, weight\)"),
            (lambda p: (p["in"]["w"].sum(), 1, {"a": "x"}), r"aux\['a'\] of type str, expected a scalar"),
        ],
    )
    def test_losses(self, returned: Any, message: str, booster: fb.Booster, state: fb.TrainState) -> None:
        with pytest.raises(TypeError, match=message):
            booster.train_step(lambda params, batch: returned(params), TX, jit=False)(state, rows(2))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"accumulate": 0}, "accumulate: 0"),
            ({"max_norm": -1.0}, "max_norm: -1.0"),
            ({"accumulate": 1.5}, "accumulate: 1.5"),
        ],
    )
    def test_options(self, options: Any, message: str, booster: fb.Booster) -> None:
        with pytest.raises(ValueError, match=message):
            booster.train_step(loss_fn, TX, **options)

    def test_reserved_names_and_foreign_buffers(self, booster: fb.Booster, state: fb.TrainState) -> None:
        for aux, message in (
            ({"grad_norm": 1.0}, r"aux\['grad_norm'\], but that is the name of a metric"),
            ({"buffers": {"new": torch.ones(3)}}, "new is not among the state's"),
        ):
            with pytest.raises(ValueError, match=message):
                booster.train_step(lambda p, b, a=aux: (*loss_fn(p, b), a), TX, jit=False)(state, rows(2))

    def test_parameters_of_another_kind(self, booster: fb.Booster) -> None:
        params = fb.tree.map(lambda leaf: leaf.long(), MODEL.init(fb.random.key(0)))
        with pytest.raises(ValueError, match=r"in\.w: torch\.int64, expected torch\.float64"):
            booster.init(MODEL, TX, key=fb.random.key(0), params=params)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda b: b.train_step(loss_fn, TX)({}, rows(2)), "state: dict, expected a TrainState"),
            (lambda b: b.eval_step(loss_fn)(None, rows(2)), "state: NoneType, expected a TrainState"),
            (lambda b: b.full_params({}), "state: dict, expected a TrainState"),
            (lambda b: b.shard({}, {}), "like: dict, expected a TrainState"),
            (lambda b: b.load("nothing", like=None), "like: NoneType, expected a TrainState"),
            (lambda b: b.init(torch.nn.Linear(2, 2), TX, key=fb.random.key(0)), r"model: Linear, expected a fb\.Model"),
            (lambda b: b.abstract(torch.nn.Linear(2, 2), TX), r"model: Linear, expected a fb\.Model"),
            (lambda b: b.abstract(MODEL, None), "tx: a transformation is .*, got NoneType"),
            (lambda b: b.init(MODEL, 1e-3, key=fb.random.key(0)), "tx: a transformation is .*, got float"),
            (lambda b: b.train_step(loss_fn, 1e-3), "tx: a transformation is .*, got float"),
            (lambda b: b.train_step(3, TX), "loss_fn: int"),
            (lambda b: b.eval_step(3), "loss_fn: int"),
        ],
    )
    def test_other_types(self, call: Any, message: str, booster: fb.Booster) -> None:
        with pytest.raises(TypeError, match=message):
            call(booster)


@pytest.mark.parametrize("form", [fb.region, fb.remat, lambda fn: fb.remat(fn, fb.checkpoint_policies.dots_saveable)])
def test_functionalized_modules_in_regions_and_remat(form: Any, booster: fb.Booster) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, 6), torch.nn.Tanh(), torch.nn.Linear(6, CLASSES)).double()
    model = fb.functionalize(module)
    block = form(lambda params, x: model.apply(params, x))

    def through(params: Any, batch: Any) -> Any:
        return fb.losses.cross_entropy(block(params, batch["x"]), batch["y"])

    def plain(params: Any, batch: Any) -> Any:
        return fb.losses.cross_entropy(model.apply(params, batch["x"]), batch["y"])

    results = []
    for loss, jit in ((plain, False), (through, False), (through, True)):
        state = booster.init(model, TX, key=fb.random.key(0))
        results.append(booster.train_step(loss, TX, jit=jit)(state, rows(6)))
    close(results[1], results[0], 1e-9)
    close(results[2], results[0], 1e-9)


def test_eval_step(booster: fb.Booster, state: fb.TrainState) -> None:
    batch = rows(6, ignored=0.3)
    total, weight = loss_fn(state.params, batch)
    for jit in (False, True):
        metrics = booster.eval_step(loss_fn, jit=jit)(state, batch)
        close(metrics["loss"], total / weight)
        assert metrics["tokens"].item() == weight.item()


def test_eval_step_drops_nothing_whatever_the_loss_says(booster: fb.Booster) -> None:
    model = fb.models.gpt2(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)  # with dropout

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return fb.losses.next_token(model.apply(params, batch["ids"], key=key, train=True), batch["ids"])

    batch = {"ids": torch.arange(16).view(2, 8)}
    state = booster.init(model, TX, key=fb.random.key(0))
    expected = fb.losses.next_token(model.apply(state.params, batch["ids"]), batch["ids"])
    close(booster.eval_step(loss, jit=False)(state, batch)["loss"], expected[0] / expected[1], 1e-6)


def test_a_state_is_a_value(state: fb.TrainState) -> None:
    again = copy.deepcopy(state)
    close(fb.tree.map(torch.sub, state.params, again.params), fb.tree.map(torch.zeros_like, state.params), 0)
    assert fb.tree.structure(again) == fb.tree.structure(state)
    assert repr(state) == "TrainState(step=0, 3 parameters of 59 elements, on cpu)"


class TestFunctionalExtras:
    def test_per_sample_gradients(self, state: fb.TrainState) -> None:
        batch = rows(6)
        each = fb.vmap(fb.grad(lambda p, b: loss_fn(p, fb.tree.map(lambda x: x[None], b))[0]), in_axes=(None, 0))(
            state.params, batch
        )
        whole = fb.grad(lambda p: loss_fn(p, batch)[0])(state.params)
        close(fb.tree.map(lambda g: g.sum(0), each), whole)

    @pytest.mark.parametrize("jit", [False, True])
    def test_an_ensemble_of_whole_states(self, jit: bool, booster: fb.Booster) -> None:
        step = booster.train_step(loss_fn, TX, max_norm=0.1, jit=False, donate=False)
        members = [booster.init(MODEL, TX, key=fb.random.key(seed)) for seed in range(3)]
        stacked = fb.tree.map(lambda *leaves: torch.stack(leaves), *members)
        together = fb.vmap(step, in_axes=(0, None))
        run = fb.jit(together) if jit else together
        for seed in range(2):
            stacked, metrics = run(stacked, rows(4, seed))
            results = [step(member, rows(4, seed)) for member in members]
            members = [result[0] for result in results]
        for index, member in enumerate(members):
            close(fb.tree.map(lambda leaf, i=index: leaf[i], stacked), member)
        assert metrics["loss"].shape == (3,)

    def test_a_hessian_vector_product(self, state: fb.TrainState) -> None:
        batch, params = rows(6), state.params
        vector = fb.tree.map(torch.ones_like, params)

        def along(p: Any) -> Any:
            return sum((g * v).sum() for g, v in zip(*map(fb.tree.leaves, (gradient(p), vector)), strict=True))

        def gradient(p: Any) -> Any:
            return fb.grad(lambda q: loss_fn(q, batch)[0])(p)

        exact = fb.grad(along)(params)
        step = 1e-6
        ahead, behind = (gradient(fb.tree.map(lambda p, v, s=s: p + s * v, params, vector)) for s in (step, -step))
        close(exact, fb.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind), 1e-7)

    def test_a_learning_rate_learned_through_the_step(self, booster: fb.Booster) -> None:
        """d(loss after a step)/d(learning rate), against finite differences."""

        def after(rate: torch.Tensor) -> torch.Tensor:
            tx = fb.optim.adamw(rate)
            state = booster.init(MODEL, tx, key=fb.random.key(0))
            state, _ = booster.train_step(loss_fn, tx, jit=False, donate=False)(state, rows(6))
            return loss_fn(state.params, rows(6))[0]

        rate, step = torch.tensor(0.05, dtype=torch.float64), 1e-6
        close(fb.grad(after)(rate), (after(rate + step) - after(rate - step)) / (2 * step), 1e-6)

    @pytest.mark.parametrize("what", ["loss", "grad_norm"])
    def test_metrics_are_differentiable_too(self, what: str, booster: fb.Booster) -> None:
        def second(rate: torch.Tensor) -> torch.Tensor:
            tx = fb.optim.sgd(rate)
            run = booster.train_step(loss_fn, tx, jit=False, donate=False)
            state, _ = run(booster.init(MODEL, tx, key=fb.random.key(0)), rows(6))
            return run(state, rows(6))[1][what]

        rate, step = torch.tensor(0.05, dtype=torch.float64), 1e-6
        close(fb.grad(second)(rate), (second(rate + step) - second(rate - step)) / (2 * step), 1e-6)


def test_a_complex_parameter_is_refused_by_name_and_may_be_frozen() -> None:
    abstract = {"a": fb.ArrayInfo((2,)), "b": {"w": fb.ArrayInfo((2,), torch.complex64)}}
    params = {"a": torch.ones(2), "b": {"w": torch.ones(2, dtype=torch.complex64)}}
    model = fb.Model(lambda key: params, lambda params, x: params["a"] * (params["b"]["w"] * x).real, abstract)
    booster, tx = fb.Booster("cpu"), fb.optim.adamw(0.1)
    for make in (lambda: booster.abstract(model, tx), lambda: booster.init(model, tx, key=fb.random.key(0))):
        with pytest.raises(TypeError, match=r"b\.w: a parameter of torch.complex64, expected a floating-point one"):
            make()
    abstract["b"] = {"w": fb.ArrayInfo((2,), torch.complex64, trainable=False)}
    state = booster.init(model, tx, key=fb.random.key(0))
    step = booster.train_step(lambda params, x: model.apply(params, x).sum(), tx, jit=False)
    state, metrics = step(state, torch.ones(2, dtype=torch.complex64))
    assert metrics["grad_norm"].item() == pytest.approx(2**0.5)
    assert torch.equal(booster.full_params(state)["b"]["w"], params["b"]["w"])
