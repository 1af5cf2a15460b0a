"""This process, as the watchdog tells other ranks of it: where it lives, whether it does, and what it runs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn

_WATCHDOG = tuple(str(Path(__file__).with_name(name)) for name in ("process.py", "rank_watch.py", "watchdog.py"))


def hosted_by_rank_0() -> bool:
    """torchrun holds the store itself, and says so; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def host() -> str:
    """What processes have in common that see each other's process ids."""
    try:
        boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        boot = namespace = ""
    return f"{socket.gethostname()} {boot} {namespace}"


def alive(pid: int) -> bool:
    """Whether a process of this host runs; one that is dead, but not waited for by its parent, does not."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system without /proc
        return True


def main_frame() -> FrameType | None:
    """What the main thread runs, outside of the watchdog's own code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename in _WATCHDOG:
        frame = frame.f_back
    return frame


def where() -> str:
    """The main thread's line of Python."""
    frame = main_frame()
    return (
        "exit" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    )


def end() -> NoReturn:
    """Exit at once with status 1: no cleanup, which could wait for other ranks."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
