"""A matrix and its transpose, quantised together: the bits of quantising each, by torch, by Triton, under vmap."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster.kernels import fp8_cast
from functional_booster.kernels.fp8_cast import quantize, quantize_both

FORMATS = (fp8_cast.E4M3, fp8_cast.E5M2)
BOTH = pytest.mark.parametrize("dtype", FORMATS, ids=str)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers whose magnitudes spread over the range of half precision."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-8, 9, shape, generator=generator).double().exp2()
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(dtype)


def assert_same_bits(got: Any, expected: Any) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.is_contiguous()
        kind = torch.uint8 if mine.element_size() == 1 else torch.int32
        assert torch.equal(mine.cpu().view(kind), theirs.contiguous().view(kind))


def one_by_one(x: torch.Tensor, dtype: torch.dtype, by_row: bool) -> tuple[torch.Tensor, ...]:
    dim = 1 if by_row else None
    return (*quantize(x, dtype, dim), *quantize(x.t(), dtype, dim))


@given(
    shape=st.tuples(*[st.sampled_from([0, 1, 2, 7, 16, 33])] * 2),
    dtype=st.sampled_from(FORMATS),
    given_dtype=st.sampled_from(FLOATS),
    by_row=st.booleans(),
    turned=st.booleans(),
    seed=st.integers(0, 9),
)
def test_both_are_what_each_is(
    shape: tuple[int, int], dtype: torch.dtype, given_dtype: torch.dtype, by_row: bool, turned: bool, seed: int
) -> None:
    x = drawn(*shape, seed=seed, dtype=given_dtype)
    x = x.t() if turned else x
    assert_same_bits(quantize_both(x, dtype, by_row), one_by_one(x, dtype, by_row))


@BOTH
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("worst", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_makes_the_scale_nan(worst: float, by_row: bool, dtype: torch.dtype) -> None:
    x = drawn(3, 4)
    x[1, 2] = worst
    _, scale, _, turned_scale = quantize_both(x, dtype, by_row)
    assert scale.flatten()[int(by_row)].isnan() and turned_scale.flatten()[2 * by_row].isnan()
    assert scale.isnan().sum() == 1 and turned_scale.isnan().sum() == 1


@BOTH
@pytest.mark.parametrize("by_row", [False, True])
def test_members_of_a_batch_have_their_own_scales(by_row: bool, dtype: torch.dtype) -> None:
    batch = drawn(3, 5, 4)
    together = fb.vmap(lambda x: quantize_both(x, dtype, by_row))(batch)
    for index, x in enumerate(batch):
        assert_same_bits([part[index] for part in together], one_by_one(x, dtype, by_row))


INTERPRETED = """
import contextlib
import torch
from functional_booster.kernels import fp8_cast, fp8_cast_triton
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
generator = torch.Generator().manual_seed(0)
for dtype, exponent in ((fp8_cast.E4M3, 8), (fp8_cast.E5M2, 15)):
    for shape in ((1, 1), (1, 130), (5, 7), (65, 129)):
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            for by_row in (False, True):
                spread = torch.randint(-8, 9, shape, generator=generator).float().exp2()
                x = (torch.randn(shape, generator=generator) * spread).to(kind)
                x[0, 0] = torch.finfo(kind).max
                largest = fp8_cast_triton.largest_by_both(x) if by_row else (fp8_cast_triton.largest(x),) * 2
                expected = fp8_cast._cast_both_by_torch(x, dtype, by_row)
                out = tuple(torch.full(part.shape, 3.0).to(part.dtype) for part in expected)
                fp8_cast_triton.cast(*out, x, *largest, exponent, fp8_cast.limit(dtype), by_row, False)
                for mine, theirs in zip(out, expected):
                    assert torch.equal(mine.float(), theirs.float()), (dtype, shape, kind, by_row)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernel_interpreted_on_cpu() -> None:
    command = [sys.executable, "-W", "error", "-c", INTERPRETED]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("default")
def test_the_gpu_quantises_to_the_same_bits(dtype: torch.dtype, dim: int | None, compiled: bool) -> None:
    run = fb.jit(lambda x: quantize(x, dtype, dim)) if compiled else lambda x: quantize(x, dtype, dim)
    for exponent in (-130, -100, 0, 100):
        x = drawn(257, 129) * 2.0**exponent
        (values, scale), (own, own_scale) = run(x.cuda()), quantize(x, dtype, dim)
        assert torch.equal(values.cpu().view(torch.uint8), own.view(torch.uint8)) and torch.equal(
            scale.cpu(), own_scale
        )


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("given_dtype", FLOATS, ids=str)
def test_the_gpu_casts_both_to_the_same_bits(given_dtype: torch.dtype, by_row: bool, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (17, 50257), (257, 129), (64, 64), (80, 48), (256, 640)):
        x = drawn(*shape, dtype=given_dtype)
        for side in (x, x.t()):
            got = quantize_both(side.cuda(), dtype, by_row)
            assert_same_bits(got, one_by_one(side, dtype, by_row))
            assert_same_bits(quantize_both(side.cuda(), dtype, by_row), [part.cpu() for part in got])


@pytest.mark.gpu
@pytest.mark.parametrize("native", [False, True])
def test_both_ways_to_round_on_a_gpu_are_one(native: bool) -> None:
    from functional_booster.kernels import fp8_cast_triton

    if native and not fp8_cast.has_units(torch.device("cuda", 0)):
        pytest.skip("this GPU has no fp8 units")
    for dtype, exponent in zip(FORMATS, (8, 15), strict=True):
        x = drawn(128, 256).cuda()
        out, largest = fp8_cast._empty_both(x, dtype, False), fp8_cast_triton.largest(x)
        fp8_cast_triton.cast(*out, x, largest, largest, exponent, fp8_cast.limit(dtype), False, native)
        assert_same_bits(out, one_by_one(x.cpu(), dtype, False))
