"""What a collective does to numbers on their way: casts them, or sends them as fp8 (``kernels.block_scale``).

Sums are never taken in fp8: the terms travel, and are added in float32 or wider where they arrive, ranks ascending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from functional_booster.kernels.block_scale import decode, decode_sum, encode

Move: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Wire:
    """The dtypes of a collective.

    Of what is ``given``, of its ``result``, and in which sums of what is not compressed are ``summed``. ``forward``
    and ``backward``: the fp8 formats in which values and cotangents travel; None for those that travel as they are.
    """

    given: torch.dtype
    result: torch.dtype
    summed: torch.dtype
    forward: torch.dtype | None = None
    backward: torch.dtype | None = None

    def reversed(self) -> Wire:
        """That of the transpose."""
        return Wire(self.result, self.given, self.summed, self.backward, self.forward)


def carried(x: torch.Tensor, wire: Wire | None = None, *, by: Move = lambda x: x) -> torch.Tensor:
    """``by(x)``, which moves rows (..., n) and changes none, in the result's dtype."""
    if wire is None:
        return by(x)
    x = x.to(wire.result)
    if wire.forward is None:
        return by(x)
    return decode(by(encode(x, wire.forward)), x.shape[-1], wire.forward, wire.result)


def summed(
    x: torch.Tensor,
    wire: Wire | None = None,
    *,
    by: Move = lambda x: x.sum(0, dtype=x.dtype),
    exchange: Move = lambda x: x,
) -> torch.Tensor:
    """The sums over ranks of x (ranks, ..., n), in the result's dtype.

    ``by`` sums; ``exchange`` brings together the terms of this rank's sum, along dim 0.
    """
    if wire is None:
        return by(x)
    if wire.forward is None:
        return by(x.to(wire.summed)).to(wire.result)
    return decode_sum(exchange(encode(x, wire.forward)), x.shape[-1], wire.forward, wire.result)


def exactly(x: torch.Tensor, wire: Wire | None = None) -> torch.Tensor:
    """What is sent to nobody: cast alone."""
    return x if wire is None else x.to(wire.result)
