"""The plugins' arguments: Colossal-AI's names and defaults; what is refused, what is ignored, and says so once."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import pytest
import torch
from torch.distributed import fsdp

import functional_booster as fb
from functional_booster.plugins import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    max_norm_under,
    precision_under,
)
from functional_booster.precision import Policy, precision_of

# As Colossal-AI has them, but for ``precision``, which is the Booster's by default.
SCALER = {
    "min_scale": 1,
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 2**32,
    "max_norm": 0.0,
    "norm_type": 2.0,
}
DEFAULTS: dict[type, dict[str, Any]] = {
    TorchDDPPlugin: {
        "broadcast_buffers": True,
        "bucket_cap_mb": 25,
        "find_unused_parameters": False,
        "check_reduction": False,
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "fp8_communication": False,
    },
    LowLevelZeroPlugin: {
        "stage": 1,
        "precision": None,
        "initial_scale": 2**32,
        **SCALER,
        "reduce_bucket_size_in_m": 12,
        "communication_dtype": None,
        "overlap_communication": True,
        "overlap_allgather": False,
        "cpu_offload": False,
        "master_weights": True,
        "verbose": False,
        "cast_inputs": True,
        "fp8_communication": False,
        "use_fp8": False,
        "extra_dp_size": 1,
    },
    TorchFSDPPlugin: {
        **dict.fromkeys(["process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy"]),
        **dict.fromkeys(["backward_prefetch", "mixed_precision", "ignored_modules", "param_init_fn"]),
        "sync_module_states": False,
        "fp8_communication": False,
    },
    GeminiPlugin: {
        "chunk_config_dict": None,
        "chunk_init_device": None,
        "placement_policy": "static",
        "enable_gradient_accumulation": False,
        "max_prefetch": 0,
        "shard_param_frac": 1.0,
        "offload_optim_frac": 0.0,
        "offload_param_frac": 0.0,
        "warmup_non_model_data_ratio": 0.8,
        "steady_cuda_cap_ratio": 0.9,
        "precision": None,
        "master_weights": True,
        "pin_memory": False,
        "force_outputs_fp32": False,
        "strict_ddp_mode": False,
        "search_range_m": 32,
        "hidden_dim": None,
        "min_chunk_size_m": 32,
        "memstats": None,
        "gpu_margin_mem_ratio": 0.0,
        "initial_scale": 2**16,
        **SCALER,
        "tp_size": 1,
        "extra_dp_size": 1,
        "enable_all_optimization": False,
        "enable_fused_normalization": False,
        "enable_flash_attention": False,
        "enable_sequence_parallelism": False,
        "enable_jit_fused": False,
        "enable_async_reduce": True,
        "use_fp8": False,
        "verbose": False,
        "fp8_communication": False,
    },
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_names_order_and_defaults(kind: type) -> None:
    assert [(field.name, field.default) for field in dataclasses.fields(kind)] == list(DEFAULTS[kind].items())
    assert kind() == kind()
    assert hash(kind()) == hash(kind())


class Unhashable:
    """A function from names to units that cannot be static."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, name: str) -> str:
        return name

    def __repr__(self) -> str:
        return "Unhashable()"


REFUSED = [
    (TorchDDPPlugin, {"bucket_cap_mb": -1}, ValueError, "bucket_cap_mb: -1, expected a finite number, at least 0"),
    (TorchDDPPlugin, {"bucket_cap_mb": "25"}, TypeError, "bucket_cap_mb: '25', expected a number"),
    (TorchDDPPlugin, {"fp8_communication": 1}, TypeError, "fp8_communication: 1, expected True or False"),
    (LowLevelZeroPlugin, {"stage": 3}, ValueError, "stage: 3, expected 1 or 2 (3 is fb.GeminiPlugin"),
    (LowLevelZeroPlugin, {"stage": True}, TypeError, "stage: True, expected 1 or 2"),
    (LowLevelZeroPlugin, {"stage": 1.0}, TypeError, "stage: 1.0, expected 1 or 2"),
    (LowLevelZeroPlugin, {"overlap_communication": []}, TypeError, "overlap_communication: [], expected True or False"),
    (TorchDDPPlugin, {"static_graph": [1]}, TypeError, "static_graph: [1], expected True or False"),
    (LowLevelZeroPlugin, {"precision": "int3"}, ValueError, "precision: 'int3' is not known"),
    (
        LowLevelZeroPlugin,
        {"precision": 16},
        TypeError,
        "precision: int, expected a name, a MixedPrecision, a Policy or None",
    ),
    (LowLevelZeroPlugin, {"norm_type": 1.0}, ValueError, "norm_type: 1.0, expected 2.0"),
    (LowLevelZeroPlugin, {"max_norm": -1.0}, ValueError, "max_norm: -1.0, expected"),
    (LowLevelZeroPlugin, {"max_norm": float("nan")}, ValueError, "max_norm: nan, expected"),
    (LowLevelZeroPlugin, {"initial_scale": 2**33}, ValueError, "initial_scale: 8589934592, expected one from"),
    (LowLevelZeroPlugin, {"growth_factor": 0.5}, ValueError, "growth_factor: 0.5, expected"),
    (LowLevelZeroPlugin, {"backoff_factor": 2}, ValueError, "backoff_factor: 2, expected a number up to 1"),
    (
        LowLevelZeroPlugin,
        {"growth_interval": 0},
        ValueError,
        "growth_interval: 0, expected a finite number, at least 1",
    ),
    (LowLevelZeroPlugin, {"hysteresis": 1.5}, TypeError, "hysteresis: 1.5, expected a whole number"),
    (LowLevelZeroPlugin, {"communication_dtype": torch.int8}, TypeError, "communication_dtype: torch.int8, expected"),
    (LowLevelZeroPlugin, {"cpu_offload": "cpu"}, TypeError, "cpu_offload: 'cpu', expected True or False"),
    (LowLevelZeroPlugin, {"cast_inputs": 0}, TypeError, "cast_inputs: 0, expected True or False"),
    (LowLevelZeroPlugin, {"use_fp8": "e4m3"}, TypeError, "use_fp8: 'e4m3', expected True or False"),
    (LowLevelZeroPlugin, {"extra_dp_size": 0}, ValueError, "extra_dp_size: got 0"),
    (TorchFSDPPlugin, {"process_group": object()}, ValueError, "process_group: "),
    (TorchFSDPPlugin, {"param_init_fn": print}, ValueError, "param_init_fn: "),
    (TorchFSDPPlugin, {"sync_module_states": True}, ValueError, "sync_module_states: True is not supported"),
    (TorchFSDPPlugin, {"sharding_strategy": "ZERO"}, ValueError, "sharding_strategy: 'ZERO', expected one of FULL_SH"),
    (TorchFSDPPlugin, {"cpu_offload": 1}, TypeError, "cpu_offload: 1, expected a bool, torch's CPUOffload or None"),
    (TorchFSDPPlugin, {"mixed_precision": "int3"}, ValueError, "mixed_precision: 'int3' is not known"),
    (
        TorchFSDPPlugin,
        {"mixed_precision": fsdp.MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)},
        ValueError,
        "mixed_precision: buffer_dtype=torch.bfloat16 is not supported, expected None: buffers are not cast",
    ),
    (
        TorchFSDPPlugin,
        {"mixed_precision": fsdp.MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)},
        ValueError,
        "mixed_precision: keep_low_precision_grads=True is not supported, expected False",
    ),
    (
        TorchFSDPPlugin,
        {"mixed_precision": fsdp.MixedPrecision(torch.bfloat16, cast_root_forward_inputs=False)},
        ValueError,
        "mixed_precision: cast_root_forward_inputs=False is not supported, expected True",
    ),
    (
        TorchFSDPPlugin,
        {"mixed_precision": fsdp.MixedPrecision(torch.bfloat16, _module_classes_to_ignore=[torch.nn.LayerNorm])},
        ValueError,
        "mixed_precision: _module_classes_to_ignore=[",
    ),
    (TorchFSDPPlugin, {"ignored_modules": 5}, TypeError, "ignored_modules: int 5, expected names in the parameter"),
    (TorchFSDPPlugin, {"ignored_modules": 0}, TypeError, "ignored_modules: int 0, expected names in the parameter"),
    (TorchFSDPPlugin, {"auto_wrap_policy": 1.5}, TypeError, "auto_wrap_policy: float 1.5, expected names in the"),
    (TorchFSDPPlugin, {"auto_wrap_policy": ["h.*", None]}, TypeError, "auto_wrap_policy: NoneType None, expected"),
    (TorchFSDPPlugin, {"auto_wrap_policy": Unhashable()}, TypeError, "auto_wrap_policy: Unhashable() cannot be hashed"),
    (
        TorchFSDPPlugin,
        {"ignored_modules": [torch.nn.ReLU()]},
        TypeError,
        "ignored_modules: ReLU ReLU(), expected names",
    ),
    (TorchFSDPPlugin, {"auto_wrap_policy": {torch.nn.ReLU}}, TypeError, "auto_wrap_policy: type <class"),
    (
        GeminiPlugin,
        {"placement_policy": "cpu"},
        ValueError,
        "placement_policy: 'cpu', expected 'static' or 'auto'",
    ),
    (GeminiPlugin, {"shard_param_frac": 1.5}, ValueError, "shard_param_frac: 1.5, expected a number up to 1"),
    (GeminiPlugin, {"offload_param_frac": 0.5}, ValueError, "offload_param_frac: 0.5, which asks for"),
    (GeminiPlugin, {"hidden_dim": 0}, ValueError, "hidden_dim: got 0"),
    (GeminiPlugin, {"tp_size": 2, "placement_policy": "auto"}, ValueError, "tp_size: 2 with placement_policy='auto'"),
    (GeminiPlugin, {"chunk_config_dict": {}}, ValueError, "chunk_config_dict: {} is not supported"),
]


@pytest.mark.parametrize(
    "plugin",
    [
        TorchDDPPlugin(bucket_cap_mb=1),
        LowLevelZeroPlugin(precision=Policy(compute=torch.bfloat16), communication_dtype=torch.bfloat16),
        TorchFSDPPlugin(ignored_modules=["b", "a"], auto_wrap_policy={"h.*"}),
        TorchFSDPPlugin(auto_wrap_policy=str.upper, mixed_precision=fsdp.MixedPrecision(torch.bfloat16)),
        GeminiPlugin(hidden_dim=8, precision="bf16"),
    ],
    ids=repr,
)
def test_plugins_are_static_values(plugin: Any) -> None:
    assert hash(plugin) == hash(dataclasses.replace(plugin))
    assert {plugin: 1}[dataclasses.replace(plugin)] == 1


@pytest.mark.parametrize(("kind", "given", "error", "message"), REFUSED)
def test_what_is_refused(kind: type, given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        kind(**given)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (TorchDDPPlugin, {"static_graph": True}),
        (
            TorchDDPPlugin,
            {"broadcast_buffers": False, "find_unused_parameters": True, "gradient_as_bucket_view": True},
        ),
        (LowLevelZeroPlugin, {"overlap_communication": False, "overlap_allgather": True, "verbose": True}),
        (TorchFSDPPlugin, {"backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_PRE}),
        (GeminiPlugin, {"enable_gradient_accumulation": True, "max_prefetch": 2, "pin_memory": True}),
    ],
)
def test_what_has_no_meaning_says_so_once(kind: type, given: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="no meaning here: accepted, and without effect") as seen:
        kind(**given)
    (warning,) = seen
    assert warning.filename == __file__
    names, _ = str(warning.message).removeprefix(f"{kind.__name__}: ").split(" ha")
    assert names.split(", ") == list(given)


def test_nothing_is_said_of_what_is_as_by_default() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind, defaults in DEFAULTS.items():
            kind(**defaults)


class TestPrecision:
    @pytest.mark.parametrize("kind", [LowLevelZeroPlugin, GeminiPlugin])
    def test_the_plugins_or_the_boosters(self, kind: type) -> None:
        mesh = fb.virtual_mesh(2)
        assert fb.Booster("cpu", None, kind(precision="bf16"), mesh).policy == precision_of("bf16").policy
        assert fb.Booster("cpu", "bf16", kind(), mesh).policy == precision_of("bf16").policy
        assert (
            fb.Booster("cpu", "bf16", kind(precision=precision_of("bf16").policy), mesh).policy
            == precision_of("bf16").policy
        )
        with pytest.raises(ValueError, match="mixed_precision: 'fp32', but the plugin's precision is 'bf16'"):
            fb.Booster("cpu", "fp32", kind(precision="bf16"), mesh)

    def test_what_else_a_plugin_says_of_dtypes(self) -> None:
        bf16 = precision_of("bf16").policy
        assert precision_under(LowLevelZeroPlugin(master_weights=False), "bf16").policy.param == torch.bfloat16
        low = precision_under(LowLevelZeroPlugin(communication_dtype=torch.bfloat16), "bf16").policy
        assert low == dataclasses.replace(bf16, reduce=torch.bfloat16)
        half = Policy(compute=torch.bfloat16)
        assert precision_under(GeminiPlugin(force_outputs_fp32=True), half).policy.output == torch.float32
        assert precision_under(GeminiPlugin(), half).policy == half

    def test_torchs_own(self) -> None:
        plugin = TorchFSDPPlugin(mixed_precision=fsdp.MixedPrecision(torch.bfloat16, torch.float32))
        assert precision_under(plugin, None).policy == Policy(compute=torch.bfloat16, reduce=torch.float32)
        plugin = TorchFSDPPlugin(mixed_precision=fsdp.MixedPrecision(torch.bfloat16))
        assert precision_under(plugin, None).policy == Policy(
            compute=torch.bfloat16, reduce=torch.bfloat16
        )  # as torch sums


class TestFSDP:
    @pytest.mark.parametrize("strategy", list(fsdp.ShardingStrategy))
    def test_torchs_strategies_and_their_names(self, strategy: fsdp.ShardingStrategy) -> None:
        assert TorchFSDPPlugin(sharding_strategy=strategy) == TorchFSDPPlugin(sharding_strategy=strategy.name)

    def test_none_is_what_torch_makes_of_it(self) -> None:
        assert TorchFSDPPlugin() == TorchFSDPPlugin(
            sharding_strategy="FULL_SHARD", cpu_offload=fsdp.CPUOffload(), ignored_modules=[]
        )
        assert TorchFSDPPlugin(cpu_offload=fsdp.CPUOffload(offload_params=True)).cpu_offload is True

    def test_hybrid_is_within_a_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hybrid = TorchFSDPPlugin(sharding_strategy="HYBRID_SHARD")
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        assert hybrid.axes(8) == {"dp": 1, "fsdp": 8}
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert hybrid.axes(8) == {"dp": 2, "fsdp": 4}
        assert TorchFSDPPlugin().axes(8) == {"dp": 1, "fsdp": 8}
        assert TorchFSDPPlugin(sharding_strategy="NO_SHARD").axes(8) == {"dp": 8, "fsdp": 1}

    @pytest.mark.parametrize("argument", ["ignored_modules", "auto_wrap_policy"])
    def test_patterns_that_match_nothing_are_named(self, argument: str) -> None:
        mesh = fb.virtual_mesh(fsdp=2)
        abstract = {name: fb.ArrayInfo((2,), trainable=name != "still") for name in ("abcdefgh", "still")}
        model = fb.Model(lambda key: {}, lambda params, x: x, abstract)
        names = r"'abcdefgh', 'still'"
        given: dict[str, Any] = {argument: ["ab*", "h.*", "still", "x"]}
        fitting: dict[str, Any] = {argument: ["ab*", "still"]}
        booster = fb.Booster("cpu", "fp32", plugin=TorchFSDPPlugin(**given), mesh=mesh)
        with pytest.raises(
            ValueError, match=rf"{argument}: 'h\.\*', 'x' matches no name of the parameter tree: {names}"
        ):
            booster.abstract(model, fb.optim.sgd(1.0))
        booster = fb.Booster("cpu", "fp32", plugin=TorchFSDPPlugin(**fitting), mesh=mesh)
        layouts = booster.abstract(model, fb.optim.sgd(1.0)).layouts  # one of the trained leaf, one of the frozen one
        assert [len(layout.slots) for layout in layouts if layout is not None] == [1, 1]

    @pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
    def test_ranks_that_split_nothing_are_refused(self, strategy: str) -> None:
        plugin, tree = TorchFSDPPlugin(sharding_strategy=strategy), ({"w": fb.ArrayInfo((2,))}, {"w": ()})
        with pytest.raises(
            ValueError, match=rf"{strategy} splits over the axis 'fsdp', as that of fb.virtual_mesh\(fsd"
        ):
            plugin.layout(*tree, fb.virtual_mesh(dp=4, fsdp=1))
        assert plugin.layout(*tree, fb.virtual_mesh(dp=1, fsdp=1)).split
        assert TorchFSDPPlugin(sharding_strategy="HYBRID_SHARD").layout(*tree, fb.virtual_mesh(dp=4, fsdp=1)).split

    def test_wrapping_that_names_no_unit(self) -> None:
        plugin = TorchFSDPPlugin(auto_wrap_policy=lambda name: True)  # type: ignore[arg-type]  # as torch's would say
        with pytest.raises(TypeError, match="auto_wrap_policy: True for the parameter 'w', expected the name of its"):
            plugin.layout({"w": fb.ArrayInfo((2,))}, {"w": ()}, fb.virtual_mesh(dp=1, fsdp=2))


class TestClipping:
    """The norm of a step whose gradient is 4 in each of 4 elements: 8 before clipping."""

    def moved(self, plugin: Any, max_norm: float | None = None) -> float:
        booster = fb.Booster("cpu", "fp32", plugin=plugin, mesh=fb.virtual_mesh(2))
        model = fb.Model(
            init=lambda key: {"w": torch.zeros(4, dtype=torch.float64)},
            apply=lambda params, x: params["w"] * x,
            abstract={"w": fb.ArrayInfo((4,), torch.float64)},
        )
        tx = fb.optim.sgd(1.0)
        state = booster.init(model, tx, key=fb.random.key(0))
        step = booster.train_step(lambda params, batch: params["w"].sum() * 4, tx, max_norm=max_norm, jit=False)
        state, _ = step(state, {"x": torch.ones(2)})
        return float(booster.full_params(state)["w"].norm())

    @pytest.mark.parametrize("kind", [LowLevelZeroPlugin, GeminiPlugin])
    def test_the_plugins_or_the_steps(self, kind: type) -> None:
        assert self.moved(kind()) == pytest.approx(8)
        assert self.moved(kind(max_norm=2.0)) == pytest.approx(2, rel=1e-6)
        assert self.moved(kind(), 2.0) == pytest.approx(2, rel=1e-6)

    def test_given_twice(self) -> None:
        assert max_norm_under(LowLevelZeroPlugin(max_norm=2.0), 2.0) == 2.0
        assert max_norm_under(TorchDDPPlugin(), None) is None
        booster = fb.Booster("cpu", "fp32", plugin=LowLevelZeroPlugin(max_norm=2.0), mesh=fb.virtual_mesh(2))
        with pytest.raises(ValueError, match=r"max_norm: 1.0, but the plugin's is 2.0: give one of them"):
            booster.train_step(lambda params, batch: params, fb.optim.sgd(1.0), max_norm=1.0)


@pytest.mark.parametrize("kind", [LowLevelZeroPlugin, GeminiPlugin])
def test_replicas_that_do_not_divide_the_ranks(kind: type) -> None:
    with pytest.raises(ValueError, match="extra_dp_size: 3 does not divide 8 ranks"):
        fb.Booster("cpu", "fp32", plugin=kind(extra_dp_size=3), mesh=fb.virtual_mesh(8))
