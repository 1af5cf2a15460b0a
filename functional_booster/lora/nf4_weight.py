"""Nf4Weight: a frozen weight that is stored in NF4 and dequantized where it is used. (QLoRA, Dettmers et al. 2023.)"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from functional_booster.kernels import graph, nf4, tree
from functional_booster.sharding.abstract import ArrayInfo


@dataclass(frozen=True, eq=False)
class Nf4Weight:
    """A node of the tree, whose leaves are integers: the parts of ``kernels.nf4.Quantized``, of a tensor of the shape
    ``stored`` and of ``dtype``; with ``is_transposed`` the weight is that tensor's transpose."""

    codes: Any
    scales: Any
    steps: Any
    stored: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool = False

    @classmethod
    def of(cls, weight: torch.Tensor) -> Nf4Weight:
        """The weight, quantized."""
        return cls(*nf4.quantize(weight), tuple(weight.shape), weight.dtype)

    @classmethod
    def described(cls, info: ArrayInfo) -> Nf4Weight:
        """The abstract node of a weight."""
        codes, scales, steps = nf4.sizes(info.shape)
        return cls(
            codes=ArrayInfo((codes,), torch.uint8, trainable=False),
            scales=ArrayInfo((scales,), torch.uint8, trainable=False),
            steps=ArrayInfo((steps,), torch.int32, trainable=False),
            stored=info.shape,
            dtype=info.dtype,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return self.stored[::-1] if self.is_transposed else self.stored

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return self.codes.device

    def t(self) -> Nf4Weight:
        """The transposed weight."""
        return replace(self, is_transposed=not self.is_transposed)

    def to(self, dtype: torch.dtype) -> Nf4Weight:
        """The weight that is dequantized to another dtype."""
        return replace(self, dtype=dtype)

    def dense(self) -> torch.Tensor:
        """The plain tensor."""
        parts = nf4.Quantized(self.codes, self.scales, self.steps)
        stored = nf4.dequantize(parts, self.stored, self.dtype)
        return stored.t() if self.is_transposed else stored

    def linear(self, input: torch.Tensor) -> torch.Tensor:
        """(..., into) -> (..., out): the product with the weight (out, into), in the input's dtype.

        Backward dequantizes again, so that no dense weight is kept.
        """
        return _Linear.apply(input, self.codes, self.scales, self.steps, self.stored, self.is_transposed)


tree.register(Nf4Weight, ("codes", "scales", "steps"), ("stored", "dtype", "is_transposed"))


@dataclass(frozen=True, eq=False)
class Nf4Rows:
    """Weights one below the other, of which some are an Nf4Weight."""

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

    def to(self, dtype: torch.dtype) -> Nf4Rows:
        """The weights in another dtype."""
        return Nf4Rows(tuple(part.to(dtype) for part in self.parts))

    def dense(self) -> torch.Tensor:
        """The plain tensor."""
        return torch.cat([part.dense() if isinstance(part, Nf4Weight) else part for part in self.parts])

    def linear(self, input: torch.Tensor) -> torch.Tensor:
        """(..., into) -> (..., out): the products side by side."""
        products = [part.linear(input) if isinstance(part, Nf4Weight) else F.linear(input, part) for part in self.parts]
        return torch.cat(products, dim=-1)


class _Linear(torch.autograd.Function):
    """Forward: x @ w.T; backward: dy @ w. The weight is frozen."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        steps: torch.Tensor,
        shape: tuple[int, ...],
        is_transposed: bool,
    ) -> torch.Tensor:
        weight = nf4.dequantize(nf4.Quantized(codes, scales, steps), shape, input.dtype)
        return F.linear(input, weight.t() if is_transposed else weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, *parts, ctx.shape, ctx.is_transposed = inputs
        ctx.save_for_backward(*parts)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes, scales, steps = ctx.saved_tensors
        if graph.is_tracing():  # else the compiler would find the forward's dense weight again and keep it
            codes = torch.ops.functional_booster_remat.barrier(codes, cotangent)
        product = _Linear.apply(cotangent, codes, scales, steps, ctx.shape, not ctx.is_transposed)
        return product, None, None, None, None, None
