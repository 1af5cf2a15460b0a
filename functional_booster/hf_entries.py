"""The tensors of a file in Hugging Face's form, and the leaves that each is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from functional_booster.sharding.mesh import Mesh

from .checkpoint.leaves import Leaf
from .models import hf
from .models.hf import Source
from .models.model import Model


@dataclass(frozen=True)
class Entry:
    """A tensor of a file and the leaves that it is made of; ``names``: that it is given, then others it may have.

    ``shape`` and ``dtype`` are those of the file.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Source, Leaf], ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def of_model(model: Model, leaves: Mapping[str, Leaf], dtype: torch.dtype | None = None) -> list[Entry]:
    """Those of an own model, under Hugging Face's names. ``dtype``: of floating-point tensors, None: as stored."""
    return [
        Entry(stored.names, stored.shape, _stored(leaves[stored.parts[0][0]].dtype, dtype), parts)
        for stored in hf.stored_tensors(model)
        for parts in [tuple((source, leaves[name]) for name, source in stored.parts)]
    ]


def of_leaves(
    leaves: Mapping[str, Leaf], names: Mapping[str, str] | None = None, dtype: torch.dtype | None = None
) -> list[Entry]:
    """One for each leaf, under the first of its ``names`` ({name: leaf}, None: its own); dtype as in ``of_model``."""
    aliases: dict[str, list[str]] = {}
    for name, leaf in (names or dict(zip(leaves, leaves, strict=True))).items():
        aliases.setdefault(leaf, []).append(name)
    return [
        Entry(tuple(others), leaves[name].shape, _stored(leaves[name].dtype, dtype), ((Source(name), leaves[name]),))
        for name, others in aliases.items()
    ]


def plain(values: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, Leaf]:
    """Leaves that every rank has whole, one value for all."""
    return {name: Leaf(tuple(value.shape), value, mesh) for name, value in values.items()}


def _stored(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype
