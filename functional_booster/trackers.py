"""Where metrics go: one small protocol, a file of JSON lines, TensorBoard, a progress bar."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

Metrics = Mapping[str, float]

_NARROW = 80  # columns; the bar has no room for more than the loss below that


class Tracker(Protocol):
    """Takes the metrics of a step, step numbers rising; ``close`` once at the end."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record ``metrics`` under the number of steps done."""
        ...

    def close(self) -> None:
        """Write what is held back and let go of files."""
        ...


class JsonlTracker:
    """A line of JSON a step, ``{"step": 10, "loss": 2.5, ...}``, flushed at once; NaN and infinity become null.

    ``resumed_at`` is the step that a resumed run starts from: records up to it are kept, later ones, which the run will
    write again, are dropped. Without it ``path`` must be new: raises FileExistsError, and nothing is overwritten.
    """

    def __init__(self, path: str | os.PathLike[str], resumed_at: int | None = None) -> None:
        path = Path(path)
        if resumed_at is None:
            if path.exists() and path.stat().st_size:
                raise FileExistsError(f"{path}: holds metrics already; give resumed_at to go on with them")
        elif path.exists():
            kept = [record for record in read_jsonl(path) if record["step"] <= resumed_at]
            beside = path.with_name(path.name + ".new")
            with beside.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in kept)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        """Append one line."""
        record = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **record}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records that a JsonlTracker wrote, in order. A last line cut off by a crash is left out.

    Raises ValueError, naming path and line, for any other line that is no record.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # a whole line ends in a newline: the rest is cut off, or empty
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            text = line[:60].decode("utf-8", errors="replace")
            raise ValueError(f"{path}, line {number}: {text!r}, expected a JSON object with a whole number as step")
        records.append(record)
    return records


class TensorBoardTracker:
    """Scalars for TensorBoard in ``folder``; a resumed run hides what was written after ``resumed_at``."""

    def __init__(self, folder: str | os.PathLike[str], resumed_at: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(os.fspath(folder), purge_step=purge)

    def log(self, step: int, metrics: Metrics) -> None:
        """Add one scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class ProgressTracker:
    """A live bar with loss, tokens a second and time left; where no one watches (no terminal), a line now and then.

    ``total`` is the number of steps of the run, ``start`` where it begins, ``interval`` the seconds between two lines,
    ``waiting`` what the bar says until the first step is done. A narrow terminal shows the loss alone.
    """

    def __init__(
        self, total: int, start: int = 0, console: Any = None, interval: float = 10.0, waiting: str = "starting"
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True) if console is None else console
        self._total, self._interval = total, interval
        self._started = self._printed = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._latest: dict[str, float] = {}
        self._live = bool(self._console.is_terminal)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            expand=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task(waiting, total=total, completed=start, numbers="")
        self._bar.start()

    def log(self, step: int, metrics: Metrics) -> None:
        """Move the bar; without a terminal, print when the last line is old enough or the run is complete."""
        self._latest |= metrics
        numbers = "  ".join(_readable(self._latest))
        if self._live:
            if self._console.width < _NARROW:
                numbers = "".join(_readable({"loss": self._latest["loss"]} if "loss" in self._latest else {}))
            self._bar.update(self._task, description="training", completed=step, numbers=numbers)
            return
        now = time.monotonic()
        self._first = self._first or (step, now)
        if step < self._total and self._first[0] != step and now - self._printed < self._interval:
            return
        self._printed = now
        done, since = self._first
        left = (
            f"  {_clock((now - since) / (step - done) * (self._total - step))} left"
            if done < step < self._total
            else ""
        )
        self._console.print(f"step {step}/{self._total}  {numbers}{left}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()


class _Combined:
    def __init__(self, trackers: tuple[Tracker, ...]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Metrics) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # each is closed, even where another one fails to
            for tracker in self._trackers:
                stack.callback(tracker.close)


def combine(*trackers: Tracker) -> Tracker:
    """One tracker that hands everything to all of them, in order."""
    return _Combined(trackers)


def _readable(metrics: Metrics) -> list[str]:
    shown = []
    if "loss" in metrics:
        shown.append(f"loss {metrics['loss']:.3f}")
    if "eval_loss" in metrics:
        shown.append(f"eval {metrics['eval_loss']:.3f}")
    if "tokens_per_second" in metrics:
        rate = metrics["tokens_per_second"]
        shown.append(f"{rate:.0f} tokens/s" if rate < 1e4 else f"{rate / 1e3:.1f}k tokens/s")
    if "mfu" in metrics:
        shown.append(f"MFU {metrics['mfu']:.0%}")
    return shown


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
