"""1F1B: a backward as soon as there is one, so that few activations live. (Narayanan et al. 2019, 3.2; 2021, 2.2.1.)"""

from __future__ import annotations

from .actions import Action, Kind, Schedule, looped, require_counts
from .transfers import with_transfers


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """A stage a rank; GPipe's bubble, (p - 1) / (m + p - 1), with min(p - rank, m) live activations.

    Raises ValueError for a count below 1.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    rows = tuple(_row(rank, min(ranks - 1 - rank, microbatches), microbatches) for rank in range(ranks))
    return with_transfers(Schedule("1F1B", microbatches, looped(ranks), rows))


def _row(stage: int, ahead: int, microbatches: int) -> tuple[Action, ...]:
    """So many forwards ahead, then a forward and a backward in turn."""
    forwards = [Action(Kind.FORWARD, stage, one) for one in range(microbatches)]
    backwards = [Action(Kind.BACKWARD, stage, one) for one in range(microbatches)]
    return in_turn(forwards, backwards, ahead)


def in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """``ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    steady = zip(forwards[ahead:], backwards, strict=False)
    left = backwards[len(forwards) - ahead :]
    return (*forwards[:ahead], *(action for pair in steady for action in pair), *left)
