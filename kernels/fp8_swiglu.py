"""A gated MLP in fp8: down(silu(gate(x)) * up(x)), with what lies between the two products quantised where it is made.

(Shazeer 2020, "GLU Variants Improve Transformer".) The numbers are those of ``fp8.linear`` with one scale a tensor,
twice, and of ``silu(gate) * up`` computed in float32 and rounded once, to x's dtype. On a GPU that product, and in the
backward its pullback, are never written but in fp8: as it is and transposed, for the products that follow.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from . import fp8
from .fp8_cast import E4M3, E5M2, EXPONENT, Both, empty_both, has_units, limit, quantize_both, require_float
from .primitive import primitive


def mlp(x: torch.Tensor, gate_and_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x (..., D), gate_and_up (2F, D), gate's rows above, down (E, F) -> (..., E) in x's dtype.

    Under vmap each member of the batch has its own scales. Differentiable once, as ``fp8.linear``. Raises TypeError for
    dtypes that are not floating-point, ValueError for shapes that do not fit.
    """
    for name, value in (("x", x), ("gate_and_up", gate_and_up), ("down", down)):
        require_float(name, value)
    shapes = tuple(map(tuple, (x.shape, gate_and_up.shape, down.shape)))
    fits = x.dim() > 0 and gate_and_up.dim() == down.dim() == 2 and x.shape[-1] == gate_and_up.shape[1]
    if not fits or gate_and_up.shape[0] != 2 * down.shape[1]:
        raise ValueError(f"x, gate_and_up and down: shapes {shapes}, expected (..., D), (2F, D) and (E, F)")
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return _Mlp.apply(rows, gate_and_up, down)[0].reshape(*x.shape[:-1], down.shape[0])


def swiglu(gated: torch.Tensor) -> torch.Tensor:
    """gate and up side by side (M, 2F) -> silu(gate) * up (M, F), computed in float32 at least."""
    wide = torch.promote_types(gated.dtype, torch.float32)
    gate, up = gated.to(wide).chunk(2, -1)
    return (F.silu(gate) * up).to(gated.dtype)


def swiglu_pullback(gated: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """The cotangent (M, F) of ``swiglu`` -> that of gated (M, 2F)."""
    wide = torch.promote_types(gated.dtype, torch.float32)
    gate, up = gated.to(wide).chunk(2, -1)
    cotangent, sigmoid = cotangent.to(wide), torch.sigmoid(gate)
    to_gate = cotangent * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([to_gate, cotangent * gate * sigmoid], -1).to(gated.dtype)


class _Mlp(torch.autograd.Function):
    """(x, gate_and_up, down) -> (out, what the backward uses), of matrices."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, gate_and_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x8, x_scale, *x_turned = quantize_both(x, E4M3, False)
        first8, first_scale, *first_turned = quantize_both(gate_and_up, E4M3, False)
        gated = fp8.scaled_mm(x8, x_scale, first8.t(), first_scale, x.dtype, fast_accumulation=True)
        inner8, inner_scale, *inner_turned = _cast_swiglu(gated)
        second8, second_scale, *second_turned = quantize_both(down, E4M3, False)
        out = fp8.scaled_mm(inner8, inner_scale, second8.t(), second_scale, x.dtype, fast_accumulation=True)
        return (out, gated, *x_turned, *first_turned, *inner_turned, *second_turned)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])
        ctx.dtypes = [value.dtype for value in inputs]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[torch.Tensor | None, ...]:
        cotangent = cotangents[0]
        if cotangent is None:
            return None, None, None
        gated, x8, x_scale, first8, first_scale, inner8, inner_scale, second8, second_scale = ctx.saved_tensors
        x_dtype, first_dtype, second_dtype = ctx.dtypes
        x_wanted, first_wanted, second_wanted = ctx.needs_input_grad
        values, scale, turned, turned_scale = quantize_both(cotangent, E5M2, False)
        x_grad = first_grad = second_grad = None
        if second_wanted:
            second_grad = fp8.scaled_mm(turned, turned_scale, inner8.t(), inner_scale, second_dtype)
        if x_wanted or first_wanted:
            to_inner = fp8.scaled_mm(values, scale, second8.t(), second_scale, x_dtype)
            values, scale, turned, turned_scale = _cast_swiglu_pullback(gated, to_inner)
        if x_wanted:
            x_grad = fp8.scaled_mm(values, scale, first8.t(), first_scale, x_dtype)
        if first_wanted:
            first_grad = fp8.scaled_mm(turned, turned_scale, x8.t(), x_scale, first_dtype)
        return x_grad, first_grad, second_grad


def _by_torch(gated: torch.Tensor) -> Both:
    return quantize_both(swiglu(gated), E4M3, False)


def _pullback_by_torch(gated: torch.Tensor, cotangent: torch.Tensor) -> Both:
    return quantize_both(swiglu_pullback(gated, cotangent), E5M2, False)


def _on_cuda(gated: torch.Tensor) -> Both:
    if (kernels := _kernels(gated)) is None:
        return _by_torch(gated)
    out = _empty(gated)
    kernels.cast(out, gated.contiguous(), None, EXPONENT[E4M3], limit(E4M3), has_units(gated.device))
    return out


def _pullback_on_cuda(gated: torch.Tensor, cotangent: torch.Tensor) -> Both:
    if (kernels := _kernels(gated)) is None:
        return _pullback_by_torch(gated, cotangent)
    out = _empty_pullback(gated, cotangent)
    arguments = (EXPONENT[E5M2], limit(E5M2), has_units(gated.device))
    kernels.cast(out, gated.contiguous(), cotangent.contiguous(), *arguments)
    return out


def _empty(gated: torch.Tensor) -> Both:
    return empty_both(gated, gated.shape[0], gated.shape[1] // 2, E4M3, False)


def _empty_pullback(gated: torch.Tensor, cotangent: torch.Tensor) -> Both:
    return empty_both(gated, gated.shape[0], gated.shape[1], E5M2, False)


def _kernels(gated: torch.Tensor) -> Any:
    if gated.dtype == torch.float64 or not gated.numel():
        return None
    try:
        from . import fp8_swiglu_triton
    except ModuleNotFoundError:  # torch without triton
        return None
    return fp8_swiglu_triton


_cast_swiglu = primitive(
    "fp8_cast_swiglu",
    "(Tensor gated) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_by_torch,
    cuda=_on_cuda,
    fake=_empty,
)
_cast_swiglu_pullback = primitive(
    "fp8_cast_swiglu_pullback",
    "(Tensor gated, Tensor cotangent) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_pullback_by_torch,
    cuda=_pullback_on_cuda,
    fake=_empty_pullback,
)
