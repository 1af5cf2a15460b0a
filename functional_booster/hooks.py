"""What happens beside the training: hooks for ``fb.fit``, called after each step as ``hook(n, state, metrics)``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from functional_booster.kernels import tree
from functional_booster.sharding.collectives import pmax
from functional_booster.sharding.mesh import Replicated, spmd

from . import checkpoint, debug, step, watchdog
from .optim.validate import check_integer
from .state import TrainState

Batch = Any
Scalars = Mapping[str, Any]  # 0-d tensors, not fetched yet, or numbers
Hook = Callable[[int, Any, Scalars], Scalars | None]


class StopTraining(Exception):
    """Raised by a hook to end the training cleanly after this step."""


def every(n: int, hook: Hook) -> Hook:
    """The hook, called after every n-th step alone. Raises TypeError or ValueError unless n is an int from 1 on."""
    return _Every(n, hook)


def stop(n: int, state: Any, metrics: Scalars) -> None:
    """A hook that ends the training: ``every(1000, stop)`` after step 1,000."""
    raise StopTraining


def stop_on_nan(n: int, state: Any, metrics: Scalars) -> None:
    """A hook that raises FloatingPointError, naming the metric or the leaf, where there is a NaN or an infinity.

    Waits for the device: use ``every(100, stop_on_nan)``. On processes all raise, whichever holds the leaf.
    """
    _check_params(n, state)
    debug.check_finite({name: metrics[name] for name in ("loss", "grad_norm") if name in metrics}, f"step {n}: metrics")


def evaluate(
    eval_step: Callable[[Any, Batch], Scalars], batches: Iterable[Batch], every: int, prefix: str = "eval_"
) -> Hook:
    """A hook that runs ``eval_step`` over ``batches`` every so many steps and logs ``mean_metrics`` under a prefix."""
    held = list(batches)

    def hook(n: int, state: Any, metrics: Scalars) -> Scalars:
        return {prefix + name: value for name, value in mean_metrics(eval_step, state, held).items()}

    return _Every(every, hook)


def mean_metrics(
    eval_step: Callable[[Any, Batch], Scalars], state: Any, batches: Iterable[Batch]
) -> dict[str, torch.Tensor]:
    """The batches' metrics averaged by tokens, as 0-d tensors without waiting for the device; ``tokens`` is the sum.

    Raises ValueError when there is no batch.
    """
    sums: dict[str, Any] = {}
    for batch in batches:
        metrics = dict(eval_step(state, batch))
        tokens = metrics.pop("tokens")
        for name, value in {**{name: value * tokens for name, value in metrics.items()}, "tokens": tokens}.items():
            sums[name] = sums[name] + value if name in sums else value
    if not sums:
        raise ValueError("batches: there is none to evaluate")
    tokens = sums.pop("tokens")
    return {**{name: step.mean(value, tokens) for name, value in sums.items()}, "tokens": tokens}


@dataclass
class Checkpoint:
    """A hook that calls ``save(path, state)`` every so many steps and at the end, however it comes.

    ``path`` may hold ``{step}``; without, one checkpoint is written over again, which ``save`` must do atomically.
    Parameters that are not finite are never saved: raises FloatingPointError, and the checkpoint before stays.

    ``keep``: which of ``"<root>/step-{step}"`` stay, the others being removed once a newer one is complete.
    ``measure(state)`` gives numbers that are saved along (``save(path, state, metrics=...)``), by which ``keep`` finds
    the best. A ``checkpoint.Saving`` that ``save`` returns is waited for at the next one, and at the end.
    """

    save: Callable[..., Any]
    path: str | os.PathLike[str]
    every: int
    keep: checkpoint.Retention | None = None
    measure: Callable[[Any], Scalars] | None = None
    _saved: int | None = field(default=None, init=False, repr=False)
    _saving: checkpoint.Saving | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("every", self.every, minimum=1)
        if self.keep is not None and not os.fspath(self.path).endswith("/step-{step}"):
            raise ValueError(f"path: {os.fspath(self.path)!r}, expected '<root>/step-{{step}}' where some are kept")

    def __call__(self, n: int, state: Any, metrics: Scalars) -> None:
        """Save where it is time."""
        if n % self.every == 0:
            self._write(n, state)

    def close(self, n: int, state: Any) -> None:
        """Save the last state, unless that has been done, and wait for it."""
        if state is not None and n != self._saved:
            self._write(n, state)
        self._finish(n)

    def _write(self, n: int, state: Any) -> None:
        _check_params(n, state)
        self._finish(n)
        measured = {} if self.measure is None else {"metrics": self.measure(state)}
        saved = self.save(os.fspath(self.path).replace("{step}", str(n)), state, **measured)
        self._saved = n
        if isinstance(saved, checkpoint.Saving):
            self._saving = saved
        else:
            self._prune(n)

    def _finish(self, n: int) -> None:
        """Wait for what is being saved; only then others may go."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
            self._prune(n)

    def _prune(self, n: int) -> None:
        if self.keep is not None:
            with watchdog.all_or_none("retention", n):
                if not dist.is_initialized() or dist.get_rank() == 0:
                    checkpoint.prune(os.fspath(self.path).removesuffix("/step-{step}"), self.keep)


class Profiler:
    """A hook that records ``active`` steps with torch.profiler, after ``wait`` and ``warmup`` steps, once.

    The trace goes to ``folder``/trace.json, for chrome://tracing or Perfetto; a run too short for it leaves none.
    """

    def __init__(self, folder: str | os.PathLike[str], wait: int = 5, warmup: int = 2, active: int = 3) -> None:
        self._path = Path(folder) / "trace.json"
        schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        self._profile = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write)
        self._running = False
        self._unseen = wait + warmup  # steps still to go before the first that is recorded

    def __call__(self, n: int, state: Any, metrics: Scalars) -> None:
        """Tell the profiler that a step is over."""
        if not self._running:
            self._profile.start()
            self._running = True
        self._profile.step()
        self._unseen -= 1

    def close(self, n: int, state: Any) -> None:
        """Stop recording; a run that ends early keeps what there is."""
        if self._running:
            self._profile.stop()

    def _write(self, profile: torch.profiler.profile) -> None:
        if self._unseen >= 0:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(os.fspath(self._path))


def _check_params(n: int, state: Any) -> None:
    """Raise FloatingPointError where a parameter is not finite: on all ranks of the state's mesh, or on none."""
    if not isinstance(state, TrainState) or not (state.plan.mesh.virtual or state.plan.mesh.across):
        debug.check_finite(getattr(state, "params", None), f"step {n}: params")
        return
    mesh, device = state.plan.mesh, state.step.device

    def broken(parts: Any) -> Replicated:
        floats = [leaf for leaf in tree.leaves(parts) if leaf.is_floating_point() or leaf.is_complex()]
        finite = torch.stack([leaf.isfinite().all().to(device) for leaf in floats]).all()
        return Replicated(pmax(1.0 - finite.float(), mesh.names))

    with torch.no_grad():
        if bool(spmd(broken, mesh)((state.storage, state.frozen))):  # on all ranks, which now look for it together
            whole = checkpoint.named_tensors(state)
            params = {name.partition(".")[2]: whole[name] for name in whole if name.partition(".")[0] == "params"}
            debug.check_finite(params, f"step {n}: params")


@dataclass(frozen=True)
class _Every:
    n: int
    hook: Hook

    def __post_init__(self) -> None:
        check_integer("every", self.n, minimum=1)

    def __call__(self, n: int, state: Any, metrics: Scalars) -> Scalars | None:
        return self.hook(n, state, metrics) if n % self.n == 0 else None

    def close(self, n: int, state: Any) -> None:
        if close := getattr(self.hook, "close", None):
            close(n, state)
