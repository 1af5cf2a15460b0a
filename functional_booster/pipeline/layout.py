"""The storage of a pipeline: buckets that the axis "pp" splits where one rank's leaves end and the next one's begin.

So a state of a pipeline is a state like any other: a rank holds its part of every bucket, norms are taken over parts,
checkpoints know leaves by name, and a state may be loaded into any other layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property

from functional_booster.kernels import flat, tree

Tree = tree.Tree
AXIS = "pp"


@tree.hash_once
@dataclasses.dataclass(frozen=True)
class StagedLayout(flat.Layout):
    """A layout whose buckets have gaps between the leaves of different ranks. ``sizes``: elements of each bucket."""

    sizes: tuple[tuple[str, int], ...] = ()

    @cached_property
    def buckets(self) -> dict[str, tuple[flat.Slot, ...]]:
        """The slots of each bucket, by offset."""
        return {
            name: tuple(sorted(slots, key=lambda slot: slot.offset or 0)) for name, slots in super().buckets.items()
        }

    def size(self, bucket: str) -> int:
        """Elements of a whole bucket, padding included."""
        return dict(self.sizes).get(bucket) or super().size(bucket)


def layout(
    abstract: Tree, labels: Tree, ranks_of: Mapping[str, int], ranks: int, inner: tuple[str, ...], extent: int
) -> StagedLayout:
    """The layout in which leaf ``name`` lies in the part of rank ``ranks_of[name]`` of ``ranks``.

    ``labels`` as for ``flat.plan``. ``inner``: axes of ``extent`` ranks together that split each part further. A leaf
    that the optimizer keeps as it is, and a bucket of which the first rank has no leaf, are stored by all ranks.
    """
    planned = flat.plan(abstract, labels, extent)
    unit = flat.ALIGNMENT * extent
    offsets: dict[str, int] = {}
    sizes, split = [], []
    for bucket, slots in planned.buckets.items():
        own = [[slot for slot in slots if ranks_of[slot.name] == rank] for rank in range(ranks)]
        if slots[0].offset is None or not own[0]:
            continue
        part = max(sum(_rounded(slot.size, flat.ALIGNMENT) for slot in row) for row in own)
        part = _rounded(max(part, 1), unit)
        for rank, row in enumerate(own):
            start = rank * part
            for slot in row:
                offsets[slot.name] = start
                start += _rounded(slot.size, flat.ALIGNMENT)
        sizes.append((bucket, ranks * part))
        split.append((bucket, (AXIS, *inner)))
    slots = tuple(dataclasses.replace(slot, offset=offsets.get(slot.name, slot.offset)) for slot in planned.slots)
    return StagedLayout(planned.structure, slots, extent, tuple(split), sizes=tuple(sizes))


def _rounded(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
