"""Chunks: buckets of about one size, that units are packed into, and which of them go where. (Fang et al. 2021,
"PatrickStar"; Gemini in Colossal-AI.)"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping

from functional_booster.kernels.flat import Layout


@functools.lru_cache(maxsize=64)
def search(sizes: tuple[int, ...], least: int, span: int, interval: int) -> int:
    """The capacity of a chunk that leaves the least unused when ``sizes`` are packed in order: the most even chunks.

    Among the multiples of ``interval`` from ``least``, or the largest size if that is more, to ``span`` above; the
    smallest of the best. Sizes beyond three standard deviations of the mean, which are chunks by themselves, do not
    count. All in one unit (bytes, elements). What fits into ``least`` altogether is one chunk.
    """
    total = sum(sizes)
    if total <= least:
        return total
    limit = statistics.fmean(sizes) + 3 * statistics.pstdev(sizes)
    usual = [size for size in sizes if size <= limit]
    first = -(-max(least, *usual) // interval) * interval
    return min(range(first, first + span + 1, interval), key=lambda capacity: _unused(usual, capacity))


def leading(layout: Layout, fraction: float) -> frozenset[str]:
    """The first chunks, in the order of the leaves, up to ``fraction`` of all elements; the one on the border too."""
    sizes = {bucket: layout.size(bucket) for bucket in _ordered(layout)}
    goal, filled, chosen = fraction * sum(sizes.values()), 0, []
    for bucket, size in sizes.items():
        if filled >= goal:
            break
        chosen.append(bucket)
        filled += size
    return frozenset(chosen)


def overflowing(layout: Layout, held: Mapping[str, int], room: float) -> tuple[str, ...]:
    """The chunks, of ``held`` bytes each, for which ``room`` bytes are not enough: the first ones, as few as can be."""
    for bucket in reversed(ordered := [name for name in _ordered(layout) if name in layout.host]):
        room -= held.get(bucket, 0)
        if room < 0:
            return tuple(ordered[: ordered.index(bucket) + 1])
    return ()


def _unused(sizes: list[int], capacity: int) -> int:
    left = unused = 0
    for size in sizes:
        if size > left:
            unused += left
            left = capacity
        left -= size
    return unused + left


def _ordered(layout: Layout) -> list[str]:
    """The buckets that mesh axes split, in the order of their first leaves."""
    return [bucket for bucket in dict.fromkeys(slot.bucket for slot in layout.slots) if layout.axes[bucket]]
