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
    with _opened(path) as handle, _locked(handle, wait=wait) as held:
        yield held


@contextlib.contextmanager
def shared(path: Path) -> Generator[bool]:
    """Hold ``path``, which exists, together with others that share it; waits for one that holds it alone."""
    with _opened(path) as handle, _locked(handle, wait=True, alone=False) as held:
        yield held


@contextlib.contextmanager
def marked(path: Path) -> Generator[bool]:
    """``exclusive``, at once, of a file that is there for this alone, and removed at the end."""
    while True:
        with _opened(path) as handle, _locked(handle, wait=False) as held:
            if _is_at(handle, path):  # else another one, which held it until now, has removed it
                try:
                    yield held
                finally:
                    if handle is not None:
                        path.unlink(missing_ok=True)
                return


@contextlib.contextmanager
def in_turn(path: Path) -> Generator[None]:
    """Hold ``path``, which exists, against the other threads of this process that ask for it; waits for them."""
    about = os.stat(path)
    with _turns_change:
        turn = _turns.setdefault((about.st_dev, about.st_ino), threading.Lock())
    with turn:
        yield


@contextlib.contextmanager
def _opened(path: Path) -> Generator[int | None]:
    """A handle of a directory or a file, None where the system has no locks."""
    if fcntl is None:
        yield None
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(handle: int | None, *, wait: bool, alone: bool = True) -> Generator[bool]:
    if fcntl is None or handle is None:
        yield False
        return
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:  # some network file systems
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # child processes may hold the handle open


def _is_at(handle: int | None, path: Path) -> bool:
    """Whether the file that was opened is still the one of this name."""
    try:
        return handle is None or os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _forget() -> None:
    """A forked process has none of the threads that hold these."""
    global _turns_change
    _turns.clear()
    _turns_change = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
