"""Threefry-2x32-20 inside a Triton kernel: the cipher, and the elements of the stream of ``threefry.bits``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _round(x0, x1, rotation: tl.constexpr):
    x0 = x0 + x1
    return x0, ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0


@triton.jit
def cipher(key0, key1, number):
    """The two uint32 words of block ``number`` (int64) under a key of two uint32 words."""
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x0 = number.to(tl.int32).to(tl.uint32, bitcast=True) + key0
    x1 = (number >> 32).to(tl.int32).to(tl.uint32, bitcast=True) + key1
    for group in tl.static_range(5):
        if group % 2 == 0:
            x0, x1 = _round(x0, x1, 13)
            x0, x1 = _round(x0, x1, 15)
            x0, x1 = _round(x0, x1, 26)
            x0, x1 = _round(x0, x1, 6)
        else:
            x0, x1 = _round(x0, x1, 17)
            x0, x1 = _round(x0, x1, 29)
            x0, x1 = _round(x0, x1, 16)
            x0, x1 = _round(x0, x1, 24)
        key0, key1, key2 = key1, key2, key0
        x0 = x0 + key0
        x1 = x1 + key1 + (group + 1)
    return x0, x1


@triton.jit
def elements(key_ptr, block, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """``COUNT`` consecutive elements of ``WIDTH`` bits, int32 or int16, from the first of ``block`` (int64) on."""
    number = block + tl.arange(0, COUNT * WIDTH // 64)
    key0 = tl.load(key_ptr).to(tl.uint32, bitcast=True)
    key1 = tl.load(key_ptr + 1).to(tl.uint32, bitcast=True)
    x0, x1 = cipher(key0, key1, number)
    if WIDTH == 32:
        drawn = tl.interleave(x0, x1).to(tl.int32, bitcast=True)
    else:
        low = tl.interleave((x0 & 0xFFFF).to(tl.uint16), (x1 & 0xFFFF).to(tl.uint16))
        high = tl.interleave((x0 >> 16).to(tl.uint16), (x1 >> 16).to(tl.uint16))
        drawn = tl.interleave(low, high).to(tl.int16, bitcast=True)
    return drawn
