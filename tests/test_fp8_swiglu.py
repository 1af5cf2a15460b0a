"""A gated MLP in fp8: the products and casts of its parts, to the bit; the Triton kernels cast what torch computes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster.kernels import fp8, fp8_swiglu

SIZES = st.sampled_from([1, 2, 7, 16, 33])


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def of_parts(x: torch.Tensor, gate_and_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The same, of ``fp8.linear`` and torch's own derivative of what lies between."""
    return fp8.linear(fp8_swiglu.swiglu(fp8.linear(x, gate_and_up)), down)


@given(rows=SIZES, size=SIZES, inner=SIZES, out=SIZES, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_values_and_gradients_are_those_of_its_parts(
    rows: int, size: int, inner: int, out: int, dtype: torch.dtype
) -> None:
    leaves = (
        drawn(rows, size, dtype=dtype),
        drawn(2 * inner, size, seed=1, dtype=dtype),
        drawn(out, inner, seed=2, dtype=dtype),
    )
    cotangent = drawn(rows, out, seed=3, dtype=dtype)
    got, pull = fb.vjp(fp8_swiglu.mlp, *leaves)
    expected, pull_parts = fb.vjp(of_parts, *leaves)
    assert torch.equal(got, expected)
    for mine, theirs in zip(pull(cotangent), pull_parts(cotangent), strict=True):
        # The pullback is written in another order, so that now and then a number is rounded to fp8's other neighbour.
        assert (mine - theirs).norm() <= 1e-2 * theirs.norm()


@given(rows=SIZES, inner=SIZES, dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_the_pullback_is_torchs(rows: int, inner: int, dtype: torch.dtype) -> None:
    gated, cotangent = drawn(rows, 2 * inner, dtype=dtype), drawn(rows, inner, seed=1, dtype=dtype)
    exact = gated.double().requires_grad_()
    expected = torch.autograd.grad(fp8_swiglu.swiglu(exact), exact, cotangent.double())[0]
    got = fp8_swiglu.swiglu_pullback(gated, cotangent)
    assert got.dtype == dtype
    rounding = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=rounding, atol=rounding / 64)


def test_members_of_a_batch_are_each_on_their_own() -> None:
    batch, gate_and_up, down = drawn(3, 5, 4), drawn(12, 4, seed=1), drawn(2, 6, seed=2)
    together = fb.vmap(lambda x: fp8_swiglu.mlp(x, gate_and_up, down))(batch)
    for member, x in zip(together, batch, strict=True):
        torch.testing.assert_close(member, fp8_swiglu.mlp(x, gate_and_up, down), rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"x, gate_and_up and down: shapes .* expected \(..., D\), \(2F, D\) and"):
        fp8_swiglu.mlp(torch.ones(2, 3), torch.ones(8, 3), torch.ones(3, 5))
    with pytest.raises(TypeError, match=r"down: torch.int64"):
        fp8_swiglu.mlp(torch.ones(2, 3), torch.ones(8, 3), torch.ones(3, 4, dtype=torch.int64))


INTERPRETED = """
import contextlib
import torch
from functional_booster.kernels import fp8_cast, fp8_swiglu, fp8_swiglu_triton
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
generator = torch.Generator().manual_seed(0)
for rows, inner in ((1, 1), (5, 7), (33, 130)):
    for kind in (torch.float32, torch.float16):  # the interpreter cuts numbers to bfloat16, where it should round
        gated = torch.randn(rows, 2 * inner, generator=generator).to(kind)
        cotangent = torch.randn(rows, inner, generator=generator).to(kind)
        for grad, dtype in ((None, fp8_cast.E4M3), (cotangent, fp8_cast.E5M2)):
            expected = fp8_swiglu._by_torch(gated) if grad is None else fp8_swiglu._pullback_by_torch(gated, grad)
            out = tuple(torch.full(part.shape, 3.0).to(part.dtype) for part in expected)
            fp8_swiglu_triton.cast(out, gated, grad, fp8_cast.EXPONENT[dtype], fp8_cast.limit(dtype), False)
            assert torch.equal(out[1], expected[1]) and torch.equal(out[3], expected[3])
            assert torch.equal(out[0].float(), out[2].float().t())
            # An exponential that is rounded otherwise takes a number, now and then, to fp8's other neighbour.
            error = (out[0].float() - expected[0].float()).norm()
            assert error <= 1e-2 * expected[0].float().norm(), (rows, inner, kind, dtype)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernels_interpreted_on_cpu() -> None:
    command = [sys.executable, "-W", "error", "-c", INTERPRETED]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (17, 50257), (64, 128), (257, 96)])
def test_the_gpu_casts_what_torch_computes(rows: int, inner: int, dtype: torch.dtype) -> None:
    gated, cotangent = drawn(rows, 2 * inner, dtype=dtype).cuda(), drawn(rows, inner, seed=1, dtype=dtype).cuda()
    for got, expected in (
        (fp8_swiglu._on_cuda(gated), fp8_swiglu._by_torch(gated)),
        (fp8_swiglu._pullback_on_cuda(gated, cotangent), fp8_swiglu._pullback_by_torch(gated, cotangent)),
    ):
        assert torch.equal(got[1], expected[1]) and torch.equal(got[3], expected[3])
        assert torch.equal(got[0].float(), got[2].float().t())
        assert (got[0].float() - expected[0].float()).norm() <= 1e-2 * expected[0].float().norm()
