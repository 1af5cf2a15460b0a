"""The proof that a schedule is legal: every action once, in an order in which no rank waits for ever."""

from __future__ import annotations

import functools
from collections import Counter

from .actions import Action, Kind, Product, Schedule, needs, product, receive_of, send_after, sent_by
from .simulation import require_finished


@functools.lru_cache(maxsize=16)  # a training loop asks for the same one again and again
def check(schedule: Schedule) -> None:
    """Raise ValueError, naming rank and action, unless the schedule is a legal one.

    Legal is: each microbatch goes forward once at each stage, on the rank that holds it, and backward once, as a whole
    or as input and weight gradients (or no microbatch goes backward at all: evaluation); each value that another rank
    needs is sent once and received once; and ``execution_order`` reaches the end.
    """
    require_places(schedule)
    for rank, (expected, row) in enumerate(zip(_expected(schedule), schedule.actions, strict=True)):
        given = Counter(row)
        for action in expected - given:
            raise ValueError(f"{schedule.name}: rank {rank} lacks {action}")
        for action in given - expected:
            many = "more than once" if action in expected else "which is not due there"
            raise ValueError(f"{schedule.name}: rank {rank} has {action} {many}")
    execution_order(schedule)


def require_places(schedule: Schedule) -> None:
    """Raise ValueError unless stages are on ranks that there are, and actions where their stage is."""
    if not schedule.placement or not all(0 <= rank < schedule.ranks for rank in schedule.placement):
        raise ValueError(
            f"{schedule.name}: placement {schedule.placement}, expected for each stage a rank from 0 to "
            f"{schedule.ranks - 1}"
        )
    for rank, row in enumerate(schedule.actions):
        held = schedule.held_by(rank)
        for action in row:
            if action.stage not in held or not 0 <= action.microbatch < schedule.microbatches:
                raise ValueError(f"{schedule.name}: rank {rank} has {action} which is not due there")


@functools.lru_cache(maxsize=16)
def execution_order(schedule: Schedule) -> tuple[tuple[int, Action], ...]:
    """An order of all (rank, action) in which one process can take them.

    A transfer is taken by both its ranks at once, when both have come to it and the value is there. A schedule that
    ends under this, the strictest, rule ends as well where sends are buffered and receives posted ahead; and since each
    pair of ranks has its transfers in one order, messages need no tags (NCCL has none). Raises ValueError, naming what
    each rank waits with, where that order does not reach the end.
    """
    left = [list(reversed(row)) for row in schedule.actions]
    present: set[tuple[int, Product]] = set()
    order: list[tuple[int, Action]] = []
    before = -1
    while len(order) > before:
        before = len(order)
        for rank, row in enumerate(left):
            while row:
                action = row[-1]
                if action.is_compute and all((rank, need) in present for need in needs(action, schedule.stages)):
                    order.append((rank, row.pop()))
                    if (made := product(action)) is not None:
                        present.add((rank, made))
                elif (sent := sent_by(action)) is not None and (rank, sent) in present:
                    receive = receive_of(action)
                    peer = schedule.placement[receive.stage]
                    if not left[peer] or left[peer][-1] != receive:
                        break
                    order += [(rank, row.pop()), (peer, left[peer].pop())]
                    present.add((peer, sent))
                else:
                    break
    require_finished(schedule, [tuple(reversed(row)) for row in left])
    return tuple(order)


def _expected(schedule: Schedule) -> list[Counter[Action]]:
    """For each rank the actions that it must have, once each."""
    given = {action for row in schedule.actions for action in row}
    trains = any(action.kind is not Kind.FORWARD for action in given if action.is_compute)
    expected: list[Counter[Action]] = [Counter() for _ in range(schedule.ranks)]
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            kinds = [Kind.FORWARD]
            if trains:
                apart = [Kind.INPUT_GRAD, Kind.WEIGHT_GRAD]
                kinds += apart if given & {Action(kind, stage, microbatch) for kind in apart} else [Kind.BACKWARD]
            for kind in kinds:
                action = Action(kind, stage, microbatch)
                expected[rank][action] += 1
                if (send := send_after(schedule, action)) is not None:
                    receive = receive_of(send)
                    expected[rank][send] += 1
                    expected[schedule.placement[receive.stage]][receive] += 1
    return expected
