"""The Triton kernel of ``threefry``: imported at its first use on a GPU, never before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .threefry_cipher_triton import cipher

_BLOCK = 256  # blocks of the cipher a program computes


def bits(out: torch.Tensor, key: torch.Tensor, starts: torch.Tensor | None, base: int, length: int, width: int) -> None:
    """Fill ``out``: runs of ``length`` elements of ``width`` bits from ``starts`` on (None: one run, from ``base``)."""
    lanes = 64 // width
    rows = 1 if starts is None else starts.numel()
    aligned = starts is None and base % lanes == 0
    blocks = -(-length // lanes) if aligned else (length + 2 * (lanes - 1)) // lanes
    with torch.cuda.device_of(out):
        _bits[(triton.cdiv(rows * blocks, _BLOCK),)](
            out,
            key,
            key if starts is None else starts,
            base,
            length,
            rows,
            blocks,
            rows // (key.numel() // 2),
            ONE_RUN=starts is None,
            PHASE=base % lanes if starts is None else 0,
            LANES=lanes,
            BLOCK=_BLOCK,
        )


@triton.jit
def _bits(
    out_ptr,
    key_ptr,
    starts_ptr,
    base,
    length,
    rows,
    blocks,
    rows_per_key,
    ONE_RUN: tl.constexpr,
    PHASE: tl.constexpr,  # of the one run: its first element in its first block
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64) * BLOCK
    index = tile + tl.arange(0, BLOCK)  # of the block, rows one after the other
    element = tile * LANES + tl.arange(0, BLOCK * LANES)  # of the output words, in the order of the blocks
    if ONE_RUN:
        row = tl.zeros((BLOCK,), tl.int64)
        start = tl.zeros((BLOCK,), tl.int64) + base
        place = element - PHASE
        inside = (place >= 0) & (place < length)
    else:
        row = tl.minimum(index // blocks, rows - 1)
        start = tl.load(starts_ptr + row)
        index = index % blocks
        line = element // LANES // blocks
        phase = tl.load(starts_ptr + tl.minimum(line, rows - 1)) & (LANES - 1)
        column = element - line * blocks * LANES - phase
        place = line * length + column
        inside = (line < rows) & (column >= 0) & (column < length)
    number = (start >> (1 if LANES == 2 else 2)) + index
    keys = key_ptr + row // rows_per_key * 2
    key0 = tl.load(keys).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    x0, x1 = cipher(key0, key1, number)
    if LANES == 2:
        words = tl.interleave(x0, x1).to(tl.int32, bitcast=True)
    else:
        low = tl.interleave((x0 & 0xFFFF).to(tl.uint16), (x1 & 0xFFFF).to(tl.uint16))
        high = tl.interleave((x0 >> 16).to(tl.uint16), (x1 >> 16).to(tl.uint16))
        words = tl.interleave(low, high).to(tl.int16, bitcast=True)
    tl.store(out_ptr + place, words, mask=inside)
