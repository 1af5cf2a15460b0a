"""QuantizedWeight: a frozen weight that is stored in few bits and dequantized where it is used. (QLoRA, Dettmers et al.
2023.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from functional_booster.kernels import graph, int8, nf4, tree
from functional_booster.sharding.abstract import ArrayInfo

# Each has ``quantize(x) -> Quantized``, ``dequantize(Quantized, shape, dtype)`` and ``described(shape)``.
CODECS: Mapping[str, Any] = {"nf4": nf4, "int8": int8}


def codec_of(quantize: bool | str) -> str | None:
    """The name of a codec, None for False; True is NF4. Raises ValueError for another."""
    chosen = {True: "nf4", False: None}.get(quantize, quantize)  # type: ignore[call-overload]
    if chosen is not None and chosen not in CODECS:
        raise ValueError(f"quantize: {quantize!r}, expected True or one of {', '.join(map(repr, CODECS))}")
    return chosen


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A node of the tree, whose leaves are integers: the parts that ``codec`` stores a tensor of the shape ``stored``
    and of ``dtype`` in; with ``is_transposed`` the weight is that tensor's transpose. int8 has no ``steps``."""

    codes: Any
    scales: Any
    steps: Any
    codec: str
    stored: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool = False

    @classmethod
    def of(cls, weight: torch.Tensor, codec: str = "nf4") -> QuantizedWeight:
        """The weight, quantized."""
        return cls.from_parts(CODECS[codec].quantize(weight), codec, tuple(weight.shape), weight.dtype)

    @classmethod
    def described(cls, info: ArrayInfo, codec: str) -> QuantizedWeight:
        """The abstract node of a weight."""
        parts = [ArrayInfo(shape, dtype, trainable=False) for shape, dtype in CODECS[codec].described(info.shape)]
        return cls.from_parts(parts, codec, info.shape, info.dtype)

    @classmethod
    def from_parts(cls, parts: Any, codec: str, stored: tuple[int, ...], dtype: torch.dtype) -> QuantizedWeight:
        """The weight that these parts store."""
        codes, scales, *rest = parts
        return cls(codes, scales, rest[0] if rest else None, codec, stored, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return self.stored[::-1] if self.is_transposed else self.stored

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return self.codes.device

    def t(self) -> QuantizedWeight:
        """The transposed weight."""
        return replace(self, is_transposed=not self.is_transposed)

    def to(self, dtype: torch.dtype) -> QuantizedWeight:
        """The weight that is dequantized to another dtype."""
        return replace(self, dtype=dtype)

    def dense(self) -> torch.Tensor:
        """The plain tensor."""
        stored = _dequantized(self.codes, self.scales, self.steps, self.codec, self.stored, self.dtype)
        return stored.t() if self.is_transposed else stored

    def linear(self, input: torch.Tensor) -> torch.Tensor:
        """(..., into) -> (..., out): the product with the weight (out, into), in the input's dtype.

        Backward dequantizes again, so that no dense weight is kept.
        """
        parts = self.codes, self.scales, self.steps
        return _Linear.apply(input, *parts, self.codec, self.stored, self.is_transposed)


tree.register(QuantizedWeight, ("codes", "scales", "steps"), ("codec", "stored", "dtype", "is_transposed"))


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Weights one below the other, of which some are a QuantizedWeight."""

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of all together."""
        return sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        """That of the first."""
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        """That of the first."""
        return self.parts[0].device

    def t(self) -> torch.Tensor:
        """The transposed weight, dense."""
        return self.dense().t()

    def to(self, dtype: torch.dtype) -> QuantizedRows:
        """The weights in another dtype."""
        return QuantizedRows(tuple(part.to(dtype) for part in self.parts))

    def dense(self) -> torch.Tensor:
        """The plain tensor."""
        return torch.cat([part.dense() if isinstance(part, QuantizedWeight) else part for part in self.parts])

    def linear(self, input: torch.Tensor) -> torch.Tensor:
        """(..., into) -> (..., out): the products side by side."""
        products = [
            part.linear(input) if isinstance(part, QuantizedWeight) else F.linear(input, part) for part in self.parts
        ]
        return torch.cat(products, dim=-1)


class _Linear(torch.autograd.Function):
    """Forward: x @ w.T; backward: dy @ w. The weight is frozen."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        steps: torch.Tensor | None,
        codec: str,
        shape: tuple[int, ...],
        is_transposed: bool,
    ) -> torch.Tensor:
        weight = _dequantized(codes, scales, steps, codec, shape, input.dtype)
        return F.linear(input, weight.t() if is_transposed else weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, *parts, ctx.codec, ctx.shape, ctx.is_transposed = inputs
        ctx.save_for_backward(*parts)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes, scales, steps = ctx.saved_tensors
        if graph.is_tracing():  # else the compiler would find the forward's dense weight again and keep it
            codes = torch.ops.functional_booster_remat.barrier(codes, cotangent)
        product = _Linear.apply(cotangent, codes, scales, steps, ctx.codec, ctx.shape, not ctx.is_transposed)
        return product, None, None, None, None, None, None


def _dequantized(
    codes: torch.Tensor,
    scales: torch.Tensor,
    steps: torch.Tensor | None,
    codec: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    kernel = CODECS[codec]
    parts = kernel.Quantized(codes, scales) if steps is None else kernel.Quantized(codes, scales, steps)
    return kernel.dequantize(parts, shape, dtype)
