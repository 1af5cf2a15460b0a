"""Watchdog: one rank's failure is a clear error on every rank, never a hang.

Each rank reports over the store of torch.distributed what it is doing; a thread on each reads the reports of all. The
main thread raises ``RankFailure`` at its next guarded work, or out of a collective that broke. Where it is stuck (gloo
cannot be interrupted while the other process lives, nor can an NCCL kernel), the thread prints the error and ends the
process with exit status 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch.distributed as dist

from .rank_watch import Watchdog

_running: Watchdog | None = None  # of this process: there is one default process group


def started(timeout: float = 600.0, dead_after: float = 60.0, grace: float = 5.0) -> Watchdog | None:
    """This process's watchdog, started at the first call; None where there is one process only.

    Seconds: ``timeout`` for which ranks in a work wait for one that has not come to it; ``dead_after`` without any sign
    of life, for a rank on another host (on this host, the process is looked up); ``grace`` for which the main thread
    may take to raise an error, before the process is ended. The first call's values hold. Every process must call this.
    """
    global _running
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    if _running is None or not _running.is_current:
        if _running is not None:
            _running.close()
        _running = Watchdog(timeout, dead_after, grace)
    return _running


def stop() -> None:
    """End this process's watchdog, where there is one; every process calls this before it destroys the process group.

    (At exit it ends by itself.)
    """
    if _running is not None:
        _running.close()


@contextlib.contextmanager
def guard(what: str, step: int | None = None) -> Generator[None]:
    """Around work that all ranks take part in, in the same order: with guard("train step", 7): ...

    An exception in it is told to the others, which raise RankFailure; where it is only the echo of another rank's
    failure (a lost connection), that RankFailure is raised from it. For the main thread. Costs microseconds.
    """
    watchdog = started()
    if watchdog is None:
        yield
        return
    watchdog.enter(what, step)
    try:
        yield
    except BaseException as error:
        failure = watchdog.abandon(error)
        if failure is error:
            raise
        raise failure from error
    watchdog.leave()


def agree(error: Exception | None, what: str, step: int | None = None) -> None:
    """All ranks go on, or all raise: waits for every rank to come here with its ``error`` or None.

    A rank that has one raises it; the others raise RankFailure with the lowest such rank's. Afterwards the ranks are in
    step, and may go on. Also the way to end a loop over batches: a rank with batches left is then somewhere else, which
    is an error on all. On one process: raises ``error``, if there is one.
    """
    watchdog = started()
    if watchdog is not None:
        watchdog.agree(error, what, step)
    elif error is not None:
        raise error


@contextlib.contextmanager
def all_or_none(what: str, step: int | None = None, alone: bool = False) -> Generator[None]:
    """Around what each process does by itself: where it fails on one, all raise, as by ``agree``.

    ``alone``: this process does it for itself, and no other one takes part.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    if not alone:
        agree(error, what, step)
    elif error is not None:
        raise error
