"""How long a schedule takes, how much of that its ranks are idle, and what they hold."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from .actions import Action, Kind, Product, Schedule, needs, product, send_of


@dataclasses.dataclass(frozen=True)
class Costs:
    """The time of each action, in any unit: called with an action, it gives its time.

    A whole backward takes ``input_grad + weight_grad``; ``transfer`` is the time from the end of the action that makes
    an activation or a gradient until another rank has it. The default, three equal parts, is that of Qi et al. 2024.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    transfer: float = 0.0

    def __call__(self, action: Action) -> float:
        match action.kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.BACKWARD:
                return self.input_grad + self.weight_grad
            case Kind.INPUT_GRAD:
                return self.input_grad
            case Kind.WEIGHT_GRAD:
                return self.weight_grad
            case _:
                return self.transfer


@dataclasses.dataclass(frozen=True)
class Span:
    """When a rank is busy with a compute action."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The times of a schedule, simulated or measured: for each rank its spans in order."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        spans = list(itertools.chain(*self.spans))
        return max(span.end for span in spans) - min(span.start for span in spans)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they are idle, from 0 to 1."""
        busy = sum(span.end - span.start for span in itertools.chain(*self.spans))
        return 1 - busy / (len(self.spans) * self.makespan)

    @property
    def live(self) -> tuple[int, ...]:
        """For each rank, the largest number of activations that it holds at a time: of one stage and microbatch each.

        One lives from the start of its forward to the end of its backward, or of its weight gradient.
        """
        return tuple(_peak([span.action.kind for span in spans]) for spans in self.spans)


def simulate(schedule: Schedule, costs: Callable[[Action], float] = Costs()) -> Timeline:
    """When each compute action runs, where transfers overlap with compute.

    A rank does its compute actions in order, each as soon as what it needs is there. Between ranks this takes
    ``costs`` of the send, whether the schedule has transfers yet or not; links are never busy. Raises ValueError, with
    what each rank waits for, where the schedule cannot go on.
    """
    rows = schedule.without_transfers().actions
    done: list[list[Span]] = [[] for _ in rows]
    made: dict[Product, tuple[float, int]] = {}
    advanced = True
    while advanced:
        advanced = False
        for rank, row in enumerate(rows):
            for action in row[len(done[rank]) :]:
                if any(need not in made for need in needs(action, schedule.stages)):
                    break
                start = done[rank][-1].end if done[rank] else 0.0
                for need in needs(action, schedule.stages):
                    end, maker = made[need]
                    start = max(start, end if maker == rank else end + costs(send_of(need)))
                end = start + costs(action)
                done[rank].append(Span(action, start, end))
                if (makes := product(action)) is not None:
                    made[makes] = end, rank
                advanced = True
    require_finished(schedule, [row[len(spans) :] for row, spans in zip(rows, done, strict=True)])
    return Timeline(schedule, tuple(map(tuple, done)))


def require_finished(schedule: Schedule, left: list[tuple[Action, ...]]) -> None:
    """Raise ValueError, naming what each rank waits with, where actions are left that no rank can take."""
    if any(left):
        waiting = "; ".join(f"rank {rank} waits with {row[0]}" for rank, row in enumerate(left) if row)
        raise ValueError(f"{schedule.name}: deadlock: {waiting}")


def _peak(kinds: list[Kind]) -> int:
    held = peak = 0
    for kind in kinds:
        held += kind is Kind.FORWARD
        peak = max(peak, held)
        held -= kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
    return peak
