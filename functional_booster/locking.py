"""Locks between processes, held by the operating system: one goes when its holder does, however that ends.

And between the threads of this process, which take turns.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Generator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_turns: weakref.WeakValueDictionary[tuple[int, int], threading.Lock] = weakref.WeakValueDictionary()
_turns_change = threading.Lock()


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool) -> Generator[bool]:
    """Hold ``path``, a directory or a file (made where missing), against every other process that asks for it.

    Yields False where the system or the file system has no such locks. Raises BlockingIOError at once where another
    one holds it, unless told to ``wait``.
    """
    if fcntl is None:
        yield False
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except BlockingIOError:
            raise
        except OSError:  # some network file systems
            held = False
        try:
            yield held
        finally:
            if held:
                fcntl.flock(handle, fcntl.LOCK_UN)  # child processes may hold the handle open
    finally:
        os.close(handle)


@contextlib.contextmanager
def in_turn(path: Path) -> Generator[None]:
    """Hold ``path``, which exists, against the other threads of this process that ask for it; waits for them."""
    about = os.stat(path)
    with _turns_change:
        turn = _turns.setdefault((about.st_dev, about.st_ino), threading.Lock())
    with turn:
        yield


def _forget() -> None:
    """A forked process has none of the threads that hold these."""
    global _turns_change
    _turns.clear()
    _turns_change = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
