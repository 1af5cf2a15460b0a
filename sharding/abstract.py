"""ArrayInfo: what a leaf is before it holds numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .spec import PartitionSpec

Initializer = Callable[[torch.Tensor, tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class ArrayInfo:
    """A leaf of the abstract tree: global shape, dtype, how it is split, how it is born, and whether it is trained.

    ``initializer(key, shape, dtype) -> Tensor`` makes its value; None for a leaf that only a checkpoint or a module
    fills. An ArrayInfo is a leaf, not a node: trees of them have the structure of the trees they describe.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    spec: PartitionSpec = PartitionSpec()
    initializer: Initializer | None = None
    trainable: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return self.size * self.dtype.itemsize

    @classmethod
    def of(cls, value: Any) -> ArrayInfo:
        """The info of a tensor (anything with a shape and a dtype); an ArrayInfo is returned as it is."""
        return value if isinstance(value, cls) else cls(tuple(value.shape), value.dtype)
