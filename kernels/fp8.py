"""fp8: the scaled matrix product and the linear layer made of it.

A linear layer multiplies float8_e4m3fn operands, and its backward takes the cotangent in float8_e5m2 (Micikevicius et
al. 2022, "FP8 Formats for Deep Learning"). Scales are computed just in time and are powers of two (``fp8_cast``).
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F

from .fp8_cast import E4M3, E5M2, has_units, quantize_both, require_float

Scaling: TypeAlias = Literal["tensor", "row"]
SCALINGS: tuple[str, ...] = get_args(Scaling)

_ALIGNMENT = 16  # elements: of the inner and the last dim in the fp8 units


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
        if not isinstance(operand, torch.Tensor) or operand.dtype not in (E4M3, E5M2):
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
    along the dim that a product sums over: x and weight are quantised along their other dim, too, for the backward.
    Under vmap each member of the batch has its own scales. Differentiable once: a second derivative raises
    NotImplementedError. Raises TypeError for dtypes that are not floating-point, ValueError for shapes that do not fit
    and for an unknown scaling.
    """
    require_scaling(scaling)
    require_float("x", x)
    require_float("weight", weight)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"x and weight: shapes {shapes}, expected (..., in) and (out, in)")
    if bias is not None:
        require_float("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: shape {tuple(bias.shape)}, expected ({weight.shape[0]},), as weight's first dim")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = _Linear.apply(rows, weight, bias, scaling)[0]
    return out.reshape(*x.shape[:-1], weight.shape[0])


def require_scaling(scaling: Any) -> None:
    """Raise ValueError unless ``scaling`` is "tensor" or "row"."""
    if scaling not in SCALINGS:
        raise ValueError(f"scaling: {scaling!r}, expected one of {', '.join(map(repr, SCALINGS))}")


class _Linear(torch.autograd.Function):
    """(x, weight, bias, scaling) -> (out, what the backward uses: x and weight transposed, quantised), of matrices."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: Scaling
    ) -> tuple[torch.Tensor, ...]:
        x8, x_scale, *x_turned = quantize_both(x, E4M3, scaling == "row")
        weight8, weight_scale, *weight_turned = quantize_both(weight, E4M3, scaling == "row")
        out = scaled_mm(x8, x_scale, weight8.t(), weight_scale.t(), x.dtype, bias, fast_accumulation=True)
        return (out, *x_turned, *weight_turned)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        x, weight, bias, ctx.scaling = inputs
        ctx.set_materialize_grads(False)  # of the quantised operands there are none
        ctx.save_for_backward(*output[1:])
        ctx.dtypes = [None if value is None else value.dtype for value in (x, weight, bias)]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[torch.Tensor | None, ...]:
        cotangent = cotangents[0]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        x_grad = weight_grad = bias_grad = None
        if cotangent is None:
            return x_grad, weight_grad, bias_grad, None
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        values, scale, turned, turned_scale = quantize_both(cotangent, E5M2, ctx.scaling == "row")
        if ctx.needs_input_grad[0]:
            x_grad = scaled_mm(values, scale, weight8.t(), weight_scale.t(), x_dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = scaled_mm(turned, turned_scale, x8.t(), x_scale.t(), weight_dtype)
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
        if empty or b.dtype != E4M3 or not has_units(a.device):
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
