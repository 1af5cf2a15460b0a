"""Threefry-2x32-20: the bits that a key and a position stand for.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), as in their Random123 library. A
block cipher turns a 64-bit block number into two 32-bit words under a 64-bit key, so that a key names a stream of
words, each of which can be had without the ones before it: a slice of a draw is a draw of the slice. Words are int32
and wrap (int64 is slower; uint32 has no arithmetic on CPU).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .primitive import leading_dims, primitive

ROUNDS = 20
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF
_DTYPES = {16: torch.int16, 32: torch.int32}  # by width in bits
_FEW = 32  # elements; up to here plain Python integers beat the overhead of some hundred torch calls
_CHUNK = 32768  # blocks a thread works on at a time: torch's grain size; the buffers stay in cache and on the heap


def _reference(
    key: torch.Tensor, offset: torch.Tensor | None, base: int, shape: Sequence[int], strides: Sequence[int], width: int
) -> torch.Tensor:
    size = math.prod(shape)
    if key.dim() == 1 and 0 < size <= _FEW and len(_runs(shape, strides)) == 1:
        return _few(key, base if offset is None else base + int(offset), size, width).view(shape)
    out = _empty(key, offset, base, shape, strides, width)
    if out.numel() == 0:
        return out
    starts, length = run_starts(key, offset, base, shape, strides)
    rows, starts = starts.numel(), starts.unsqueeze(1)
    keys = key.reshape(-1, 2)
    keys = keys.repeat_interleave(rows // len(keys), 0) if len(keys) > 1 else keys.expand(rows, 2)
    lines = out.view(rows, length)
    chunk = _CHUNK * torch.get_num_threads() * (64 // width)
    tall, wide = max(1, chunk // length), min(length, chunk)
    for top, left in itertools.product(range(0, rows, tall), range(0, length, wide)):
        band, span = slice(top, top + tall), slice(left, min(left + wide, length))
        lines[band, span] = _many(keys[band], starts[band] + left, span.stop - left, width)
    return out


def _cuda(
    key: torch.Tensor, offset: torch.Tensor | None, base: int, shape: Sequence[int], strides: Sequence[int], width: int
) -> torch.Tensor:
    try:
        from . import threefry_triton
    except ModuleNotFoundError:  # torch without triton
        return _reference(key, offset, base, shape, strides, width)
    out = _empty(key, offset, base, shape, strides, width)
    if out.numel():
        single = offset is None and key.dim() == 1 and len(_runs(shape, strides)) == 1
        starts, length = (None, out.numel()) if single else run_starts(key, offset, base, shape, strides)
        threefry_triton.bits(out, key.contiguous(), starts, base, length, width)
    return out


def _empty(
    key: torch.Tensor, offset: torch.Tensor | None, base: int, shape: Sequence[int], strides: Sequence[int], width: int
) -> torch.Tensor:
    return key.new_empty((*key.shape[:-1], *shape), dtype=_DTYPES[width])


bits = primitive(
    "threefry_bits",
    "(Tensor key, Tensor? offset, int base, SymInt[] shape, SymInt[] strides, int width) -> Tensor",
    reference=_reference,
    cuda=_cuda,
    fake=_empty,
    batching=leading_dims,
)
"""The bits at given positions of a key's stream: int16 or int32 of ``shape``.

``bits(key, offset, base, shape, strides, width)``: key int32 (2,); element l of the draw is number
``base + offset + sum(l[d] * strides[d])`` of the stream, counted in elements of ``width`` bits (16 or 32). ``offset``
is None or an int64 0-d tensor. Under vmap key and offset have the same leading dims, as the result. Word w is word
w % 2 of block w // 2; the 16-bit elements of a word are its low half, then its high half.
"""


def run_starts(
    key: torch.Tensor, offset: torch.Tensor | None, base: int, shape: Sequence[int], strides: Sequence[int]
) -> tuple[torch.Tensor, int]:
    """A draw as runs of consecutive positions: where each run starts, int64 (batch * runs,), and their length."""
    *outer, (length, _) = _runs(shape, strides)
    starts = key.new_full((1,), base, dtype=torch.int64) if offset is None else offset.reshape(-1) + base
    for size, stride in outer:
        starts = starts.unsqueeze(-1) + torch.arange(size, device=key.device) * stride
    batch = key.numel() // 2
    return starts.reshape(1 if offset is None else batch, -1).expand(batch, -1).flatten().contiguous(), length


def _runs(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) of each dim, outermost first, once those that follow each other without a gap are joined."""
    joined: list[tuple[int, int]] = [(1, 1)]
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        inner_size, inner_stride = joined[0]
        if size == 1:
            continue
        if stride == inner_size * inner_stride:
            joined[0] = (size * inner_size, inner_stride)
        else:
            joined.insert(0, (size, stride))
    return joined


def _few(key: torch.Tensor, start: int, length: int, width: int) -> torch.Tensor:
    """The elements (length,) from ``start`` on, computed in Python integers."""
    key0, key1 = (half & _WORD for half in key.tolist())
    lanes = 64 // width
    first, phase = divmod(start, lanes)
    words = [
        word - (word >> 31 << 32)
        for block in range(first, first - (-(phase + length) // lanes))
        for word in threefry(key0, key1, block & _WORD, block >> 32 & _WORD)
    ]
    elements = torch.tensor(words, dtype=torch.int32, device=key.device).view(_DTYPES[width])
    return elements[phase : phase + length].clone()


def threefry(key0: int, key1: int, counter0: int, counter1: int) -> tuple[int, int]:
    """One block: two words for a key of two words and a counter of two words, as unsigned Python integers."""
    schedule = (key0, key1, key0 ^ key1 ^ PARITY)
    x0, x1 = counter0 + key0 & _WORD, counter1 + key1 & _WORD
    for turn in range(ROUNDS):
        rotation = ROTATIONS[turn % 8]
        x0 = x0 + x1 & _WORD
        x1 = (x1 << rotation & _WORD | x1 >> 32 - rotation) ^ x0
        if turn % 4 == 3:
            step = turn // 4 + 1
            x0 = x0 + schedule[step % 3] & _WORD
            x1 = x1 + schedule[(step + 1) % 3] + step & _WORD
    return x0, x1


def _many(keys: torch.Tensor, starts: torch.Tensor, length: int, width: int) -> torch.Tensor:
    """The elements (rows, length) from ``starts`` (rows, 1) on under keys (rows, 2): torch arithmetic, in place."""
    lanes = 64 // width
    first, phase = starts >> lanes.bit_length() - 1, starts & lanes - 1
    aligned = not phase.any()
    blocks = -(-length // lanes) if aligned else (length + 2 * (lanes - 1)) // lanes
    number = first + torch.arange(blocks, device=keys.device)
    words = number.view(torch.int32).view(*number.shape, 2)  # little-endian: the low word of a number is its first
    key0, key1 = keys[0] if keys.stride(0) == 0 or len(keys) == 1 else keys.unsqueeze(-1).unbind(1)
    schedule = (key0, key1, key0 ^ key1 ^ PARITY)
    x0, x1 = words[..., 0] + key0, words[..., 1] + key1
    spill = torch.empty_like(x0)
    for turn in range(ROUNDS):
        rotation = ROTATIONS[turn % 8]
        shift, mask = _constants(rotation, keys.device)
        x0.add_(x1)
        torch.bitwise_right_shift(x1, shift, out=spill).bitwise_and_(mask)
        torch.add(spill, x1, alpha=1 << rotation, out=x1).bitwise_xor_(x0)  # spill + (x1 << rotation)
        if turn % 4 == 3:
            step = turn // 4 + 1
            x0.add_(schedule[step % 3])
            x1.add_(schedule[(step + 1) % 3] + step)
    words[..., 0] = x0
    words[..., 1] = x1
    elements = words.flatten(1).view(_DTYPES[width])
    return elements[:, :length] if aligned else elements.gather(1, phase + torch.arange(length, device=keys.device))


@functools.cache
def _constants(rotation: int, device: torch.device) -> tuple[Any, Any]:
    """32 - rotation and the mask of the low ``rotation`` bits, as tensors: torch wraps a number at every call."""
    return (
        torch.tensor(32 - rotation, dtype=torch.int32, device=device),
        torch.tensor((1 << rotation) - 1, dtype=torch.int32, device=device),
    )
