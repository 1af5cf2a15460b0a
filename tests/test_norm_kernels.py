"""RMSNorm and LayerNorm, alone and of a sum, against torch's own."""

from __future__ import annotations

import kernel_conformance as conformance
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_conformance import Case, Draw, numbers

from functional_booster.kernels import layer_norm, rms_norm
from functional_booster.kernels.choice import Way, use
from functional_booster.models import layers as models

EPS = 1e-5


def arguments(weights: int, residual: bool) -> conformance.Callable[[Draw, torch.dtype], tuple[torch.Tensor, ...]]:
    def drawn(draw: Draw, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        rows = draw(st.sampled_from([(), (1,), (2, 3), (9,), (40,)]))
        size = draw(st.sampled_from([1, 5, 7, 33, 128, 600]))
        kept = draw(st.sampled_from([dtype, torch.promote_types(dtype, torch.float32)]))
        leaves = [coarse(numbers(draw, *rows, size, dtype=dtype)) for _ in range(1 + residual)]
        return (*leaves, *(coarse(numbers(draw, size, dtype=kept)) for _ in range(weights)))

    return drawn


def coarse(x: torch.Tensor) -> torch.Tensor:
    """Quarters: sums and products of two are exact in any dtype, where a short row's norm would make rounding large."""
    return x.mul_(4).round_().div_(4)


def summed_rms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.rms_norm(x + residual, weight.shape, weight, EPS), x + residual


def summed_layer(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return F.layer_norm(x + residual, weight.shape, weight, bias, EPS), x + residual


CASES = {
    "rms_norm": Case(
        lambda x, w: rms_norm.by_triton(x, w, EPS),
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        arguments(1, residual=False),
        {"rms_norm": rms_norm._on_cuda, "rms_norm_backward": rms_norm._backward_on_cuda},
        (0, 1),
    ),
    "add_rms_norm": Case(
        lambda x, r, w: rms_norm.sum_by_triton(x, r, w, EPS),
        summed_rms,
        arguments(1, residual=True),
        {"add_rms_norm": rms_norm._sum_on_cuda, "rms_norm_backward": rms_norm._backward_on_cuda},
        (0, 1, 2),
    ),
    "layer_norm": Case(
        lambda x, w, b: layer_norm.by_triton(x, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        arguments(2, residual=False),
        {"layer_norm": layer_norm._on_cuda, "layer_norm_backward": layer_norm._backward_on_cuda},
        (0, 1, 2),
    ),
    "add_layer_norm": Case(
        lambda x, r, w, b: layer_norm.sum_by_triton(x, r, w, b, EPS),
        summed_layer,
        arguments(2, residual=True),
        {"add_layer_norm": layer_norm._sum_on_cuda, "layer_norm_backward": layer_norm._backward_on_cuda},
        (0, 1, 2, 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6)
@given(data=st.data())
def test_the_primitives_in_plain_torch(name: str, data: st.DataObject) -> None:
    conformance.check(CASES[name], data.draw, torch.float64)


def test_the_triton_kernels_interpreted() -> None:
    conformance.interpreted("test_norm_kernels", examples=3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", conformance.FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_triton_kernels_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    conformance.on_gpu(CASES[name], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", conformance.FLOATS, ids=str)
@pytest.mark.parametrize("size", [2048, 4096, 5000, 16384])
@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_wide_rows_on_a_gpu(name: str, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(size)
    shapes = [(3000, size)] * 2 + [(size,)] * (len(CASES[name].wanted) - 2)
    args = tuple(torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    conformance.compare_sums(CASES[name], args, dtype)


def test_shapes_that_do_not_fit_and_rows_that_are_too_wide() -> None:
    with pytest.raises(ValueError, match=r"weight: shape \(3,\), expected \(4,\), as x's last dim"):
        rms_norm.rms_norm(torch.ones(2, 4), torch.ones(3), EPS)
    with pytest.raises(ValueError, match=r"residual: shape \(1, 4\), expected \(2, 4\), as x has"):
        layer_norm.add_layer_norm(torch.ones(2, 4), torch.ones(1, 4), torch.ones(4), torch.ones(4), EPS)
    assert rms_norm.lacks(torch.ones(1, rms_norm.WIDEST + 1), torch.ones(1)) is not None


@pytest.mark.parametrize("way", ["compiled", "library"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_way_is_the_models_norm(way: Way, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 33).to(dtype).unbind()
    weight, bias = torch.randn(2, 33).unbind()
    params = {"weight": weight, "bias": bias}
    rounding = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
    kernels: tuple[str, ...] = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
    with use(**dict.fromkeys(kernels, way)):
        got = [
            rms_norm.rms_norm(x, weight, EPS),
            *rms_norm.add_rms_norm(x, residual, weight, EPS),
            layer_norm.layer_norm(x, weight, bias, EPS),
            *layer_norm.add_layer_norm(x, residual, weight, bias, EPS),
        ]
    total = x + residual
    expected = [models.rms_norm(params, x, EPS), models.rms_norm(params, total, EPS), total]
    expected += [models.layer_norm(params, x, EPS), models.layer_norm(params, total, EPS), total]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rounding, atol=rounding)
