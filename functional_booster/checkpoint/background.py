"""Saves that go on in the background: one at a time, none given up, no error lost."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable

_NICE = 10  # a tenth of the weight of other threads, where cores are scarce; it is whole where one is free
_last: Saving | None = (
    None  # of this process: an error must be told by the next save, or at exit, whoever has dropped it
)


class Saving:
    """A checkpoint that is being written. The interpreter does not exit before it is."""

    def __init__(self, path: str, write: Callable[[], None]) -> None:
        self._path = path
        self._error: BaseException | None = None
        self._told = False
        self._ended = threading.Event()
        # No daemon, and no executor's: both would be stopped at exit.
        threading.Thread(target=self._run, args=(write,), name=f"saving {path}", daemon=False).start()

    def __repr__(self) -> str:
        return f"Saving({self._path!r}, {'done' if self.done() else 'in progress'})"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is on the disk; raises what kept it from it, as ``save`` does.

        Raises TimeoutError where it is not over after ``timeout`` seconds.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the checkpoint {self._path} is still being written after {timeout} s")
        self._told = True
        if self._error is not None:
            raise self._error

    def _run(self, write: Callable[[], None]) -> None:
        _give_way()
        try:
            write()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _settle(self) -> None:
        self._ended.wait()
        if not self._told:
            self.result()

    def _report(self) -> bool:
        """Print the error that nobody has heard; whether there is one."""
        if self._error is None or self._told:
            return False
        traceback.print_exception(self._error, file=sys.stderr)
        print(f"(the checkpoint {self._path} was being written in the background)", file=sys.stderr)
        return True


def start(path: str, write: Callable[[], None]) -> Saving:
    """Have ``write()`` done by a thread, once the save before it has ended. Raises as ``settle``."""
    global _last
    settle()
    _last = Saving(path, write)
    return _last


def settle() -> None:
    """Wait for the save that is going on, if there is one; raises its error, unless ``result`` has raised it."""
    global _last
    if _last is None:
        return
    try:
        _last._settle()
    finally:
        if _last.done():  # else Ctrl-C has ended the waiting
            _last = None


@atexit.register  # after all threads have ended
def _report() -> None:
    """A checkpoint that is not there is a failure of the process: its exit status is 1."""
    if _last is not None and _last._report():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # there is no other way by now


def _give_way() -> None:
    """Let the other threads of this process go before this one, and those that it starts."""
    if sys.platform == "linux":  # elsewhere only whole processes have a priority
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _forget() -> None:
    global _last
    _last = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # which does not have the thread
