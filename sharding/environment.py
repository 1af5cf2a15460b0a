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
    """Named axes in scope (name -> axis), and how regions are treated.

    ``outline``: a jit is tracing, so regions become opaque calls. ``marks``: a joint graph is traced to be cut, so named
    values leave a mark in it.
    """

    axes: dict[str, Any] = field(default_factory=dict)
    outline: bool = False
    marks: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What a graph traced in this environment depends on, hashable."""
        return (tuple(self.axes.items()), self.outline)


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


@contextlib.contextmanager
def restore(environment: Environment) -> Iterator[None]:
    """Bind a whole environment, as it was read earlier."""
    token = _current.set(environment)
    try:
        yield
    finally:
        _current.reset(token)
