"""The Triton kernels of ``elementwise_update``: imported at their first use on a GPU, never before.

One kernel; the rule is a function that it is compiled with. A rule gets an element's parameter, scaled gradient and
moments, and the coefficients, float32. Square roots and quotients are rounded as IEEE says: memory is the limit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .threefry_cipher_triton import elements

_BLOCK: int = 1024  # elements of a program
_WARPS: int = 4


def update(
    name: str,
    outputs: tuple[torch.Tensor | None, ...],
    param: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor | None,
    copy: torch.Tensor | None,
    coefficients: torch.Tensor,
    keep: torch.Tensor | None,
    key: torch.Tensor | None,
    decayed: bool,
) -> None:
    """Fill ``outputs``, which may be the buffers themselves; all are contiguous."""
    size = param.numel()
    if size == 0:
        return
    with torch.cuda.device_of(param):
        _update[(triton.cdiv(size, _BLOCK),)](
            *(param if buffer is None else buffer for buffer in outputs),
            param,
            grad,
            first,
            param if second is None else second,
            param if copy is None else copy,
            coefficients,
            coefficients if keep is None else keep.view(torch.uint8),
            coefficients if key is None else key,
            size,
            RULE=_RULES[name],
            DECAYED=decayed,
            HAS_SECOND=second is not None,
            HAS_COPY=copy is not None,
            HAS_KEEP=keep is not None,
            ROUND_PARAM=key is not None and param.dtype == torch.bfloat16,
            ROUND_COPY=key is not None and copy is not None and copy.dtype == torch.bfloat16,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


@triton.jit
def _at(coefficients_ptr, place: tl.constexpr):
    return tl.load(coefficients_ptr + place).to(tl.float32)


@triton.jit
def _lerp(start, end, weight):
    """As torch.lerp: exact at both ends."""
    step = end - start
    return tl.where(weight < 0.5, start + weight * step, end - step * (1 - weight))


@triton.jit
def _adamw(param, grad, first, second, coefficients_ptr, DECAYED: tl.constexpr):
    first = _lerp(first, grad, _at(coefficients_ptr, 1))
    second = _lerp(second, grad * grad, _at(coefficients_ptr, 2))
    shifted = tl.maximum(second + _at(coefficients_ptr, 5), 1.1754943508222875e-38, tl.PropagateNan.ALL)
    root = tl.sqrt_rn(shifted)
    step = tl.div_rn(first, root * _at(coefficients_ptr, 3) + _at(coefficients_ptr, 4))
    if DECAYED:
        step += _at(coefficients_ptr, 6) * param
    return param + _at(coefficients_ptr, 7) * step, first, second


@triton.jit
def _lion(param, grad, first, second, coefficients_ptr, DECAYED: tl.constexpr):
    toward = _lerp(first, grad, _at(coefficients_ptr, 1))
    sign = tl.where(toward > 0, 1.0, tl.where(toward < 0, -1.0, 0.0))
    step = tl.where(toward == toward, sign, toward)
    if DECAYED:
        step += _at(coefficients_ptr, 3) * param
    return param + _at(coefficients_ptr, 4) * step, _lerp(first, grad, _at(coefficients_ptr, 2)), second


@triton.jit
def _sgd_momentum(param, grad, first, second, coefficients_ptr, DECAYED: tl.constexpr):
    if DECAYED:
        grad += _at(coefficients_ptr, 5) * param
    first = _at(coefficients_ptr, 2) * grad + _at(coefficients_ptr, 1) * first
    step = _at(coefficients_ptr, 3) * grad + _at(coefficients_ptr, 4) * first
    return param + _at(coefficients_ptr, 6) * step, first, second


_RULES = {"adamw": _adamw, "lion": _lion, "sgd_momentum": _sgd_momentum}


@triton.jit
def _by_chance(x, words):
    """float32 in bfloat16, by the low 16 bits of ``words``; what is not finite stays."""
    raw = x.to(tl.int32, bitcast=True)
    rounded = ((raw + (words & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
    finite = (raw & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, x).to(tl.bfloat16)


@triton.jit
def _store(ptr, place, inside, new, old, keep):
    tl.store(ptr + place, tl.where(keep, new, old), mask=inside)


@triton.jit
def _update(
    new_param_ptr,
    new_first_ptr,
    new_second_ptr,
    new_copy_ptr,
    param_ptr,
    grad_ptr,
    first_ptr,
    second_ptr,
    copy_ptr,
    coefficients_ptr,
    keep_ptr,
    key_ptr,
    size,
    RULE: tl.constexpr,
    DECAYED: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    HAS_COPY: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    ROUND_PARAM: tl.constexpr,
    ROUND_COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = start + tl.arange(0, BLOCK)
    inside = place < size
    keep, skip = tl.full((), True, tl.int1), tl.full((), False, tl.int1)
    if HAS_KEEP:
        flag = tl.load(keep_ptr)
        keep, skip = flag != 0, flag == 0

    param = tl.load(param_ptr + place, mask=inside)
    grad = tl.load(grad_ptr + place, mask=inside).to(tl.float32) * _at(coefficients_ptr, 0)
    first = tl.load(first_ptr + place, mask=inside)
    second = first
    if HAS_SECOND:
        second = tl.load(second_ptr + place, mask=inside)
    new_param, new_first, new_second = RULE(
        param.to(tl.float32), grad, first.to(tl.float32), second.to(tl.float32), coefficients_ptr, DECAYED
    )
    _store(new_first_ptr, place, inside, new_first.to(first.dtype), first, keep)
    if HAS_SECOND:
        _store(new_second_ptr, place, inside, new_second.to(second.dtype), second, keep)
    words = tl.zeros((BLOCK,), tl.int32)
    if ROUND_PARAM or ROUND_COPY:
        words = elements(key_ptr, start // 2, BLOCK, 32)
    if ROUND_PARAM:
        _store(new_param_ptr, place, inside, _by_chance(new_param, words), param, keep)
    else:
        _store(new_param_ptr, place, inside, new_param.to(param.dtype), param, keep)
    if HAS_COPY:
        old = tl.load(copy_ptr + place, mask=inside & skip)  # read where nothing else will do
        if ROUND_COPY:
            _store(new_copy_ptr, place, inside, _by_chance(new_param, words), old, keep)
        else:
            _store(new_copy_ptr, place, inside, new_param.to(old.dtype), old, keep)
