"""fit: the loop, its hooks, the trackers and the loss curve."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from functional_booster import trackers, visualize
from functional_booster.fit import fit
from functional_booster.hooks import (
    Checkpoint,
    Profiler,
    StopTraining,
    evaluate,
    every,
    mean_metrics,
    stop,
    stop_on_nan,
)


@dataclass(frozen=True)
class State:
    """A weight that descends towards the data's mean."""

    params: Any
    position: torch.Tensor
    consumed_by: str = ""


@dataclass
class Recorder:
    """A tracker that keeps what it is given."""

    records: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def log(self, step: int, metrics: Any) -> None:
        self.records.append((step, dict(metrics)))

    def close(self) -> None:
        pass


def start() -> State:
    return State(torch.zeros(3, dtype=torch.float64), torch.tensor(0))


def step(state: State, batch: torch.Tensor) -> tuple[State, dict[str, torch.Tensor]]:
    error = state.params - batch
    metrics = {"loss": (error**2).sum(), "tokens": torch.tensor(batch.numel())}
    return State(state.params - 0.1 * error, state.position + 1), metrics


def data(position: int) -> torch.Tensor:
    return torch.arange(3, dtype=torch.float64) * math.sin(position)


def at(wanted: int, act: Callable[[], None]) -> Callable[[int, Any, Any], None]:
    def hook(n: int, state: Any, metrics: Any) -> None:
        if n == wanted:
            act()

    return hook


@given(first=st.integers(1, 12), more=st.integers(1, 12), log_every=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_a_stopped_and_resumed_run_is_the_straight_run(first: int, more: int, log_every: int) -> None:
    straight, parts = Recorder(), Recorder()
    whole = fit(step, start(), data, steps=first + more, tracker=straight, log_every=log_every)
    half = fit(step, start(), data, steps=first + more, tracker=parts, log_every=log_every, hooks=[every(first, stop)])
    resumed = fit(step, half, data, steps=first + more, tracker=parts, log_every=log_every)
    assert int(half.position) == first
    assert torch.equal(whole.params, resumed.params)
    assert [(n, record["loss"]) for n, record in straight.records] == [
        (n, record["loss"]) for n, record in parts.records
    ]


def test_fit_is_the_loop_written_out() -> None:
    state, losses = start(), []
    for position in range(7):
        state, metrics = step(state, data(position))
        losses.append(float(metrics["loss"]))
    recorder = Recorder()
    fitted = fit(step, start(), data, steps=7, tracker=recorder, log_every=3)
    assert torch.equal(fitted.params, state.params)
    assert {n: record["loss"] for n, record in recorder.records} == {n: losses[n - 1] for n in (1, 3, 6, 7)}


def test_between_logs_no_metric_is_fetched() -> None:
    fetched: list[int] = []

    class Scalar:
        def __init__(self, n: int) -> None:
            self.n = n

        def __float__(self) -> float:
            fetched.append(self.n)
            return 1.0

    def lazy(state: State, batch: torch.Tensor) -> tuple[State, dict[str, Any]]:
        state, _ = step(state, batch)
        return state, {"loss": Scalar(int(state.position))}

    seen: list[tuple[int, tuple[int, ...]]] = []
    fit(lazy, start(), data, steps=10, log_every=5, hooks=[lambda n, *_: seen.append((n, tuple(fetched)))])
    assert dict(seen)[4] == dict(seen)[2] == (1,)
    assert set(fetched) == {1}  # without a tracker nothing but the first step, which sets the clock
    fit(lazy, start(), data, steps=10, log_every=5, tracker=Recorder())
    assert set(fetched) == {1, 5, 10}


def test_hooks_see_every_step_and_what_they_return_is_logged() -> None:
    recorder, seen = Recorder(), []

    def hook(n: int, state: State, metrics: Any) -> dict[str, Any]:
        assert int(state.position) == n
        seen.append(n)
        return {"twice": 2 * metrics["loss"]}

    fit(step, start(), data, steps=6, log_every=4, tracker=recorder, hooks=[every(3, hook)])
    assert seen == [3, 6]
    records = dict(recorder.records)
    assert list(records) == [1, 3, 4, 6]
    assert records[3].keys() == {"twice"}
    assert records[6]["twice"] == 2 * records[6]["loss"]


def test_speed_is_counted_in_tokens_after_the_first_step() -> None:
    recorder = Recorder()
    fit(step, start(), data, steps=20, tracker=recorder, flops_per_token=6e3, peak_flops=3e12)
    records = dict(recorder.records)
    assert "tokens_per_second" not in records[1]
    for n in (10, 20):
        assert records[n]["tokens_per_second"] > 0
        assert records[n]["mfu"] == pytest.approx(records[n]["tokens_per_second"] * 2e-9, rel=1e-12)


def test_an_iterable_ends_the_training_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    state = fit(step, start(), [data(position) for position in range(4)], steps=9)
    assert torch.equal(state.params, fit(step, start(), data, steps=4).params)
    assert "4 of 9" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_returns(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    saved: list[tuple[str, State]] = []
    hooks = [
        at(3, lambda: os.kill(os.getpid(), number)),
        Checkpoint(lambda path, state: saved.append((path, state)), "at/{step}", every=100),
    ]
    state = fit(step, start(), data, steps=50, hooks=hooks)
    assert saved == [("at/3", state)]
    assert int(state.position) == 3
    assert signal.getsignal(number) is before


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own answer to Ctrl-C, which a shell takes away from what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_ends_at_once_and_saves_nothing() -> None:
    saved: list[str] = []

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(
            step,
            start(),
            data,
            steps=50,
            hooks=[at(3, twice), Checkpoint(lambda path, _: saved.append(path), "x", 100)],
        )
    assert saved == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_fit_runs_outside_the_main_thread() -> None:
    found: list[State] = []
    thread = threading.Thread(target=lambda: found.append(fit(step, start(), data, steps=3)))
    thread.start()
    thread.join()
    assert torch.equal(found[0].params, fit(step, start(), data, steps=3).params)


def failing_data(position: int) -> torch.Tensor:
    if position == 3:
        raise OSError("the disk went away")
    return data(position)


def failing_step(state: State, batch: torch.Tensor) -> tuple[State, dict[str, torch.Tensor]]:
    if int(state.position) == 3:
        state.params.fill_(math.nan)  # a step may have written half of the donated state
        object.__setattr__(state, "consumed_by", "step")
        raise RuntimeError("out of memory")
    return step(state, batch)


def refusing_step(state: State, batch: torch.Tensor) -> tuple[State, dict[str, torch.Tensor]]:
    if int(state.position) == 3:
        raise ValueError("batch: no rows in it")
    return step(state, batch)


def test_an_error_saves_the_last_good_state_and_never_a_donated_one() -> None:
    saved: list[State] = []
    checkpoint = Checkpoint(lambda _, state: saved.append(state), "x", every=2)
    with pytest.raises(OSError, match="went away"):
        fit(step, start(), failing_data, steps=9, hooks=[checkpoint])
    assert [int(state.position) for state in saved] == [2, 3]
    saved.clear()
    with pytest.raises(ValueError, match="no rows"):
        fit(refusing_step, start(), data, steps=9, hooks=[Checkpoint(lambda _, state: saved.append(state), "x", 2)])
    assert [int(state.position) for state in saved] == [2, 3]
    saved.clear()
    checkpoint = Checkpoint(lambda _, state: saved.append(replace(state)), "x", every=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(failing_step, start(), data, steps=9, hooks=[checkpoint])
    assert [int(state.position) for state in saved] == [2]


def test_every_hook_is_closed_even_where_another_one_fails() -> None:
    closed: list[str] = []

    class Hook:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, n: int, state: State, metrics: Any) -> None:
            pass

        def close(self, n: int, state: State) -> None:
            closed.append(self.name)
            raise RuntimeError(self.name)

    with pytest.raises(RuntimeError):
        fit(step, start(), data, steps=1, hooks=[Hook("a"), every(2, Hook("b"))])
    assert sorted(closed) == ["a", "b"]


def test_a_checkpoint_is_written_once_a_state() -> None:
    saved: list[str] = []
    fit(step, start(), data, steps=6, hooks=[Checkpoint(lambda path, _: saved.append(path), Path("run/{step}"), 3)])
    assert saved == ["run/3", "run/6"]


def test_stop_on_nan_names_the_leaf_and_the_metric() -> None:
    good = State({"blocks": [{"w": torch.ones(2)}, {"w": torch.ones(2)}]}, torch.tensor(0))
    stop_on_nan(1, good, {"loss": torch.tensor(1.0)})
    bad = replace(good, params={"blocks": [{"w": torch.ones(2)}, {"w": torch.tensor([1.0, math.nan])}]})
    with pytest.raises(FloatingPointError, match=r"step 7: params\.blocks\.1\.w: 1 NaN"):
        stop_on_nan(7, bad, {})
    with pytest.raises(FloatingPointError, match=r"step 7: metrics\.loss"):
        stop_on_nan(7, good, {"loss": torch.tensor(math.inf)})


def test_a_nan_is_not_saved_over_the_last_checkpoint() -> None:
    saved: list[State] = []

    def diverging(state: State, batch: torch.Tensor) -> tuple[State, dict[str, torch.Tensor]]:
        state, metrics = step(state, batch)
        return (replace(state, params=state.params * math.nan) if int(state.position) == 3 else state), metrics

    for hooks, steps in (
        ([stop_on_nan], 9),
        ([], 9),
        ([], 3),
    ):  # it is found by the hook, at a save, after the last step
        checkpoint = Checkpoint(lambda _, state: saved.append(state), "x", every=2)
        with pytest.raises(FloatingPointError, match=r"step [34]: params: 3 NaN"):
            fit(diverging, start(), data, steps=steps, hooks=[*hooks, checkpoint])
        assert [int(state.position) for state in saved] == [2]
        saved.clear()


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_evaluation_averages_by_tokens(sizes: list[int]) -> None:
    values = torch.arange(sum(sizes), dtype=torch.float64) ** 2

    def eval_step(state: State, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": batch.mean(), "tokens": torch.tensor(len(batch), dtype=torch.float64)}

    metrics = mean_metrics(eval_step, start(), values.split(sizes))
    torch.testing.assert_close(metrics["loss"], values.mean(), rtol=1e-12, atol=0)
    assert int(metrics["tokens"]) == len(values)
    hook = evaluate(eval_step, iter(values.split(sizes)), every=2)  # an iterator, read once and kept
    assert hook(1, start(), {}) is None
    for n in (2, 4):
        assert torch.equal(dict(hook(n, start(), {}) or {})["eval_loss"], metrics["loss"])


def test_the_profiler_writes_a_trace_of_the_steps(tmp_path: Path) -> None:
    fit(step, start(), data, steps=8, hooks=[Profiler(tmp_path / "profile", wait=1, warmup=1, active=2)])
    events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name", "").startswith("ProfilerStep") for event in events) >= 2
    assert any(event.get("name") == "aten::sub" for event in events)
    for steps in (1, 2):
        fit(step, start(), data, steps=steps, hooks=[Profiler(tmp_path / "short", wait=1, warmup=1, active=2)])
    assert not (tmp_path / "short").exists()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps: got 0, expected an int at least 1"),
        ({"steps": 2.5}, TypeError, "steps: got float 2.5, expected an int"),
        ({"steps": "9"}, TypeError, "steps: got str '9', expected an int"),
        ({"log_every": 0}, ValueError, "log_every: got 0, expected an int at least 1"),
        ({"log_every": None}, TypeError, "log_every: got NoneType None, expected an int"),
        ({"step": start()}, TypeError, r"step: State, expected a function \(state, batch\) -> \(state, metrics\)"),
        ({"state": {"w": 1}}, TypeError, r"state: dict, expected a TrainState \(booster.init makes one\)"),
        ({"data": 3}, TypeError, "data: int, expected a function position -> batch or an iterable of batches"),
        ({"data": {"input_ids": torch.ones(3)}}, TypeError, "data: dict, expected a function position -> batch or an"),
        ({"data": "corpus.txt"}, TypeError, "data: str, expected a function position -> batch or an iterable"),
        ({"hooks": stop}, TypeError, r"hooks: function, expected a list of functions \(n, state, metrics\)"),
        ({"hooks": {"stop": stop}}, TypeError, "hooks: dict, expected a list of functions"),
        ({"hooks": [stop, 3]}, TypeError, r"hooks\[1\]: int, expected a function \(n, state, metrics\)"),
        ({"tracker": "run"}, TypeError, "tracker: str, expected a Tracker or None"),
    ],
)
def test_wrong_arguments_are_named_before_the_first_step(
    wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    def fetch(position: int) -> torch.Tensor:
        raise AssertionError("work has begun")

    arguments: dict[str, Any] = {"step": step, "state": start(), "data": fetch, "steps": 3} | wrong
    with pytest.raises(error, match=message):
        fit(**arguments)


def test_wrong_numbers_of_hooks_are_named() -> None:
    cases: list[tuple[Any, type[Exception]]] = [(0, ValueError), (stop, TypeError)]
    for wrong, error in cases:
        with pytest.raises(error, match="every: got"):
            every(wrong, stop)
        with pytest.raises(error, match="every: got"):
            Checkpoint(lambda *_: None, "x", every=wrong)
    with pytest.raises(ValueError, match="batches: there is none"):
        mean_metrics(lambda *_: {}, None, [])
    with pytest.raises(StopTraining):
        stop(1, None, {})


def test_jsonl_goes_on_after_the_resumed_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    tracker = trackers.JsonlTracker(path)
    for n in range(1, 6):
        tracker.log(n, {"loss": n / 3})
        assert json.loads(path.read_text().splitlines()[-1]) == {"step": n, "loss": n / 3}  # on disk at once
    tracker.close()
    with pytest.raises(FileExistsError, match=r"metrics\.jsonl"):
        trackers.JsonlTracker(path)
    path.write_text(path.read_text() + '{"step": 6, "lo')  # a crash cut the line off
    tracker = trackers.JsonlTracker(path, resumed_at=3)
    tracker.log(4, {"loss": math.nan, "lr": math.inf})
    tracker.close()
    expected = [{"step": n, "loss": n / 3} for n in (1, 2, 3)]
    assert trackers.read_jsonl(path) == [*expected, {"step": 4, "loss": None, "lr": None}]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_broken_jsonl_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: 'not json'"):
        trackers.JsonlTracker(path, resumed_at=1)
    assert path.read_text() == '{"step": 1}\nnot json\n{"step": 2}\n'
    for line in (b'{"step": "1"}', b'{"step": true}', b'{"step": 1.5}', b"[1]", b"\xff\xfe\x00", b"[" * 100_000):
        path.write_bytes(b'{"step": 1}\n' + line + b"\n")
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: .* expected a JSON object with a whole number"):
            trackers.read_jsonl(path)


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = trackers.TensorBoardTracker(tmp_path)
    for n in range(1, 5):
        first.log(n, {"loss": 1 / n})
    first.close()
    resumed = trackers.TensorBoardTracker(tmp_path, resumed_at=2)
    for n in (3, 4, 5):
        resumed.log(n, {"loss": 10.0 + n})
    resumed.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("loss")]
    assert scalars == [(1, 1.0), (2, 0.5), (3, 13.0), (4, 14.0), (5, 15.0)]


def test_progress_without_a_terminal_prints_a_line_now_and_then() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=False, width=120)
    tracker = trackers.ProgressTracker(100, console=console, interval=1e9)
    for n in range(1, 101):
        tracker.log(n, {"loss": 2.5, "eval_loss": 2.625, "tokens_per_second": 12_345.0, "mfu": 0.41})
    tracker.close()
    lines = written.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/100", "step 100/100"]
    assert lines[1] == "step 100/100  loss 2.500  eval 2.625  12.3k tokens/s  MFU 41%"


def test_progress_on_a_terminal_is_a_bar() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    tracker = trackers.combine(trackers.ProgressTracker(100, start=40, console=console), Recorder())
    tracker.log(50, {"loss": 2.5, "tokens_per_second": 950.0})
    tracker.close()
    shown = written.getvalue()
    assert "50/100" in shown
    assert "loss 2.500  950 tokens/s" in shown


def test_a_narrow_terminal_shows_the_loss() -> None:
    written = io.StringIO()
    tracker = trackers.ProgressTracker(
        100, console=Console(file=written, force_terminal=True, width=60), waiting="compiling the step"
    )
    tracker.log(1, {"loss": 2.5, "eval_loss": 2.625, "tokens_per_second": 950.0})
    tracker.close()
    shown = written.getvalue()
    assert "compiling the step" in shown
    assert "loss 2.500" in shown
    assert "1/100" in shown
    assert "eval" not in shown
    assert "tokens/s" not in shown


def test_combined_trackers_all_get_it_and_all_close() -> None:
    class Failing(Recorder):
        def close(self) -> None:
            self.records.append((0, {}))
            raise OSError("full")

    first, second = Failing(), Failing()
    both = trackers.combine(first, second)
    both.log(1, {"loss": 1.0})
    with pytest.raises(OSError, match="full"):
        both.close()
    assert first.records == second.records == [(1, {"loss": 1.0}), (0, {})]


def test_the_loss_curve_draws_what_was_logged(tmp_path: Path) -> None:
    tracker = trackers.JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"loss": 5.0})
    tracker.log(2, {"loss": math.nan, "eval_loss": 4.5})
    tracker.log(3, {"loss": 3.0, "eval_loss": 4.0})
    tracker.close()
    figure = visualize.loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", references={"unigram entropy": 3.25})
    curves = {line.get_label(): np.asarray(line.get_data()).tolist() for line in figure.axes[0].lines}
    assert curves["train"] == [[1, 3], [5, 3]]
    assert curves["validation"] == [[2, 3], [4.5, 4]]
    assert curves["unigram entropy 3.25"][1] == [3.25, 3.25]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert figure.axes[0].get_ylabel() == "loss (nats per token)"
    alone = visualize.loss([{"step": 1, "loss": 5.0}], unit="byte").axes[0]
    assert alone.lines[0].get_marker() == "o"  # a line through one point is nothing to see
    assert alone.get_ylabel() == "loss (nats per byte)"
    with pytest.raises(ValueError, match="no record has a loss"):
        visualize.loss([{"step": 1, "lr": 0.1}])
