"""The watchdog, with real processes that fail: each ends by itself, and says which rank failed, and where."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_as_scripts

from functional_booster import watchdog
from functional_booster.rank_failure import Fault, RankFailure, Report, judge

Run = Callable[..., list[tuple[int | str, str]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(scenario, world) -> (exit status, output) of each rank."""
    return lambda scenario, world=2, **options: run_as_scripts(tmp_path, scenario, world, **options)


def statuses(ends: list[tuple[int | str, str]]) -> list[int | str]:
    return [status for status, _ in ends]


def last_line(output: str) -> str:
    """The error that a person sees last, without torch's prefix and log lines."""
    lines = [line for line in output.splitlines() if "RankFailure: " in line or "Error: " in line]
    return lines[-1].partition("]: ")[2] if lines[-1].startswith("[rank") else lines[-1]


def test_a_normal_run_says_nothing_and_leaves_no_thread(run: Run) -> None:
    ends = run("normal", 3)
    assert statuses(ends) == [0, 0, 0]
    for _, output in ends:
        assert "watched by ['MainThread', 'functional_booster watchdog']" in output
        assert "left ['MainThread'] False" in output
        assert "RankFailure" not in output and "Traceback" not in output and "TCPStore" not in output


def test_a_slow_rank_is_not_a_dead_one(run: Run) -> None:
    assert statuses(run("slow")) == [0, 0]


def test_an_exception_between_steps_reaches_all_ranks(run: Run) -> None:
    ends = run("data_raises", 3)
    assert statuses(ends) == [1, 1, 1]
    assert last_line(ends[1][1]) == "ValueError: bad file" and "RankFailure" not in ends[1][1]
    for rank in (0, 2):
        assert last_line(ends[rank][1]).endswith("RankFailure: rank 1 failed after train step 2: ValueError: bad file")


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_in_a_step_reaches_all_ranks(run: Run, culprit: int) -> None:
    """Rank 0 holds the store, which ends with it."""
    ends = run("step_raises", 3, culprit=culprit)
    assert statuses(ends) == [1, 1, 1]
    assert last_line(ends[culprit][1]) == "ValueError: bad batch" and "RankFailure" not in ends[culprit][1]
    for rank in {0, 1, 2} - {culprit}:
        assert last_line(ends[rank][1]).endswith(
            f"RankFailure: rank {culprit} failed in train step 3: ValueError: bad batch"
        )


def test_a_rank_that_lives_on_after_its_exception_holds_nobody_up(run: Run) -> None:
    ends = run("step_raises_and_is_caught")
    assert statuses(ends) == [1, 1]
    message = "RankFailure: rank 1 failed in train step 3: ValueError: bad batch"
    assert last_line(ends[0][1]) == message and "all_reduce" in ends[0][1], "where it was stuck is shown"
    assert last_line(ends[1][1]).endswith(message), "its next step is refused"


def test_a_rank_with_fewer_batches_is_named(run: Run) -> None:
    ends = run("fewer_batches", 3)
    assert statuses(ends) == [1, 0, 1]
    for rank in (0, 2):
        assert "RankFailure: rank 1 ended after train step 2, but rank" in last_line(ends[rank][1])
        assert "is in train step 3 (do they have unequal numbers of batches?)" in last_line(ends[rank][1])


def test_the_end_of_an_epoch_is_agreed_upon(run: Run) -> None:
    ends = run("fewer_batches_and_agree")
    assert statuses(ends) == [1, 1]
    message = "the ranks part ways: rank 1 is in end of epoch 0, but rank 0 is in train step 3"
    for _, output in ends:
        assert f"RankFailure: {message}" in last_line(output)


@pytest.mark.parametrize(("world", "culprit"), [(2, 1), (3, 0)])
def test_a_killed_rank_is_named_by_all_others(run: Run, world: int, culprit: int) -> None:
    """Also rank 0, which takes the store with it."""
    ends = run("killed", world, culprit=culprit)
    for rank, (status, output) in enumerate(ends):
        assert status == (-9 if rank == culprit else 1)
        if rank != culprit:
            assert last_line(output).endswith(f"RankFailure: rank {culprit} died in train step 3")


def test_a_rank_without_a_sign_of_life_is_named(run: Run) -> None:
    ends = run("silent")
    assert statuses(ends) == [1, 1]
    assert last_line(ends[0][1]).endswith("RankFailure: rank 1 died after train step 2")


def test_a_rank_that_does_not_come_is_named_after_the_timeout(run: Run) -> None:
    ends = run("sleeps_before_step")
    assert statuses(ends) == [1, 1]
    for _, output in ends:
        assert (
            "RankFailure: rank 1 has not come to train step 3, where rank 0 has waited for it for 2 s: "
            "it is after train step 2, at ranks.py:"
        ) in last_line(output)
        assert last_line(output).endswith("in sleeps_before_step")


def test_a_collective_that_times_out_says_where_the_others_are(run: Run) -> None:
    ends = run("sleeps_in_step")
    assert statuses(ends) == [1, 1]
    assert "RankFailure: rank 0 lost the others in train step 0: RuntimeError: " in last_line(ends[0][1])
    assert "rank 1 is in train step 0, at ranks.py:" in last_line(ends[0][1])


def test_errors_that_all_ranks_share_leave_them_in_step(run: Run) -> None:
    ends = run("agrees")
    assert statuses(ends) == [0, 0]
    for rank, (_, output) in enumerate(ends):
        for step in range(3):
            theirs = f"RankFailure rank 1 failed in write at step {step}: OSError: disk full"
            assert (theirs if rank == 0 else "OSError disk full") in output
        assert output.count("bad on all") == 3 and output.endswith("done\n")


def test_a_process_that_cannot_end_is_ended(run: Run) -> None:
    ends = run("stuck_after_failure")
    assert statuses(ends) == [1, 1]
    assert last_line(ends[0][1]) == "RankFailure: rank 1 failed after train step 2: ValueError: bad file"
    assert "stuck_after_failure" in ends[0][1]


@pytest.mark.parametrize(
    ("fault", "plugin", "norm", "ends", "said"),
    [
        ("forward", "fsdp", False, [1, 1], "rank 1 failed after gather at step 3: RuntimeError: mat1 and mat2"),
        ("forward", "zero", True, [1, 1], "rank 1 failed in forward at step 3: RuntimeError: mat1 and mat2"),
        ("forward, caught", "ddp", True, [1, 1], "rank 1 failed in forward at step 3: RuntimeError: mat1 and mat2"),
        ("between", "ddp", False, [1, 1], "rank 1 failed after backward at step 3: ValueError: bad gradients"),
        ("killed", "ddp", True, [1, -9], "rank 1 died after forward at step 3"),
        ("fewer batches", "ddp", False, [1, 0], "rank 1 ended after optimizer step 2, but rank 0 is in backward at"),
        ("fewer batches", "fsdp", True, [1, 0], "rank 1 ended after optimizer step 2, but rank 0 is in gather at"),
        ("state_dict", "fsdp", False, [1, 1], "the ranks part ways: rank 1 is in "),
        ("load", "ddp", False, [1, 1], "rank 1 failed in load_state_dict at step 2: RuntimeError: Error(s) in loading"),
    ],
)
def test_an_imperative_loop_names_rank_and_step(
    run: Run, fault: str, plugin: str, norm: bool, ends: list[int], said: str
) -> None:
    """On the rank that raised, its own error; on each other one, whose fault it was, and where."""
    found = run("imperative_loop", fault=fault, plugin=plugin, norm=norm)
    assert statuses(found) == ends
    assert "RankFailure: " in last_line(found[0][1]) and said in last_line(found[0][1])
    if fault in ("forward", "between", "load"):
        assert "RankFailure" not in found[1][1] and last_line(found[1][1]).startswith(("RuntimeError", "ValueError"))


def test_an_imperative_loop_whose_first_rank_raises(run: Run) -> None:
    """It holds the store, which ends with it."""
    found = run("imperative_loop", fault="between", plugin="zero", norm=False, culprit=0)
    assert statuses(found) == [1, 1] and last_line(found[0][1]) == "ValueError: bad gradients"
    assert last_line(found[1][1]).endswith("rank 0 failed after backward at step 3: ValueError: bad gradients")


def test_a_rank_may_look_at_whole_weights_alone(run: Run) -> None:
    ends = run("looks_alone")
    assert statuses(ends) == [0, 0]
    assert all(output.endswith("done\n") and "RankFailure" not in output for _, output in ends)


def test_one_process_needs_no_watchdog() -> None:
    assert watchdog.started() is None
    with watchdog.guard("train step", 0):
        pass
    watchdog.agree(None, "save")
    with pytest.raises(OSError, match="disk full"):
        watchdog.agree(OSError("disk full"), "save")
    with pytest.raises(ValueError, match="bad batch"), watchdog.guard("train step", 1):
        raise ValueError("bad batch")


def test_a_rank_failure_has_fields_and_travels() -> None:
    error = pickle.loads(pickle.dumps(RankFailure("rank 1 died", 1, "save", 7)))
    assert str(error) == error.message == "rank 1 died"
    assert (error.rank, error.what, error.step) == (1, "save", 7)


def report(rank: int, count: int, inside: float | None = None, **changes: Any) -> Report:
    blank = Report(rank, "host", 1, 1, 1, count, "train step", count - 1, inside, "data.py:1 in read", False, None)
    return blank._replace(**changes)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.none() | st.floats(0, 10), st.booleans()), min_size=1, max_size=8),
    st.data(),
)
def test_ranks_in_one_sequence_of_works_are_never_at_fault(
    ranks: list[tuple[int, float | None, bool]], data: st.DataObject
) -> None:
    """Whatever their distance, while nobody waits longer than the timeout; a rank may end with as many works as all."""
    most = max(count for count, _, _ in ranks)
    reports = [
        report(rank, count, inside, ended=ended and count == most and inside is None)
        for rank, (count, inside, ended) in enumerate(ranks)
    ]
    me = data.draw(st.integers(0, len(ranks) - 1))
    gone = {each.rank for each in reports if each.ended}
    assert judge(me, [*reports], gone, set(), timeout=10) is None


@given(st.integers(2, 6), st.data())
def test_all_ranks_give_the_same_verdict_on_a_rank_that_failed(world: int, data: st.DataObject) -> None:
    culprit = data.draw(st.integers(0, world - 1))
    fault = Fault(True, 3, culprit, "train step", 2, "bad batch")
    echo = Fault(False, 3, culprit, "train step", 2, "bad batch")
    reports = [
        report(rank, 3, 0.0, fault=fault if rank == culprit else data.draw(st.sampled_from([None, echo])))
        for rank in range(world)
    ]
    for me in range(world):
        verdict = judge(me, [*reports], (), (), timeout=10)
        if me != culprit:
            assert verdict == fault
            assert judge(me, [r._replace(fault=fault) for r in reports], (), {3}, timeout=10) is None, (
                "all failed alike"
            )
            assert judge(me, [*reports], (), {2}, timeout=10) == fault, "an earlier failure excuses nothing"


def test_a_rank_that_never_reports_is_late() -> None:
    assert judge(0, [report(0, 1, 3.0), None], (), (), timeout=4) is None
    verdict = judge(0, [report(0, 1, 5.0), None], (), (), timeout=4)
    assert verdict is not None and verdict.rank == 1 and verdict.message.endswith("it never reported")
