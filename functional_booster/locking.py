"""A lock between processes, held by the operating system: it goes when its holder does, however that ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


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
