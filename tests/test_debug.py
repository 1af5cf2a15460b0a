"""debug and profile: the leaf with a NaN, deterministic runs, the work of a token."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_booster import debug, profile
from functional_booster.kernels import tree
from functional_booster.models.model import Model
from functional_booster.sharding.abstract import ArrayInfo

BAD = st.sampled_from([math.nan, math.inf, -math.inf])


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), place=st.data(), value=BAD)
def test_the_first_bad_leaf_is_found_by_name(sizes: list[int], place: st.DataObject, value: float) -> None:
    values = {"blocks": [{"w": torch.ones(size), "ids": torch.arange(3)} for size in sizes], "none": None}
    assert debug.first_nonfinite(values) is None
    debug.check_finite(values)
    bad = place.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, unique=True))
    for index in bad:
        values["blocks"][index]["w"][place.draw(st.integers(0, sizes[index] - 1))] = value
    name = f"blocks.{min(bad)}.w"
    assert debug.first_nonfinite(values) == name
    with pytest.raises(FloatingPointError, match=rf"grads\.{name}: "):
        debug.check_finite(values, "grads")


def test_nans_and_infinities_are_counted_apart() -> None:
    leaf = torch.tensor([math.nan, 1.0, math.inf, -math.inf])
    with pytest.raises(FloatingPointError, match=r"^params\.w: 1 NaN and 2 infinite of 4 elements$"):
        debug.check_finite({"a": torch.ones(1), "w": leaf}, "params")
    with pytest.raises(FloatingPointError, match=r"^loss: 1 NaN"):
        debug.check_finite(leaf[0], "loss")
    assert debug.first_nonfinite({"h": torch.tensor([65504.0]).half(), "c": torch.tensor([1j * math.nan])}) == "c"


def settings() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_deterministic_puts_everything_back(monkeypatch: pytest.MonkeyPatch, workspace: str | None) -> None:
    if workspace is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    before, generator = settings(), torch.get_rng_state()
    drawn: list[torch.Tensor] = []

    def failing() -> None:
        with debug.deterministic(seed=3):
            assert settings() == (True, False, True, False, ":4096:8")
            drawn.append(torch.rand(4))
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), generator)
    with debug.deterministic(seed=3):
        assert torch.equal(torch.rand(4), drawn[0])
    with debug.deterministic():
        unseeded = torch.rand(4)
    torch.set_rng_state(generator)
    assert torch.equal(torch.rand(4), unseeded)  # without a seed the generators are left alone


def test_deterministic_refuses_what_cannot_repeat() -> None:
    source = torch.zeros(4)
    with debug.deterministic(), pytest.raises(RuntimeError, match="deterministic"):
        source.put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)


def test_flops_of_a_token_by_hand() -> None:
    layers, width, vocabulary, length = 3, 8, 50, 16
    block = {"attn": ArrayInfo((width, 4 * width)), "mlp": ArrayInfo((width, 8 * width)), "norm": ArrayInfo((width,))}
    abstract = {
        "wte": {"weight": ArrayInfo((vocabulary, width))},
        "wpe": {"weight": ArrayInfo((length, width))},
        "h": [block] * layers,
    }
    config = SimpleNamespace(n_layer=layers, n_embd=width, vocab_size=vocabulary)
    model = Model(init=lambda key: {}, apply=lambda params: params, abstract=abstract, config=config)
    inner = layers * (12 * width * width + width)
    expected = 6 * (inner + vocabulary * width) + 12 * layers * width * length
    assert profile.flops_per_token(model, length) == expected
    untied = Model(
        model.init, model.apply, {**abstract, "lm_head": {"weight": ArrayInfo((vocabulary, width))}}, config=config
    )
    assert profile.flops_per_token(untied, length) == expected
    with pytest.raises(ValueError, match="num_hidden_layers, n_layer"):
        profile.flops_per_token(Model(model.init, model.apply, abstract), length)


def test_peaks_by_device_name() -> None:
    assert profile.peak_flops_of("NVIDIA H200") == profile.peak_flops_of("NVIDIA H100 80GB HBM3") == 989e12
    assert profile.peak_flops_of("NVIDIA H100 PCIe") == 756e12
    assert profile.peak_flops_of("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert profile.peak_flops_of("NVIDIA GB200", torch.float16) == 2250e12
    assert profile.peak_flops_of("Tesla V100-SXM2-16GB", torch.bfloat16) is None
    assert profile.peak_flops_of("Some Other Device") is None
    assert profile.peak_flops("cpu") is None
    assert profile.peak_memory("cpu") is None


def test_trace_writes_what_ran(tmp_path: Path) -> None:
    with profile.trace(tmp_path / "deep", "matmul"):
        torch.ones(4, 4) @ torch.ones(4, 4)
    events = json.loads((tmp_path / "deep" / "matmul.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_names_are_the_trees_own() -> None:
    values = {"a": {"b": [torch.ones(1), torch.tensor([math.nan])]}}
    assert debug.first_nonfinite(values) == tree.names(values)[1]
