"""Interleaved 1F1B: several chunks a rank, and a smaller bubble for more transfers. (Narayanan et al. 2021, 2.2.2.)"""

from __future__ import annotations

from .actions import Action, Kind, Schedule, looped, require_counts
from .one_f_one_b import in_turn
from .transfers import with_transfers


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """v = ``chunks`` stages a rank: the bubble is (p - 1) / (v m + p - 1) for p ranks and m >= p microbatches.

    Microbatches go round the ranks v times in rounds of p or more, as equal as they can be, so that p need not divide
    m; with m < p a round waits for its own end, and the bubble is 1 - v m / (v p + m - 1). With g microbatches in the
    largest round, rank r has min((v - 1) g + 2 (p - 1 - r) + 1, v m) live activations of a v-th of a stage of 1F1B's
    (with one chunk, all is as in 1F1B). Raises ValueError for a count below 1.
    """
    require_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rounds = max(1, microbatches // ranks)
    sizes = [microbatches // rounds + (one < microbatches % rounds) for one in range(rounds)]
    starts = [sum(sizes[:one]) for one in range(rounds)]
    order = [
        (chunk, start + one)
        for start, size in zip(starts, sizes, strict=True)
        for chunk in range(chunks)
        for one in range(size)
    ]
    rows = []
    for rank in range(ranks):
        forwards = [Action(Kind.FORWARD, chunk * ranks + rank, one) for chunk, one in order]
        backwards = [Action(Kind.BACKWARD, (chunks - 1 - chunk) * ranks + rank, one) for chunk, one in order]
        ahead = (chunks - 1) * sizes[0] + (2 if chunks > 1 else 1) * (ranks - 1 - rank)
        rows.append(in_turn(forwards, backwards, min(ahead, len(order))))
    return with_transfers(
        Schedule(f"interleaved 1F1B, {chunks} chunks", microbatches, looped(ranks, chunks), tuple(rows))
    )
