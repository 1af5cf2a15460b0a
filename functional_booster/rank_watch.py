"""A rank's part in watching: what the main thread tells, and the thread that reads what all ranks tell."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store  # private: confined to this file

from . import process
from .rank_failure import Fault, RankFailure, Report, describe, is_lost_connection, judge

PATIENCE = 8.0  # seconds for which a rank whose collective broke waits to learn whose fault it is


class Watchdog:
    """A rank's part in watching. ``enter`` and ``leave`` only write attributes; a daemon thread talks to the store."""

    def __init__(self, timeout: float, dead_after: float, grace: float) -> None:
        self.store: Any = _get_default_store()  # kept, as rank 0's may hold the server
        own_connection = self.store.clone()  # type: ignore[attr-defined]  # the other one may be held by a main thread that waits on it
        own_connection.set_timeout(timedelta(seconds=30))
        self._told: dist.Store | None = dist.PrefixStore("functional_booster/watchdog", own_connection)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._nccl = "nccl" in dist.get_backend_config()
        self._timeout, self._dead_after, self._grace = timeout, dead_after, grace
        self._interval = max(0.25, self._world / 128)  # seconds; the store serves world^2 / interval reads a second
        self._host, self._pid = process.host(), os.getpid()
        self._work: tuple[int, str, int | None, float] = (0, "start", None, 0.0)  # count, what, step, entered at
        self._depth = 0
        self._beat = 0
        self._raised: Fault | None = None
        self._failed: set[int] = set()  # counts of the works that this rank failed in by its own fault
        self._last_error: BaseException | None = None
        self._agreed: str | None = None  # the key of this rank's last say
        self._doomed = self._ended = self._alarmed = False
        self._reports: list[Report | None] = [None] * self._world
        self._heard = [(0, time.monotonic())] * self._world  # each rank's last beat, and when it was first read
        self._fault: Fault | None = None
        self._noticed = 0.0  # when that was
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="functional_booster watchdog", daemon=True)
        self._thread.start()
        self._previous_hook = sys.excepthook
        self._hook: Callable[..., None] = self._uncaught
        sys.excepthook = self._hook
        atexit.register(self.close)

    @property
    def is_current(self) -> bool:
        """Whether torch.distributed is still the world that is watched."""
        return self.store is _get_default_store()

    # --- the main thread

    def enter(self, what: str, step: int | None = None) -> None:
        """Begin a work that all ranks take part in, in the same order: its ``what`` and ``step`` are the same on all.

        Within another work, None is that one's step. Raises RankFailure where another rank has failed.
        """
        self._check()
        if step is None and self._depth > 0:
            step = self._work[2]
        self._work = (self._work[0] + 1, what, step, time.monotonic())
        self._depth += 1

    def leave(self) -> None:
        """The work is done. Raises RankFailure where another rank has failed."""
        self._depth -= 1
        self._check()

    def abandon(self, error: BaseException) -> BaseException:
        """The work has failed; tells the others, and returns what to raise, as ``failed``."""
        failure = self.failed(error)
        self._depth -= 1
        return failure

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others; returns what to raise: ``error`` itself, or the RankFailure of which it is but an echo."""
        if isinstance(error, RankFailure) or error is self._last_error:
            return error
        self._last_error = error
        count, what, step, _ = self._work
        if not is_lost_connection(error):
            message = f"rank {self._rank} failed {self._report().position}: {describe(error)}"
            self._failed.add(count)
            self._tell(Fault(True, count, self._rank, what, step, message))
            return error
        self._alarmed = True
        fault = self._await_verdict()
        if fault is None:
            places = "; ".join(
                f"rank {report.rank} is {report.position}, at {report.where}"
                for report in self._reports
                if report is not None and report.rank != self._rank
            )
            lost = f"rank {self._rank} lost the others {self._report().position}: {describe(error)}; {places}"
            fault = Fault(False, count, self._rank, what, step, lost)
        return self._give_up(fault)

    def agree(self, error: Exception | None, what: str, step: int | None = None) -> None:
        """See ``watchdog.agree``."""
        self.enter(what, step)
        count, position = self._work[0], self._report().position
        try:
            said = self._gather(count, "" if error is None else describe(error))
        except RankFailure as failure:
            if error is not None:
                raise failure from error
            raise
        finally:
            self._depth -= 1
        if error is not None:
            self._last_error = error  # told already
            raise error
        for rank, message in enumerate(said):
            if message:
                raise RankFailure(f"rank {rank} failed {position}: {message}", rank, what, step)

    def close(self) -> None:
        """This rank takes part no more."""
        if os.getpid() != self._pid or self._ended:
            return
        atexit.unregister(self.close)
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)
        self._ended = True
        self._farewell()
        if self._doomed and self._nccl:  # kernels that wait for the other ranks would hold up the exit
            process.end()

    def _check(self) -> None:
        fault = self.verdict
        if fault is not None and fault.count <= self._work[0]:  # a failure in a work yet to come may be ours as well
            raise self._give_up(fault)

    @property
    def verdict(self) -> Fault | None:
        """The thread's, but for a failure of another rank that this one has shared since."""
        fault = self._fault
        return None if fault is not None and fault.own and fault.count in self._failed else fault

    def _await_verdict(self) -> Fault | None:
        until = time.monotonic() + PATIENCE
        while self.verdict is None and time.monotonic() < until:
            time.sleep(0.02)
        return self.verdict

    def _give_up(self, fault: Fault) -> RankFailure:
        self._tell(fault._replace(own=False))
        return RankFailure(fault.message, fault.rank, fault.what, fault.step)

    def _tell(self, fault: Fault) -> None:
        self._raised = fault
        with contextlib.suppress(RuntimeError):  # the store may be what is lost
            self._publish()

    def _gather(self, count: int, said: str) -> list[str]:
        """The strings of all ranks."""
        told = self._told  # which the thread drops where it is lost
        if told is None:
            raise self._give_up(self.verdict or self._store_lost())
        keys = [f"agree/{count}/{rank}" for rank in range(self._world)]
        try:
            told.set(keys[self._rank], said)
            pause = 0.001
            while not told.check(keys):
                self._check()
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            if self._agreed is not None:
                told.delete_key(self._agreed)  # all came here, so all have read what was said before
            self._agreed = keys[self._rank]
            return [value.decode() for value in told.multi_get(keys)]
        except RankFailure:
            raise
        except RuntimeError as lost:
            raise self._give_up(self._await_verdict() or self._store_lost()) from lost

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """sys.excepthook: an exception that ends the process, from outside guarded work."""
        if os.getpid() == self._pid and not self._ended:
            self._doomed = True
            failure = self.failed(error)
            if failure is not error:
                failure.__cause__ = error
                kind, error = type(failure), failure
        self._previous_hook(kind, error, trace)

    # --- the thread

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            gone = self._gone()  # before reading: a process that is gone now has told before how it ended
            if self._told is not None:
                try:
                    self._read()
                    self._publish()
                except RuntimeError:
                    self._told = None
                    self._stopped.wait(self._interval)  # sockets close a little before a process is gone
                    gone = self._gone()
            self._reports[self._rank] = self._report()
            fault = judge(self._rank, self._reports, gone, self._failed, self._timeout)
            host = self._reports[0]
            if self._told is None and fault is None and not (host is not None and host.ended):
                fault = self._store_lost()
            if host is not None and host.ended and process.hosted_by_rank_0():
                self._told = None  # it goes with rank 0's process
            self._settle(fault)

    def _settle(self, fault: Fault | None) -> None:
        if self._raised is not None and not self._raised.own:
            fault = self._raised  # for good
        if fault is None or self._fault is None or fault[:3] != self._fault[:3]:
            self._noticed = time.monotonic()
        self._fault = fault
        if fault is None:
            return
        raised = self._raised is not None and (self._work[0] in self._failed or not self._raised.own)
        if time.monotonic() > self._noticed + self._grace and (self._nccl or not raised):
            self._end(fault)

    def _end(self, fault: Fault) -> None:
        self._tell(fault._replace(own=False))
        frame = process.main_frame()
        stuck = "".join(traceback.format_stack(frame)) if frame is not None else ""
        with contextlib.suppress(Exception):
            told = f"{stuck}RankFailure: {fault.message}\n(rank {self._rank} ends: it was stuck above)"
            print(told, file=sys.__stderr__, flush=True)  # torch's excepthook, for one, puts a buffer in stderr's place
        self._farewell()
        process.end()

    def _farewell(self) -> None:
        """The last report; where the store goes with this process, wait a little for the others to read it."""
        if self._told is None:
            return
        with contextlib.suppress(RuntimeError):
            self._publish()
            until = time.monotonic() + 3 + 2 * self._interval
            while self._rank == 0 and process.hosted_by_rank_0() and time.monotonic() < until:
                self._read()
                gone = self._gone()
                unread = (r is not None and not r.ended and r.seen < self._beat for r in self._reports[1:])
                if not any(waits and rank not in gone for rank, waits in enumerate(unread, start=1)):
                    return
                time.sleep(0.02)

    def _publish(self) -> None:
        told = self._told  # the thread may close it meanwhile
        if told is not None:
            with self._lock:
                self._beat += 1
                told.set(f"rank/{self._rank}", json.dumps(self._report()))

    def _read(self) -> None:
        assert self._told is not None
        ranks = [rank for rank in range(self._world) if rank != self._rank]
        ranks = [rank for rank in ranks if self._reports[rank] is not None or self._told.check([f"rank/{rank}"])]
        told_by_rank = self._told.multi_get([f"rank/{rank}" for rank in ranks]) if ranks else []
        for rank, told in zip(ranks, told_by_rank, strict=True):
            report = Report(*json.loads(told))
            self._reports[rank] = report._replace(fault=Fault(*report.fault) if report.fault else None)
            if report.beat != self._heard[rank][0]:
                self._heard[rank] = (report.beat, time.monotonic())

    def _report(self) -> Report:
        count, what, step, since = self._work
        inside = time.monotonic() - since if self._depth > 0 else None
        host = self._reports[0]
        return Report(
            rank=self._rank,
            host=self._host,
            pid=self._pid,
            beat=self._beat,
            seen=host.beat if host is not None else 0,
            count=count,
            what=what,
            step=step,
            inside=inside,
            where=process.where(),
            ended=self._ended,
            fault=self._raised,
        )

    def _gone(self) -> set[int]:
        """Ranks that are dead: no such process on this host, or no beat for long."""
        silence = 2 + 4 * self._interval if self._alarmed else self._dead_after
        now = time.monotonic()
        return {
            report.rank
            for report in self._reports
            if report is not None and report.rank != self._rank
            if (report.host == self._host and not process.alive(report.pid))
            or (self._told is not None and now - self._heard[report.rank][1] > silence)
        }

    def _store_lost(self) -> Fault:
        count, what, step, _ = self._work
        owner = "rank 0" if process.hosted_by_rank_0() else "the launcher"
        message = f"rank {self._rank} lost the store {self._report().position}: {owner}, which holds it, is gone"
        return Fault(False, count, 0, what, step, message)
