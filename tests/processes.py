"""Real ranks for tests: ``run_on_ranks(4, function, *args)`` calls a function on 4 processes joined by gloo.

The processes are forked once, at the first call, from one that has imported the package; they serve every test of this
pytest process. Each call gets a new process group, so that no call sees what another one left. Nothing hangs: a rank
that dies, or does not answer in time, is an error that says so, after which others are forked.

``run_as_scripts`` runs ranks that end as scripts do, each in a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import functools
import json
import multiprocessing
import operator
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Answer = tuple[float | None, bytes]
_START = 120.0  # seconds that a process has to import torch and the package
_GRACE = 2.0  # seconds that the other ranks have to answer once one has failed


class RankError(RuntimeError):
    """A rank died, did not answer in time, or raised what cannot be pickled."""


def run_on_ranks(ranks: int, function: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
    """``function(*args)`` on so many processes at once, and what it returned on each, by rank.

    ``function`` is defined at the top of an importable module; arguments and results are pickled. The processes are a
    gloo world of ``ranks``, one thread each, and a warning is an error. What a rank raises is raised here, with its
    traceback in a note; of several ranks, that of the first one to raise. Raises RankError where a rank dies, or gives
    no answer within ``timeout`` seconds.
    """
    job = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            started = [_Worker() for _ in range(ranks - len(_workers))]
            _workers.extend(started)
            for worker in started:
                worker.require_ready()
            for rank, worker in enumerate(_workers[:ranks]):
                worker.send((rank, ranks, f"{folder}/store", timeout, job))
            answers, failures = _answers(ranks, timeout)
        except BaseException:  # an interrupt: answers that nobody read must not be taken for those to the next call
            stop(ranks)
            raise
    if failures:
        raise failures[0]
    return [pickle.loads(answer) for answer in answers]


def _answers(ranks: int, timeout: float) -> tuple[list[bytes], list[BaseException]]:
    """What the ranks answer, and the failures in the order in which they happened."""
    ends = time.monotonic() + timeout
    waiting = {worker.connection: rank for rank, worker in enumerate(_workers[:ranks])}
    answers, failures = [b""] * ranks, list[tuple[float, BaseException]]()
    while waiting:
        ready = wait(list(waiting), max(0.0, ends - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[call-overload]
            try:
                failed, answers[rank] = connection.recv()  # type: ignore[union-attr]
            except (EOFError, ConnectionError):
                failures.append((0.0, _workers[rank].died(rank, ranks)))
                ends = 0.0  # the others may wait for it for ever
            else:
                if failed is not None:
                    failures.append((failed, pickle.loads(answers[rank])))
                    ends = min(ends, time.monotonic() + _GRACE)
    if waiting and not failures:
        missing = sorted(waiting.values())
        where = "".join(f"\nrank {rank} was here:\n{_workers[rank].stacks()}" for rank in missing)
        named = ", ".join(map(str, missing))
        failures.append((0.0, RankError(f"no answer within {timeout:g} seconds from rank {named} of {ranks}{where}")))
    if waiting or failures:  # what a failed rank leaves behind (a count of groups, say) must not reach the next call
        stop(ranks)
    return answers, [error for _, error in sorted(failures, key=operator.itemgetter(0))]


def stop(number: int | None = None) -> None:
    """End the first so many processes (None: all); the next call starts others."""
    for worker in _workers[:number]:
        worker.stop()
    del _workers[:number]


def run_as_scripts(folder: Path, scenario: str, world: int, **options: Any) -> list[tuple[int | str, str]]:
    """(exit status, all that was written) of each rank of a scenario of ``workers/ranks.py``.

    The status is negative for a signal, "hung" for a rank that had to be ended.
    """
    request = {"scenario": scenario, "world": world, "port": free_port(), "folder": str(folder), **options}
    nursery = _nursery()
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write(json.dumps(request) + "\n")
    nursery.stdin.flush()
    statuses = json.loads(nursery.stdout.readline())
    return [(status, (folder / f"{rank}.txt").read_text()) for rank, status in enumerate(statuses)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@functools.cache
def _nursery() -> subprocess.Popen[str]:
    """The process that forks them, which ends with this one's end of its input."""
    command = [sys.executable, "-u", str(Path(__file__).parent / "workers" / "ranks.py")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class _Worker:
    """A process that waits for jobs, and what it writes."""

    def __init__(self) -> None:
        self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed by stop)
        self.connection, theirs = Pipe()
        self.process = _context.Process(target=serve, args=(theirs, self.log.name), daemon=True)
        self.process.start()
        theirs.close()

    def require_ready(self) -> None:
        if not self.connection.poll(_START):
            raise RankError(f"a process did not start within {_START:g} seconds")
        with contextlib.suppress(EOFError):  # a dead process is found when its answer is missing
            self.connection.recv()

    def send(self, job: Any) -> None:
        with contextlib.suppress(ConnectionError):  # a dead process is found when its answer is missing
            self.connection.send(job)

    def died(self, rank: int, ranks: int) -> RankError:
        self.process.join()
        written = Path(self.log.name).read_text(errors="replace")[-4000:]
        status = self.process.exitcode
        return RankError(f"rank {rank} of {ranks} died with exit status {status}; what it wrote:\n{written}")

    def stacks(self) -> str:
        """Where the threads of a process that does not answer are."""
        before = os.path.getsize(self.log.name)
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        time.sleep(_GRACE)
        return Path(self.log.name).read_text(errors="replace")[before:]

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()
        self.log.close()


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "functional_booster"])  # what takes long to import
_workers: list[_Worker] = []
atexit.register(stop)


def serve(connection: Connection, log: str) -> None:
    """The life of a worker: jobs come and answers go, until the other end is closed."""
    import torch

    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    faulthandler.register(signal.SIGUSR1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            rank, ranks, store, timeout, job = connection.recv()
        except EOFError:
            return
        try:
            answer = _call(rank, ranks, store, timeout, job)
        except BaseException as error:
            answer = time.monotonic(), _pickled(error, rank, ranks)
        connection.send(answer)


def _call(rank: int, ranks: int, store: str, timeout: float, job: bytes) -> Answer:
    """When the job failed (None: it did not), and its pickled result or exception."""
    import torch.distributed as dist

    from functional_booster import watchdog

    with contextlib.ExitStack() as left:
        left.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        left.callback(watchdog.stop)  # it reads the store, which goes with this call
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout),
        )
        dist.barrier()  # a rank that left before another one had connected would be taken for a dead one
        left.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`torch.jit.script.* is deprecated", DeprecationWarning)
        try:
            function, args = pickle.loads(job)
            return None, pickle.dumps(function(*args))
        except BaseException as error:  # told before the world is left, which may make others fail
            return time.monotonic(), _pickled(error, rank, ranks)


def _pickled(error: BaseException, rank: int, ranks: int) -> bytes:
    """The exception with its traceback in a note, or a RankError that tells of it where it cannot be pickled."""
    told = "".join(traceback.format_exception(error))
    try:
        error.add_note(f"raised on rank {rank} of {ranks}:\n{told}")
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps(RankError(f"raised on rank {rank} of {ranks}:\n{told}"))
    return pickled
