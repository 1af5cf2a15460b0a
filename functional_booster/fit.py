"""The training loop that people reuse."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from . import watchdog
from .hooks import Batch, Hook, Scalars, StopTraining
from .optim.validate import check_integer
from .profile import peak_memory
from .trackers import Tracker

log = logging.getLogger(__name__)


class HasPosition(Protocol):
    """What ``fit`` needs of a state: how many batches it has consumed, a 0-d int64 tensor."""

    @property
    def position(self) -> Any:
        """Batches consumed."""
        ...


State = TypeVar("State", bound=HasPosition)


class _DataEnded(Exception):
    pass


class Closing(Protocol):
    """What a hook may also have: ``close(n, state)``, called once however the training ends.

    ``state`` is the last good one, or None where an error left none.
    """

    def close(self, n: int, state: Any) -> None:
        """Finish what the hook has begun."""
        ...


def fit(
    step: Callable[[State, Batch], tuple[State, Scalars]],
    state: State,
    data: Callable[[int], Batch] | Iterable[Batch],
    *,
    steps: int,
    hooks: Sequence[Hook] = (),
    tracker: Tracker | None = None,
    log_every: int = 10,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> State:
    """Train until ``state.position`` is ``steps``, and return the state; the one given is donated to ``step``.

    ``data`` is a function position -> batch, which makes a resumed run exact, or an iterable, taken from its beginning
    and ending the training when it ends. After every step each hook is called as ``hook(n, state, metrics)``, n being
    the steps done; what it returns is logged. ``step`` must count ``state.position`` up by one.

    Metrics go to ``tracker`` (which stays open) after the first step, every ``log_every`` steps and after the last;
    between, the host never waits for the device. Added are tokens_per_second (wall clock, hooks included),
    mfu where FLOPs per token and the peak in FLOP/s are known, and peak_memory in bytes on CUDA.

    Ctrl-C and SIGTERM finish the running step, close the hooks (a checkpoint is saved) and return; a second one ends
    at once. An error closes the hooks with the last good state before it goes on; one in a step that had consumed its
    state already closes them without, and so does a FloatingPointError. Raises TypeError or ValueError, naming the
    argument, before the first step.

    A state that is laid out over processes is trained by all of them: each calls this with its part of the data and
    the same hooks, as those that evaluate or save work together; ``tracker`` is given on one of them. They stop after
    the same step, whichever gets the signal or the StopTraining. Where one fails, or runs out of batches before the
    others, all raise (the others ``rank_failure.RankFailure``), and the hooks are closed without a state.
    """
    check_integer("steps", steps, minimum=1)
    check_integer("log_every", log_every, minimum=1)
    _check(step, state, data, hooks, tracker)
    n = int(state.position)
    fetch = data if callable(data) else _in_order(data)
    meter = _Meter(n, flops_per_token, peak_flops)
    good: State | None = state
    with _signals() as stopped, _ranks(state) as ranks, contextlib.ExitStack() as closing:
        for hook in hooks:
            if close := getattr(hook, "close", None):
                closing.callback(lambda close=close: close(n, good))
        try:
            while n < steps and not ranks.any(bool(stopped), n):
                with ranks.step(n + 1):
                    try:
                        batch = fetch(n)
                    except _DataEnded:
                        log.warning("the data ended after %d of %d steps", n, steps)
                        break
                    good = None
                    try:
                        state, metrics = step(state, batch)
                    except Exception:
                        good = None if getattr(state, "consumed_by", "") else state  # refused before it was consumed
                        raise
                    good, n = state, n + 1
                    meter.count(metrics)
                    due = n == 1 or n % log_every == 0 or n == steps
                    record = dict(metrics) if due else {}
                    for hook in hooks:
                        try:
                            record |= hook(n, state, metrics) or {}
                        except StopTraining:
                            stopped.append(n)
                    if due:
                        record |= meter.read(metrics)
                    if record and tracker is not None:
                        tracker.log(n, {name: float(value) for name, value in record.items()})
            ranks.end(n)
        except BaseException as error:
            if ranks.group is not None or isinstance(error, KeyboardInterrupt | FloatingPointError):
                good = None  # not that of all ranks; or ends at once; or is not good
            raise
    return state


def _check(step: Any, state: Any, data: Any, hooks: Any, tracker: Any) -> None:
    if not callable(step):
        raise TypeError(f"step: {_kind(step)}, expected a function (state, batch) -> (state, metrics)")
    if not hasattr(state, "position"):
        raise TypeError(f"state: {_kind(state)}, expected a TrainState (booster.init makes one)")
    if isinstance(data, Mapping | str) or not (callable(data) or isinstance(data, Iterable)):
        raise TypeError(f"data: {_kind(data)}, expected a function position -> batch or an iterable of batches")
    if not isinstance(hooks, Sequence):
        raise TypeError(f"hooks: {_kind(hooks)}, expected a list of functions (n, state, metrics)")
    for index, hook in enumerate(hooks):
        if not callable(hook):
            raise TypeError(f"hooks[{index}]: {_kind(hook)}, expected a function (n, state, metrics)")
    if tracker is not None and not hasattr(tracker, "log"):
        raise TypeError(f"tracker: {_kind(tracker)}, expected a Tracker or None")


def _kind(value: Any) -> str:
    return type(value).__name__


class _Meter:
    """Tokens a second since the last reading. The first step, which compiles, sets the clock and is not counted."""

    def __init__(self, start: int, flops_per_token: float | None, peak_flops: float | None) -> None:
        self._first, self._flops, self._peak = start + 1, flops_per_token, peak_flops
        self._since: float | None = None
        self._tokens: list[Any] = []

    def count(self, metrics: Scalars) -> None:
        if self._since is None:
            if "loss" in metrics:
                float(metrics["loss"])  # waits for the device, this once
            self._since = time.perf_counter()
        elif "tokens" in metrics:
            self._tokens.append(metrics["tokens"])

    def read(self, metrics: Scalars) -> dict[str, float]:
        device = next((value.device for value in metrics.values() if isinstance(value, torch.Tensor)), "cpu")
        tokens = sum(float(value) for value in self._tokens)  # waits for the device
        now = time.perf_counter()
        measured: dict[str, float] = {}
        if tokens and self._since is not None:
            measured["tokens_per_second"] = tokens / (now - self._since)
            if self._flops and self._peak:
                measured["mfu"] = measured["tokens_per_second"] * self._flops / self._peak
        if (memory := peak_memory(device)) is not None:
            measured["peak_memory"] = float(memory)
        self._since, self._tokens = now, []
        return measured


@dataclass(frozen=True)
class _Ranks:
    """The processes that a state is laid out over: they go through each step together, stop together, fail together.

    ``group``: theirs, on the CPU; None for one process, which has nobody to ask.
    """

    group: Any = None

    def any(self, flag: bool, n: int) -> bool:
        """Whether the flag is set on one of them."""
        if self.group is None:
            return flag
        told = torch.tensor(int(flag))
        with watchdog.guard("stop signal", n):
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        return bool(told)

    def step(self, n: int) -> contextlib.AbstractContextManager[None]:
        """Around step ``n``: where it fails on one of them, all raise."""
        return contextlib.nullcontext() if self.group is None else watchdog.guard("train step", n)

    def end(self, n: int) -> None:
        """The training is over on each; raises RankFailure where another one still has batches."""
        if self.group is not None:
            watchdog.agree(None, "end of training", n)


@contextlib.contextmanager
def _ranks(state: Any) -> Generator[_Ranks]:
    mesh = getattr(getattr(state, "plan", None), "mesh", None)
    if mesh is None or not mesh.across:
        yield _Ranks()
        return
    group: Any = dist.new_group(backend="gloo")  # flags are the host's: on the device each would be waited for
    try:
        yield _Ranks(group)
    finally:
        dist.destroy_process_group(group)


def _in_order(data: Iterable[Batch]) -> Callable[[int], Batch]:
    batches = iter(data)

    def fetch(position: int) -> Batch:
        try:
            return next(batches)
        except StopIteration:
            raise _DataEnded from None

    return fetch


@contextlib.contextmanager
def _signals() -> Generator[list[int]]:
    """The SIGINT or SIGTERM that arrived, in a list that is empty until then; the second one acts as ever.

    Python hands signals to the main thread: elsewhere the list stays empty.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        restore()
        log.warning("%s: ending after this step; once more ends at once", signal.Signals(number).name)

    for number in before:
        signal.signal(number, handle)
    try:
        yield received
    finally:
        restore()
