"""A pipeline schedule is a value: for each rank, the list of its actions."""

from __future__ import annotations

import dataclasses
import enum

from functional_booster.kernels import tree

Product = tuple[str, int, int]  # ("activation" or "gradient", the stage that makes it, its microbatch)


class Kind(enum.StrEnum):
    """What an action does with a microbatch at a stage; the values are torch.distributed.pipelining's."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of input and weights at once
    INPUT_GRAD = "I"  # the gradient of the input alone ("B" in Qi et al. 2024)
    WEIGHT_GRAD = "W"  # the gradients of the weights, after INPUT_GRAD
    SEND_ACTIVATION = "SEND_F"  # to the next stage
    RECV_ACTIVATION = "RECV_F"  # from the stage before
    SEND_GRADIENT = "SEND_B"  # to the stage before
    RECV_GRADIENT = "RECV_B"  # from the next stage


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
_RECEIVES = {Kind.SEND_ACTIVATION: Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT: Kind.RECV_GRADIENT}


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does: ``kind``, for ``microbatch``, at ``stage`` (of the whole model, not of the rank).

    A transfer names the stage of the rank that does it: ``SEND_ACTIVATION`` at stage 1 is received as
    ``RECV_ACTIVATION`` at stage 2.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    @property
    def other_stage(self) -> int:
        """The stage at the other end of a transfer."""
        ahead = self.kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT)
        return self.stage + 1 if ahead else self.stage - 1


@tree.hash_once
@dataclasses.dataclass(frozen=True)
class Schedule:
    """What each rank does, in order, and which rank holds each stage.

    ``placement[stage]`` is the rank that holds it; a stage is one chunk of its rank. ``actions[rank]`` are compute
    actions with the transfers between them; ``with_transfers`` adds these to a schedule that has none. Stages that
    follow one another on the same rank hand over without a transfer.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:  # lists are welcome, but a value can be hashed
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def without_transfers(self) -> Schedule:
        """The compute actions alone."""
        return dataclasses.replace(
            self, actions=tuple(tuple(action for action in row if action.is_compute) for row in self.actions)
        )

    def forwards(self) -> Schedule:
        """The forwards alone, and their transfers: an evaluation."""
        kinds = (Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)
        return dataclasses.replace(
            self, actions=tuple(tuple(action for action in row if action.kind in kinds) for row in self.actions)
        )


def looped(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """The placement in which the stages go round the ranks ``chunks`` times: 0 1 2 0 1 2. (Narayanan et al. 2021.)"""
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int) -> tuple[int, ...]:
    """The placement in which the stages go down the ranks and come back: 0 1 2 2 1 0. (Qi et al. 2024.)"""
    return (*range(ranks), *reversed(range(ranks)))


def product(action: Action) -> Product | None:
    """What other actions wait for that this one makes; None for the gradients of weights."""
    if action.kind is Kind.FORWARD:
        return "activation", action.stage, action.microbatch
    if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
        return "gradient", action.stage, action.microbatch
    return None


def needs(action: Action, stages: int) -> tuple[Product, ...]:
    """The products that a compute action waits for."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return (("activation", stage - 1, microbatch),) if stage else ()
    if action.kind is Kind.WEIGHT_GRAD:
        return (("gradient", stage, microbatch),)
    own = ("activation", stage, microbatch)
    return (own, ("gradient", stage + 1, microbatch)) if stage + 1 < stages else (own,)


def send_after(schedule: Schedule, action: Action) -> Action | None:
    """The send that follows a compute action; None where no other rank waits for what it makes."""
    made = product(action)
    if made is None:
        return None
    send = send_of(made)
    there = send.other_stage
    if not 0 <= there < schedule.stages or schedule.placement[there] == schedule.placement[action.stage]:
        return None
    return send


def send_of(made: Product) -> Action:
    """The send that hands a product on."""
    what, stage, microbatch = made
    return Action(Kind.SEND_ACTIVATION if what == "activation" else Kind.SEND_GRADIENT, stage, microbatch)


def sent_by(action: Action) -> Product | None:
    """What a send hands on; None for another action."""
    if action.kind not in _RECEIVES:
        return None
    return "activation" if action.kind is Kind.SEND_ACTIVATION else "gradient", action.stage, action.microbatch


def receive_of(send: Action) -> Action:
    """The other end of a send."""
    return Action(_RECEIVES[send.kind], send.other_stage, send.microbatch)


def require_counts(**counts: int) -> None:
    """Raise ValueError for a count below 1, TypeError for what is no int, naming it."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name}: {count!r}, expected an int")
        if count < 1:
            raise ValueError(f"{name}: {count}, expected at least 1")
