"""Losses and gradients of logits in one go: torch's own, by autograd, in float64; the Triton kernel equals them."""

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

from functional_booster.kernels import cross_entropy

OPTIONS = st.fixed_dictionaries(
    {
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "z_loss": st.sampled_from([0.0, 1e-2]),
        "softcap": st.sampled_from([None, 3.0]),
    }
)


def defined(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's cross entropy and autograd."""
    logits = logits.double().requires_grad_()
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(capped, labels, reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * capped.logsumexp(-1) ** 2 * (labels != -100)
    return losses.detach(), torch.autograd.grad((losses * weights).sum(), logits)[0]


@given(rows=st.integers(0, 5), size=st.integers(1, 40), seed=st.integers(0, 9), options=OPTIONS)
def test_losses_and_gradients_are_those_of_autograd(rows: int, size: int, seed: int, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, size, dtype=torch.float64, generator=generator)
    labels = torch.randint(size, (rows,), generator=generator)
    labels[::3] = -100
    weights = torch.rand(rows, dtype=torch.float64, generator=generator)
    got = cross_entropy.losses_and_grads(logits, labels, weights, **options)
    for mine, theirs in zip(got, defined(logits, labels, weights, **options), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_ignored_rows_may_hold_anything() -> None:
    logits = torch.tensor([[1.0, float("nan")], [float("inf"), 0.0]])
    for part in cross_entropy.losses_and_grads(logits, torch.full((2,), -100), torch.ones(2)):
        assert torch.equal(part, torch.zeros_like(part))


CHECK = """
import contextlib, itertools
import torch
from functional_booster.kernels import cross_entropy, cross_entropy_triton
from tests.test_cross_entropy import defined
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
cross_entropy_triton._LONGEST = 64
generator = torch.Generator().manual_seed(0)
for size, dtype in itertools.product((1, 17, 64, 150), (torch.float32, torch.bfloat16, torch.float16)):
    for smoothing, z_loss, softcap in ((0.0, 0.0, None), (0.1, 1e-2, 3.0), (1.0, 0.0, None), (0.0, 1e-2, 30.0)):
        logits = (4 * torch.randn(5, size, generator=generator)).to(dtype)
        labels = torch.randint(size, (5,), generator=generator)
        labels[2], logits[2] = -100, float("nan")
        weights = torch.rand(5, generator=generator)
        losses, grads = torch.full((5,), 7.0), torch.full((5, size), 7.0, dtype=dtype)
        options = dict(label_smoothing=smoothing, z_loss=z_loss, softcap=softcap)
        cross_entropy_triton.losses_and_grads(losses, grads, logits, labels, weights, -100, *options.values())
        expected = defined(logits.nan_to_num(0), labels, weights, **options)
        torch.testing.assert_close(losses.double(), expected[0], rtol=1e-5, atol=1e-5)
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(grads.double(), expected[1], rtol=max(rounding, 1e-5), atol=max(1e-6, rounding / 64))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernel_interpreted_on_cpu() -> None:
    command = [sys.executable, "-W", "error", "-c", CHECK]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 17, 4096, 50257])
@pytest.mark.parametrize(("smoothing", "z_loss", "softcap"), [(0.0, 0.0, None), (0.1, 1e-3, 30.0)])
def test_the_gpu_gives_them_to_rounding_and_always_the_same(
    size: int, dtype: torch.dtype, smoothing: float, z_loss: float, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = (4 * torch.randn(33, size, generator=generator)).to(dtype)
    labels = torch.randint(size, (33,), generator=generator)
    labels[::5] = -100
    weights = torch.rand(33, generator=generator)
    options = (-100, smoothing, z_loss, softcap)
    losses, grads = cross_entropy.losses_and_grads(logits.cuda(), labels.cuda(), weights.cuda(), *options)
    again = cross_entropy.losses_and_grads(logits.cuda(), labels.cuda(), weights.cuda(), *options)
    assert torch.equal(losses, again[0]) and torch.equal(grads, again[1])
    expected = defined(logits, labels, weights, label_smoothing=smoothing, z_loss=z_loss, softcap=softcap)
    torch.testing.assert_close(losses.cpu().double(), expected[0], rtol=1e-5, atol=1e-5)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(grads.cpu().double(), expected[1], rtol=max(rounding, 1e-5), atol=1e-6)
