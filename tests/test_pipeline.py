"""Schedules as data: legal at all sizes, with the bubbles and the memory of the papers; what is illegal is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import defaultdict, deque
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection

from functional_booster import pipeline
from functional_booster.pipeline import Action, Costs, Kind, Schedule

Sizes = tuple[int, int, int]

FAMILIES: dict[str, Any] = {
    "gpipe": lambda ranks, microbatches, chunks: pipeline.gpipe(ranks, microbatches),
    "1f1b": lambda ranks, microbatches, chunks: pipeline.one_f_one_b(ranks, microbatches),
    "interleaved": pipeline.interleaved,
    "zbv": lambda ranks, microbatches, chunks: pipeline.zero_bubble_v(ranks, microbatches),
}
families = pytest.mark.parametrize("family", FAMILIES)
sizes = st.tuples(st.integers(1, 7), st.integers(1, 16), st.integers(1, 4))
costs = st.builds(Costs, *[st.integers(1, 9)] * 3)
seeds = st.integers(0, 2**31)


def any_schedule(seed: int) -> Schedule:
    """Somebody's own schedule: stages anywhere, any order that a run could have, backwards whole or apart."""
    choose = random.Random(seed)
    ranks, stages, microbatches = choose.randint(1, 4), choose.randint(1, 5), choose.randint(1, 4)
    placement = tuple(choose.randrange(ranks) for _ in range(stages))
    pending = {
        (stage, one): choose.choice([[Kind.FORWARD, Kind.BACKWARD], [Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD]])
        for stage in range(stages)
        for one in range(microbatches)
    }
    forward, backward = set[tuple[int, int]](), set[tuple[int, int]]()
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while pending:
        stage, one = choose.choice(list(pending))
        kind = pending[stage, one][0]
        if kind is Kind.FORWARD:
            if stage and (stage - 1, one) not in forward:
                continue
            forward.add((stage, one))
        elif kind is not Kind.WEIGHT_GRAD:
            if stage + 1 < stages and (stage + 1, one) not in backward:
                continue
            backward.add((stage, one))
        rows[placement[stage]].append(Action(kind, stage, one))
        pending[stage, one] = pending[stage, one][1:]
        if not pending[stage, one]:
            del pending[stage, one]
    return pipeline.with_transfers(Schedule("own", microbatches, placement, tuple(map(tuple, rows))))


def run_buffered(schedule: Schedule, seed: int) -> None:
    """Take the actions with sends that never wait, in a random order of the ranks: another program than ``check``.

    What a rank receives is the oldest message from that rank; it must be the one that is meant.
    """
    choose = random.Random(seed)
    last = len(schedule.placement) - 1
    left = [deque(row) for row in schedule.actions]
    wires: dict[tuple[int, int], deque[tuple[str, int, int]]] = defaultdict(deque)
    known: list[set[tuple[str, int, int]]] = [set() for _ in left]

    def take(rank: int) -> bool:
        kind, stage, one = left[rank][0].kind, left[rank][0].stage, left[rank][0].microbatch
        here = known[rank]
        match kind:
            case Kind.FORWARD:
                ready = stage == 0 or ("y", stage - 1, one) in here
            case Kind.WEIGHT_GRAD:
                ready = ("g", stage, one) in here
            case Kind.BACKWARD | Kind.INPUT_GRAD:
                ready = ("y", stage, one) in here and (stage == last or ("g", stage + 1, one) in here)
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                message = ("y" if kind is Kind.SEND_ACTIVATION else "g", stage, one)
                assert message in here
                there = stage + 1 if kind is Kind.SEND_ACTIVATION else stage - 1
                wires[rank, schedule.placement[there]].append(message)
                return True
            case Kind.RECV_ACTIVATION | Kind.RECV_GRADIENT:
                back = kind is Kind.RECV_GRADIENT
                maker = stage + 1 if back else stage - 1
                wire = wires[schedule.placement[maker], rank]
                if not wire:
                    return False
                message = wire.popleft()
                assert message == ("g" if back else "y", maker, one)
                here.add(message)
                return True
        if ready and kind is not Kind.WEIGHT_GRAD:
            here.add(("y" if kind is Kind.FORWARD else "g", stage, one))
        return ready

    while any(left):
        able = [rank for rank in choose.sample(range(len(left)), len(left)) if left[rank]]
        taken = next((rank for rank in able if take(rank)), None)
        assert taken is not None, "deadlock"
        left[taken].popleft()
    assert not any(wires.values())


# Every family, at every size.


@families
@given(sizes=sizes, seed=seeds)
@settings(max_examples=25)
def test_a_family_is_legal_at_any_size(family: str, sizes: Sizes, seed: int) -> None:
    schedule = FAMILIES[family](*sizes)
    pipeline.check(schedule)
    run_buffered(schedule, seed)
    assert schedule.ranks == sizes[0] and schedule.microbatches == sizes[1]
    assert all(len(schedule.held_by(rank)) == schedule.stages // sizes[0] for rank in range(sizes[0]))
    assert pipeline.with_transfers(schedule) == schedule


@given(seed=seeds)
@settings(max_examples=60)
def test_an_own_schedule_gets_its_transfers(seed: int) -> None:
    schedule = any_schedule(seed)
    pipeline.check(schedule)
    run_buffered(schedule, seed)


def test_an_own_schedule_may_be_written_as_lists() -> None:
    rows = [[Action(kind, rank, 0) for kind in (Kind.FORWARD, Kind.BACKWARD)] for rank in range(3)]
    fields: dict[str, Any] = {"placement": [0, 1, 2], "actions": rows}
    own = pipeline.with_transfers(Schedule("1F1B", 1, **fields))
    assert own == pipeline.one_f_one_b(3, 1)
    assert hash(own) == hash(pipeline.one_f_one_b(3, 1))
    assert " ".join(map(str, own.actions[1])) == "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0"


# The papers' formulas.


@given(sizes=sizes, costs=costs)
def test_the_bubble_of_gpipe_and_1f1b(sizes: Sizes, costs: Costs) -> None:
    p, m, _ = sizes
    for schedule in (pipeline.gpipe(p, m), pipeline.one_f_one_b(p, m)):
        assert pipeline.simulate(schedule, costs).bubble == pytest.approx((p - 1) / (m + p - 1))


@given(sizes=sizes)
def test_the_memory_of_gpipe_and_1f1b(sizes: Sizes) -> None:
    p, m, _ = sizes
    assert pipeline.simulate(pipeline.gpipe(p, m)).live == (m,) * p
    assert pipeline.simulate(pipeline.one_f_one_b(p, m)).live == tuple(min(p - rank, m) for rank in range(p))


@given(sizes=sizes, costs=costs)
def test_the_bubble_of_interleaved(sizes: Sizes, costs: Costs) -> None:
    p, m, v = sizes
    bubble = pipeline.simulate(pipeline.interleaved(p, m, v), costs).bubble
    assert bubble == pytest.approx(1 - v * m / ((v - 1) * max(m, p) + m + p - 1))
    if m >= p:
        assert bubble == pytest.approx((p - 1) / (v * m + p - 1))


@given(sizes=sizes, v=st.integers(2, 4))
def test_the_memory_of_interleaved(sizes: Sizes, v: int) -> None:
    p, m, _ = sizes
    largest = math.ceil(m / max(1, m // p))  # microbatches in a round: p, where p divides m
    live = pipeline.simulate(pipeline.interleaved(p, m, v)).live
    assert live == tuple(min((v - 1) * largest + 2 * (p - 1 - rank) + 1, v * m) for rank in range(p))


@given(sizes=sizes)
def test_interleaved_of_one_chunk_is_1f1b(sizes: Sizes) -> None:
    p, m, _ = sizes
    assert pipeline.interleaved(p, m, 1).actions == pipeline.one_f_one_b(p, m).actions


@given(sizes=sizes)
def test_the_bubble_and_the_memory_of_zero_bubble_v(sizes: Sizes) -> None:
    p, m, _ = sizes
    timeline = pipeline.simulate(pipeline.zero_bubble_v(p, m))
    assert timeline.makespan == max(6 * m + p - 1, 4 * m + 4 * p - 2)
    assert timeline.bubble == pytest.approx(1 - 6 * m / timeline.makespan)
    assert timeline.live == tuple(min(2 * p, 2 * m, m + 1 + rank) for rank in range(p))
    if m >= 2 * p - 1:  # never idle between the first action and the last
        assert all(spans[-1].end - spans[0].start == 6 * m for spans in timeline.spans)


@given(p=st.integers(1, 7), costs=costs, transfer=st.integers(0, 5))
def test_a_lone_microbatch_pays_each_transfer(p: int, costs: Costs, transfer: int) -> None:
    timeline = pipeline.simulate(pipeline.one_f_one_b(p, 1), dataclasses.replace(costs, transfer=transfer))
    once = costs.forward + costs.input_grad + costs.weight_grad
    assert timeline.makespan == p * once + 2 * (p - 1) * transfer


@families
@given(sizes=sizes, costs=costs, transfer=st.integers(0, 5))
@settings(max_examples=25)
def test_a_simulation_keeps_order_and_needs(family: str, sizes: Sizes, costs: Costs, transfer: int) -> None:
    schedule = FAMILIES[family](*sizes)
    costs = dataclasses.replace(costs, transfer=transfer)
    timeline = pipeline.simulate(schedule, costs)
    ends = {span.action: span.end for spans in timeline.spans for span in spans}
    for rank, spans in enumerate(timeline.spans):
        assert [span.action for span in spans] == [action for action in schedule.actions[rank] if action.is_compute]
        assert all(before.end <= after.start for before, after in itertools.pairwise(spans))
        assert all(span.end - span.start == costs(span.action) for span in spans)
        for span in spans:
            stage = span.action.stage
            if span.action.kind is Kind.FORWARD and stage:
                away = transfer * (schedule.placement[stage - 1] != rank)
                assert span.start >= ends[Action(Kind.FORWARD, stage - 1, span.action.microbatch)] + away


# What is refused.


@given(seed=seeds, which=seeds)
@settings(max_examples=60)
def test_an_action_too_few_or_too_many_is_refused(seed: int, which: int) -> None:
    schedule = any_schedule(seed)
    assume(schedule.stages * schedule.microbatches > 1)  # else what is left without its backward is an evaluation's
    rank = random.Random(which).choice([rank for rank, row in enumerate(schedule.actions) if row])
    row = schedule.actions[rank]
    place = which % len(row)

    def with_row(*actions: Action) -> Schedule:
        return dataclasses.replace(schedule, actions=(*schedule.actions[:rank], actions, *schedule.actions[rank + 1 :]))

    without = with_row(*row[:place], *row[place + 1 :])
    with pytest.raises(ValueError, match=r"lacks|which is not due there"):
        pipeline.check(without)
    with pytest.raises(ValueError, match=f"own: rank {rank} has {row[place]} more than once"):
        pipeline.check(with_row(*row, row[place]))
    with pytest.raises(ValueError, match=f"own: rank {rank} has 99F0 which is not due there"):
        pipeline.check(with_row(*row, Action(Kind.FORWARD, 99, 0)))


@given(seed=seeds, which=seeds)
@settings(max_examples=60)
def test_a_backward_before_its_forward_is_refused(seed: int, which: int) -> None:
    schedule = any_schedule(seed)
    rank = random.Random(which).choice([rank for rank, row in enumerate(schedule.actions) if row])
    row = list(schedule.actions[rank])
    forwards = [place for place, action in enumerate(row) if action.kind is Kind.FORWARD]
    place = forwards[which % len(forwards)]
    row.append(row.pop(place))
    changed = dataclasses.replace(
        schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :])
    )
    with pytest.raises(ValueError, match=r"own: deadlock: rank \d+ waits with "):
        pipeline.check(changed)
    with pytest.raises(ValueError, match=r"own: deadlock: rank \d+ waits with "):
        pipeline.simulate(changed)


def test_transfers_in_another_order_than_the_peers_are_refused() -> None:
    schedule = pipeline.gpipe(2, 2)
    first, second = schedule.actions
    places = [place for place, action in enumerate(second) if action.kind is Kind.RECV_ACTIVATION]
    swapped = list(second)
    swapped[places[0]], swapped[places[1]] = second[places[1]], second[places[0]]
    with pytest.raises(ValueError, match="rank 0 waits with 0SEND_F0; rank 1 waits with 1RECV_F1"):
        pipeline.check(dataclasses.replace(schedule, actions=(first, tuple(swapped))))


def test_ranks_that_both_send_first_are_refused() -> None:
    """Right where sends are buffered; on NCCL each would wait for the other."""
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    schedule = Schedule("both", 2, (0, 1), tuple(tuple(map(parsed, row.split())) for row in rows))
    run_buffered(schedule, 0)
    with pytest.raises(ValueError, match="both: deadlock: rank 0 waits with 0SEND_F1; rank 1 waits with 1SEND_B0"):
        pipeline.check(schedule)
    pipeline.check(pipeline.with_transfers(schedule))


def parsed(text: str) -> Action:
    """The action of ``str(action)``, for stages and microbatches below 10."""
    return Action(Kind(text[1:-1]), int(text[0]), int(text[-1]))


def test_a_placement_on_ranks_that_there_are_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1F1B: placement \(0, 2\), expected for each stage a rank from 0 to 1"):
        pipeline.check(dataclasses.replace(pipeline.one_f_one_b(2, 2), placement=(0, 2)))


def test_an_action_on_a_rank_without_its_stage_is_refused() -> None:
    rows = tuple((Action(Kind.FORWARD, rank, 0), Action(Kind.BACKWARD, rank, 0)) for rank in range(2))
    with pytest.raises(ValueError, match="own: rank 0 has 0F0 which is not due there"):
        pipeline.with_transfers(Schedule("own", 1, (1, 0), rows))


@families
@pytest.mark.parametrize(
    ("given", "error"), [(0, "ranks: 0, expected at least 1"), (1.5, "ranks: 1.5, expected an int")]
)
def test_counts_are_named(family: str, given: Any, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        FAMILIES[family](given, 2, 1)


# The picture.


@pytest.mark.parametrize(
    "schedule", [pipeline.one_f_one_b(3, 4), pipeline.zero_bubble_v(2, 5)], ids=lambda one: one.name
)
def test_a_picture_has_each_action_at_its_time(schedule: Schedule, tmp_path: Any) -> None:
    timeline = pipeline.simulate(schedule, Costs(2, 3, 1))
    figure = pipeline.draw(timeline, tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").stat().st_size > 1000
    axes = figure.axes[0]
    boxes = []
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        corners = collection.get_paths()[0].get_extents()
        boxes.append((round((corners.y0 + corners.y1) / 2), corners.x0, corners.x1, str(collection.get_facecolor())))
    expected = [(rank, span.start, span.end) for rank, spans in enumerate(timeline.spans) for span in spans]
    assert [box[:3] for box in boxes] == pytest.approx(expected)
    looks = {
        (span.action.kind, schedule.held_by(rank).index(span.action.stage))
        for rank, spans in enumerate(timeline.spans)
        for span in spans
    }
    assert len({box[3] for box in boxes}) == len(looks)
    assert f"{timeline.bubble:.1%} idle" in axes.get_title()
    assert [text.get_text() for text in axes.texts] == [
        str(span.action.microbatch) for row in timeline.spans for span in row
    ]
