"""Scaled masked softmax against scaled_dot_product_attention's rules in float64, its gradients, empty rows."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster.kernels.scaled_masked_softmax import scaled_causal_softmax, scaled_masked_softmax

SHAPES = [(1,), (3, 17), (2, 3, 5), (2, 3, 4, 70), (2, 1, 2, 3, 9)]


def masks(shape: tuple[int, ...], generator: torch.Generator) -> list[torch.Tensor | None]:
    """None, and masks of every kind that broadcasts to ``shape``: whole rows are masked in some."""
    found: list[torch.Tensor | None] = [None]
    for kept in dict.fromkeys(
        (shape, shape[-1:], (1,) * (len(shape) - 1) + shape[-1:], shape[:1] + (1,) * (len(shape) - 1))
    ):
        found.append(torch.rand(kept, generator=generator) > 0.4)
        found.append(torch.randn(kept, generator=generator))
    additive = torch.randn(shape, generator=generator)
    additive.view(-1, shape[-1])[0] = -torch.inf
    return [*found, additive]


def defined(x: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """By torch's own attention: the probabilities are its outputs where the values are the identity."""
    size = x.shape[-1]
    scores = x.double().reshape(-1, size) * scale
    bias = torch.zeros(()) if mask is None else mask
    if mask is not None and mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    bias = bias.double().expand(x.shape).reshape(-1, size)
    one = torch.ones(len(scores), 1, 1, dtype=torch.float64)
    keys = torch.zeros(len(scores), size, 1, dtype=torch.float64)
    values = torch.eye(size, dtype=torch.float64).expand(len(scores), size, size)
    empty = ((scores + bias) == -torch.inf).all(-1)
    full = torch.where(empty[:, None], 0.0, scores + bias)
    found = F.scaled_dot_product_attention(one, keys, values, attn_mask=full[:, None])[:, 0]
    return torch.where(empty[:, None], 0.0, found).reshape(x.shape)


@given(shape=st.sampled_from(SHAPES), scale=st.sampled_from([1.0, 0.125, -2.0]), seed=st.integers(0, 9))
def test_it_is_the_attention_of_torch(shape: tuple[int, ...], scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(shape, dtype=torch.float64, generator=generator)
    for mask in masks(shape, generator):
        got = scaled_masked_softmax(x, mask, scale)
        torch.testing.assert_close(got, defined(x, mask, scale), rtol=1e-10, atol=1e-14)


@given(size=st.integers(1, 12), seed=st.integers(0, 9))
def test_the_causal_one_is_the_one_with_a_causal_mask(size: int, seed: int) -> None:
    x = torch.randn(2, size, size, generator=torch.Generator().manual_seed(seed))
    x.masked_fill_(torch.ones(size, size, dtype=torch.bool).triu(1), float("nan"))  # never looked at
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    expected = scaled_masked_softmax(torch.where(mask, x, 0.0), mask, 0.5)
    torch.testing.assert_close(scaled_causal_softmax(x, 0.5), expected, rtol=0, atol=0)


def test_gradients_of_scores_and_of_an_additive_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    bias = torch.randn(3, 1, dtype=torch.float64, generator=generator)
    column = torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True)
    keep = torch.rand(2, 1, 4, generator=generator) > 0.3
    for fn in (
        lambda x, column: scaled_masked_softmax(x, column, 0.7),
        lambda x, column: scaled_masked_softmax(x, keep, 0.7) + column,
        lambda x, column: scaled_masked_softmax(x, bias, 0.7) + column,
    ):
        assert torch.autograd.gradcheck(fn, (x, column))
        assert torch.autograd.gradgradcheck(fn, (x, column))
    square = torch.randn(2, 4, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: scaled_causal_softmax(x, 0.7), (square,))


@pytest.mark.parametrize("mask", [torch.zeros(3, 5, dtype=torch.bool), torch.full((3, 5), -torch.inf)], ids=str)
def test_a_row_with_nothing_kept_is_zero_and_so_are_its_gradients(mask: torch.Tensor) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    y = scaled_masked_softmax(x, mask)
    (grad,) = torch.autograd.grad((y * torch.randn(3, 5)).sum(), x)
    assert torch.equal(y, torch.zeros_like(y)) and torch.equal(grad, torch.zeros_like(grad))


def test_transforms_and_traces() -> None:
    generator = torch.Generator().manual_seed(0)
    x, mask = torch.randn(3, 2, 4, 5, generator=generator), torch.rand(3, 1, 4, 5, generator=generator) > 0.3

    def loss(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_masked_softmax(x, mask, 0.5).square().sum()

    whole = fb.grad(loss)(x, mask)
    torch.testing.assert_close(torch.vmap(fb.grad(loss))(x, mask), whole)
    torch.testing.assert_close(fb.remat(fb.grad(loss))(x, mask), whole)
    found = fb.jit(fb.grad(loss)).lower(x, mask).graph
    names = [str(node.target) for node in found.nodes if "scaled_masked_softmax" in str(node.target)]
    assert [name.split(".")[1] for name in names] == ["scaled_masked_softmax", "scaled_masked_softmax_backward"]


def test_bad_arguments_are_named() -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises(TypeError, match=r"mask: torch.int64, expected bool"):
        scaled_masked_softmax(x, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"mask: shape \(2, 4\), expected one that broadcasts to \(2, 3, 4\)"):
        scaled_masked_softmax(x, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"as many keys as queries"):
        scaled_causal_softmax(x)
    with pytest.raises(TypeError, match=r"x: torch.int64"):
        scaled_causal_softmax(x.long())


def check(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The Triton kernels against float64, and that they write their outputs and no more."""
    from functional_booster.kernels import scaled_masked_softmax as plain
    from functional_booster.kernels import scaled_masked_softmax_triton as kernels

    generator = torch.Generator().manual_seed(0)
    x = (4 * torch.randn(shape, generator=generator)).to(dtype)
    cotangent = torch.randn(shape, generator=generator).to(dtype)
    given: list[tuple[Any, bool]] = [(mask, False) for mask in masks(shape, generator)]
    if len(shape) > 1 and shape[-1] == shape[-2]:
        given.append((None, True))
    rounding = max(torch.finfo(dtype).eps, 1e-5)
    for mask, causal in given:
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        out, whole = guarded(x.to(device))
        kernels.forward(out, x.to(device), None if mask is None else mask.to(device), 0.5, causal)
        bias = None if mask is None else mask if mask.dtype == torch.bool else mask.double()
        expected = plain.by_torch(x.double(), bias, 0.5, causal)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=rounding, atol=1e-6)
        y, back = expected.to(dtype), guarded(x.to(device))
        kernels.backward(back[0], y.to(device), cotangent.to(device), 0.5)
        slopes = plain.backward_by_torch(y.double(), cotangent.double(), 0.5)
        torch.testing.assert_close(back[0].cpu().double(), slopes, rtol=rounding, atol=1e-5)
        assert bool((whole[x.numel() :] == 7).all() and (back[1][x.numel() :] == 7).all())


def guarded(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Storage like a tensor, and the longer buffer of sevens that it is the head of."""
    whole = like.new_full((like.numel() + 8,), 7.0)
    return whole[: like.numel()].view(like.shape), whole


INTERPRETED = """
import contextlib
import torch
from functional_booster.kernels import scaled_masked_softmax_triton
from tests.test_softmax_kernel import check
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
scaled_masked_softmax_triton._LONGEST, scaled_masked_softmax_triton._TILE = 16, 128
for shape, dtype in (((1,), torch.float32), ((2, 1, 2, 3, 9), torch.float32), ((2, 2, 3, 17), torch.float32),
                     ((2, 9, 9), torch.float16), ((20, 20), torch.float32)):
    check("cpu", dtype, shape)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernels_interpreted_on_cpu() -> None:
    command = [sys.executable, "-W", "error", "-c", INTERPRETED]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 257, 257), (2, 2048, 2048), (3, 5, 8192), (3, 20000)], ids=str)
def test_the_gpu_gives_it_to_rounding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check("cuda", dtype, shape)


@pytest.mark.gpu
def test_the_gpu_differentiates_and_repeats_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 65, 65, generator=generator)
    keep = torch.rand(2, 1, 65, 65, generator=generator) > 0.2

    def loss(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return (scaled_masked_softmax(x, keep, 0.3) * scaled_causal_softmax(x, 0.3)).sum()

    expected = fb.grad(loss)(x.double(), keep)
    got, again = (fb.grad(loss)(x.cuda(), keep.cuda()) for _ in range(2))
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(got, again)
