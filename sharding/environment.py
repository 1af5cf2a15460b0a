"""The environment: what a traced function may know about where it runs.

One frozen value, bound around a loss function by the step; a primitive reads it once, in its forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Environment:
    """How what is traced is to be treated.

    ``outline``: a jit is tracing, so regions become opaque calls. ``marks``: a joint graph is traced to be cut, so
    named values leave a mark in it. ``evaluating``: nothing is dropped, and no key is asked for, whatever ``train``
    says. ``compute``: the dtype that floating-point inputs of functionalized modules are cast to.
    """

    outline: bool = False
    marks: bool = False
    evaluating: bool = False
    compute: torch.dtype | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What a graph traced in this environment depends on, hashable."""
        return (self.outline, self.evaluating, self.compute)


_current: ContextVar[Environment] = ContextVar("environment", default=Environment())


def current() -> Environment:
    """The environment in scope."""
    return _current.get()


@contextlib.contextmanager
def bind(**changes: Any) -> Generator[Environment]:
    """Change fields of the environment for the length of a with block; leaving it restores the one before, always."""
    token = _current.set(replace(_current.get(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


@contextlib.contextmanager
def restore(environment: Environment) -> Generator[None]:
    """Bind a whole environment, as it was read earlier."""
    token = _current.set(environment)
    try:
        yield
    finally:
        _current.reset(token)
