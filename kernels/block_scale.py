"""Floats as fp8 in a buffer of bytes: a block of elements shares a scale, which is a power of two.

The format is that of the OCP Microscaling (MX) specification 1.0, MXFP8: float8_e4m3fn or float8_e5m2 elements, 32 to a
block, and one E8M0 byte a block, the scale's biased exponent. The scale is the smallest with which the block's largest
magnitude fits (rounded up, where the specification's example lets it saturate: Mishra et al. 2025, "Recipes for
Pre-training LLMs with MXFP8", section 3). To scale by a power of two is exact, so every device finds the same bytes,
and to encode what was decoded gives it back.

For a block whose largest magnitude is a, an element x arrives as y with ::

    |y - x| <= max(|x| 2^-(m+1), a 2^-e)        e4m3: m = 3, e = 17;  e5m2: m = 2, e = 31

for 2^-111 <= a, and to 2^-136 below. A block with a value that is not finite (or, of float64, beyond
float32) arrives as NaNs. The largest numbers of a dtype, which would round beyond it, are rounded down.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

from .primitive import leading_dims, primitive

BLOCK = 32  # elements that share a scale
FORMATS = {  # mantissa bits, exponent of the largest number; the mantissa of that is 1.75 in both
    torch.float8_e4m3fn: (3, 8),
    torch.float8_e5m2: (2, 15),
}
_ROUND_UP = 0x1FFFFF  # carries into a float32's exponent what has a mantissa above 1.75
_INFINITE = 0x7F800000  # float32's infinity as an integer, above which are the NaNs


def encoded_size(size: int) -> int:
    """Bytes of ``size`` encoded elements."""
    return size + _blocks(size)


def encode(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """x (..., n), floating-point, as bytes (..., n + ceil(n / 32)): a row's elements, then its scales. Not
    differentiable."""
    return _encode(x, fp8)


def decode_sum(message: torch.Tensor, size: int, fp8: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """The sum over dim 0 of what was encoded: bytes (R, ..., n + ceil(n / 32)) and ``size`` n -> (..., n) in ``dtype``.

    The terms are added one after the other, in float32, or in ``dtype`` where that is wider: the same bits everywhere.
    Not differentiable.
    """
    return _decode_sum(message, size, fp8, dtype)


def decode(message: torch.Tensor, size: int, fp8: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """What was encoded: bytes (..., n + ceil(n / 32)) and ``size`` n -> (..., n) in ``dtype``. Not differentiable."""
    return _decode_sum(message.unsqueeze(0), size, fp8, dtype)


def largest(dtype: torch.dtype, fp8: torch.dtype) -> float:
    """The largest number that fp8's mantissa can hold, and both ``dtype`` and float32 the range of."""
    mantissa, _ = FORMATS[fp8]
    finite = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return (2 - 2.0**-mantissa) * 2.0 ** (math.frexp(finite)[1] - 1)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    """(..., n) -> (..., blocks, 32), zeros behind."""
    blocks = _blocks(x.shape[-1])
    return pad(x, (0, blocks * BLOCK - x.shape[-1])).unflatten(-1, (blocks, BLOCK))


def _reference_encode(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    size, (_, exponent), limit = x.shape[-1], FORMATS[fp8], largest(x.dtype, fp8)
    blocks = _in_blocks(x.to(torch.promote_types(x.dtype, torch.float32)))
    bits = blocks.abs().amax(-1).to(torch.float32).view(torch.int32) & 0x7FFFFFFF  # the sign of a NaN is any
    scales = (((bits + _ROUND_UP) >> 23) - exponent).clamp(min=1)  # no subnormal scale
    inverse = ((254 - scales) << 23).view(torch.float32)
    scaled = blocks.clamp(-limit, limit) * inverse.unsqueeze(-1)
    broken = bits >= _INFINITE
    scales = torch.where(broken, 255, scales)  # infinity, when it is decoded, and zero times that is NaN
    elements = torch.where(broken.unsqueeze(-1), 0, scaled).to(fp8).view(torch.uint8).flatten(-2)[..., :size]
    return torch.cat([elements, scales.to(torch.uint8)], -1)


def _reference_decode_sum(message: torch.Tensor, size: int, fp8: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(dtype, torch.float32)

    def decoded(row: torch.Tensor) -> torch.Tensor:
        elements = _in_blocks(row[..., :size]).view(fp8).to(wide)
        scales = (row[..., size:].to(torch.int32) << 23).view(torch.float32)
        return (elements * scales.unsqueeze(-1)).flatten(-2)[..., :size]

    first, *others = message.unbind(0)
    total = decoded(first)
    for row in others:
        total = total + decoded(row)
    return total.to(dtype).contiguous()


def _encode_on_cuda(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    if x.dtype == torch.float64 or not x.numel() or (kernels := _kernels()) is None:
        return _reference_encode(x, fp8)
    out = _empty_message(x, fp8)
    kernels.encode(out, x.contiguous(), BLOCK, *FORMATS[fp8], largest(x.dtype, fp8))
    return out


def _decode_sum_on_cuda(message: torch.Tensor, size: int, fp8: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float64 or not message.numel() or (kernels := _kernels()) is None:
        return _reference_decode_sum(message, size, fp8, dtype)
    out = _empty_sum(message, size, fp8, dtype)
    kernels.decode_sum(out, message.contiguous(), BLOCK, FORMATS[fp8][0])
    return out


def _kernels() -> Any:
    try:
        from . import block_scale_triton
    except ModuleNotFoundError:  # torch without triton
        return None
    return block_scale_triton


def _empty_message(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], encoded_size(x.shape[-1])), dtype=torch.uint8)


def _empty_sum(message: torch.Tensor, size: int, fp8: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    return message.new_empty((*message.shape[1:-1], size), dtype=dtype)


def _batch_behind_the_terms(
    decode_sum: Any, size: int, dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[torch.Tensor, int]:
    message, *static = args
    return decode_sum(message.movedim(dims[0], 1), *static), 0


_encode = primitive(
    "block_scale_encode",
    "(Tensor x, ScalarType fp8) -> Tensor",
    reference=_reference_encode,
    cuda=_encode_on_cuda,
    fake=_empty_message,
    batching=leading_dims,
)
_decode_sum = primitive(
    "block_scale_decode_sum",
    "(Tensor message, int size, ScalarType fp8, ScalarType dtype) -> Tensor",
    reference=_reference_decode_sum,
    cuda=_decode_sum_on_cuda,
    fake=_empty_sum,
    batching=_batch_behind_the_terms,
)
