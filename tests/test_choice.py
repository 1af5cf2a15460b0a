"""Which way a kernel is computed: asked for, measured, fallen back to; seen, and part of what a trace depends on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import functional_booster as fb
from functional_booster.kernels import choice, gated, graph, rms_norm


def ops(fn: Callable[..., Any], *args: torch.Tensor) -> set[str]:
    graph = make_fx(fn, tracing_mode="fake")(*args)
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor passes for one on a GPU that nothing was measured on; raw ops run their reference."""
    monkeypatch.setattr(choice, "_lacks", lambda x: None)
    monkeypatch.setattr(choice, "_device_name", lambda device: "a GPU")
    monkeypatch.setattr(choice, "_decided", {})


def test_each_way_is_another_graph(on_a_gpu: None) -> None:
    x, weight = torch.ones(2, 3), torch.ones(3)
    norm = lambda x, weight: rms_norm.rms_norm(x, weight, 1e-6)  # noqa: E731
    with fb.kernels.use(rms_norm="triton"):
        assert "functional_booster.rms_norm.default" in ops(norm, x, weight)
        with fb.kernels.use(gated="triton", rms_norm="compiled"):
            assert "aten.rsqrt.default" in ops(norm, x, weight)
            assert "functional_booster.gated.default" in ops(lambda x: gated.gated(x, "silu"), torch.ones(2, 4))
        assert "functional_booster.rms_norm.default" in ops(norm, x, weight)
    assert "functional_booster.rms_norm.default" not in ops(norm, x, weight)


def test_what_was_chosen_is_seen_with_its_reason(on_a_gpu: None) -> None:
    for _ in range(2):
        rms_norm.rms_norm(torch.ones(2, 3), torch.ones(3), 1e-6)
        with fb.kernels.use(rms_norm="triton"):
            rms_norm.rms_norm(torch.ones(2, 3), torch.ones(3), 1e-6)
    plain, asked = fb.kernels.choices()
    assert (plain.kernel, plain.device, plain.dtype, plain.size) == ("rms_norm", "a GPU", torch.float32, 0)
    assert (plain.way, plain.why) == ("library", "nothing was measured")
    assert (asked.way, asked.why) == ("triton", "asked for")


def test_the_best_way_depends_on_device_and_size(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, tuple[tuple[int, choice.Way], ...]] = {
        "a GPU": ((0, "compiled"), (6, "triton")),
        "": ((0, "library"),),
    }
    monkeypatch.setitem(choice.KERNELS, "rms_norm", choice.Kernel(("triton", "compiled", "library"), "library", table))
    assert choice.choose("rms_norm", torch.ones(5)) == "compiled"
    assert choice.choose("rms_norm", torch.ones(6)) == "triton"
    assert choice.choose("rms_norm", torch.ones(7), "it is too wide") == "library"
    monkeypatch.setattr(choice, "_device_name", lambda device: "another")
    assert choice.choose("rms_norm", torch.ones(6)) == "library"
    found = {(one.device, one.size, one.way, one.why) for one in fb.kernels.choices()}
    assert found == {
        ("a GPU", 0, "compiled", "measured"),
        ("a GPU", 6, "triton", "measured"),
        ("a GPU", 6, "library", "Triton cannot: it is too wide"),
        ("another", 0, "library", "measured"),
    }


def test_a_fallback_is_said_once_and_only_where_triton_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_decided", {})
    x, weight = torch.ones(2, 3), torch.ones(3)
    expected = rms_norm.rms_norm(x, weight, 1e-6)
    with fb.kernels.use(rms_norm="triton"):
        with pytest.warns(fb.kernels.KernelFallbackWarning, match="rms_norm was to be .* Triton, but .* are on cpu"):
            assert torch.equal(rms_norm.rms_norm(x, weight, 1e-6), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rms_norm.rms_norm(x, weight, 1e-6)
    assert "Triton cannot: the tensors are on cpu" in {one.why for one in fb.kernels.choices()}


def test_the_overrides_are_hashable_and_their_order_is_nothing() -> None:
    with fb.kernels.use(rms_norm="triton", gated="compiled"):
        first = choice.current()
    with fb.kernels.use(gated="compiled"), fb.kernels.use(rms_norm="triton"):
        assert choice.current() == first and hash(choice.current()) == hash(first)
    assert choice.current() == ()


def test_kernels_and_ways_that_there_are_none_of() -> None:
    with pytest.raises(ValueError, match=r"rmsnorm: no such kernel, expected one of .*rms_norm"):
        fb.kernels.use(rmsnorm="triton").__enter__()
    with pytest.raises(ValueError, match="rotary: 'library', expected one of 'triton', 'compiled'"):
        fb.kernels.use(rotary="library").__enter__()


@pytest.mark.filterwarnings("ignore::functional_booster.RecompileWarning")
def test_a_jitted_function_is_compiled_again_under_other_choices(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "compile", lambda traced, examples, options=None: traced)
    norm = fb.jit(lambda x, weight: rms_norm.rms_norm(x, weight, 1e-6))
    args = torch.ones(2, 3), torch.ones(3)
    norm(*args)
    with fb.kernels.use(rms_norm="triton"):
        norm(*args)
        norm(*args)
        assert norm.compiles == 2
        assert "functional_booster.rms_norm.default" in str(norm.lower(*args).graph)
    norm(*args)
    assert norm.compiles == 2


def test_a_remat_recomputes_as_it_computed(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    real = choice.choose
    monkeypatch.setattr(rms_norm, "choose", lambda *args: chosen.append(real(*args)) or chosen[-1])
    x, weight = torch.randn(2, 3, requires_grad=True), torch.ones(3)
    with fb.kernels.use(rms_norm="triton"):
        out = fb.remat(lambda x: rms_norm.rms_norm(x, weight, 1e-6))(x)
    out.sum().backward()
    assert len(chosen) > 1 and set(chosen) == {"triton"}
