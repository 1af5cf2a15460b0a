"""NF4: 4-bit normal floats, in which QLoRA stores frozen weights. (Dettmers et al. 2023, "QLoRA", sections 2 and 3.)

Blocks of 64 values share a scale, the largest of their magnitudes; the scales are stored in float8 (e4m3), less their
mean, in blocks of 256 that share a step in float32: 4.127 bits a value. All parts are integers, which no policy casts:
4-bit codes two a byte, float8 scales as bytes, and float32 steps as the integers of their bits. Numbers come back by a
Triton kernel on a GPU; elsewhere this is plain torch, open to the compiler. Both give the same bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .primitive import leading_dims, primitive

BLOCK = 64  # values that share a scale
SCALES = 256  # scales that share a step
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max

# The quantiles of the normal distribution that code for 0 and both ends exactly (appendix E of the paper).
CODE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Quantized(NamedTuple):
    """``codes`` (32 * blocks,) uint8, the first value of a pair in the high half; ``scales`` (blocks,) uint8, bits of
    e4m3; ``steps`` (ceil(blocks / 256) + 1,) int32, bits of float32, the last of which is the scales' mean."""

    codes: torch.Tensor
    scales: torch.Tensor
    steps: torch.Tensor


def described(shape: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """(shape, dtype) of each part of a tensor of ``shape``."""
    blocks = -(-math.prod(shape) // BLOCK)
    steps = -(-blocks // SCALES) + 1
    return ((blocks * BLOCK // 2,), torch.uint8), ((blocks,), torch.uint8), ((steps,), torch.int32)


def require_finite(x: torch.Tensor) -> None:
    """Raise TypeError for integers, ValueError for what is empty or not finite in float32."""
    if not x.is_floating_point():
        raise TypeError(f"x: {x.dtype}, expected floating-point numbers")
    if x.numel() == 0 or not bool(x.float().isfinite().all()):
        raise ValueError(f"x: {tuple(x.shape)}, expected one number at least, and finite ones")


def quantize(x: torch.Tensor) -> Quantized:
    """The nearest NF4 value of each element, relative to its block's scale. Raises as ``require_finite``."""
    require_finite(x)
    flat = x.detach().reshape(-1).float()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    scales, steps = _quantize_scales(largest)
    # Relative to the scale as it will be read, so that its own rounding costs no more than it must.
    restored = _scales(scales, steps)
    relative = blocks / torch.where(restored > 0, restored, 1.0)[:, None]
    code = torch.tensor(CODE, device=x.device)
    index = torch.bucketize(relative, (code[1:] + code[:-1]) / 2, out_int32=True).to(torch.uint8)
    pairs = index.view(-1, 2)
    return Quantized(pairs[:, 0] << 4 | pairs[:, 1], scales, steps)


def dequantize(parts: Quantized, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The values, of ``shape``, in ``dtype``. Not differentiable."""
    on_gpu = parts.codes.device.type == "cuda" and _kernels() is not None
    values = (_by_triton if on_gpu else _by_torch)(*parts, math.prod(shape), dtype)
    return values.view(shape)


def _by_torch(
    codes: torch.Tensor, scales: torch.Tensor, steps: torch.Tensor, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """The first ``size`` values, (..., size), of parts that may have further leading dims."""
    indices = torch.stack((codes >> 4, codes & 15), dim=-1).to(torch.int32)
    blocks = torch.tensor(CODE, device=codes.device)[indices].unflatten(-2, (-1, BLOCK // 2)).flatten(-2)
    return (blocks * _scales(scales, steps)[..., None]).flatten(-2)[..., :size].to(dtype)


def _on_cuda(
    codes: torch.Tensor, scales: torch.Tensor, steps: torch.Tensor, size: int, dtype: torch.dtype
) -> torch.Tensor:
    out = _empty(codes, scales, steps, size, dtype)
    parts = [part.reshape(-1, part.shape[-1]).contiguous() for part in (codes, scales, steps.view(torch.float32))]
    if out.numel():
        _kernels().dequantize(out.view(-1, size), *parts, _table(codes.device))
    return out


def _empty(
    codes: torch.Tensor, scales: torch.Tensor, steps: torch.Tensor, size: int, dtype: torch.dtype
) -> torch.Tensor:
    return codes.new_empty((*codes.shape[:-1], size), dtype=dtype)


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """The codes' numbers on a device, copied there once."""
    return torch.tensor(CODE, device=device)


def _kernels() -> Any:
    try:
        from . import nf4_triton
    except ModuleNotFoundError:  # torch without triton
        return None
    return nf4_triton


def _quantize_scales(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = largest.mean()
    centered = F.pad(largest - mean, (0, -len(largest) % SCALES)).view(-1, SCALES)
    steps = centered.abs().amax(1) / _E4M3_MAX
    relative = centered / torch.where(steps > 0, steps, 1.0)[:, None]
    scales = relative.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return scales.view(-1)[: len(largest)].contiguous(), torch.cat([steps, mean[None]]).view(torch.int32)


def _scales(scales: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """(..., blocks) float32."""
    exact = steps.view(torch.float32)
    each = exact[..., :-1].repeat_interleave(SCALES, dim=-1)[..., : scales.shape[-1]]
    return scales.view(torch.float8_e4m3fn).float() * each + exact[..., -1:]


_by_triton = primitive(
    "nf4_dequantize",
    "(Tensor codes, Tensor scales, Tensor steps, int size, ScalarType dtype) -> Tensor",
    reference=_by_torch,
    cuda=_on_cuda,
    fake=_empty,
    batching=leading_dims,
)
