"""The transfers of a schedule, from its compute actions."""

from __future__ import annotations

import dataclasses

from .actions import Action, Schedule, receive_of, send_after
from .checking import require_places
from .simulation import simulate


def with_transfers(schedule: Schedule) -> Schedule:
    """The schedule with its transfers, in an order that cannot deadlock; transfers that it has are dropped first.

    Both ends of a transfer are put where the schedule, run with equal parts (``Costs()``), has the value ready. The
    order of the starts and of the transfers in that run is then one in which all ranks can take every action, each
    transfer by both its ranks at once, so that no rank waits for ever whatever a send does: buffer, or block. Raises
    ValueError where an action is not on the rank that holds its stage, or the compute actions already deadlock.
    """
    require_places(schedule)
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    for _, _, rank, entry in sorted(_events(schedule), key=lambda event: event[:3]):
        rows[rank].append(entry)
        if not entry.is_compute:
            rows[schedule.placement[entry.other_stage]].append(receive_of(entry))
    return dataclasses.replace(schedule, actions=tuple(map(tuple, rows)))


def _events(schedule: Schedule) -> list[tuple[float, int, int, Action]]:
    """(time, order, rank, compute action or send): what is sent at a time comes before what starts then."""
    events = []
    for rank, spans in enumerate(simulate(schedule).spans):
        for span in spans:
            events.append((span.start, 1, rank, span.action))
            if (send := send_after(schedule, span.action)) is not None:
                events.append((span.end, 0, rank, send))
    return events
