"""The environment: what a traced function may know about where it runs.

One frozen value, bound around a loss function by the step; a primitive reads it once, in its forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from functional_booster.kernels import choice


@dataclass(frozen=True, eq=False)
class Axis:
    """A mesh axis as a program on one rank sees it.

    ``index``: this rank's place along it; on a virtual mesh a 0-d int32 tensor, batched at the axis's own vmap level.
    ``group``: the name of its process group on a real mesh; None on a virtual one, and where one rank is all there is.
    """

    name: str
    size: int
    index: torch.Tensor | int
    group: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What a graph traced along this axis depends on, hashable."""
        return (self.name, self.size, self.group, None if isinstance(self.index, torch.Tensor) else self.index)


@dataclass(frozen=True)
class Environment:
    """How what is traced is to be treated.

    ``axes``: the mesh axes, in order. ``data_axes``: those over which the batch is split. ``outline``: a jit traces, so
    regions become opaque calls. ``marks``: a joint graph is traced to be cut, so named values leave a mark in it.
    ``evaluating``: nothing is dropped, and no key is asked for, whatever ``train`` says. ``compute``: the dtype that
    floating-point inputs of functionalized modules are cast to. ``stands_in``: the rows here count nothing, as others
    stand in for some that a rank lacks; on a virtual mesh, those of some ranks. ``token_axes``: those over which own
    models split the tokens of a row.
    """

    axes: tuple[Axis, ...] = ()
    data_axes: tuple[str, ...] = ()
    outline: bool = False
    marks: bool = False
    evaluating: bool = False
    compute: torch.dtype | None = None
    stands_in: bool = False
    token_axes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What a graph traced in this environment depends on, hashable: the choice of kernels, too."""
        flags = (self.outline, self.evaluating, self.stands_in)
        return (
            self.data_axes,
            self.token_axes,
            *flags,
            self.compute,
            choice.current(),
            *(axis.key for axis in self.axes),
        )

    @property
    def indices(self) -> tuple[torch.Tensor, ...]:
        """The indices along virtual axes, in order."""
        return tuple(axis.index for axis in self.axes if isinstance(axis.index, torch.Tensor))

    def at(self, indices: Iterable[torch.Tensor]) -> Environment:
        """This environment with these indices along virtual axes: the same ones at another vmap level."""
        rest = iter(indices)
        axes = [replace(axis, index=next(rest)) if isinstance(axis.index, torch.Tensor) else axis for axis in self.axes]
        return replace(self, axes=tuple(axes))

    def axis(self, name: str) -> Axis | None:
        """The axis of this name, None where nobody declares it."""
        return next((axis for axis in self.axes if axis.name == name), None)


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
