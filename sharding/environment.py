"""The axis environment: what a traced function may know about where it runs.

One frozen value, bound around a loss function by the step; a primitive reads it once, in its forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Environment:
    """Named axes in scope (name -> axis), the precision policy, and the sharding plan of functionalized models."""

    axes: dict[str, Any] = field(default_factory=dict)
    policy: Any = None
    plan: Any = None


_current: ContextVar[Environment] = ContextVar("axis_environment", default=Environment())


def current() -> Environment:
    """The environment in scope."""
    return _current.get()


@contextlib.contextmanager
def bind(**changes: Any) -> Iterator[Environment]:
    """Change fields of the environment for the length of a with block; leaving it restores the one before, always."""
    token = _current.set(replace(_current.get(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
