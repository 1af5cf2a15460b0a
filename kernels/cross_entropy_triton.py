"""The Triton kernel of ``cross_entropy``: imported at its first use on a GPU, never before.

A program has one row. It goes over the row for its maximum and sum of exponentials (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"), then again for the gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LONGEST = 16384  # columns that a program holds at a time


def losses_and_grads(
    losses: torch.Tensor,
    grads: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> None:
    """Fill losses (N,) float32 and grads (N, V) from logits (N, V), all contiguous and none empty."""
    rows, size = logits.shape
    block = min(triton.next_power_of_2(size), _LONGEST)
    with torch.cuda.device_of(logits):
        _losses_and_grads[(rows,)](
            losses,
            grads,
            logits,
            labels,
            weights,
            size,
            ignore_index,
            label_smoothing,
            z_loss,
            softcap or 1.0,
            SMOOTHED=label_smoothing != 0,
            CAPPED=softcap is not None,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )


@triton.jit
def _tanh(x):
    """By the exponential of a negative number, which cannot overflow."""
    small = tl.exp(-2 * tl.abs(x))
    magnitude = (1 - small) / (1 + small)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def _loaded(row_ptr, column, size, softcap, CAPPED: tl.constexpr):
    """Logits, -inf behind the row, and the slope of the softcap."""
    z = tl.load(row_ptr + column, mask=column < size, other=float("-inf")).to(tl.float32)
    slope = tl.full(z.shape, 1.0, tl.float32)
    if CAPPED:
        tanh = _tanh(z / softcap)
        z = tl.where(column < size, softcap * tanh, float("-inf"))
        slope = 1 - tanh * tanh
    return z, slope


@triton.jit
def _losses_and_grads(
    losses_ptr,
    grads_ptr,
    logits_ptr,
    labels_ptr,
    weights_ptr,
    size,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits_ptr += row * size
    grads_ptr += row * size
    offsets = tl.arange(0, BLOCK)
    if label == ignore_index:
        for start in range(0, size, BLOCK):
            column = start + offsets
            tl.store(grads_ptr + column, tl.zeros((BLOCK,), grads_ptr.dtype.element_ty), mask=column < size)
        tl.store(losses_ptr + row, 0.0)
        return

    most, total, plain_sum = -3.0e38, 0.0, 0.0  # of finite magnitude, so that -inf - most is no NaN
    for start in range(0, size, BLOCK):
        z, _ = _loaded(logits_ptr, start + offsets, size, softcap, CAPPED)
        higher = tl.maximum(most, tl.max(z, axis=0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(z - higher), axis=0)
        most = higher
        if SMOOTHED:
            plain_sum += tl.sum(tl.where(start + offsets < size, z, 0.0), axis=0)
    lse = most + tl.log(total)
    at_label, _ = _loaded(logits_ptr, label, size, softcap, CAPPED)
    loss = lse - (1 - smoothing) * at_label + z_loss * lse * lse
    if SMOOTHED:
        loss -= smoothing * plain_sum / size
    tl.store(losses_ptr + row, loss)

    weight = tl.load(weights_ptr + row)
    stretch = 1 + 2 * z_loss * lse
    for start in range(0, size, BLOCK):
        column = start + offsets
        z, slope = _loaded(logits_ptr, column, size, softcap, CAPPED)
        grad = tl.exp(z - lse) * stretch - tl.where(column == label, 1 - smoothing, 0.0) - smoothing / size
        tl.store(grads_ptr + column, (grad * slope * weight).to(grads_ptr.dtype.element_ty), mask=column < size)
