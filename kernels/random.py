"""Random numbers as pure functions of a key (public as ``fb.random``), after ``jax.random``.

A key is an int32 tensor of shape (2,): a value like any other, to be split or folded, never used twice. A draw is a
function of key and shape alone: the same bits on CPU and GPU, eager, traced and under vmap (normals to rounding).

A shard of a draw is drawn by itself: with ``global_shape`` and ``start`` (the offset in each dim, an int or an integer
0-d tensor, which vmap may batch) a draw of ``shape`` equals that slice of the draw of ``global_shape``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from . import threefry

Shape: TypeAlias = Sequence[int]
Start: TypeAlias = Sequence[int | torch.Tensor]

# The stream of a key, in words: draws use those from 0 on, and further digits of a draw those from 2**61 on; keys made
# by split and by fold_in stand where no draw reaches, so that a key's draws and its children are independent.
_LOW_DIGITS = 2**61
_SPLIT = 2**62
_FOLD = -(2**63)
_FOLDED_BITS = 62


def key(seed: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The key of a seed, int32 (2,): any integer, taken modulo 2**64. Raises TypeError for another type."""
    if isinstance(seed, bool):
        raise TypeError("seed: expected an integer, got bool")
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed: expected an integer, got {type(seed).__name__}") from None
    return torch.tensor([_as_int32(number), _as_int32(number >> 32)], dtype=torch.int32, device=device)


def split(key: torch.Tensor, num: int = 2) -> torch.Tensor:
    """``num`` keys, int32 (num, 2), independent of each other and of the draws of ``key``, which is then used up."""
    _check_key(key)
    _check_shape("num", (num,))
    return threefry.bits(key, None, _SPLIT, (num, 2), (2, 1), 32)


def fold_in(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    """The key int32 (2,) for ``key`` and a number (step, rank, layer): an int or integer 0-d tensor, modulo 2**62."""
    _check_key(key)
    if isinstance(data, torch.Tensor):
        if data.dim() or not _is_integer(data):
            given = f"{data.dtype} of shape {tuple(data.shape)}"
            raise TypeError(f"data: expected an int or an integer 0-d tensor, got {given}")
        number = data.to(key.device, torch.int64) & (1 << _FOLDED_BITS) - 1
        return threefry.bits(key, number * 2, _FOLD, (2,), (1,), 32)
    if isinstance(data, bool) or not hasattr(data, "__index__"):
        raise TypeError(f"data: expected an int or an integer 0-d tensor, got {type(data).__name__}")
    number = operator.index(data) % (1 << _FOLDED_BITS)
    return threefry.bits(key, None, _FOLD + 2 * number, (2,), (1,), 32)


def bits(
    key: torch.Tensor, shape: Shape = (), *, global_shape: Shape | None = None, start: Start | None = None
) -> torch.Tensor:
    """Uniform bits, int32 of ``shape``."""
    return _draw(key, shape, global_shape, start)


def uniform(
    key: torch.Tensor,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    minval: float = 0.0,
    maxval: float = 1.0,
    *,
    global_shape: Shape | None = None,
    start: Start | None = None,
) -> torch.Tensor:
    """Uniform in [minval, maxval), of ``shape`` and a floating-point ``dtype``.

    The unit draw is a multiple of 2**-d, d the digits of dtype (53, 24, 11, 8); all dtypes share the leading digits.
    """
    _check_float(dtype)
    if not minval < maxval:
        raise ValueError(f"uniform: minval {minval} is not below maxval {maxval}")
    digits = _digits(dtype)
    if dtype == torch.float64:
        fraction = (_wide(key, shape, global_shape, start) >> 64 - digits) & (1 << digits) - 1
    else:
        fraction = (_draw(key, shape, global_shape, start) >> 32 - digits) & (1 << digits) - 1
    unit = fraction.to(dtype) * 2.0**-digits
    if (minval, maxval) == (0.0, 1.0):
        return unit
    info = torch.finfo(dtype)
    below = max(minval, maxval - max(abs(maxval) * info.eps, info.tiny))  # rounding must not reach maxval
    return (unit * (maxval - minval) + minval).clamp(max=below)


def normal(
    key: torch.Tensor,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    *,
    global_shape: Shape | None = None,
    start: Start | None = None,
) -> torch.Tensor:
    """Standard normal, of ``shape`` and a floating-point ``dtype``, by inversion; float16 and bfloat16 round float32.

    Within 5.4 standard deviations in float32 (24 random bits), 8.3 in float64.
    """
    _check_float(dtype)
    return (torch.erfinv(_symmetric(key, shape, dtype, global_shape, start)) * math.sqrt(2.0)).to(dtype)


def truncated_normal(
    key: torch.Tensor,
    lower: float,
    upper: float,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    *,
    global_shape: Shape | None = None,
    start: Start | None = None,
) -> torch.Tensor:
    """Standard normal given that it lies in [lower, upper], of ``shape`` and a floating-point ``dtype``."""
    _check_float(dtype)
    if not lower < upper:
        raise ValueError(f"truncated_normal: lower {lower} is not below upper {upper}")
    low, high = math.erf(lower / math.sqrt(2.0)), math.erf(upper / math.sqrt(2.0))
    draw = _symmetric(key, shape, dtype, global_shape, start)
    inside = 1.0 - torch.finfo(draw.dtype).eps / 2
    quantile = (draw * ((high - low) / 2) + (high + low) / 2).clamp(-inside, inside)
    return (torch.erfinv(quantile) * math.sqrt(2.0)).clamp(lower, upper).to(dtype)


def bernoulli(
    key: torch.Tensor,
    p: float | torch.Tensor = 0.5,
    shape: Shape | None = None,
    *,
    global_shape: Shape | None = None,
    start: Start | None = None,
) -> torch.Tensor:
    """True with probability ``p`` (to 2**-24), bool of ``shape``; by default the shape of ``p``, which is broadcast."""
    if not isinstance(p, torch.Tensor):
        _check_probability("bernoulli", p)
    if shape is None:
        shape = tuple(p.shape) if isinstance(p, torch.Tensor) else ()
    return uniform(key, shape, global_shape=global_shape, start=start) < p


def randint(
    key: torch.Tensor,
    shape: Shape,
    minval: int,
    maxval: int,
    dtype: torch.dtype = torch.int64,
    *,
    global_shape: Shape | None = None,
    start: Start | None = None,
) -> torch.Tensor:
    """Uniform integers in [minval, maxval), of ``shape``; the bias is below (maxval - minval) / 2**63."""
    info = torch.iinfo(dtype)
    if not info.min <= minval < maxval <= info.max + 1:
        raise ValueError(f"randint: [{minval}, {maxval}) is empty or does not fit {dtype}")
    if maxval - minval >= 2**63:
        raise ValueError(f"randint: [{minval}, {maxval}) holds 2**63 integers or more")
    number = _wide(key, shape, global_shape, start) & 2**63 - 1
    return (number % (maxval - minval) + minval).to(dtype)


def permutation(key: torch.Tensor, x: int | torch.Tensor) -> torch.Tensor:
    """A random order of 0..x-1, int64 (x,), or the tensor ``x`` in a random order along dim 0."""
    if isinstance(x, torch.Tensor) and x.dim() == 0:
        raise ValueError("permutation: x has no dim to permute, it is a 0-d tensor")
    count = x.shape[0] if isinstance(x, torch.Tensor) else x
    order = torch.argsort(_wide(key, (count,), None, None), stable=True)
    return x[order] if isinstance(x, torch.Tensor) else order


def categorical(
    key: torch.Tensor,
    logits: torch.Tensor,
    dim: int = -1,
    *,
    global_shape: Shape | None = None,
    start: Start | None = None,
) -> torch.Tensor:
    """A class by its unnormalised log-probabilities: logits (..., V) -> int64 (...), V at ``dim``; -inf is never taken.

    The first of independent exponential clocks to ring, which is the Gumbel trick; ``global_shape`` is that of logits.
    """
    word = _draw(key, logits.shape, global_shape, start).to(torch.int64) & 2**32 - 1
    # In floating point the small values, which decide, keep their relative precision; the largest must stay below 1.
    unit = ((word.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return torch.argmax(logits - torch.log(-torch.log1p(-unit)), dim)


def dropout(
    x: torch.Tensor,
    p: float,
    key: torch.Tensor,
    *,
    global_shape: Shape | None = None,
    start: Start | None = None,
) -> torch.Tensor:
    """Zero each element with probability ``p`` and scale the others by 1 / (1 - p), so that the mean stays.

    ``p``, in [0, 1], is taken to the nearest multiple of 2**-16, and the scale fits that value exactly. Backward keeps
    one byte an element. ``global_shape`` and ``start`` place ``x`` in the whole activation. (Srivastava et al., 2014.)
    """
    if not x.is_floating_point():
        raise TypeError(f"dropout: x must be floating-point, got {x.dtype}")
    _check_probability("dropout", p)
    dropped = round(p * 2**16)
    if dropped == 0:
        return x
    keep = _draw(key, x.shape, global_shape, start, width=16) > dropped - 2**15 - 1
    scale = 2**16 / (2**16 - dropped) if dropped < 2**16 else 0.0
    return x * keep * scale  # torch.where is several times slower on CPU, where it is not vectorised


def _draw(
    key: torch.Tensor, shape: Shape, global_shape: Shape | None, start: Start | None, base: int = 0, width: int = 32
) -> torch.Tensor:
    """The elements of ``width`` bits from ``base`` on, at the positions of a draw of ``shape``."""
    _check_key(key)
    _check_shape("shape", shape)
    if global_shape is None:
        if start is not None:
            raise ValueError("start: needs global_shape, the shape of the whole draw")
        return threefry.bits(key, None, base, tuple(shape), _strides(shape), width)
    _check_shape("global_shape", global_shape)
    start = (0,) * len(shape) if start is None else start
    if not len(shape) == len(global_shape) == len(start):
        raise ValueError(
            f"a draw of {len(shape)} dims needs as many in global_shape and start, "
            f"got {len(global_shape)} and {len(start)}"
        )
    strides, offset = _strides(global_shape), None
    for dim, (begin, size, whole, stride) in enumerate(zip(start, shape, global_shape, strides, strict=True)):
        if isinstance(begin, torch.Tensor):
            if begin.dim() or not _is_integer(begin):
                raise TypeError(
                    f"start[{dim}]: expected an int or an integer 0-d tensor, got shape {tuple(begin.shape)}"
                )
            term = begin.to(key.device, torch.int64) * stride
            offset = term if offset is None else offset + term
            begin = 0
        else:
            base += begin * stride
        if begin < 0 or begin + size > whole:
            raise ValueError(
                f"dim {dim}: a draw of {size} from {begin} on does not lie in global_shape {tuple(global_shape)}"
            )
    return threefry.bits(key, offset, base, tuple(shape), strides, width)


def _wide(key: torch.Tensor, shape: Shape, global_shape: Shape | None, start: Start | None) -> torch.Tensor:
    """64 random bits an element, int64: the word of ``_draw`` is the high half."""
    high = _draw(key, shape, global_shape, start).to(torch.int64)
    low = _draw(key, shape, global_shape, start, base=_LOW_DIGITS).to(torch.int64)
    return high << 32 | low & 2**32 - 1


def _symmetric(
    key: torch.Tensor, shape: Shape, dtype: torch.dtype, global_shape: Shape | None, start: Start | None
) -> torch.Tensor:
    """Uniform in (-1, 1), symmetric, never 0: float64 for float64, else float32."""
    if dtype == torch.float64:
        return ((_wide(key, shape, global_shape, start) >> 11).to(torch.float64) + 0.5) * 2.0**-52
    return ((_draw(key, shape, global_shape, start) >> 8).to(torch.float32) + 0.5) * 2.0**-23


def _strides(shape: Shape) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides[: len(shape)])


def _digits(dtype: torch.dtype) -> int:
    """Binary digits of the significand, the implicit one counted."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _as_int32(number: int) -> int:
    number &= 2**32 - 1
    return number - 2**32 if number >= 2**31 else number


def _is_integer(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _check_key(key: Any) -> None:
    if not isinstance(key, torch.Tensor) or key.dtype != torch.int32 or tuple(key.shape) != (2,):
        given = f"{key.dtype} of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else type(key).__name__
        raise TypeError(f"key: expected int32 of shape (2,), as fb.random.key makes it, got {given}")


def _check_shape(name: str, shape: Any) -> None:
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"{name}: expected a tuple of sizes, got {type(shape).__name__}")
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
            raise TypeError(f"{name}: expected integer sizes, got {shape!r}")
        if size < 0:
            raise ValueError(f"{name}: a size is negative in {shape!r}")


def _check_float(dtype: torch.dtype) -> None:
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"dtype: expected float64, float32, float16 or bfloat16, got {dtype}")


def _check_probability(name: str, p: Any) -> None:
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
        raise ValueError(f"{name}: p must be a number in [0, 1], got {p!r}")
