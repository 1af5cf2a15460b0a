"""Mixed precision: what each name means, the loss scale as state, steps that overflow, rounding by chance."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster import testing
from functional_booster.precision import NAMES, LossScale, precision_of, stochastic_round
from functional_booster.testing.problem import residual

PLUGINS: dict[str, tuple[Any, Any]] = {
    "one device": (None, None),
    "ddp": (fb.TorchDDPPlugin(), fb.virtual_mesh(4)),
    "zero1": (fb.LowLevelZeroPlugin(stage=1), fb.virtual_mesh(4)),
    "zero2": (fb.LowLevelZeroPlugin(stage=2, extra_dp_size=2), fb.virtual_mesh(4)),
    "fsdp": (fb.TorchFSDPPlugin(), fb.virtual_mesh(4)),
    "gemini": (fb.GeminiPlugin(shard_param_frac=0.5), fb.virtual_mesh(4)),
}
FINITE = st.lists(st.booleans(), max_size=60)


def booster(name: str, precision: Any) -> fb.Booster:
    plugin, mesh = PLUGINS[name]
    return fb.Booster("cpu", precision, plugin, mesh)


def same(got: Any, expected: Any) -> None:
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), got, expected)


def scales(scaling: Any, finite: list[bool]) -> list[float]:
    """The factor before each step."""
    state, factors = scaling.init(), []
    for one in finite:
        factors.append(state.factor.item())
        state = scaling.update(state, torch.tensor(one))
    return factors


class TestDynamicScaling:
    @given(finite=FINITE, interval=st.integers(1, 5))
    def test_with_a_hysteresis_of_one_it_is_torchs(self, finite: list[bool], interval: int) -> None:
        scaling = fb.FP16TorchMixedPrecision(growth_interval=interval).scaling
        factor, tracker, expected = torch.full((1,), 2.0**16), torch.zeros(1, dtype=torch.int32), []
        for one in finite:
            expected.append(factor.item())
            found_inf = torch.full((1,), 0.0 if one else 1.0)
            torch._amp_update_scale_(factor, tracker, found_inf, 2.0, 0.5, interval)
        assert scales(scaling, finite) == expected

    @given(finite=FINITE, interval=st.integers(1, 4), hysteresis=st.integers(1, 4), power=st.integers(0, 12))
    def test_it_is_colossal_ais(self, finite: list[bool], interval: int, hysteresis: int, power: int) -> None:
        """Its DynamicGradScaler.update, written out in Python's numbers."""
        low, high, scale, growth, counted, expected = 4.0, 2.0**10, 2.0**power, 0, 0, []
        scale = min(max(scale, low), high)
        scaling = fb.DynamicScaling(scale, 2.0, 0.5, interval, low, high, hysteresis)
        for one in finite:
            expected.append(scale)
            if not one:
                counted, growth = counted + 1, 0
                if counted >= hysteresis:
                    scale = max(scale * 0.5, low)
            else:
                growth += 1
                if growth == interval:
                    counted, growth, scale = 0, 0, min(scale * 2.0, high)
        assert scales(scaling, finite) == expected

    def test_a_constant_one_stays(self) -> None:
        assert scales(fb.ConstantScaling(128.0), [True, False, True]) == [128.0] * 3

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"initial_scale": 0.5}, ValueError, "initial_scale: 0.5, expected one from min_scale=1"),
            ({"initial_scale": float("inf")}, ValueError, "initial_scale: inf, expected a number up to 3.4"),
            ({"growth_factor": 0.9}, ValueError, "growth_factor: 0.9"),
            ({"backoff_factor": 1.5}, ValueError, "backoff_factor: 1.5, expected a number up to 1"),
            ({"growth_interval": 2.5}, TypeError, "growth_interval: 2.5, expected a whole number"),
            ({"hysteresis": 0}, ValueError, "hysteresis: 0"),
            ({"hysteresis": True}, TypeError, "hysteresis: True, expected a number"),
        ],
    )
    def test_wrong_arguments(self, arguments: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            fb.DynamicScaling(**arguments)


class TestScaledSteps:
    @pytest.mark.parametrize("accumulate", [1, 2])
    @pytest.mark.parametrize("name", PLUGINS)
    def test_a_scale_changes_nothing_but_rounding(self, name: str, accumulate: int) -> None:
        """In float64: ignored labels in unequal numbers on ranks and microbatches, a weight that is no constant."""
        problem, found = testing.small(16), []

        def loss_fn(params: Any, batch: Any, key: Any) -> Any:
            total, weight, aux = problem.loss_fn(params, batch, key)
            return total, weight * (1 + 0.1 * params["scale"].sum().square()), aux

        for scaling in (None, fb.ConstantScaling(2.0**20), fb.ConstantScaling(1e-3)):
            here = booster(name, fb.MixedPrecision(scaling=scaling))
            state = here.init(problem.model, problem.tx, key=problem.key)
            step = here.train_step(loss_fn, problem.tx, accumulate=accumulate, max_norm=problem.max_norm, jit=False)
            history = []
            for _ in range(3):
                state, metrics = step(state, problem.batch)
                history.append({**metrics, "loss_scale": torch.zeros(())})
            found.append((here.full_params(state), history))
        for scaled in found[1:]:
            fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13), scaled, found[0])

    @pytest.mark.parametrize("name", PLUGINS)
    def test_small_gradients_are_kept(self, name: str) -> None:
        """Gradients of about 1e-8 are zero in float16; the scale carries them through the backward and over ranks."""
        model = residual(3, 3, width=5, depth=1)
        problem = testing.small(8)

        def tiny(params: Any, batch: Any, key: Any) -> Any:
            total, weight = fb.losses.cross_entropy(model.apply(params, batch["x"], key=None), batch["y"])
            return total * 1e-8, weight

        norms = {}
        for precision in ("fp32", "fp16", fb.MixedPrecision(precision_of("fp16").policy)):
            here = booster(name, precision)
            state = here.init(model, fb.optim.sgd(0.1), key=problem.key)
            _, metrics = here.train_step(tiny, fb.optim.sgd(0.1), jit=False)(state, problem.batch)
            norms[precision if isinstance(precision, str) else "without"] = metrics["grad_norm"].item()
        assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.01)
        assert abs(norms["without"] / norms["fp32"] - 1) > 0.1

    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize("name", ["one device", "zero1", "fsdp"])
    def test_a_step_that_overflows_changes_the_scale_alone(self, name: str, jit: bool, tmp_path: Path) -> None:
        """Infinities at some steps, in the rows of one rank: exact semantics, and resumed as if never stopped."""
        scaling = fb.DynamicScaling(2.0**10, growth_interval=2, hysteresis=2)
        here = booster(name, fb.MixedPrecision(precision_of("fp16").policy, scaling))
        problem = testing.small(8)
        tx = fb.optim.adamw(fb.schedules.linear(1e-2, 0.0, 20))
        bad = {**problem.batch, "x": problem.batch["x"].clone()}
        bad["x"][0] = float("inf")
        finite = [True, False, True, True, False, False, True, True, True]
        with testing.traced():
            state = here.init(problem.model, tx, key=problem.key)
            step = here.train_step(problem.loss_fn, tx, max_norm=0.1, jit=jit, donate=False)
            for index, (one, expected) in enumerate(zip(finite, scales(scaling, finite), strict=True)):
                new, metrics = step(state, problem.batch if one else bad)
                assert metrics["loss_scale"].item() == expected == state.loss_scale.factor.item()
                assert metrics["skipped"].item() == (not one)
                assert (new.step.item(), new.position.item()) == (sum(finite[: index + 1]), index + 1)
                if not one:
                    same((new.storage, new.opt_state), (state.storage, state.opt_state))
                else:
                    assert 0 < metrics["grad_norm"].item() < 100  # unscaled
                if index == 4:  # between two overflows that count together
                    here.save(tmp_path / "state", new)
                    new = here.load(tmp_path / "state", like=here.abstract(problem.model, tx))
                state = new
        assert state.loss_scale.factor.item() == scaling.update(_last(scaling, finite[:-1]), torch.tensor(True)).factor

    def test_what_is_no_number_is_skipped_whatever_is_asked(self) -> None:
        problem, here = testing.small(8), booster("one device", "fp16")
        state = here.init(problem.model, problem.tx, key=problem.key)
        step = here.train_step(problem.loss_fn, problem.tx, skip_nonfinite=False, jit=False, donate=False)
        new, metrics = step(state, {**problem.batch, "x": problem.batch["x"] * float("nan")})
        assert metrics["skipped"].item() == 1
        same(new.storage, state.storage)


def _last(scaling: fb.DynamicScaling, finite: list[bool]) -> LossScale:
    state = scaling.init()
    for one in finite:
        state = scaling.update(state, torch.tensor(one))
    return state


class TestApex:
    """The levels, against autocast and ``half()`` themselves."""

    def module(self) -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Linear(16, 4)]
        return torch.nn.Sequential(*layers, torch.nn.Softmax(-1))

    def batch(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {
            "x": torch.randn(32, 6, generator=generator),
            "y": torch.rand(32, 4, generator=generator),
        }

    def trained(self, precision: Any, steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
        model, here, tx = fb.functionalize(self.module()), fb.Booster("cpu", precision), fb.optim.sgd(0.5)

        def loss(params: Any, batch: Any, key: Any, buffers: Any) -> Any:
            out, new = model.apply(params, batch["x"], key=key, train=True, buffers=buffers, mutable=True)
            return (*fb.losses.mse(out, batch["y"]), {"buffers": new})

        state = here.init(model, tx, key=fb.random.key(0))
        step, history = here.train_step(loss, tx, jit=False), []
        for _ in range(steps):
            state, metrics = step(state, self.batch())
            history.append(metrics["loss"].item())
        return {**state.params, **state.buffers}, history

    def test_o1_is_autocast(self) -> None:
        module, batch, history = self.module(), self.batch(), []
        optimizer = torch.optim.SGD(module.parameters(), 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for _ in range(5):
            with torch.autocast("cpu", torch.float16):
                loss = torch.nn.functional.mse_loss(module(batch["x"]), batch["y"])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            history.append(loss.item())
        values, losses = self.trained(fb.FP16ApexMixedPrecision("O1"), 5)
        assert losses == pytest.approx(history, rel=1e-4)
        for name, expected in module.state_dict().items():
            torch.testing.assert_close(values[name], expected, rtol=2e-3, atol=2e-4)
            assert values[name].dtype == expected.dtype

    def test_each_op_runs_in_the_dtype_of_its_level(self) -> None:
        seen: dict[str, list[torch.dtype]] = {}
        for level in ("O0", "O1", "O2", "O3"):
            module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
            dtypes = seen.setdefault(level, [])
            model, here = fb.functionalize(module), fb.Booster("cpu", fb.FP16ApexMixedPrecision(level))
            state = here.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))

            def loss(params: Any, batch: Any, model: Any = model, dtypes: Any = dtypes) -> Any:
                out = model.apply(params, batch["x"], buffers=model.buffers())
                error = torch.nn.functional.mse_loss(out, out.detach() * 0)
                dtypes[:] = [out.dtype, error.dtype]
                return error.float()

            here.train_step(loss, fb.optim.sgd(0.1), jit=False, donate=False)(state, {"x": torch.randn(8, 4)})
            stored = {name: leaf.dtype for name, leaf in state.params.items()}
            half, single = torch.float16, torch.float32
            expected = {"O3": half}.get(level, single)
            assert set(stored.values()) == {expected}
        assert seen["O0"] == [single, single]
        assert seen["O1"] == [half, single]  # autocast's lists
        assert seen["O2"] == [half, half] == seen["O3"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"opt_level": "O4"}, "opt_level: 'O4', expected one of 'O0', 'O1', 'O2', 'O3'"),
            ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "O1 has a float32 model"),
            ({"opt_level": ["O1"]}, "opt_level: ['O1'], expected one of"),
            ({"loss_scale": "static"}, "loss_scale: 'static', expected 'dynamic' or a number"),
            ({"loss_scale": True}, "loss_scale: True, expected a number"),
            (
                {"loss_scale": 8.0, "min_loss_scale": 2.0},
                "min_loss_scale: 2.0, which a loss_scale of 8.0 does not have",
            ),
            ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, "min_loss_scale: 4.0, expected a number up to 2"),
            ({"opt_level": "O2", "master_weights": "no"}, "master_weights: 'no', expected True or False"),
        ],
    )
    def test_wrong_arguments(self, arguments: Any, message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            fb.FP16ApexMixedPrecision(**arguments)

    def test_a_small_largest_scale_is_the_first(self) -> None:
        scaling = fb.FP16ApexMixedPrecision("O2", max_loss_scale=2.0**10).scaling
        assert isinstance(scaling, fb.DynamicScaling) and scaling.initial_scale == 2.0**10

    def test_a_number_is_a_constant_scale(self) -> None:
        assert fb.FP16ApexMixedPrecision("O2", loss_scale=128.0).scaling == fb.ConstantScaling(128.0)
        assert fb.FP16ApexMixedPrecision("O0").scaling is None
        assert isinstance(fb.FP16ApexMixedPrecision("O2").scaling, fb.DynamicScaling)


class TestNames:
    @pytest.mark.parametrize("precision", NAMES)
    @pytest.mark.parametrize(("name", "jit"), [("one device", True), ("ddp", False), ("fsdp", False)])
    def test_each_trains_as_float32_does(self, name: str, precision: str, jit: bool) -> None:
        """The same losses to the dtype's rounding, the parameters stored in float32."""
        problem, history = testing.small(16, tx=fb.optim.sgd(0.02), max_norm=None), {}
        for chosen in ("fp32", precision):
            here = booster(name, chosen)
            with testing.traced():
                state = here.init(problem.model, problem.tx, key=problem.key)
                state = state.replace(
                    loss_scale=_at(state.loss_scale, 2.0**8) if chosen != "fp32" else state.loss_scale
                )
                step = here.train_step(problem.loss_fn, problem.tx, jit=jit)
                history[chosen] = []
                for _ in range(4):
                    state, metrics = step(state, problem.batch)
                    assert metrics["skipped"].item() == 0
                    history[chosen].append(metrics["loss"].item())
        assert history[precision] == pytest.approx(
            history["fp32"], rel={"bf16": 2e-2, "fp8": 5e-2}.get(precision, 5e-3)
        )
        assert history["fp32"][-1] < history["fp32"][0]
        if precision not in ("fp32", "fp16_apex"):  # whose loss is computed in float64 here
            assert history[precision] != history["fp32"]

    def test_a_norm_of_large_activations_does_not_overflow(self) -> None:
        """Norms, softmax and losses have float32 inside: squares of 1000 are no infinities."""
        model = fb.models.llama(
            vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
        here, tokens = (
            fb.Booster("cpu", "fp16"),
            torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(0)),
        )
        state = here.init(model, fb.optim.sgd(1e-3), key=fb.random.key(0))
        params = fb.tree.map_with_name(
            lambda name, leaf: leaf * 1000 / leaf.std() if name == "model.embed_tokens.weight" else leaf, state.params
        )
        state = state.replace(params=params, loss_scale=_at(state.loss_scale, 1.0))
        loss = here.eval_step(model.loss, jit=False)(state, {"input_ids": tokens})["loss"]
        _, metrics = here.train_step(model.loss, fb.optim.sgd(1e-3), jit=False)(state, {"input_ids": tokens})
        assert loss.isfinite() and metrics["skipped"].item() == 0

    def test_both_the_boosters_and_the_plugins(self) -> None:
        for kind in (fb.LowLevelZeroPlugin, fb.GeminiPlugin):
            mesh = fb.virtual_mesh(2)
            for name in NAMES:
                one, other = fb.Booster("cpu", name, kind(), mesh), fb.Booster("cpu", None, kind(precision=name), mesh)
                assert one.precision == other.precision
            with pytest.raises(ValueError, match="initial_scale: given beside a precision that has its own"):
                fb.Booster("cpu", fb.FP16TorchMixedPrecision(), kind(initial_scale=8.0), mesh)
            with pytest.warns(UserWarning, match="hysteresis: without effect, since 'bf16' does not scale"):
                fb.Booster("cpu", "bf16", kind(hysteresis=3), mesh)
            with pytest.raises(ValueError, match="mixed_precision: 'fp32', but the plugin's precision is 'fp16'"):
                fb.Booster("cpu", "fp32", kind(precision="fp16"), mesh)
            assert fb.Booster("cpu", None, kind(), mesh).policy == precision_of("fp16").policy  # Colossal-AI's default
            scaled = fb.Booster("cpu", "fp16", kind(initial_scale=8.0, hysteresis=3, max_scale=16.0), mesh)
            assert scaled.precision.scaling == fb.DynamicScaling(8.0, max_scale=16.0, hysteresis=3)
            own = fb.FP16TorchMixedPrecision(init_scale=4.0)
            assert fb.Booster("cpu", own, kind(), mesh).precision.scaling == own.scaling
        assert fb.Booster("cpu", None, fb.TorchDDPPlugin(), fb.virtual_mesh(2)).precision == fb.MixedPrecision()
        with pytest.raises(ValueError, match="mixed_precision: '' is not known"):
            fb.Booster("cpu", "", fb.LowLevelZeroPlugin(), fb.virtual_mesh(2))
        with pytest.raises(TypeError, match=r"function, expected a name, .*: call it, BF16MixedPrecision\(\)"):
            fb.Booster("cpu", fb.BF16MixedPrecision)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"policy": "fp16"}, TypeError, "MixedPrecision: policy is 'fp16'"),
            ({"scaling": 128.0}, TypeError, "MixedPrecision: scaling is 128.0"),
            ({"keep": "norm"}, TypeError, "keep: 'norm', expected a tuple of patterns of leaf names"),
            ({"keep": 5}, TypeError, "keep: 5, expected a tuple of patterns of leaf names"),
            ({"keep": ("norm", 5)}, TypeError, "keep: 5, expected patterns of leaf names"),
            ({"autocast": torch.int8}, ValueError, "autocast: torch.int8, expected torch.float16, torch.bfloat16"),
            (
                {"policy": fb.Policy(compute=torch.float16), "autocast": torch.bfloat16},
                ValueError,
                "autocast: torch.bfloat16, but the policy computes in torch.float16",
            ),
            ({"cast_inputs": 1}, TypeError, "MixedPrecision: cast_inputs is 1, expected True or False"),
            ({"stochastic_rounding": True}, ValueError, "stochastic_rounding is for parameters stored in bfloat16"),
        ],
    )
    def test_wrong_arguments(self, arguments: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            fb.MixedPrecision(**arguments)


def _at(state: LossScale, factor: float) -> LossScale:
    return LossScale(torch.full_like(state.factor, factor), state.good, state.overflows)


class TestStochasticRounding:
    @given(x=st.floats(width=32, allow_nan=False), bits=st.integers(-(2**31), 2**31 - 1))
    def test_it_gives_a_neighbour(self, x: float, bits: int) -> None:
        exact = torch.tensor(x, dtype=torch.float32)
        got = stochastic_round(exact, torch.tensor(bits, dtype=torch.int32))
        raw = exact.view(torch.int32)
        down = (raw & -65536).view(torch.float32)  # towards zero
        up = ((raw & -65536) + 65536).view(torch.float32) if down != exact else down
        assert got.dtype == torch.bfloat16
        assert got.float() in (down, up) or not exact.isfinite()
        assert exact.isfinite() or got.float() == exact

    @given(x=st.floats(-(2.0**100), 2.0**100, width=32))
    def test_its_mean_is_exact(self, x: float) -> None:
        """Over all 2^16 draws of the bits that count."""
        bits = torch.arange(2**16, dtype=torch.int32)
        mean = stochastic_round(torch.full((2**16,), x), bits).double().mean().item()
        assert mean == pytest.approx(x, rel=1e-12, abs=1e-40)

    @pytest.mark.parametrize("name", PLUGINS)
    def test_small_updates_count(self, name: str) -> None:
        """Updates of a thousandth of a bfloat16's spacing: lost by rounding to nearest, on average kept by chance."""
        model = fb.Model(
            init=lambda key: {"w": torch.ones(4096)},
            apply=lambda params: params["w"],
            abstract={"w": fb.ArrayInfo((4096,), torch.float32)},
        )

        def loss(params: Any, batch: Any) -> Any:
            return params["w"].float().sum() * batch["x"].sum(), batch["x"].sum()

        moved = {}
        for chance in (False, True):
            here = booster(name, fb.BF16MixedPrecision(master_weights=False, stochastic_rounding=chance))
            state = here.init(model, fb.optim.sgd(1e-5), key=fb.random.key(0))
            assert {leaf.dtype for leaf in fb.tree.leaves(state.storage)} == {torch.bfloat16}
            step = here.train_step(loss, fb.optim.sgd(1e-5), jit=False)
            for _ in range(20):
                state, _ = step(state, {"x": torch.ones(4)})
            moved[chance] = 1 - here.full_params(state)["w"].double().mean().item()
        assert moved[False] == 0
        assert moved[True] == pytest.approx(20e-5, rel=0.25)  # a standard deviation is 7%


class TestKept:
    def test_leaves_keep_their_dtype_by_pattern(self) -> None:
        """Stored and computed with in float32, beside bfloat16; sums over ranks, too."""
        model = fb.models.gpt2(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
        keep = ("h.*.ln_*", "ln_f")
        precision = fb.MixedPrecision(fb.Policy(torch.bfloat16, torch.bfloat16), keep=keep)
        batch = {"input_ids": torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))}
        for name in PLUGINS:
            here = booster(name, precision)
            state = here.init(model, fb.optim.adamw(1e-2), key=fb.random.key(0))
            seen: dict[str, torch.dtype] = {}

            def loss(params: Any, batch: Any, seen: Any = seen) -> Any:
                seen |= {name: leaf.dtype for name, leaf in fb.tree.named_leaves(params).items()}
                return model.loss(params, batch)

            state, metrics = here.train_step(loss, fb.optim.adamw(1e-2), jit=False)(state, batch)
            stored = {name: leaf.dtype for name, leaf in fb.tree.named_leaves(here.full_params(state)).items()}
            assert metrics["loss"].isfinite()
            expected = {each: torch.float32 if "ln_" in each else torch.bfloat16 for each in stored}
            assert stored == expected == seen

    @pytest.mark.parametrize("pattern", ["wte", "wpe", "attn", "h.*.mlp.c_fc", "h.0", "c_proj.bias"])
    def test_any_leaf_may_be_kept(self, pattern: str) -> None:
        """Beside bfloat16 ones, own models and modules: close to what bfloat16 gives, and closer to float32."""
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 8}
        model = fb.models.gpt2(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        batch = {"input_ids": torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))}
        found = {}
        for name, precision in {
            "fp32": None,
            "kept": fb.MixedPrecision(fb.Policy(torch.bfloat16, torch.bfloat16), keep=(pattern,)),
            "fp8": fb.MixedPrecision(precision_of("fp8").policy, fp8=precision_of("fp8").fp8, keep=(pattern,)),
        }.items():
            here = booster("fsdp", precision)
            state = here.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))
            _, metrics = here.train_step(model.loss, fb.optim.sgd(0.1), jit=False)(state, batch)
            found[name] = (metrics["loss"].item(), metrics["grad_norm"].item())
        assert found["kept"] == pytest.approx(found["fp32"], rel=0.03)
        assert found["fp8"] == pytest.approx(found["fp32"], rel=0.1)

    def test_a_kept_head_of_its_own(self) -> None:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = fb.models.llama(vocab_size=17, tie_word_embeddings=False, **sizes)
        here = fb.Booster("cpu", fb.MixedPrecision(precision_of("bf16").policy, keep=("lm_head", "embed_tokens")))
        state = here.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))
        _, metrics = here.train_step(model.loss, fb.optim.sgd(0.1), jit=False)(
            state, {"input_ids": torch.arange(8)[None]}
        )
        assert metrics["loss"].item() == pytest.approx(2.83, abs=0.2)

    @pytest.mark.parametrize("pattern", ["0", "1", "2", "4"])
    def test_a_modules_leaf_is_kept(self, pattern: str) -> None:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            *(
                torch.nn.Embedding(9, 8),
                torch.nn.Linear(8, 8),
                torch.nn.LayerNorm(8),
                torch.nn.GELU(),
                torch.nn.Linear(8, 2),
            )
        )
        model, seen, outs = fb.functionalize(module), {}, {}
        for keep in ((), (pattern,)):
            here = fb.Booster("cpu", fb.MixedPrecision(precision_of("bf16").policy, fp8=None, keep=keep))
            state = here.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))

            def loss(params: Any, batch: Any, keep: Any = keep) -> Any:
                seen[keep] = {name for name, leaf in params.items() if leaf.dtype == torch.float32}
                outs[keep] = model.apply(params, batch["x"])
                return outs[keep].float().square().sum(), 4

            here.train_step(loss, fb.optim.sgd(0.1), jit=False, donate=False)(state, {"x": torch.arange(4)})
        assert seen == {(): set(), (pattern,): {name for name in state.params if name.startswith(pattern)}}
        assert outs[pattern,].dtype == torch.bfloat16
        torch.testing.assert_close(outs[pattern,].detach(), outs[()].detach(), rtol=0.05, atol=0.02)

    def test_a_kept_weight_is_not_multiplied_in_fp8(self) -> None:
        model, kinds = fb.functionalize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))), []
        precision = precision_of("fp8")
        here = fb.Booster("cpu", fb.MixedPrecision(precision.policy, fp8=precision.fp8, keep=("0",)))

        def loss(params: Any, batch: Any) -> Any:
            kinds[:] = [(type(params[f"{place}.weight"]).__name__, params[f"{place}.weight"].dtype) for place in (0, 1)]
            return model.apply(params, batch["x"]).float().square().sum(), 4

        state = here.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))
        here.train_step(loss, fb.optim.sgd(0.1), jit=False)(state, {"x": torch.randn(4, 4)})
        assert kinds == [("Tensor", torch.float32), ("Fp8Weight", torch.bfloat16)]

    def test_batch_norms_are_found_by_their_type(self) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4))
        model, here = fb.functionalize(module), fb.Booster("cpu", fb.FP16ApexMixedPrecision("O2"))
        state, seen = here.init(model, fb.optim.sgd(0.1), key=fb.random.key(0)), {}

        def loss(params: Any, batch: Any) -> Any:
            seen.update({name: leaf.dtype for name, leaf in params.items()})
            return model.apply(params, batch["x"], buffers=model.buffers()).float().square().sum(), 8

        here.train_step(loss, fb.optim.sgd(0.1), jit=False)(state, {"x": torch.randn(8, 4)})
        assert {name for name, dtype in seen.items() if dtype == torch.float32} == {"1.weight", "1.bias"}
        assert model.batch_norms == {"1.weight", "1.bias"}

    def test_a_pattern_that_matches_nothing(self) -> None:
        problem = testing.small(8)
        with pytest.raises(ValueError, match="keep: 'norm' matches no name of the parameter tree: "):
            fb.Booster("cpu", fb.MixedPrecision(keep=("norm", "blocks"))).init(
                problem.model, problem.tx, key=problem.key
            )


class TestFp8:
    def model(self) -> fb.Model:
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
        return fb.models.gpt2(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

    def losses(self, here: fb.Booster, steps: int = 8, jit: bool = False) -> list[float]:
        model, tx = self.model(), fb.optim.adamw(3e-3)
        batch = {"input_ids": torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))}
        state = here.init(model, tx, key=fb.random.key(0))
        step, history = here.train_step(model.loss, tx, jit=jit), []
        with testing.traced():
            for _ in range(steps):
                state, metrics = step(state, batch)
                history.append(metrics["loss"].item())
        return history

    @pytest.mark.parametrize("name", PLUGINS)
    def test_it_trains_as_bfloat16_does(self, name: str) -> None:
        plain, fast = (self.losses(booster(name, precision)) for precision in ("bf16", "fp8"))
        assert fast == pytest.approx(plain, rel=5e-3)
        assert fast != plain
        assert fast[-1] < fast[0] - 0.1

    def test_jitted(self) -> None:
        eager, jitted = (self.losses(booster("one device", "fp8"), steps=3, jit=jit) for jit in (False, True))
        assert jitted == pytest.approx(eager, rel=1e-4)

    @pytest.mark.parametrize(
        "plugin",
        [
            fb.TorchDDPPlugin(fp8_communication=True),
            fb.LowLevelZeroPlugin(stage=2, fp8_communication=True, use_fp8=True, extra_dp_size=2),
            fb.TorchFSDPPlugin(fp8_communication=True),
            fb.GeminiPlugin(fp8_communication=True, shard_param_frac=0.5),
        ],
        ids=repr,
    )
    def test_communication(self, plugin: Any) -> None:
        """What travels is float8; the training is bfloat16's to its rounding."""
        policy = fb.Booster("cpu", "bf16", plugin, fb.virtual_mesh(4)).policy
        assert (policy.wire, policy.reduce_wire) == (torch.float8_e4m3fn, torch.float8_e5m2)
        got = self.losses(fb.Booster("cpu", "bf16", plugin, fb.virtual_mesh(4)))
        plain = self.losses(booster("ddp", "bf16"))
        assert got == pytest.approx(plain, rel=1e-2)
        assert got != plain

    def test_what_is_excluded_is_not_multiplied_in_fp8(self) -> None:
        every = self.losses(booster("one device", "bf16"), 2)
        none = fb.FP8MixedPrecision(exclude=("*",))
        assert self.losses(booster("one device", none), 2) == every
        some = fb.FP8MixedPrecision("row", exclude=("wte", "wpe", "h.0"))
        assert self.losses(booster("one device", some), 2) != self.losses(booster("one device", "fp8"), 2) != every

    def test_a_pattern_that_matches_nothing_is_refused_before_the_first_step(self) -> None:
        model = self.model()
        with pytest.raises(ValueError, match="exclude: 'lm_haed' matches no name of the parameter tree"):
            fb.Booster("cpu", fb.FP8MixedPrecision(exclude=("lm_haed",))).init(
                model, fb.optim.sgd(0.1), key=fb.random.key(0)
            )


class TestImperative:
    def boosted(self, precision: Any, name: str) -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        here = booster(name, precision)
        return here, *here.boost(module, optimizer, lr_scheduler=scheduler)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
        return x, x.sum(1, keepdim=True)

    @pytest.mark.parametrize("name", PLUGINS)
    @pytest.mark.parametrize("precision", ["fp16", "fp16_apex", "bf16", "fp8"])
    def test_it_trains_as_float32_does(self, precision: str, name: str) -> None:
        x, y = self.batch()
        history: dict[str, list[tuple[float, float]]] = {}
        for chosen in ("fp32", precision):
            scaled = fb.MixedPrecision(
                precision_of(chosen).policy,
                None if chosen in ("fp32", "bf16", "fp8") else fb.DynamicScaling(2.0**12),
                precision_of(chosen).fp8,
                precision_of(chosen).autocast,
            )
            here, model, optimizer, _, _, scheduler = self.boosted(scaled, name)
            history[chosen] = []
            for _ in range(5):
                loss = torch.nn.functional.mse_loss(model(x), y)
                here.backward(loss, optimizer)
                history[chosen].append((loss.item(), optimizer.get_grad_norm().item()))
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                assert not optimizer.skipped
        tolerance = 0.1 if precision == "fp8" else 0.02
        for got, expected in zip(history[precision], history["fp32"], strict=True):
            assert got == pytest.approx(expected, rel=tolerance)

    @pytest.mark.parametrize("name", PLUGINS)
    @pytest.mark.parametrize("half", ["fp16", "fp16_apex", "fp16_naive"])
    def test_small_gradients_are_kept_and_are_gradients(self, name: str, half: str) -> None:
        """Whichever way backward is called: ``.grad`` and norms are never scaled."""
        x, y = self.batch()
        norms: dict[str, list[float]] = {}
        for precision in ("fp32", half):
            own = precision_of(precision)
            scaling = fb.ConstantScaling(2.0**20) if precision == half else None
            scaled = fb.MixedPrecision(own.policy, scaling, autocast=own.autocast)
            here, model, optimizer, *_ = self.boosted(scaled, name)
            inputs = x.clone().requires_grad_()
            for through_the_booster in (True, False):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), y) * 1e-8
                here.backward(loss, optimizer) if through_the_booster else loss.backward()
                norms.setdefault(precision, []).append(optimizer.get_grad_norm().item())
            assert inputs.grad is not None
            norms[precision].append(inputs.grad.norm().item())
        assert norms[half] == pytest.approx(norms["fp32"], rel=5e-3)
        assert norms["fp32"][0] < 1e-6

    @pytest.mark.parametrize("name", ["one device", "fsdp"])
    @pytest.mark.parametrize("precision", ["fp16", "fp16_apex", "fp16_naive"])
    def test_the_scale_of_its_name_settles(self, precision: str, name: str) -> None:
        """From where it begins: half at each overflow, and no more of these than it takes."""
        x, y = self.batch()
        here, model, optimizer, *_ = self.boosted(precision, name)
        skipped, scale = 0, here.precision.scaling.initial_scale
        for _ in range(24):
            loss = torch.nn.functional.mse_loss(model(x), y)
            here.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            skipped += int(optimizer.skipped)
        assert optimizer.loss_scale.item() == scale / 2.0 ** max(0, skipped - here.precision.scaling.hysteresis + 1)
        assert 2.0**12 <= optimizer.loss_scale.item() <= 2.0**18
        assert loss.item() < (1.3 if precision == "fp16_naive" else 1)  # which skips its first sixteen steps

    def test_clipping_by_value_hides_no_overflow(self) -> None:
        module = torch.nn.Linear(4, 1)
        here = fb.Booster("cpu", fb.MixedPrecision(precision_of("fp16").policy, fb.ConstantScaling(2.0**24)))
        model, optimizer, *_ = here.boost(module, torch.optim.SGD(module.parameters(), 0.1))
        before = model.state_dict()
        here.backward(model(torch.ones(2, 4)).sum(), optimizer)
        assert any(parameter.grad is not None and parameter.grad.isinf().any() for parameter in model.parameters())
        optimizer.clip_grad_by_value(1.0)
        optimizer.step()
        assert optimizer.skipped
        same(model.state_dict(), before)

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp16_apex", "fp16_naive", "fp8"])
    def test_outputs_may_be_changed_in_place(self, precision: str) -> None:
        x, y = self.batch()
        here, model, optimizer, *_ = self.boosted(precision, "one device")
        out = model(x)
        out /= 2
        here.backward(torch.nn.functional.mse_loss(out, y.to(out.dtype)), optimizer)

    @pytest.mark.parametrize("training", [True, False])
    def test_rounding_by_chance_differs_from_step_to_step(self, training: bool) -> None:
        """Also where no forward in training counts the position on."""
        module = torch.nn.Linear(4096, 1, bias=False)
        torch.nn.init.ones_(module.weight)
        here = fb.Booster("cpu", fb.BF16MixedPrecision(master_weights=False, stochastic_rounding=True))
        model, optimizer, *_ = here.boost(module.train(training), torch.optim.SGD(module.parameters(), 1e-5))
        for _ in range(100):
            here.backward(model(torch.ones(1, 4096)).float().sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        moved = (model.state_dict()["weight"].float() < 1).double().mean().item()
        assert moved == pytest.approx(1 - (1 - 1e-5 * 2**8) ** 100, abs=0.05)

    @pytest.mark.parametrize("name", ["one device", "zero1", "fsdp"])
    def test_a_step_that_overflows_is_skipped(self, name: str) -> None:
        x, y = self.batch()
        scaled = fb.MixedPrecision(
            precision_of("fp16").policy, fb.DynamicScaling(2.0**8, growth_interval=1, hysteresis=1)
        )
        here, model, optimizer, _, _, scheduler = self.boosted(scaled, name)
        before, rate = model.state_dict(), optimizer.param_groups[0]["lr"]
        bad = x.clone()
        bad[0] = 1e6  # no float16
        for inputs, skipped in ((bad, True), (bad, True), (x, False)):
            here.backward(torch.nn.functional.mse_loss(model(inputs), y), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            assert bool(optimizer.skipped) == skipped
            if skipped:
                same(model.state_dict(), before)
                assert optimizer.param_groups[0]["lr"] == rate
        assert optimizer.param_groups[0]["lr"] < rate
        assert optimizer.loss_scale.item() == 2.0**8 / 4 * 2


@pytest.mark.parametrize("factor", [2.0**0, 2.0**10, 2.0**15])
def test_the_fused_loss_carries_the_scale(factor: float) -> None:
    """The gradient of a probability of 3e-10 is none in float16, unless it is scaled from the start."""
    head = torch.zeros(4, 1, dtype=torch.float16)
    head[1] = -22.0
    hidden = torch.ones(1, 2, 1, dtype=torch.float16)
    labels = torch.zeros(1, 2, dtype=torch.int64)

    def fused(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return fb.losses.linear_next_token(hidden, head, labels)[0] * factor

    def plain(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return fb.losses.next_token(hidden @ head.T, labels)[0] * factor

    got, expected = (fb.grad(loss, argnums=(0, 1))(hidden, head) for loss in (fused, plain))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-7)
    assert (got[1][1].item() != 0) == (factor > 1)


def test_half_precision_losses_do_not_overflow() -> None:
    """A bare mean of 19 over 8192 rows is a sum beyond float16; so is an aux of 100000."""
    model = fb.functionalize(torch.nn.Linear(2, 1, bias=False))
    here = fb.Booster("cpu", fb.FP16ApexMixedPrecision("O3"))
    state = here.init(model, fb.optim.sgd(0.0), key=fb.random.key(0))

    def loss(params: Any, batch: Any) -> Any:
        mean = (model.apply(params, batch["x"]) * 0 + 19.0).mean()
        return mean * len(batch["x"]), len(batch["x"]), {"big": 1e5}

    def bare(params: Any, batch: Any) -> Any:
        return (model.apply(params, batch["x"]) * 0 + 19.0).mean()

    for fn in (bare, loss):
        _, metrics = here.train_step(fn, fb.optim.sgd(0.0), jit=False, donate=False)(state, {"x": torch.ones(8192, 2)})
        assert metrics["skipped"] == 0 or fn is loss  # which overflows by itself
        assert metrics.get("big", torch.tensor(1e5)) == 1e5
    assert here.train_step(bare, fb.optim.sgd(0.0), jit=False)(state, {"x": torch.ones(8192, 2)})[1]["loss"] == 19


def test_a_second_moment_in_half_precision_moves() -> None:
    """1 - b2 is below bfloat16's spacing: the moment is held in float32."""
    tx = fb.optim.adam(1e-3)
    params = {"w": torch.ones(4, dtype=torch.bfloat16)}
    state = tx.init(params)
    grads = [{"w": torch.full((4,), value, dtype=torch.bfloat16)} for value in (1.0, *[0.0] * 400)]
    for each in grads:
        _, state = tx.update(each, state, params)
    nu = next(leaf for name, leaf in fb.tree.named_leaves(state).items() if "nu" in name)
    assert nu.dtype == torch.float32
    torch.testing.assert_close(nu, torch.full((4,), 1e-3 * 0.999**400), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["one device", "fsdp"])
def test_a_load_goes_on_with_a_scale_of_its_own_kind(name: str, tmp_path: Path) -> None:
    problem = testing.small(8)
    scales = {
        "bf16": None,
        "fp16": fb.MixedPrecision(precision_of("fp16").policy, fb.DynamicScaling(2.0**6, growth_interval=1)),
        "other": fb.MixedPrecision(precision_of("fp16").policy, fb.DynamicScaling(2.0**5)),
        "constant": fb.MixedPrecision(precision_of("fp16").policy, fb.ConstantScaling(128.0)),
    }
    for writer in ("bf16", "fp16", "constant"):
        here = booster(name, scales[writer] or "bf16")
        state = here.init(problem.model, problem.tx, key=problem.key)
        state, _ = here.train_step(problem.loss_fn, problem.tx, jit=False)(state, problem.batch)
        here.save(tmp_path / writer, state)
    for reader, writer, expected in [
        ("fp16", "fp16", 2.0**7),
        ("other", "fp16", 2.0**7),
        ("fp16", "bf16", 2.0**6),
        ("bf16", "fp16", 1.0),
        ("constant", "fp16", 128.0),
    ]:
        there = booster(name, scales[reader] or "bf16")
        loaded = there.load(tmp_path / writer, like=there.abstract(problem.model, problem.tx))
        assert loaded.loss_scale.factor.item() == expected, (reader, writer)


def test_masters_are_switched_off() -> None:
    """2 bytes a parameter instead of 4."""
    problem = testing.small(8)
    for plugin, precision in (
        (fb.LowLevelZeroPlugin(master_weights=False), "bf16"),
        (fb.LowLevelZeroPlugin(), fb.BF16MixedPrecision(master_weights=False)),
    ):
        here = fb.Booster("cpu", precision, plugin, fb.virtual_mesh(2))
        state = here.init(problem.model, problem.tx, key=problem.key)
        assert {leaf.dtype for leaf in fb.tree.leaves((state.storage, state.frozen))} == {torch.bfloat16}
        step = here.train_step(problem.loss_fn, problem.tx, jit=False)
        losses = []
        for _ in range(5):
            state, metrics = step(state, problem.batch)
            losses.append(metrics["loss"].item())
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["one device", "ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "fp16_apex"])
@pytest.mark.parametrize("kind", ["batch", "batch without weights", "instance"])
def test_norms_with_statistics(kind: str, precision: str, name: str) -> None:
    """In training and evaluation, beside half-precision inputs, on virtual ranks too: close to float32."""
    norm: torch.nn.Module = torch.nn.BatchNorm1d(8, affine=kind == "batch")
    if kind == "instance":
        norm = torch.nn.Sequential(
            torch.nn.Unflatten(1, (2, 4)), torch.nn.InstanceNorm1d(2, affine=True), torch.nn.Flatten()
        )
    torch.manual_seed(0)
    model = fb.functionalize(torch.nn.Sequential(torch.nn.Linear(6, 8), norm, torch.nn.Linear(8, 1)))
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def loss(params: Any, batch: Any, key: Any, buffers: Any) -> Any:
        out, new = model.apply(params, batch["x"], key=key, train=key is not None, buffers=buffers, mutable=True)
        return (*fb.losses.mse(out[:, 0], batch["x"].sum(1)), {"buffers": new})

    found = {}
    for chosen in ("fp32", precision):
        own = precision_of(chosen)
        here = booster(name, fb.MixedPrecision(own.policy, fp8=own.fp8, autocast=own.autocast))
        state = here.init(model, fb.optim.sgd(0.01), key=fb.random.key(0))
        found[chosen] = [here.eval_step(loss, jit=False)(state, {"x": x})["loss"].item()]
        for _ in range(2):
            state, metrics = here.train_step(loss, fb.optim.sgd(0.01), jit=False)(state, {"x": x})
            found[chosen].append(metrics["loss"].item())
        found[chosen].append(here.eval_step(loss, jit=False)(state, {"x": x})["loss"].item())
    assert found[precision] == pytest.approx(found["fp32"], rel=0.03)
