"""ArrayInfo: what a leaf is before it holds numbers; and how a tree of them is born."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from functional_booster.kernels import random, tree

from .spec import PartitionSpec

Initializer = Callable[[torch.Tensor, tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class ArrayInfo:
    """A leaf of the abstract tree: global shape, dtype, how it is split, how it is born, and whether it is trained.

    ``initializer(key, shape, dtype) -> Tensor`` makes its value; None for a leaf that only a checkpoint or a module
    fills. An ArrayInfo is a leaf, not a node: trees of them have the structure of the trees they describe. ``grain``:
    elements of a dim that is split which stay on one rank, such as a head's. ``uneven``: what becomes of the leaf where
    the ranks do not divide its grains: "pad" the last ranks, or "replicate" it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    spec: PartitionSpec = PartitionSpec()
    initializer: Initializer | None = None
    trainable: bool = True
    grain: int = 1
    uneven: str = "pad"

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


@dataclass(frozen=True, eq=False)
class Initialize:
    """``init(key)`` of a tree of ArrayInfo: all of it, or, by ``leaves(key)``, one leaf after the other."""

    abstract: tree.Tree

    def __call__(self, key: torch.Tensor) -> tree.Tree:
        """As ``initialize``."""
        return initialize(self.abstract, key)

    def leaves(self, key: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value) of each leaf, made when it is asked for. Raises as ``initialize``."""
        infos = tree.named_leaves(self.abstract)
        for name, info in infos.items():
            if not isinstance(info, ArrayInfo):
                raise TypeError(f"{name}: expected an ArrayInfo, got {type(info).__name__}")
        if missing := [name for name, info in infos.items() if info.initializer is None]:
            raise ValueError(
                f"no initializer for {', '.join(missing)}: the values must come from a checkpoint or a module"
            )
        for name, info in infos.items():
            yield name, _born(name, info, key)


def initialize(abstract: tree.Tree, key: torch.Tensor) -> tree.Tree:
    """The parameters that a tree of ArrayInfo describes, on the key's device.

    A leaf's value depends on the key and the leaf's name alone, not on the leaves beside it. Raises TypeError for a
    leaf that is no ArrayInfo, and ValueError, naming them, for leaves without initializer or whose initializer makes
    another shape or dtype.
    """
    return tree.unflatten(tree.structure(abstract), [value for _, value in Initialize(abstract).leaves(key)])


def _born(name: str, info: ArrayInfo, key: torch.Tensor) -> torch.Tensor:
    assert info.initializer is not None
    value = info.initializer(random.fold_in(key, zlib.crc32(name.encode())), info.shape, info.dtype)
    if tuple(value.shape) != info.shape or value.dtype != info.dtype:
        given = f"{tuple(value.shape)} {value.dtype}"
        raise ValueError(f"{name}: the initializer made {given}, expected {info.shape} {info.dtype}")
    return value
