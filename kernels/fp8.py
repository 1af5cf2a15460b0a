"""fp8: quantisation to 8-bit floats, the scaled matrix product, and the linear layer made of them.

A linear layer multiplies float8_e4m3fn operands, and its backward takes the cotangent in float8_e5m2 (Micikevicius et
al. 2022, "FP8 Formats for Deep Learning"). Scales are computed just in time from the largest magnitude and rounded up
to a power of two, with integer operations on its bits. So scaling never rounds (the only rounding is the cast's, to
nearest, ties to even), every device and compiler finds the same bits, quantising again what was quantised changes
nothing, and dequantised operands are exact in bfloat16, too; the price is at most one bit of the 8-bit format's range.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F

Scaling: TypeAlias = Literal["tensor", "row"]
SCALINGS: tuple[str, ...] = get_args(Scaling)

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_EXPONENT = {_E4M3: 8, _E5M2: 15}  # the largest number of either format is 1.75 * 2**exponent: 448 and 57344
_LEAST = -100  # of scales, 2**-100: subnormal float32 numbers, which some devices flush to zero, then round to zero
_BIAS, _MANTISSA = 127, 23  # of float32
_ALIGNMENT = 16  # elements: of the inner and the last dim in the fp8 units


def quantize(x: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x -> (values of x's shape in ``dtype``, float32 scale), x ~ values * scale, to nearest with ties to even.

    ``dtype`` is float8_e4m3fn or float8_e5m2. The scale is the least power of two, from 2**-100 up, with which nothing
    overflows: one for all of x (0-d), or, with ``dim``, one for each of its slices along that dim, which has size 1 in
    the scale. The largest float32 numbers, which would be rounded beyond float32, are rounded down. Where x is not
    finite, in float32, the scale is nan. Not differentiable. Raises TypeError for other dtypes and what is no
    floating-point tensor, IndexError for a dim that x does not have.
    """
    if dtype not in _EXPONENT:
        raise TypeError(f"dtype: {dtype}, expected torch.float8_e4m3fn or torch.float8_e5m2")
    _require_float("x", x)
    if dim is not None and not -x.dim() <= dim < x.dim():
        raise IndexError(f"dim: {dim}, but x has shape {tuple(x.shape)}")
    return _Quantize.apply(x, dtype, dim)


def scaled_mm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """(a * a_scale) @ (b * b_scale) + bias, accumulated in float32: a (..., M, K), b (..., K, N) -> (..., M, N).

    Scales are float32, for the whole operand (0-d) or for each row of a (M, 1) and each column of b (1, N); bias (N,).
    A GPU with fp8 units multiplies in them where b is float8_e4m3fn, whatever the sizes and strides: operands are laid
    out with K contiguous, and K and N are padded to multiples of 16 by zeros, which change nothing. Elsewhere
    dequantised operands, which are exact, are multiplied in float32. ``fast_accumulation`` lets Hopper's units keep
    sums in about 14 bits. Not differentiable. Raises TypeError for operands that are not in fp8, ValueError for shapes
    that do not fit.
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, torch.Tensor) or operand.dtype not in _EXPONENT:
            given = operand.dtype if isinstance(operand, torch.Tensor) else type(operand).__name__
            raise TypeError(f"{name}: {given}, expected a tensor of float8_e4m3fn or float8_e5m2")
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a and b: shapes {tuple(a.shape)} and {tuple(b.shape)}, expected (..., M, K) and (..., K, N)")
    for name, scale, rows, columns in (("a_scale", a_scale, a.shape[-2], 1), ("b_scale", b_scale, 1, b.shape[-1])):
        shape = (1, 1, *scale.shape)[-2:]
        if shape not in ((1, 1), (rows, columns)):
            raise ValueError(f"{name}: shape {tuple(scale.shape)}, expected () or {(rows, columns)}")
    if bias is not None and bias.shape[-1:] != b.shape[-1:]:
        raise ValueError(f"bias: shape {tuple(bias.shape)}, expected ({b.shape[-1]},), as b's last dim")
    return _ScaledMM.apply(a, a_scale, b, b_scale, bias, out_dtype, fast_accumulation)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, scaling: Scaling = "tensor"
) -> torch.Tensor:
    """``F.linear`` in fp8: x (..., in), weight (out, in), bias (out,) -> (..., out) in x's dtype.

    The product is of x and weight in float8_e4m3fn; the gradients of x and weight are products with the cotangent in
    float8_e5m2, and that of bias is the cotangent's sum in float32 at least. ``scaling`` "tensor": each tensor has one
    scale, and forward and backward use the same quantised x and weight. "row": one scale for each token or neuron,
    along the dim that a product sums over, so that the backward quantises x and weight anew, along their other dim.
    Under vmap each member of the batch has its own scales. Differentiable once: a second derivative raises
    NotImplementedError. Raises TypeError for dtypes that are not floating-point, ValueError for shapes that do not fit
    and for an unknown scaling.
    """
    require_scaling(scaling)
    _require_float("x", x)
    _require_float("weight", weight)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"x and weight: shapes {shapes}, expected (..., in) and (out, in)")
    if bias is not None:
        _require_float("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: shape {tuple(bias.shape)}, expected ({weight.shape[0]},), as weight's first dim")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = _Linear.apply(rows, weight, bias, scaling)[0]
    return out.reshape(*x.shape[:-1], weight.shape[0])


def require_scaling(scaling: Any) -> None:
    """Raise ValueError unless ``scaling`` is "tensor" or "row"."""
    if scaling not in SCALINGS:
        raise ValueError(f"scaling: {scaling!r}, expected one of {', '.join(map(repr, SCALINGS))}")


class _Quantize(torch.autograd.Function):
    """(x, dtype, dim) -> (values, scale). A Function, so that what has no derivative says so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, dtype: torch.dtype, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.to(torch.float32)
        if x.numel() == 0:
            return x.to(dtype), x.new_ones(()) if dim is None else x.sum(dim, keepdim=True) + 1
        magnitudes = x.abs()
        largest = magnitudes.amax() if dim is None else magnitudes.amax(dim, keepdim=True)
        # A mantissa above 1.75 carries into the exponent.
        carried = (largest.view(torch.int32) + 0x1FFFFF) >> _MANTISSA
        exponent = (carried - (_BIAS + _EXPONENT[dtype])).clamp(min=_LEAST)
        scale = torch.where(largest < math.inf, _power_of_two(exponent), math.nan)
        limit = (2 - torch.finfo(dtype).eps) * 2.0**_BIAS
        return (x.clamp(-limit, limit) * _power_of_two(-exponent)).to(dtype), scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise NotImplementedError("fp8.quantize has no derivative; neither has fp8.linear a second one")


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """int32 -> float32, exactly, of exponents from -126 to 127."""
    return ((exponent + _BIAS) << _MANTISSA).view(torch.float32)


class _Linear(torch.autograd.Function):
    """(x, weight, bias, scaling) -> (out, what the backward uses of the quantised operands), of matrices."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: Scaling
    ) -> tuple[torch.Tensor, ...]:
        dim = 1 if scaling == "row" else None
        (x8, x_scale), (weight8, weight_scale) = quantize(x, _E4M3, dim), quantize(weight, _E4M3, dim)
        out = scaled_mm(x8, x_scale, weight8.t(), weight_scale.t(), x.dtype, bias, fast_accumulation=True)
        return (out, x8, x_scale, weight8, weight_scale) if scaling == "tensor" else (out,)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        x, weight, bias, ctx.scaling = inputs
        ctx.set_materialize_grads(False)  # of the quantised operands there are none
        ctx.save_for_backward(*(output[1:] if ctx.scaling == "tensor" else (x, weight)))
        ctx.dtypes = [None if value is None else value.dtype for value in (x, weight, bias)]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[torch.Tensor | None, ...]:
        cotangent, by_row = cotangents[0], ctx.scaling == "row"
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        x_grad = weight_grad = bias_grad = None
        if cotangent is None:
            return x_grad, weight_grad, bias_grad, None
        quantized = None if by_row else quantize(cotangent, _E5M2)
        if ctx.needs_input_grad[0]:
            values, scale = quantized or quantize(cotangent, _E5M2, 1)
            weight8, weight_scale = quantize(ctx.saved_tensors[1], _E4M3, 0) if by_row else ctx.saved_tensors[2:]
            x_grad = scaled_mm(values, scale, weight8, weight_scale, x_dtype)
        if ctx.needs_input_grad[1]:
            values, scale = quantized or quantize(cotangent, _E5M2, 0)
            x8, x_scale = quantize(ctx.saved_tensors[0], _E4M3, 0) if by_row else ctx.saved_tensors[:2]
            weight_grad = scaled_mm(values.t(), scale.t(), x8, x_scale, weight_dtype)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            bias_grad = cotangent.sum(0, dtype=torch.promote_types(cotangent.dtype, torch.float32)).to(bias_dtype)
        return x_grad, weight_grad, bias_grad, None


class _ScaledMM(torch.autograd.Function):
    """scaled_mm: tensors, then the dtype and the kind of accumulation. A batch becomes leading dims."""

    @staticmethod
    def forward(
        a: torch.Tensor,
        a_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        fast: bool,
    ) -> torch.Tensor:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        empty = 0 in (*batch, *a.shape, *b.shape)
        if empty or b.dtype != _E4M3 or not _has_units(a.device):
            return _emulated(a, a_scale, b, b_scale, bias, out_dtype)
        if not batch:
            return by_units(a, a_scale, b, b_scale, bias, out_dtype=out_dtype, fast=fast)

        def members(tensor: torch.Tensor) -> torch.Tensor:
            matrix = tensor if tensor.dim() > 1 else tensor.reshape(1, -1)
            return matrix.expand(*batch, *matrix.shape[-2:]).flatten(0, -3)

        biases: Any = [None] * math.prod(batch) if bias is None else members(bias).squeeze(1)
        parts: Any = zip(*map(members, (a, a_scale, b, b_scale)), biases, strict=True)
        return torch.stack([by_units(*part, out_dtype=out_dtype, fast=fast) for part in parts]).unflatten(0, batch)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise NotImplementedError("fp8.scaled_mm has no derivative; neither has fp8.linear a second one")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[torch.Tensor, int]:
        tensors = args[:5]
        given = [(tensor, dim) for tensor, dim in zip(tensors, in_dims[:5], strict=True) if tensor is not None]
        rank = max(tensor.dim() - (dim is not None) for tensor, dim in given)

        def lead(tensor: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
            if tensor is None or dim is None:
                return tensor
            tensor = tensor.movedim(dim, 0)
            return tensor.reshape(len(tensor), *(1,) * (rank + 1 - tensor.dim()), *tensor.shape[1:])

        return _ScaledMM.apply(*map(lead, tensors, in_dims[:5]), *args[5:]), 0


def _emulated(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    product = (a.to(torch.float32) * a_scale) @ (b.to(torch.float32) * b_scale)
    return (product if bias is None else product + bias.to(torch.float32)).to(out_dtype)


def by_units(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out_dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """``scaled_mm`` of two matrices, none empty, by ``torch._scaled_mm``.

    It scales rows for bfloat16 results alone, and adds a bias to half-precision results alone: the rest is done to its
    result in float32, which loses nothing.
    """
    rows, columns = len(a), b.shape[1]
    by_row = a_scale.numel() > 1 or b_scale.numel() > 1
    native = out_dtype == torch.bfloat16 or (out_dtype == torch.float16 and not by_row)
    padded = -columns % _ALIGNMENT
    if not by_row:
        scales = a_scale.reshape(()), b_scale.reshape(())
    elif native:
        scales = _spread(a_scale, (rows, 1)), F.pad(_spread(b_scale, (1, columns)), (0, padded))
    else:
        scales = (a_scale.new_ones(()),) * 2
    product = torch._scaled_mm(
        _aligned(a, 0),
        _aligned(b.t(), padded).t(),
        *scales,
        bias=F.pad(bias.to(out_dtype), (0, padded)) if native and bias is not None else None,
        out_dtype=out_dtype if native else torch.float32,
        use_fast_accum=fast,
    )
    product = product.narrow(1, 0, columns) if padded else product
    if native:
        return product
    if by_row:
        product = product * a_scale * b_scale
    return (product if bias is None else product + bias.to(torch.float32)).to(out_dtype)


def _spread(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The scale in this shape, row-major, in the strides of dims of size 1, too."""
    return scale.expand(shape).clone(memory_format=torch.contiguous_format)


def _aligned(matrix: torch.Tensor, more_rows: int) -> torch.Tensor:
    """Row-major, in strides of dims of size 1, too, with rows of zeros below and columns up to a multiple of 16."""
    more_columns = -matrix.shape[1] % _ALIGNMENT
    if more_rows or more_columns:
        matrix = F.pad(matrix.view(torch.uint8), (0, more_columns, 0, more_rows)).view(matrix.dtype)
    return matrix.contiguous().flatten().view(matrix.shape)


def _has_units(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and _capability(device) >= (8, 9)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _require_float(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        given = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{name}: {given}, expected a floating-point tensor")
