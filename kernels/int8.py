"""int8: each row of a weight as integers of -127 to 127 and one scale, the largest of its magnitudes over 127.

(Row-wise absmax quantization: Dettmers et al. 2022, "LLM.int8()", section 2.1.) Both parts are integers, which no
policy casts: the codes, and the float32 scales as the integers of their bits. Plain torch, which the compiler fuses
into one kernel; every device gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .nf4 import require_finite

LARGEST = 127


class Quantized(NamedTuple):
    """``codes`` (..., N) int8; ``scales`` (...,) int32, bits of float32."""

    codes: torch.Tensor
    scales: torch.Tensor


def described(shape: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """(shape, dtype) of each part of a tensor of ``shape``."""
    return (shape, torch.int8), (shape[:-1], torch.int32)


def quantize(x: torch.Tensor) -> Quantized:
    """The nearest integer of each element, relative to its row's scale; x (..., N). Raises as ``nf4.quantize``."""
    require_finite(x)
    wide = x.detach().float()
    scales = wide.abs().amax(-1) / wide.new_full((), LARGEST)  # CUDA multiplies by a number's inverse
    codes = (wide / torch.where(scales > 0, scales, 1.0)[..., None]).round()
    return Quantized(codes.to(torch.int8), scales.view(torch.int32))


def dequantize(parts: Quantized, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The values, of ``shape``, in ``dtype``. Not differentiable."""
    return (parts.codes.float() * parts.scales.view(torch.float32)[..., None]).view(shape).to(dtype)
