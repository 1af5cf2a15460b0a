"""Optimizer updates in one pass over a flat buffer: gradient, moments, parameter in; moments, parameter, copy out.

A rule (``adamw``, ``lion``, ``sgd_momentum``) says what becomes of one element; what all have in common stands here::

    g                    = factor * grad                          unscaling, clipping and averaging in one number
    param', first', ...  = rule(param, g, first, second)          in float32 at least
    copy'                = param', rounded                        the low-precision copy, if there is one
    all'                 = all, where ``keep`` is False           nothing changes, to the bit

With a key what is stored in bfloat16 of the parameter is rounded by chance (Gupta et al. 2015, 3.1), element i by word
i of the key's stream. On a GPU a Triton kernel reads and writes each buffer once; elsewhere, and in float64, this is
plain torch, open to the compiler. Under a donating jit the kernel writes in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .in_place import Twin, twins
from .primitive import NAMESPACE, primitive
from .threefry import bits

Scalar: TypeAlias = float | torch.Tensor  # a number or 0-d tensor
# (param, gradient, first, second or None, coefficients, decayed) -> (param, first, second or None)
Rule: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]

_WRITTEN = (0, 2, 3, 4)  # the arguments of a raw op that its results replace
_KEPT = -(1 << 16)  # the bits of a float32 that a bfloat16 has
_ARGUMENTS = (
    "(Tensor{a} param, Tensor grad, Tensor{b} first, Tensor{c}? second, Tensor{d}? copy, Tensor coefficients, "
    "Tensor? keep, Tensor? key, bool decayed)"
)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


class Buffers(NamedTuple):
    """What an optimizer keeps of some parameters: buffers of one shape, None for what there is not."""

    param: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor | None = None
    copy: torch.Tensor | None = None  # the parameter in the dtype that it is computed with


def updater(name: str, rule: Rule) -> Callable[..., Buffers]:
    """Register the raw op of a rule, its in-place twin and its batching; gives the function that updates buffers.

    ``update(buffers, grad, coefficients, keep=None, key=None, decayed=False) -> Buffers``. ``coefficients``: factor,
    then the rule's. Not differentiable: the chain of transformations that the rule stands for is. Raises TypeError for
    a key with nothing in bfloat16 to round and for a copy in the parameter's dtype, ValueError for buffers of different
    shapes.
    """
    reference = functools.partial(_reference, rule)
    by_kernel = primitive(
        name,
        _ARGUMENTS.format(a="", b="", c="", d="") + " -> (Tensor, Tensor, Tensor, Tensor)",
        reference=reference,
        cuda=functools.partial(_on_cuda, name, reference),
        fake=_empty,
    )
    mutating = f"{name}_"
    _library.define(mutating + _ARGUMENTS.format(a="(a!)", b="(b!)", c="(c!)", d="(d!)") + " -> ()")
    _library.impl(mutating, functools.partial(_written, reference), "CompositeExplicitAutograd")
    _library.impl(mutating, functools.partial(_written_on_cuda, name, reference), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{mutating}", lambda *_: None, lib=_library)
    ops = getattr(torch.ops, NAMESPACE)
    twins[getattr(ops, name).default] = Twin(getattr(ops, mutating).default, _WRITTEN)

    def update(
        buffers: Buffers,
        grad: torch.Tensor,
        coefficients: Sequence[Scalar],
        keep: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        decayed: bool = False,
    ) -> Buffers:
        _check(buffers, grad, key)
        if not _is_for_kernel(buffers, grad):
            return by_torch(rule, buffers, grad, coefficients, keep, key, decayed)
        param = buffers.param
        new = by_kernel(
            param, grad, *buffers[1:], stacked(coefficients, param.device), _at(keep, param), _at(key, param), decayed
        )
        return _each(lambda after, _: after, Buffers(*new), buffers)

    return update


def by_torch(
    rule: Rule,
    buffers: Buffers,
    grad: torch.Tensor,
    coefficients: Sequence[Scalar],
    keep: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    decayed: bool = False,
) -> Buffers:
    """An update in plain torch."""
    present = [buffer for buffer in (*buffers, grad) if buffer is not None]
    dtype = functools.reduce(torch.promote_types, (buffer.dtype for buffer in present), torch.float32)
    wide = _each(lambda buffer: buffer.to(dtype), buffers)
    factor, *rest = (c.to(wide.param.device, dtype) if isinstance(c, torch.Tensor) else c for c in coefficients)
    param, first, second = rule(wide.param, grad.to(dtype) * factor, wide.first, wide.second, rest, decayed)
    new = _each(lambda after, before: after.to(before.dtype), Buffers(param, first, second, param), buffers)
    if key is not None:
        low = [name for name in ("param", "copy") if getattr(new, name) is not None]
        words = drawn(key.to(param.device), param)
        chance = {name: stochastic_round(param, words) for name in low if getattr(new, name).dtype == torch.bfloat16}
        new = new._replace(**chance)
    if keep is None:
        return new
    return _each(lambda after, before: torch.where(keep.to(after.device), after, before), new, buffers)


def _each(fn: Callable[..., torch.Tensor], *several: Buffers) -> Buffers:
    """``fn`` of the buffers that there are in all of them."""
    columns = zip(*several, strict=True)
    parts: list[Any] = [None if any(part is None for part in column) else fn(*column) for column in columns]
    return Buffers(*parts)


def stochastic_round(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """A float32 tensor in bfloat16: one of its two neighbours, the nearer one the likelier, itself where it is one.

    ``bits``: uniform, int32, of x's shape. Infinities and NaN stay; above the largest number it may be infinity.
    """
    raw = x.view(torch.int32)
    rounded = ((raw + (bits & ~_KEPT)) & _KEPT).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def is_zero(value: Scalar) -> bool:
    """Whether it is the number 0; of a tensor's value nothing is known."""
    return not isinstance(value, torch.Tensor) and value == 0


def add_scaled(x: torch.Tensor, y: torch.Tensor, factor: Scalar) -> torch.Tensor:
    """``x + factor * y``, in one pass."""
    return torch.addcmul(x, y, factor) if isinstance(factor, torch.Tensor) else torch.add(x, y, alpha=factor)


def drawn(key: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first words of a key's stream, int32 in the shape of ``like``: ``random.bits(key, like.shape)``."""
    return bits(key, None, 0, (like.numel(),), (1,), 32).view(like.shape)


def stacked(coefficients: Sequence[Scalar], device: torch.device) -> torch.Tensor:
    """Numbers and 0-d tensors as one float64 vector on the device, made there."""
    each = [
        c.to(device, torch.float64)
        if isinstance(c, torch.Tensor)
        else torch.full((), c, dtype=torch.float64, device=device)
        for c in coefficients
    ]
    return torch.stack(each)


def _reference(
    rule: Rule,
    param: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor | None,
    copy: torch.Tensor | None,
    coefficients: torch.Tensor,
    keep: torch.Tensor | None,
    key: torch.Tensor | None,
    decayed: bool,
) -> tuple[torch.Tensor, ...]:
    buffers = Buffers(param, first, second, copy)
    new = by_torch(rule, buffers, grad, coefficients.unbind(), keep, key, decayed)
    return tuple(param.new_empty(0) if buffer is None else buffer for buffer in new)


def _on_cuda(name: str, reference: Callable[..., Any], *args: Any) -> tuple[torch.Tensor, ...]:
    kernels = _kernels()
    if kernels is None:
        return reference(*args)
    args = tuple(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args)
    outputs = _empty(*args)
    kernels.update(name, outputs, *args)
    return outputs


def _written(reference: Callable[..., Any], *args: Any) -> None:
    for place, value in zip(_WRITTEN, reference(*args), strict=True):
        if args[place] is not None:
            args[place].copy_(value)


def _written_on_cuda(name: str, reference: Callable[..., Any], *args: Any) -> None:
    kernels = _kernels()
    buffers = [args[place] for place in _WRITTEN]
    if kernels is None or any(buffer is not None and not buffer.is_contiguous() for buffer in buffers):
        _written(functools.partial(_on_cuda, name, reference), *args)
        return
    args = tuple(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args)
    kernels.update(name, tuple(buffers), *args)


def _empty(
    param: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor | None,
    copy: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    return tuple(
        param.new_empty(0) if buffer is None else buffer.new_empty(buffer.shape)
        for buffer in (param, first, second, copy)
    )


def _is_for_kernel(buffers: Buffers, grad: torch.Tensor) -> bool:
    given = [buffer for buffer in (*buffers, grad) if buffer is not None]
    return all(b.device.type == "cuda" and b.dtype != torch.float64 for b in given) and _kernels() is not None


def _at(value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if value is None else value.to(like.device)


def _check(buffers: Buffers, grad: torch.Tensor, key: torch.Tensor | None) -> None:
    for name, buffer in {"grad": grad, **buffers._asdict()}.items():
        if buffer is not None and buffer.shape != buffers.param.shape:
            raise ValueError(
                f"{name}: shape {tuple(buffer.shape)}, expected the parameter's {tuple(buffers.param.shape)}"
            )
    dtypes = [buffer.dtype for buffer in (buffers.param, buffers.copy) if buffer is not None]
    if len(dtypes) == 2 and dtypes[0] == dtypes[1]:
        raise TypeError(f"copy: {dtypes[1]}, expected another dtype than the parameter's")
    if key is not None and (torch.bfloat16 not in dtypes or torch.float64 in dtypes):
        raise TypeError(f"key: given to round by chance, but the parameter is stored in {dtypes}, not in bfloat16")


def _kernels() -> Any:
    try:
        from . import elementwise_update_triton
    except ModuleNotFoundError:  # torch without triton
        return None
    return elementwise_update_triton
