"""The Triton kernels of ``block_scale``: imported at their first use on a GPU, never before.

They round by integer arithmetic, so that they need no fp8 instructions, and round the same on every GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 64  # blocks that a program goes over
_INFINITE = tl.constexpr(0x7F800000)


def encode(out: torch.Tensor, x: torch.Tensor, block: int, mantissa: int, exponent: int, limit: float) -> None:
    """Fill ``out`` (..., n + blocks), uint8, from x (..., n) of at most 32 bits, both contiguous and not empty.

    ``mantissa``: its bits; ``exponent``: that of the largest number; ``limit``: what magnitudes are cut to.
    """
    size = x.shape[-1]
    tiles = triton.cdiv(size, block * _TILE)
    with torch.cuda.device_of(x):
        _encode[(x.numel() // size * tiles,)](
            out, x, size, triton.cdiv(size, block), tiles, block, _TILE, mantissa, exponent, _bias(mantissa), limit
        )


def decode_sum(out: torch.Tensor, message: torch.Tensor, block: int, mantissa: int) -> None:
    """Fill ``out`` (..., n), of at most 32 bits, from a message (R, ..., n + blocks), both contiguous and not empty."""
    size = out.shape[-1]
    tiles = triton.cdiv(size, block * _TILE)
    with torch.cuda.device_of(out):
        _decode_sum[(out.numel() // size * tiles,)](
            out,
            message,
            size,
            triton.cdiv(size, block),
            tiles,
            message.shape[0],
            message.numel() // message.shape[0],
            block,
            _TILE,
            mantissa,
            _bias(mantissa),
        )


def _bias(mantissa: int) -> int:
    """Of the exponent, which has the bits that sign and mantissa leave."""
    return 2 ** (6 - mantissa) - 1


@triton.jit
def _encode(
    out_ptr,
    x_ptr,
    size,
    blocks,
    tiles,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    block = program % tiles * TILE + tl.arange(0, TILE)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * size + place, mask=place < size, other=0.0).to(tl.float32)

    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < _INFINITE
    scale = tl.where(finite, tl.maximum(((largest + 0x1FFFFF) >> 23) - EXPONENT, 1), 255)
    inverse = (tl.where(finite, 254 - scale, 0) << 23).to(tl.float32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), LIMIT) * inverse[:, None]

    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = bits + (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # A subnormal is a multiple of one quantum, to which the addition of 2^23 of them rounds.
    MAGIC_EXPONENT: tl.constexpr = 127 + 23 + 1 - BIAS - MANTISSA
    magic = tl.full((TILE, BLOCK), MAGIC_EXPONENT << 23, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude + magic).to(tl.int32, bitcast=True) - (MAGIC_EXPONENT << 23)
    code = tl.where(bits < ((128 - BIAS) << 23), subnormal, normal)
    code = tl.where(finite[:, None], code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80), 0)

    start = out_ptr + row * (size + blocks)
    tl.store(start + place, code.to(tl.uint8), mask=place < size)
    tl.store(start + size + block, scale.to(tl.uint8), mask=block < blocks)


@triton.jit
def _decoded(message_ptr, size, blocks, block, place, BLOCK: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    code = tl.load(message_ptr + place, mask=place < size, other=0).to(tl.int32)
    scale = tl.load(message_ptr + size + block, mask=block < blocks, other=0).to(tl.int32)
    bits = code & 0x7F
    normal = ((bits << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    quantum = tl.full(bits.shape, (128 - BIAS - MANTISSA) << 23, tl.int32).to(tl.float32, bitcast=True)
    magnitude = tl.where(bits < (1 << MANTISSA), bits.to(tl.float32) * quantum, normal)
    signed = magnitude.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)  # of zeros too
    return signed.to(tl.float32, bitcast=True) * (scale << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _decode_sum(
    out_ptr,
    message_ptr,
    size,
    blocks,
    tiles,
    terms,
    stride,  # from one term to the next
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    block = program % tiles * TILE + tl.arange(0, TILE)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = message_ptr + row * (size + blocks)
    total = _decoded(start, size, blocks, block, place, BLOCK, MANTISSA, BIAS)
    for _ in range(1, terms):
        start += stride
        total += _decoded(start, size, blocks, block, place, BLOCK, MANTISSA, BIAS)
    tl.store(out_ptr + row * size + place, total.to(out_ptr.dtype.element_ty), mask=place < size)
