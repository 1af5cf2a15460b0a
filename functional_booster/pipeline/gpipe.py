"""GPipe: all forwards, then all backwards. (Huang et al. 2019, 2.3.)"""

from __future__ import annotations

from .actions import Action, Kind, Schedule, looped, require_counts
from .transfers import with_transfers


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """A stage a rank; the bubble is (p - 1) / (m + p - 1) for p ranks and m microbatches, m activations are live.

    Raises ValueError for a count below 1.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    rows = tuple(
        tuple(Action(kind, rank, one) for kind in (Kind.FORWARD, Kind.BACKWARD) for one in range(microbatches))
        for rank in range(ranks)
    )
    return with_transfers(Schedule("GPipe", microbatches, looped(ranks), rows))
