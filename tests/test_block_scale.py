"""fp8 with a scale a block: the MX format, its error, and one set of bytes on every device."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from functional_booster.kernels import block_scale

FORMATS = tuple(block_scale.FORMATS)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
formats = pytest.mark.parametrize("fp8", FORMATS, ids=str)


def through(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    return block_scale.decode(block_scale.encode(x, fp8), x.shape[-1], fp8, x.dtype)


def block_max(x: torch.Tensor) -> torch.Tensor:
    """For each element, the largest magnitude of its 32."""
    pieces = [piece.abs().amax(-1, keepdim=True).expand(piece.shape) for piece in x.split(32, -1)]
    return torch.cat(pieces, -1)


def error_bound(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place, of normal numbers or of the block's subnormal ones."""
    relative, of_block = {torch.float8_e4m3fn: (2.0**-4, 2.0**-17), torch.float8_e5m2: (2.0**-3, 2.0**-31)}[fp8]
    return torch.maximum(x.abs() * relative, block_max(x) * of_block)


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """(..., n) in one of the dtypes: numbers of very different magnitudes, from anywhere in float32's range."""
    dtype, shape = draw(st.sampled_from(DTYPES)), (draw(st.integers(1, 3)), draw(st.integers(1, 80)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    middle, spread = (0, 3) if dtype == torch.float16 else (draw(st.integers(-100, 100)), draw(st.integers(0, 12)))
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    x = numbers[0] * torch.exp2(numbers[1] * spread + middle)
    return x.clamp(-3e38, 3e38).to(dtype)


@given(rows(), st.sampled_from(FORMATS))
def test_the_error_is_bounded_by_the_element_and_its_block(x: torch.Tensor, fp8: torch.dtype) -> None:
    got, exact = through(x, fp8).double(), x.double()
    tiny = 2.0**-136 if x.dtype != torch.float16 else 2.0**-25  # float16's own subnormal numbers
    assert ((got - exact).abs() <= error_bound(exact, fp8).clamp(min=tiny)).all()


@given(rows(), st.sampled_from(FORMATS))
def test_what_was_decoded_is_encoded_without_loss(x: torch.Tensor, fp8: torch.dtype) -> None:
    once = through(x, fp8)
    assert torch.equal(through(once, fp8), once)


@formats
def test_the_bytes_are_those_of_the_mx_format(fp8: torch.dtype) -> None:
    """Elements, then E8M0 scales, as torch's own dtypes read them."""
    x = torch.randn(2, 70, generator=torch.Generator().manual_seed(0)) * 50
    message = block_scale.encode(x, fp8)
    assert (message.shape, message.dtype, block_scale.encoded_size(70)) == ((2, 73), torch.uint8, 73)
    elements = message[:, :70].view(fp8).float()
    scales = message[:, 70:].contiguous().view(torch.float8_e8m0fnu).float()
    assert torch.equal(elements * scales.repeat_interleave(32, -1)[:, :70], through(x, fp8))
    normalised = torch.stack([piece.abs().amax(-1) for piece in elements.split(32, -1)])
    largest = torch.finfo(fp8).max
    assert ((normalised >= largest / 2) & (normalised <= largest)).all()  # the whole range is used


def test_known_answers() -> None:
    one, limit = 127, 0x7E  # E8M0 of 1; 448 in float8_e4m3fn
    for values, expected in [
        ([1.0, -0.5, 0.0], [0x78, 0xF0, 0x00, one - 8]),
        ([448.0], [limit, one]),
        ([449.0], [0x76, one + 1]),  # 224.5 / 1: the next scale
        ([0.0, -0.0], [0x00, 0x80, 1]),
        ([float("nan"), 1.0], [0, 0, 255]),
    ]:
        assert block_scale.encode(torch.tensor(values), torch.float8_e4m3fn).tolist() == expected


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_seen_in_its_block_alone(fp8: torch.dtype, dtype: torch.dtype) -> None:
    for value in (float("inf"), -float("inf"), float("nan"), *([1e39] if dtype == torch.float64 else [])):
        x = torch.ones(70, dtype=dtype)
        x[40] = value
        got = through(x, fp8)
        assert got[32:64].isnan().all()
        assert torch.equal(got[:32], x[:32]) and torch.equal(got[64:], x[64:])


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers_stay_finite(fp8: torch.dtype, dtype: torch.dtype) -> None:
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    x = torch.tensor([largest, -largest, largest / 3], dtype=torch.float64).to(dtype)
    x = x.clamp(-largest, largest)
    got = through(x, fp8).double()
    assert got.isfinite().all()
    assert ((got - x.double()).abs() <= error_bound(x.double(), fp8)).all()


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_terms_are_added_in_order_and_in_no_less_than_float32(fp8: torch.dtype, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    terms = torch.randn(5, 3, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    message = block_scale.encode(terms, fp8)
    expected = torch.zeros(3, 70, dtype=wide)
    for term in message:
        expected = expected + block_scale.decode(term, 70, fp8, wide)
    assert torch.equal(block_scale.decode_sum(message, 70, fp8, dtype), expected.to(dtype))


@formats
@settings(max_examples=10)
@given(x=rows(), place=st.integers(0, 2))
def test_batches(fp8: torch.dtype, x: torch.Tensor, place: int) -> None:
    batch = torch.stack([x, -x, x * 0.3], place)
    messages = vmap(lambda x: block_scale.encode(x, fp8), in_dims=place)(batch)
    assert torch.equal(messages, torch.stack([block_scale.encode(x, fp8) for x in batch.unbind(place)]))

    def total(message: torch.Tensor) -> torch.Tensor:
        return block_scale.decode_sum(message, x.shape[-1], fp8, x.dtype)

    assert torch.equal(vmap(total)(messages), torch.stack([total(message) for message in messages]))


@formats
def test_raw_ops_on_fake_tensors(fp8: torch.dtype) -> None:
    ops: Any = torch.ops.functional_booster
    for x in (torch.randn(2, 3, 70), torch.randn(70, 4, dtype=torch.bfloat16).T, torch.empty(2, 3, 0)):
        torch.library.opcheck(ops.block_scale_encode.default, (x, fp8))
        message = block_scale.encode(x, fp8)
        torch.library.opcheck(ops.block_scale_decode_sum.default, (message, x.shape[-1], fp8, torch.bfloat16))


# A process of its own, since triton reads TRITON_INTERPRET when a kernel is defined. The interpreter takes bfloat16's
# subnormal numbers for others, and cuts where it casts to bfloat16: there are none, and one term alone is exact.
INTERPRETED = """
import itertools, numpy, torch
from functional_booster.kernels import block_scale, block_scale_triton

numpy.seterr(all="ignore")
generator = torch.Generator().manual_seed(0)
dtypes, shapes = (torch.float32, torch.bfloat16, torch.float16), ((1,), (2, 3, 70), (3, 2049))
for (fp8, form), dtype, shape in itertools.product(block_scale.FORMATS.items(), dtypes, shapes):
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    x = (numbers[0] * torch.exp(numbers[1] * (3 if dtype == torch.float16 else 12))).to(dtype)
    x[..., 0] = torch.finfo(dtype).max
    if shape[-1] > 2000:
        x[0, 40:50], x[1, 70], x[2, ::7], x[2, 3::7] = float("inf"), -float("nan"), 0, -0.0
        x[2, 64:] = x[2, 64:] * (1 if dtype == torch.bfloat16 else 1e-38)
    message = torch.empty(*shape[:-1], block_scale.encoded_size(shape[-1]), dtype=torch.uint8)
    block_scale_triton.encode(message, x, block_scale.BLOCK, *form, block_scale.largest(dtype, fp8))
    assert torch.equal(message, block_scale.encode(x, fp8)), (fp8, dtype, shape)
    terms = [message, block_scale.encode(x.flip(-1) * 0.37, fp8), block_scale.encode(-x * 0.1, fp8)]
    message = torch.stack(terms[: 1 if dtype == torch.bfloat16 else 3])
    expected = block_scale.decode_sum(message, shape[-1], fp8, dtype)
    out = torch.empty_like(expected)
    block_scale_triton.decode_sum(out, message, block_scale.BLOCK, form[0])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.nan_to_num(1).signbit(), expected.nan_to_num(1).signbit()), (fp8, dtype, shape)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernels_interpreted_on_cpu() -> None:
    command = [sys.executable, "-W", "error", "-c", INTERPRETED]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (33,), (2, 3, 70), (3, 100_001), (4, 0), (2, 1_048_576)], ids=str)
def test_bytes_and_sums_on_a_gpu_are_those_of_the_cpu(
    shape: tuple[int, ...], dtype: torch.dtype, fp8: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(shape, generator=generator) * (3 if dtype == torch.float16 else 20)
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) * torch.exp(spread)).to(dtype)
    if x.numel() > 1:
        x[..., 0], x[..., -1] = torch.finfo(dtype).max, float("nan")
    terms = torch.stack([x, x * 0.3, -x * 0.7])
    message = block_scale.encode(terms, fp8)
    assert torch.equal(block_scale.encode(terms.cuda(), fp8).cpu(), message)
    for into in DTYPES:
        expected = block_scale.decode_sum(message, shape[-1], fp8, into)
        got = block_scale.decode_sum(message.cuda(), shape[-1], fp8, into)
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
