"""fp8 casts: a tensor as 8-bit floats and scales, and a matrix together with its transpose, for both of its products.

Scales are computed just in time from the largest magnitude and rounded up to a power of two, with integer operations on
its bits. So scaling never rounds (the only rounding is the cast's, to nearest, ties to even), every device and compiler
finds the same bits, quantising again what was quantised changes nothing, and dequantised operands are exact in
bfloat16, too; the price is at most one bit of the 8-bit format's range.

fp8 units want both operands with the dim that they sum over contiguous: a layer's forward and its two gradients sum
over different dims of x, weight and cotangent, so that each of the three is needed as it is and transposed. On a GPU
Triton kernels read it twice, for the largest magnitudes and for the cast, which writes both.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import torch

from .primitive import primitive

# values (M, K), their scale, transposed values (K, M), their scale
Both: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EXPONENT = {E4M3: 8, E5M2: 15}  # the largest number of either format is 1.75 * 2**exponent: 448 and 57344
_LEAST = -100  # of scales, 2**-100: subnormal float32 numbers, which some devices flush to zero, then round to zero
_BIAS, _MANTISSA = 127, 23  # of float32
_INFINITE = 0x7F800000  # float32's infinity as an integer, above which are the NaNs


def quantize(x: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x -> (values of x's shape in ``dtype``, float32 scale), x ~ values * scale, to nearest with ties to even.

    ``dtype`` is float8_e4m3fn or float8_e5m2. The scale is the least power of two, from 2**-100 up, with which nothing
    overflows: one for all of x (0-d), or, with ``dim``, one for each of its slices along that dim, which has size 1 in
    the scale. The largest float32 numbers, which would be rounded beyond float32, are rounded down. Where x is not
    finite, in float32, the scale is nan. Not differentiable. Raises TypeError for other dtypes and what is no
    floating-point tensor, IndexError for a dim that x does not have.
    """
    if dtype not in EXPONENT:
        raise TypeError(f"dtype: {dtype}, expected torch.float8_e4m3fn or torch.float8_e5m2")
    require_float("x", x)
    if dim is not None and not -x.dim() <= dim < x.dim():
        raise IndexError(f"dim: {dim}, but x has shape {tuple(x.shape)}")
    return _Quantize.apply(x, dtype, dim)


def quantize_both(x: torch.Tensor, dtype: torch.dtype, by_row: bool) -> Both:
    """x (M, K) -> values (M, K), scale, transposed values (K, M), their scale: ``quantize`` of x and of its transpose.

    ``by_row``: scales (M, 1) of the rows and (K, 1) of the transpose's rows; else one scale of all of x (0-d), twice.
    All are contiguous. Not differentiable.
    """
    return _cast_both(x, dtype, by_row)


def empty_both(like: torch.Tensor, rows: int, columns: int, dtype: torch.dtype, by_row: bool) -> Both:
    """Tensors for what ``quantize_both`` gives of a matrix, on the device of ``like``."""
    scales = [like.new_empty((size, 1) if by_row else (), dtype=torch.float32) for size in (rows, columns)]
    values = like.new_empty((rows, columns), dtype=dtype)
    return values, scales[0], like.new_empty((columns, rows), dtype=dtype), scales[1]


def require_float(name: str, value: Any) -> None:
    """Raise TypeError unless this is a floating-point tensor."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        given = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{name}: {given}, expected a floating-point tensor")


@functools.cache
def has_units(device: torch.device) -> bool:
    """Whether this is a GPU that multiplies and rounds to fp8 in hardware."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


class _Quantize(torch.autograd.Function):
    """(x, dtype, dim) -> (values, scale). A Function, so that what has no derivative says so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, dtype: torch.dtype, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.to(torch.float32)
        if x.numel() == 0:
            return x.to(dtype), x.new_ones(()) if dim is None else x.sum(dim, keepdim=True) + 1
        return _cast(x, _bits_of_largest(x, dim), dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise NotImplementedError("fp8_cast.quantize has no derivative; neither has fp8.linear a second one")


def _bits_of_largest(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The largest magnitude of a float32 x, all of it or along ``dim``, which stays with size 1, as an integer."""
    magnitudes = x.abs()
    largest = magnitudes.amax() if dim is None else magnitudes.amax(dim, keepdim=True)
    return largest.view(torch.int32) & 0x7FFFFFFF  # the sign of a NaN is any


def _cast(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 x and the bits of its largest magnitudes, of a shape that broadcasts to x's -> (values, scale)."""
    carried = (largest + 0x1FFFFF) >> _MANTISSA  # a mantissa above 1.75 carries into the exponent
    exponent = (carried - (_BIAS + EXPONENT[dtype])).clamp(min=_LEAST)
    scale = torch.where(largest < _INFINITE, _power_of_two(exponent), math.nan)
    return (x.clamp(-limit(dtype), limit(dtype)) * _power_of_two(-exponent)).to(dtype), scale


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """int32 -> float32, exactly, of exponents from -126 to 127."""
    return ((exponent + _BIAS) << _MANTISSA).view(torch.float32)


@functools.cache
def limit(dtype: torch.dtype) -> float:
    """The largest number that float32 can hold with fp8's mantissa."""
    return (2 - torch.finfo(dtype).eps) * 2.0**_BIAS


def _cast_both_by_torch(x: torch.Tensor, dtype: torch.dtype, by_row: bool) -> Both:
    dim = 1 if by_row else None
    (values, scale), (turned, turned_scale) = quantize(x, dtype, dim), quantize(x.t(), dtype, dim)
    return values.contiguous(), scale.contiguous(), turned.contiguous(), turned_scale.contiguous()


def _cast_both_on_cuda(x: torch.Tensor, dtype: torch.dtype, by_row: bool) -> Both:
    if x.dtype == torch.float64 or not x.numel() or (kernels := _kernels()) is None:
        return _cast_both_by_torch(x, dtype, by_row)
    if not x.is_contiguous() and x.t().is_contiguous():
        turned, turned_scale, values, scale = _cast_both_on_cuda(x.t(), dtype, by_row)
        return values, scale, turned, turned_scale
    out, x = _empty_both(x, dtype, by_row), x.contiguous()
    largest = kernels.largest_by_both(x) if by_row else (kernels.largest(x),) * 2
    kernels.cast(*out, x, *largest, EXPONENT[dtype], limit(dtype), by_row, has_units(x.device))
    return out


def _empty_both(x: torch.Tensor, dtype: torch.dtype, by_row: bool) -> Both:
    return empty_both(x, x.shape[0], x.shape[1], dtype, by_row)


@functools.cache
def _kernels() -> Any:
    try:
        from . import fp8_cast_triton
    except ModuleNotFoundError:  # torch without triton
        return None
    return fp8_cast_triton


_cast_both = primitive(
    "fp8_cast_both",
    "(Tensor x, ScalarType dtype, bool by_row) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_cast_both_by_torch,
    cuda=_cast_both_on_cuda,
    fake=_empty_both,
)
