"""The Triton kernel of ``nf4``: imported at its first use on a GPU, never before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024  # bytes of codes that a program reads


def dequantize(
    out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, steps: torch.Tensor, table: torch.Tensor
) -> None:
    """Fill ``out`` (L, values) from codes (L, bytes), scales (L, blocks) and steps (L, groups + 1) float32.

    All are contiguous and none is empty; ``table`` (16,) float32 has the numbers that the codes stand for.
    """
    grid = (triton.cdiv(codes.shape[1], _TILE), out.shape[0])
    with torch.cuda.device_of(out):
        # Without fused multiply-adds, so that a scale has the bits that quantizing went by.
        _dequantize[grid](
            out,
            codes,
            scales,
            steps,
            table,
            out.shape[1],
            codes.shape[1],
            scales.shape[1],
            steps.shape[1],
            TILE=_TILE,
            enable_fp_fusion=False,
        )


@triton.jit
def _dequantize(out_ptr, codes_ptr, scales_ptr, steps_ptr, table_ptr, values, size, blocks, steps, TILE: tl.constexpr):
    row, start = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * TILE
    byte = start + tl.arange(0, TILE)
    inside = byte < size
    block = byte // 32
    code = tl.load(codes_ptr + row * size + byte, mask=inside, other=0).to(tl.int32)

    # A float8 (e4m3) by its bits, for GPUs without: sign, 4 bits of exponent, 3 of mantissa; none is a NaN.
    bits = tl.load(scales_ptr + row * blocks + block, mask=inside, other=0).to(tl.int32)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).to(tl.float32)
    power = ((tl.maximum(exponent, 1) + 117) << 23).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent > 0, mantissa + 8, mantissa) * power
    relative = tl.where(bits > 127, -magnitude, magnitude)
    step = tl.load(steps_ptr + row * steps + block // 256, mask=inside, other=0.0)
    scale = relative * step + tl.load(steps_ptr + row * steps + steps - 1)

    high, low = tl.load(table_ptr + (code >> 4)) * scale, tl.load(table_ptr + (code & 15)) * scale
    place = start * 2 + tl.arange(0, 2 * TILE)
    found = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * values + place, found, mask=place < values)
