"""The norm of a buffer: torch's in float64, no overflow, derivative 0 at 0, the same bits at every call."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster.kernels import global_norm


@given(size=st.integers(0, 50), scale=st.sampled_from([1e-30, 1.0, 1e20, 3e38]), seed=st.integers(0, 9))
def test_it_is_the_norm_in_float64(size: int, scale: float, seed: int) -> None:
    x = (torch.rand(size, generator=torch.Generator().manual_seed(seed)) - 0.5) * scale
    got = global_norm._by_triton(x)
    expected = sum(value**2 for value in x.tolist()) ** 0.5
    assert got.dtype == torch.float64 and got.shape == ()
    assert float(got) == pytest.approx(expected, rel=1e-12)
    assert torch.equal(global_norm.norm(x), got)


def test_its_derivative_is_torchs_and_0_at_0() -> None:
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(global_norm._by_triton, (x,))
    assert torch.autograd.gradgradcheck(global_norm._by_triton, (x,))
    for fn in (global_norm._by_triton, global_norm.by_torch):
        assert torch.equal(fb.grad(fn)(torch.zeros(3)), torch.zeros(3))
    several = torch.randn(3, 7)
    torch.testing.assert_close(
        torch.vmap(fb.grad(global_norm._by_triton))(several), several / several.norm(dim=1, keepdim=True)
    )


def check(device: str, size: int, dtype: torch.dtype) -> None:
    from functional_booster.kernels import global_norm_triton

    for scale in (1.0, 1e20 if dtype != torch.float16 else 1e4):
        x = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * scale).to(dtype)
        got, again = (global_norm_triton.norm(x.to(device)) for _ in range(2))
        exact = math.sqrt(math.fsum(x.double().square().tolist()))
        torch.testing.assert_close(got.item(), exact, rtol=1e-13, atol=0)
        assert torch.equal(got, again)
    x[size // 2] = float("nan")
    assert bool(global_norm_triton.norm(x.to(device)).isnan())


INTERPRETED = """
import contextlib
import torch
from functional_booster.kernels import global_norm_triton
from tests.test_global_norm import check
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
global_norm_triton._BLOCK, global_norm_triton._PARTS = 64, 4
for size, dtype in ((1, torch.float32), (64, torch.float32), (65, torch.float16), (1000, torch.float32)):
    check("cpu", size, dtype)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernels_interpreted_on_cpu() -> None:
    command = [sys.executable, "-W", "error", "-c", INTERPRETED]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 4095, 4097, 50_000_003])
def test_the_gpu_gives_it_and_always_the_same(size: int, dtype: torch.dtype) -> None:
    check("cuda", size, dtype)
