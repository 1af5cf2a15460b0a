"""The one interpreter of schedules: a rank takes its actions in order.

``run`` takes those of all ranks in turn, in one process; ``run_rank`` those of one rank, over any transport.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from functional_booster.kernels import tree
from functional_booster.kernels.transforms import is_differentiable

from .actions import Action, Kind, Schedule, send_after
from .checking import check, execution_order
from .differentiation import Stage, apart, whole
from .program import Loss, Program
from .transport import Mailboxes, Transport

Tree = tree.Tree
Place = tuple[int, int]  # stage, microbatch


def run(
    schedule: Schedule, stages: Sequence[Stage], loss_fn: Loss, params: Sequence[Tree], microbatches: Sequence[Tree]
) -> tuple[torch.Tensor, list[Tree]]:
    """The loss summed over microbatches, and for each stage its gradient, computed as the schedule says.

    ``stages[0](params[0], microbatch)`` gives the activation that ``stages[1]`` gets, a tree of tensors, and so on;
    ``loss_fn(y, microbatch)`` is the 0-d sum of the losses of a microbatch, from the last stage's output. Microbatches
    may differ in shape. Where the schedule has whole backwards, nothing is computed twice; where it has the gradients
    of input and weights apart, see ``differentiation.apart``. Gradients are None where a leaf is not differentiable,
    and for every stage when the schedule has forwards alone. Raises ValueError for a schedule that is not legal
    (``check``), and where the numbers of stages, params or microbatches are not the schedule's; TypeError where a stage
    does not return tensors, or ``loss_fn`` no 0-d one.
    """
    program = _checked(schedule, Program(stages, loss_fn, params, microbatches))
    boxes: dict[tuple[int, int], collections.deque[Tree]] = {}
    ranks = [_Rank(schedule, program, rank, Mailboxes(rank, boxes)) for rank in range(schedule.ranks)]
    for rank, action in execution_order(schedule):
        ranks[rank].take(action)
    loss = ranks[schedule.placement[-1]].loss
    assert loss is not None  # a legal schedule has forwards
    return loss, [ranks[rank].gradients.get(stage) for stage, rank in enumerate(schedule.placement)]


def run_rank(
    schedule: Schedule,
    stages: Sequence[Stage],
    loss_fn: Loss,
    params: Sequence[Tree],
    microbatches: Sequence[Tree],
    rank: int,
    transport: Transport,
) -> tuple[torch.Tensor | None, dict[int, Tree]]:
    """``run`` for one rank: the loss where it holds the last stage (else None), and {stage: gradient} of its stages.

    All ranks give the same arguments but for ``rank`` and ``transport``; ``params`` of stages that the rank does not
    hold give shapes and dtypes alone, and may be on the meta device. Raises as ``run`` does.
    """
    program = _checked(schedule, Program(stages, loss_fn, params, microbatches))
    state = _Rank(schedule, program, rank, transport)
    for action in schedule.actions[rank]:
        state.take(action)
    transport.finish()
    return state.loss, state.gradients


class _Rank:
    """What a rank holds while it goes through its actions."""

    def __init__(self, schedule: Schedule, program: Program, rank: int, transport: Transport) -> None:
        self.schedule, self.program, self.rank, self.transport = schedule, program, rank, transport
        self.kinds = collections.defaultdict[Place, set[Kind]](set)
        for action in schedule.actions[rank]:
            self.kinds[action.stage, action.microbatch].add(action.kind)
        self.inputs: dict[Place, Callable[[], Tree]] = {}  # wait for what the stage before has made
        self.cotangents: dict[Place, Callable[[], Tree]] = {}  # wait for what the next stage has made
        self.outgoing: dict[Action, Tree] = {}  # what the sends to come will send
        self.residuals: dict[Place, Callable[..., Any]] = {}  # the backward that a forward left behind
        self.boundaries: dict[Hashable, tuple[Tree, ...]] = {}  # by the microbatch's signature
        self.loss: torch.Tensor | None = None
        self.gradients: dict[int, Tree] = {}

    @torch.no_grad()
    def take(self, action: Action) -> None:
        """Do the next action."""
        place = action.stage, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                self._forward(action)
            case Kind.BACKWARD:
                cotangent, weights = self.residuals.pop(place)(self.cotangents.pop(place)())
                self._hand_on(action, cotangent)
                self._accumulate(action.stage, weights)
            case Kind.INPUT_GRAD:
                cotangent, self.residuals[place] = self.residuals.pop(place)(self.cotangents.pop(place)())
                self._hand_on(action, cotangent)
            case Kind.WEIGHT_GRAD:
                self._accumulate(action.stage, self.residuals.pop(place)())
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                self.transport.send(self.schedule.placement[action.other_stage], self.outgoing.pop(action))
            case Kind.RECV_ACTIVATION:
                self.inputs[place] = self._receive(action, lambda: self._boundary(action.stage - 1, action.microbatch))
            case Kind.RECV_GRADIENT:
                self.cotangents[place] = self._receive(action, lambda: _differentiable(self._boundary(*place)))

    def _forward(self, action: Action) -> None:
        place, stage = (action.stage, action.microbatch), self.program.stage(action.stage, action.microbatch)
        params, first = self.program.params[action.stage], action.stage == 0
        x = self.program.microbatches[action.microbatch] if first else self.inputs.pop(place)()
        if Kind.BACKWARD in self.kinds[place]:
            y, self.residuals[place] = whole(stage, params, x, first)
        elif Kind.INPUT_GRAD in self.kinds[place]:
            y, self.residuals[place] = apart(stage, params, x, first)
        else:
            y = stage(params, x)
        if action.stage + 1 == self.schedule.stages:
            self.loss = y if self.loss is None else self.loss + y
            self.cotangents[place] = lambda: torch.ones_like(y)
        else:
            self._hand_on(action, y)

    def _hand_on(self, action: Action, value: Tree) -> None:
        """To another rank, when its send comes; to another stage of this rank, at once."""
        stage = action.stage + 1 if action.kind is Kind.FORWARD else action.stage - 1
        if (send := send_after(self.schedule, action)) is not None:
            self.outgoing[send] = value
        elif stage >= 0:
            arrived = self.inputs if action.kind is Kind.FORWARD else self.cotangents
            arrived[stage, action.microbatch] = lambda: value

    def _receive(self, action: Action, like: Callable[[], Tree]) -> Callable[[], Tree]:
        return self.transport.receive(self.schedule.placement[action.other_stage], like)

    def _boundary(self, stage: int, microbatch: int) -> Tree:
        """The shapes of what a stage makes of a microbatch."""
        signature = self.program.signature(microbatch)
        if signature not in self.boundaries:
            self.boundaries[signature] = self.program.boundaries(microbatch)
        return self.boundaries[signature][stage]

    def _accumulate(self, stage: int, gradient: Tree) -> None:
        known = self.gradients.get(stage)
        self.gradients[stage] = gradient if known is None else tree.map(operator.add, known, gradient)


def _checked(schedule: Schedule, program: Program) -> Program:
    check(schedule)
    program.require_fit(schedule)
    return program


def _differentiable(activation: Tree) -> Tree:
    """Its cotangent's leaves: None where there is none."""
    return tree.map(lambda leaf: leaf if is_differentiable(leaf) else None, activation)
