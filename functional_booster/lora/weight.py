"""LoraWeight: a weight with adapters, which any model that calls torch obeys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as torch_pytree

from functional_booster.kernels import random, tree
from functional_booster.precision import fp8
from functional_booster.sharding.collectives import axis_index, leave

from .quantized_weight import QuantizedRows, QuantizedWeight

# What a weight has in common with its base. Other attributes and methods are the merged weight's.
_DESCRIPTIONS = frozenset(
    "shape dtype device ndim layout requires_grad is_leaf is_cuda is_meta dim size numel stride element_size "
    "get_device is_floating_point is_complex is_inference is_contiguous __len__".split()
)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank change ``B @ A * scaling`` of rows ``start`` to ``start + len(B)`` of a weight (out, into).

    A (R, into), B (rows, R); of a table (V, D) it is the change of the transposed table. ``magnitude`` (rows,), with
    DoRA, is the norm that the rows are given (Liu et al. 2024, "DoRA"). With a ``key``, the adapter's input is dropped
    at ``dropout``. ``split``: the side of the weight, "out" or "into", of which this rank of "tp" has a part;
    ``inputs``: how many the whole weight has. (Hu et al. 2021, "LoRA".)
    """

    A: Any
    B: Any
    magnitude: Any = None
    key: Any = None
    scaling: float = 1.0
    dropout: float = 0.0
    start: int = 0
    split: str | None = None
    inputs: int = 0


tree.register(Adapter, ("A", "B", "magnitude", "key"), ("scaling", "dropout", "start", "split", "inputs"))


@dataclass(frozen=True, eq=False)
class LoraWeight:
    """A frozen weight and its adapters; a node of the tree.

    ``F.linear`` with it as the weight, ``x @ w`` and ``torch.addmm(bias, x, w)`` of it as the (into, out) right factor,
    and ``F.embedding`` in it, add the adapters' products to the base's. Its transpose, another dtype of it, and the
    concatenation of such weights along dim 0 are such weights again. All else sees ``merged()``, a plain tensor.
    ``base``: a tensor, an Fp8Weight or a QuantizedWeight; ``is_transposed``: it is (into, out); ``is_embedding``: it is
    a table (V, D).
    """

    base: Any
    adapters: tuple[Adapter, ...]
    is_transposed: bool = False
    is_embedding: bool = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        # Attributes that are tensors, but for transposes, are none that a layer asks of its weight.
        describes = getattr(func, "__name__", "") in (*_DESCRIPTIONS, "__get__")
        seen = _described if describes else plain
        args, kwargs = torch_pytree.tree_map(seen, (args, kwargs or {}), is_leaf=is_weight)
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in type(self).__dataclass_fields__:  # protocols: copying, pickling
            raise AttributeError(name)
        return getattr(self.stand_in() if name in _DESCRIPTIONS else self.merged(), name)

    def __len__(self) -> int:
        return self.base.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.merged()[index]

    @property
    def T(self) -> LoraWeight:
        return self.t()

    @property
    def mT(self) -> LoraWeight:
        return self.t()

    def t(self) -> LoraWeight:
        """The transposed weight."""
        return replace(self, base=self.base.t(), is_transposed=not self.is_transposed)

    def transpose(self, dim0: int, dim1: int) -> LoraWeight:
        """The weight with these dims exchanged."""
        return self if dim0 % 2 == dim1 % 2 else self.t()

    def to(self, dtype: torch.dtype) -> LoraWeight:
        """The weight in another dtype."""
        return replace(self, base=self.base.to(dtype))

    def stand_in(self) -> torch.Tensor:
        """A tensor that is like the base in all but perhaps its values, for modules, which can hold nothing else."""
        base = fp8.plain(self.base)
        if isinstance(base, (QuantizedWeight, QuantizedRows)):
            return torch.empty((), dtype=base.dtype, device=base.device).expand(base.shape)
        return base

    def merged(self) -> torch.Tensor:
        """The weight that the layer multiplies with, as one plain tensor of the base's shape and dtype.

        Raises ValueError where the adapters' inputs are dropped: no weight does that.
        """
        base = _dense(self.base)
        rows = whole = base.t() if self.is_transposed or self.is_embedding else base
        for adapter in self.adapters:
            if adapter.key is not None and adapter.dropout > 0:
                raise ValueError("a weight with adapters and dropout is used by more than a linear layer or a lookup")
            own = whole[adapter.start : adapter.start + len(adapter.B)]
            change = _delta(adapter, own.dtype)
            if adapter.magnitude is not None:
                change = (own + change) * _factor(adapter, own) - own
            rows = rows + _placed(change.t(), adapter.start, len(rows)).t()
        return rows.t() if self.is_transposed or self.is_embedding else rows


tree.register(LoraWeight, ("base", "adapters"), ("is_transposed", "is_embedding"))


def plain(value: Any) -> Any:
    """The merged tensor of a LoraWeight; anything else as it is."""
    return value.merged() if isinstance(value, LoraWeight) else value


def is_weight(value: Any) -> bool:
    """Whether this is a LoraWeight."""
    return isinstance(value, LoraWeight)


def _described(value: Any) -> Any:
    return value.stand_in() if is_weight(value) else value


def _dense(base: Any) -> torch.Tensor:
    return base.dense() if isinstance(base, (QuantizedWeight, QuantizedRows)) else fp8.plain(base)


def _delta(adapter: Adapter, dtype: torch.dtype) -> torch.Tensor:
    return (adapter.B.to(dtype) @ adapter.A.to(dtype)) * adapter.scaling


def _factor(adapter: Adapter, rows: torch.Tensor) -> torch.Tensor:
    """What DoRA multiplies the changed rows with, (rows, 1); their norm counts as a constant (DoRA, section 4.3)."""
    adapted = rows.detach() + _delta(adapter, rows.dtype).detach()
    if adapter.split == "into":
        norm = leave(adapted.square().sum(1), "tp").sqrt()
    else:
        norm = torch.linalg.norm(adapted, dim=1)
        norm = torch.where(norm > 0, norm, 1.0) if adapter.split else norm  # rows that only pad
    return (adapter.magnitude.to(rows.dtype) / norm)[:, None]


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not is_weight(weight) or weight.is_transposed or weight.is_embedding:
        return NotImplemented
    if isinstance(weight.base, (QuantizedWeight, QuantizedRows)):
        out = weight.base.linear(input)
        out = out if bias is None else out + bias
    else:
        out = F.linear(input, weight.base, bias)
    for adapter in weight.adapters:
        out = out + _placed(_change(input, weight.base, adapter).to(out.dtype), adapter.start, out.shape[-1])
    return out


def _change(input: torch.Tensor, base: Any, adapter: Adapter) -> torch.Tensor:
    """What the adapter adds to the base's product with the input, (..., rows)."""
    dropped = input
    if adapter.key is not None and adapter.dropout > 0:
        dropped = _dropout(input, adapter)
    hidden = F.linear(dropped, adapter.A.to(input.dtype))
    low = F.linear(hidden, adapter.B.to(input.dtype)) * adapter.scaling
    if adapter.magnitude is None:
        return low
    rows = _dense(base).to(input.dtype)[adapter.start : adapter.start + len(adapter.B)]
    factor = _factor(adapter, rows).view(-1)
    return (factor - 1) * F.linear(dropped, rows) + factor * low


def _dropout(input: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """Dropout of the adapter's input (..., into): where a rank has a part of it, what one device drops there."""
    if adapter.split != "into":
        return random.dropout(input, adapter.dropout, adapter.key)
    first = axis_index("tp").to(input.device, torch.int64) * input.shape[-1]
    whole = (*input.shape[:-1], adapter.inputs)
    start = (*[0] * (input.dim() - 1), first)
    return random.dropout(input, adapter.dropout, adapter.key, global_shape=whole, start=start)


def _placed(values: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """Values (..., N) in a row of ``width`` that is zero elsewhere."""
    after = width - start - values.shape[-1]
    return F.pad(values, (start, after)) if start or after else values


def _matmul(input: Any, other: Any) -> Any:
    return _linear(input, other.t()) if is_weight(other) else NotImplemented


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """The (into, out) layer with a bias that is one row; beta and alpha other than 1 are no layer."""
    is_layer = is_weight(mat2) and input.dim() == 1 and (beta, alpha) == (1, 1) and len(input) == mat2.shape[1]
    return _linear(mat1, mat2.t(), input) if is_layer else NotImplemented


def _embedding(input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_weight(weight) or not weight.is_embedding:
        return NotImplemented
    out = found = F.embedding(input, _dense(weight.base), *args, **kwargs)
    for adapter in weight.adapters:
        hidden = F.embedding(input, adapter.A.to(found.dtype).t(), *args, **kwargs)
        low = hidden @ adapter.B.to(found.dtype).t() * adapter.scaling
        if adapter.magnitude is None:
            out = out + low
        else:
            factor = _factor(adapter, _dense(weight.base).t().to(found.dtype)).view(-1)
            out = out + (factor - 1) * found + factor * low
    return out


def _cat(tensors: Any, dim: int = 0) -> Any:
    if dim not in (0, -2) or any(is_weight(one) and (one.is_transposed or one.is_embedding) for one in tensors):
        return NotImplemented
    bases, adapters, start = [], [], 0
    for one in tensors:
        bases.append(one.base if is_weight(one) else one)
        own = one.adapters if is_weight(one) else ()
        adapters += [replace(adapter, start=adapter.start + start) for adapter in own]
        start += one.shape[0]
    is_quantized = any(isinstance(base, QuantizedWeight) for base in bases)
    return LoraWeight(QuantizedRows(tuple(bases)) if is_quantized else torch.cat(bases), tuple(adapters))


def _transposed(input: Any, *dims: int) -> Any:
    return input.transpose(*dims) if dims else input.t()


def _to(input: Any, *args: Any, **kwargs: Any) -> Any:
    return replace(input, base=input.base.to(*args, **kwargs))


def _turned(input: Any, *_: Any) -> Any:
    return input.t()


_Tensor = torch.Tensor
_VIEWS = (_Tensor.T.__get__, _Tensor.mT.__get__)  # type: ignore[attr-defined]
_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    **dict.fromkeys((torch.matmul, torch.mm, _Tensor.matmul, _Tensor.mm, _Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.addmm, _Tensor.addmm), _addmm),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
    **dict.fromkeys((torch.t, torch.transpose, _Tensor.t, _Tensor.transpose), _transposed),
    **dict.fromkeys(_VIEWS, _turned),
    _Tensor.to: _to,
}


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: LoraWeight, *args: Any) -> Any:
        return getattr(self.merged(), name)(*map(plain, args))

    return apply


# Python looks operators up on the class, past __getattr__.
for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul neg pos abs "
    "eq ne lt le gt ge iter bool float int contains"
).split():
    setattr(LoraWeight, f"__{_name}__", _operator(f"__{_name}__"))
