"""Gated activations, and bias with GELU, against torch's own."""

from __future__ import annotations

import functools

import kernel_conformance as conformance
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_conformance import Case, Draw, numbers

from functional_booster.kernels import bias_gelu, gated
from functional_booster.models.layers import ACTIVATIONS

ROWS = st.sampled_from([(), (1,), (2, 3), (40,)])
SIZES = st.sampled_from([1, 2, 7, 33, 600])
NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}  # ours -> Hugging Face's


def side_by_side(draw: Draw, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (numbers(draw, *draw(ROWS), 2 * draw(SIZES), dtype=dtype),)


def with_bias(draw: Draw, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    size = draw(SIZES)
    kept = draw(st.sampled_from([dtype, torch.promote_types(dtype, torch.float32)]))
    return numbers(draw, *draw(ROWS), size, dtype=dtype), numbers(draw, size, dtype=kept)


def by_models(name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[NAMES[name]](gate) * up


def gated_case(name: str) -> Case:
    return Case(
        lambda x: gated.by_triton(x, name),
        functools.partial(by_models, name),
        side_by_side,
        {"gated": gated._on_cuda, "gated_backward": gated._backward_on_cuda},
        (0,),
    )


def bias_case(approximate: str) -> Case:
    return Case(
        lambda x, bias: bias_gelu.by_triton(x, bias, approximate),
        lambda x, bias: F.gelu(x + bias, approximate=approximate),
        with_bias,
        {"bias_gelu": bias_gelu._on_cuda, "bias_gelu_backward": bias_gelu._backward_on_cuda},
        (0, 1),
    )


CASES = {name: gated_case(name) for name in NAMES} | {f"bias, {name}": bias_case(name) for name in ("none", "tanh")}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6)
@given(data=st.data())
def test_the_primitives_in_plain_torch(name: str, data: st.DataObject) -> None:
    conformance.check(CASES[name], data.draw, torch.float64)


def test_the_triton_kernels_interpreted() -> None:
    conformance.interpreted("test_gated", examples=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", conformance.FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_triton_kernels_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    conformance.on_gpu(CASES[name], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", conformance.FLOATS, ids=str)
@pytest.mark.parametrize("size", [4096, 5000])
@pytest.mark.parametrize("name", CASES)
def test_wide_rows_on_a_gpu(name: str, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(size)
    shapes = [(3000, size), (size,)][: len(CASES[name].wanted)]
    args = tuple(torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    conformance.compare_sums(CASES[name], args, dtype)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation_of_the_models_is_there(name: str) -> None:
    x = torch.randn(3, 10)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(gated.gated(x, name), ACTIVATIONS[name](gate) * up)


def test_half_precision_is_computed_in_float32_and_rounded_once() -> None:
    x, bias = torch.randn(3, 10).bfloat16(), torch.randn(10).bfloat16()
    gate, up = x.float().chunk(2, -1)
    assert torch.equal(gated.gated(x, "silu"), (F.silu(gate) * up).bfloat16())
    assert torch.equal(bias_gelu.bias_gelu(x, bias, "tanh"), F.gelu(x.float() + bias, approximate="tanh").bfloat16())


def test_the_short_normal_distribution_is_exact_to_its_promise() -> None:
    """The series that the kernels take for results of half precision, in float64."""
    x = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    t = 1 / (1 + 0.3275911 * x.abs() / 2**0.5)
    coefficients = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    series = sum(c * t**power for power, c in enumerate(coefficients, 1))
    tail = 0.5 * series * torch.exp(-x * x / 2)
    assert (torch.where(x < 0, tail, 1 - tail) - torch.special.ndtr(x)).abs().max() < 1e-7


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"activation: 'elu', expected one of silu, swish, gelu"):
        gated.gated(torch.ones(2, 4), "elu")
    with pytest.raises(ValueError, match=r"x: shape \(2, 3\), expected \(\.\.\., 2F\)"):
        gated.gated(torch.ones(2, 3), "silu")
    with pytest.raises(ValueError, match="approximate: 'sigmoid', expected 'none' or 'tanh'"):
        bias_gelu.bias_gelu(torch.ones(2, 3), torch.ones(3), "sigmoid")
    with pytest.raises(ValueError, match=r"bias: shape \(2,\), expected \(3,\), as x's last dim"):
        bias_gelu.bias_gelu(torch.ones(2, 3), torch.ones(2))
