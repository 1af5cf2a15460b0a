"""The one interpreter of schedules: a rank takes its actions in order.

``run`` takes those of all ranks in turn, in one process; ``run_rank`` those of one rank, over any transport.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import torch

from functional_booster.kernels import tree

from .actions import Action, Kind, Schedule, send_after
from .checking import check, execution_order
from .objective import Objective, Traced
from .simulation import Span, Timeline
from .transport import Mailboxes, Tensors, Transport

Tree = tree.Tree
Place = tuple[int, int]  # stage, microbatch


@dataclasses.dataclass(frozen=True)
class Program:
    """What a pipeline computes: ``objective`` of the parameters and each microbatch, and the gradient of its sum.

    ``cotangent`` (0-d): what each loss is multiplied by for the gradient, None: 1. ``accumulate``: the dtype in which
    gradients are summed over microbatches, None: their own.
    """

    objective: Objective
    params: Tree
    microbatches: Sequence[Tree]
    cotangent: torch.Tensor | None = None
    accumulate: torch.dtype | None = None

    def require_fit(self, schedule: Schedule) -> None:
        """Raise ValueError where the numbers of stages or microbatches are not the schedule's."""
        given = {"stages": self.objective.split.stages, "microbatches": len(self.microbatches)}
        expected = {"stages": schedule.stages, "microbatches": schedule.microbatches}
        for name, number in expected.items():
            if given[name] != number:
                raise ValueError(f"{name}: {given[name]}, expected {number}, as {schedule.name} has")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a rank, or all of them, found.

    ``results``: (loss, more) of each microbatch, where the last stage is held. ``gradients[stage]``: {leaf: gradient},
    of the leaves that the stage uses; a leaf that several stages use has a term at each. ``timeline``: when which
    action ran, in seconds, if it was asked for.
    """

    results: dict[int, Tree]
    gradients: dict[int, dict[str, torch.Tensor]]
    timeline: Timeline | None = None


def run(schedule: Schedule, program: Program, measure: bool = False) -> Outcome:
    """The results of every microbatch, and every stage's gradients, computed as the schedule says, in this process.

    Microbatches may differ in shape. ``measure``: with a timeline, of the ranks' actions one after the other. Raises
    ValueError for a schedule that is not legal (``check``), and where the numbers of stages or microbatches are not the
    schedule's; TypeError where the objective returns anything but a 0-d loss and tensors.
    """
    check(schedule)
    program.require_fit(schedule)
    boxes: dict[tuple[int, int], collections.deque[Tensors]] = {}
    ranks = [_Rank(schedule, program, rank, Mailboxes(rank, boxes), measure) for rank in range(schedule.ranks)]
    for rank, action in execution_order(schedule):
        ranks[rank].take(action)
    return Outcome(
        ranks[schedule.placement[-1]].results,
        {stage: found for state in ranks for stage, found in state.gradients.items()},
        Timeline(schedule, tuple(tuple(state.spans) for state in ranks)) if measure else None,
    )


def run_rank(schedule: Schedule, program: Program, rank: int, transport: Transport, measure: bool = False) -> Outcome:
    """``run`` for one rank: the results where it holds the last stage, and the gradients of its stages.

    All ranks give the same arguments but for ``rank`` and ``transport``; parameters that the rank's stages do not use
    give shapes and dtypes alone, and may be on the meta device. The timeline has this rank's spans alone. Raises as
    ``run`` does.
    """
    check(schedule)
    program.require_fit(schedule)
    state = _Rank(schedule, program, rank, transport, measure)
    for action in schedule.actions[rank]:
        state.take(action)
    transport.finish()
    rows = tuple(tuple(state.spans) if each == rank else () for each in range(schedule.ranks))
    return Outcome(state.results, state.gradients, Timeline(schedule, rows) if measure else None)


class _Rank:
    """What a rank holds while it goes through its actions."""

    def __init__(self, schedule: Schedule, program: Program, rank: int, transport: Transport, measure: bool) -> None:
        self.schedule, self.program, self.rank, self.transport = schedule, program, rank, transport
        self.names, self.params = tree.names(program.params), tree.leaves(program.params)
        self.inputs: dict[Place, Callable[[], Tensors]] = {}  # wait for what the stage before has made
        self.cotangents: dict[Place, Callable[[], Tensors]] = {}  # wait for what the next stage has made
        self.outgoing: dict[Action, Tensors] = {}  # what the sends to come will send
        self.residuals: dict[Place, Tensors] = {}  # what a forward, or an input gradient, left behind
        self.results: dict[int, Tree] = {}
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.measure, self.spans = measure, list[Span]()
        self.trains = any(action.is_compute and action.kind is not Kind.FORWARD for action in schedule.actions[rank])

    @functools.cached_property
    def traces(self) -> list[Traced]:
        """The graphs of each microbatch."""
        program = self.program
        return [program.objective.traced(program.params, microbatch) for microbatch in program.microbatches]

    @torch.no_grad()
    def take(self, action: Action) -> None:
        """Do the next action."""
        measured = self.measure and action.is_compute
        start = _now() if measured else 0.0
        self._take(action)
        if measured:
            self.spans.append(Span(action, start, _now()))

    def _take(self, action: Action) -> None:
        place, graphs = (action.stage, action.microbatch), self.traces[action.microbatch].stages[action.stage]
        match action.kind:
            case Kind.FORWARD:
                self._forward(action)
            case Kind.BACKWARD:
                found = graphs.backward([*self.residuals.pop(place), *self.cotangents.pop(place)()])
                cotangents = len(graphs.sent_cotangents)
                self._hand_on(action, found[:cotangents])
                self._accumulate(action, found[cotangents:])
            case Kind.INPUT_GRAD:
                given = [*self.residuals.pop(place), *self.cotangents.pop(place)()]
                sent, self.residuals[place] = graphs.apart[0](given)
                self._hand_on(action, sent)
            case Kind.WEIGHT_GRAD:
                self._accumulate(action, graphs.apart[1](self.residuals.pop(place)))
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                self.transport.send(self.schedule.placement[action.other_stage], self.outgoing.pop(action))
            case Kind.RECV_ACTIVATION:
                self.inputs[place] = self._receive(action, graphs.received)
            case Kind.RECV_GRADIENT:
                self.cotangents[place] = self._receive(action, graphs.received_cotangents)

    def _forward(self, action: Action) -> None:
        place, trace = (action.stage, action.microbatch), self.traces[action.microbatch]
        graphs = trace.stages[action.stage]
        entries = tree.leaves(self.program.microbatches[action.microbatch])
        received = self.inputs.pop(place)() if action.stage else []
        given = [*(self.params[at] for at in graphs.parameters), *(entries[at] for at in graphs.entries), *received]
        sent, residuals = graphs.forward(given)
        if self.trains:
            self.residuals[place] = residuals
        if action.stage + 1 < self.schedule.stages:
            self._hand_on(action, sent)
        else:
            self.results[action.microbatch] = tree.unflatten(trace.structure, sent)
            seed = self.program.cotangent
            device = sent[0].device
            one = torch.ones((), dtype=torch.float32, device=device) if seed is None else seed
            self.cotangents[place] = lambda: [one.to(device, torch.float32)]

    def _hand_on(self, action: Action, values: Tensors) -> None:
        """To another rank, when its send comes; to another stage of this rank, at once."""
        stage = action.stage + 1 if action.kind is Kind.FORWARD else action.stage - 1
        if (send := send_after(self.schedule, action)) is not None:
            self.outgoing[send] = values
        elif stage >= 0:
            arrived = self.inputs if action.kind is Kind.FORWARD else self.cotangents
            arrived[stage, action.microbatch] = lambda: values

    def _receive(self, action: Action, like: Sequence[torch.Tensor]) -> Callable[[], Tensors]:
        return self.transport.receive(self.schedule.placement[action.other_stage], like)

    def _accumulate(self, action: Action, terms: Tensors) -> None:
        graphs, known = self.traces[action.microbatch].stages[action.stage], self.gradients.setdefault(action.stage, {})
        for at, term in zip(graphs.gradients, terms, strict=True):
            name = self.names[at]
            if name in known:
                known[name] = known[name].add_(term)
            else:
                known[name] = term.to(self.program.accumulate or term.dtype)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
