"""Dropout + residual: the bits of random.dropout, a mask that is drawn again and never kept; the norm of a buffer."""

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
from functional_booster.kernels import dropout_residual as kernel
from functional_booster.kernels import random
from functional_booster.kernels.dropout_residual import dropout_residual

SHAPES = [(), (1,), (7, 33), (64,), (3, 5, 50)]


@given(shape=st.sampled_from(SHAPES), p=st.sampled_from([0.0, 0.1, 0.5, 1.0]), seed=st.integers(0, 9))
def test_it_is_dropout_and_then_the_residual(shape: tuple[int, ...], p: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    expected = residual + random.dropout(x, p, random.key(seed))
    torch.testing.assert_close(dropout_residual(x, residual, p, random.key(seed)), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x, residual = torch.randn(40, 50).to(dtype), torch.randn(40, 50).to(dtype)
    wide = residual.float() + random.dropout(x.float(), 0.1, random.key(1))
    assert torch.equal(dropout_residual(x, residual, 0.1, random.key(1)), wide.to(dtype))


def test_the_backward_draws_the_same_mask() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, r: dropout_residual(x, r, 0.4, random.key(2)), (x, residual))
    assert torch.autograd.gradgradcheck(lambda x, r: dropout_residual(x, r, 0.4, random.key(2)).sin(), (x, residual))
    mine = torch.autograd.grad(dropout_residual(x, residual, 0.4, random.key(2)).sum(), x)[0]
    theirs = torch.autograd.grad(random.dropout(x, 0.4, random.key(2)).sum(), x)[0]
    torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=0)


def test_no_mask_and_no_activation_is_kept_for_the_backward() -> None:
    x, residual = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        dropout_residual(x, residual, 0.4, random.key(2))
    assert kept == [2]  # the key


def test_transforms_and_traces() -> None:
    x, residual = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    keys = random.split(random.key(0), 3)

    def loss(x: torch.Tensor, residual: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return dropout_residual(x, residual, 0.3, key).square().sum()

    each = [fb.grad(loss)(*members) for members in zip(x, residual, keys, strict=True)]
    torch.testing.assert_close(torch.vmap(fb.grad(loss))(x, residual, keys), torch.stack(each), rtol=0, atol=0)
    shared = torch.vmap(lambda x: dropout_residual(x, residual[0], 0.3, keys[0]))(x)
    for one, member in zip(shared, x, strict=True):
        assert torch.equal(one, dropout_residual(member, residual[0], 0.3, keys[0]))
    torch.testing.assert_close(fb.remat(loss)(x, residual, keys[0]), loss(x, residual, keys[0]), rtol=0, atol=0)
    found = fb.jit(fb.grad(loss)).lower(x, residual, keys[0]).graph
    assert sum("dropout_residual" in str(node.target) for node in found.nodes) == 2


def test_a_part_of_an_activation_has_the_bits_of_the_whole() -> None:
    x, residual = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    whole = dropout_residual(x, residual, 0.3, random.key(0))
    part = (slice(None), slice(2, 4))
    options: dict[str, Any] = {"global_shape": (4, 6, 8), "start": (0, 2, 0)}
    torch.testing.assert_close(dropout_residual(x[part], residual[part], 0.3, random.key(0), **options), whole[part])


def test_bad_arguments_are_named() -> None:
    x, key = torch.zeros(3), random.key(0)
    with pytest.raises(ValueError, match=r"residual: torch.float64 of shape \(3,\)"):
        dropout_residual(x, x.double(), 0.1, key)
    with pytest.raises(ValueError, match="p must be a number in"):
        dropout_residual(x, x, 1.5, key)
    with pytest.raises(TypeError, match="key: expected int32"):
        dropout_residual(x, x, 0.1, torch.zeros(2))
    with pytest.raises(TypeError, match=r"x: torch\.int64"):
        dropout_residual(x.long(), x.long(), 0.1, key)


def check(device: str, shape: tuple[int, ...], dtype: torch.dtype, p: float) -> None:
    """The Triton kernel gives the reference's bits, but for a fused multiply-add, and writes its output and no more."""
    from functional_booster.kernels import dropout_residual_triton

    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    dropped = round(p * 2**16)
    for other in (None, residual):
        whole = torch.full((x.numel() + 8,), 7.0, dtype=dtype, device=device)
        out = whole[: x.numel()].view(shape)
        there = None if other is None else other.to(device)
        key = random.key(5)
        dropout_residual_triton.add(out, x.to(device), there, key.to(device), dropped, kernel._scale(dropped))
        expected = kernel.by_torch(x, other, key, dropped)
        torch.testing.assert_close(out.cpu(), expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
        assert bool((whole[x.numel() :] == 7).all())
        if other is None:
            assert torch.equal(out.cpu() == 0, expected == 0)


INTERPRETED = """
import contextlib
import torch
from functional_booster.kernels import dropout_residual, dropout_residual_triton, random
from tests.test_dropout_residual import check
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
dropout_residual_triton._BLOCK = 64
for shape, dtype, p in (
    ((), torch.float32, 0.1), ((7, 33), torch.float32, 0.5), ((64,), torch.float32, 1.0), ((130,), torch.float16, 0.1)
):
    check("cpu", shape, dtype, p)
keys, x = random.split(random.key(1)), torch.randn(2, 50)
out = torch.empty_like(x)
dropout_residual_triton.add(out, x, None, keys, 3000, dropout_residual._scale(3000))
assert torch.equal(out, dropout_residual.by_torch(x, None, keys, 3000))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernel_interpreted_on_cpu() -> None:
    command = [sys.executable, "-W", "error", "-c", INTERPRETED]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (513, 4097)], ids=str)
@pytest.mark.parametrize("p", [0.1, 1.0])
def test_the_gpu_draws_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype, p: float) -> None:
    check("cuda", shape, dtype, p)


@pytest.mark.gpu
def test_the_gpu_differentiates_and_batches() -> None:
    x, residual, keys = torch.randn(3, 40, 50), torch.randn(3, 40, 50), random.split(random.key(0), 3)

    def loss(x: torch.Tensor, residual: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return dropout_residual(x, residual, 0.3, key).square().sum()

    expected = torch.vmap(fb.grad(loss))(x, residual, keys)
    got = torch.vmap(fb.grad(loss))(x.cuda(), residual.cuda(), keys.cuda())
    torch.testing.assert_close(got.cpu(), expected)
