"""ZB-V: two chunks a rank, placed as a V, and weight gradients where ranks would be idle.

(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", 6.)
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Kind, Schedule, require_counts, v_shaped
from .transfers import with_transfers


def zero_bubble_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank, the first rank has the last one too; the gradients of input and weights are apart.

    For p ranks, m microbatches and actions that all take 1, the whole takes max(6 m + p - 1, 4 m + 4 p - 2): with
    m >= 2 p - 1 no rank is ever idle between its first action and its last, and the bubble is (p - 1) / (6 m + p - 1),
    a sixth of 1F1B's. Rank r has min(2 p, 2 m, m + 1 + r) live activations, each half of one of 1F1B's: no rank has
    more memory than 1F1B's first. Raises ValueError for a count below 1.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    full = max(microbatches, 2 * ranks - 1)  # what fills the pipeline; of those, the ones that there are
    rows = tuple(
        tuple(action for action in _row(rank, ranks, full) if action.microbatch < microbatches) for rank in range(ranks)
    )
    return with_transfers(Schedule("ZB-V", microbatches, v_shaped(ranks), rows))


def _row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    down, up = rank, 2 * ranks - 1 - rank  # the rank's two stages
    done: dict[tuple[Kind, int], int] = {}

    def count(kind: Kind, stage: int) -> int:
        return done.get((kind, stage), 0)

    def step(kind: Kind, stage: int) -> Iterator[Action]:
        yield Action(kind, stage, count(kind, stage))
        done[kind, stage] = count(kind, stage) + 1

    def backward(stage: int) -> Iterator[Action]:
        yield from step(Kind.INPUT_GRAD, stage)
        yield from step(Kind.WEIGHT_GRAD, stage)

    for _ in range(2 * (ranks - rank) - 1):  # warm up
        yield from step(Kind.FORWARD, down)
    for _ in range(rank):
        yield from step(Kind.FORWARD, up)
        yield from step(Kind.FORWARD, down)
    for _ in range(ranks - rank):
        yield from step(Kind.FORWARD, up)
        yield from backward(up)
    while count(Kind.FORWARD, up) < microbatches:  # one of each
        if count(Kind.FORWARD, down) < microbatches:
            yield from step(Kind.FORWARD, down)
        yield from backward(down)
        yield from step(Kind.FORWARD, up)
        yield from backward(up)
    for _ in range(rank):  # cool down: what others wait for first
        yield from step(Kind.INPUT_GRAD, down)
        yield from step(Kind.INPUT_GRAD, up)
    for _ in range(ranks - rank):
        yield from backward(down)
    for stage in (up, down):
        while count(Kind.WEIGHT_GRAD, stage) < microbatches:
            yield from step(Kind.WEIGHT_GRAD, stage)
