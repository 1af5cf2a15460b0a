"""int8 by rows against Python's numbers, and as a weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster.kernels import int8
from functional_booster.lora import QuantizedWeight


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([(1,), (7,), (5, 1), (3, 33), (2, 4, 9)]),
    seed=st.integers(0, 99),
    magnitude=st.sampled_from([1e-30, 1e-4, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_each_value_is_the_nearest_of_its_row(
    shape: tuple[int, ...], seed: int, magnitude: float, dtype: torch.dtype
) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude).to(dtype)
    parts = int8.quantize(x)
    assert tuple((tuple(part.shape), part.dtype) for part in parts) == int8.described(shape)
    got = int8.dequantize(parts, shape, torch.float64).reshape(-1, shape[-1])
    for row, found in zip(x.double().reshape(-1, shape[-1]).tolist(), got.tolist(), strict=True):
        step = max(map(abs, row)) / 127
        for value, other in zip(row, found, strict=True):
            assert other == pytest.approx(round(value / step) * step, rel=1e-5, abs=0.501 * step)
            assert abs(other - value) <= 0.5001 * step


def test_zeros_and_extremes_stay() -> None:
    x = torch.tensor([[0.0, 0.0], [127.0, -127.0], [-2.0, 0.0]])
    assert torch.equal(int8.dequantize(int8.quantize(x), (3, 2), torch.float32), x)


def test_what_has_no_scale_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        int8.quantize(torch.arange(3))
    for bad in (torch.empty(0), torch.tensor([float("inf")]), torch.tensor([1e300], dtype=torch.float64)):
        with pytest.raises(ValueError, match="finite"):
            int8.quantize(bad)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_product_and_its_gradient_are_the_dense_ones(is_transposed: bool) -> None:
    weight = QuantizedWeight.of(torch.randn(33, 20, dtype=torch.float64), "int8")
    weight = weight.t() if is_transposed else weight
    x = torch.randn(4, weight.shape[1], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(weight.linear(x), x @ weight.dense().t())
    assert torch.autograd.gradcheck(weight.linear, (x,))
    several = torch.randn(2, 4, weight.shape[1], dtype=torch.float64)
    grads = torch.func.vmap(torch.func.grad(lambda x: weight.linear(x).pow(2).sum()))(several)
    torch.testing.assert_close(grads, 2 * (several @ weight.dense().t()) @ weight.dense())


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's own warnings are not ours to judge
def test_the_gpu_gives_the_same_bits_and_compiled_products() -> None:
    x = torch.randn(257, 129, generator=torch.Generator().manual_seed(0))
    parts = int8.quantize(x)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(int8.quantize(x.cuda()), parts, strict=True))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        on_gpu = int8.dequantize(int8.Quantized(*(part.cuda() for part in parts)), (257, 129), dtype)
        assert torch.equal(on_gpu.cpu(), int8.dequantize(parts, (257, 129), dtype))
    weight, input = (
        QuantizedWeight.of(torch.randn(512, 512, device="cuda"), "int8"),
        torch.randn(64, 512, device="cuda"),
    )
    step, dense = fb.jit(fb.grad(lambda x, weight: weight.linear(weight.linear(x)).square().sum())), weight.dense()
    expected = 2 * (input @ dense.t() @ dense.t()) @ dense @ dense
    torch.testing.assert_close(step(input, weight), expected, rtol=1e-3, atol=1e-1)
