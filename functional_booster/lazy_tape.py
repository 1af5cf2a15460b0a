"""The tape of a lazy initialization: what would have been computed, op by op, on tensors that have no values.

Tensors are on the meta device; a ``Cell`` stands for the memory that one or several of them share. Views are no ops:
each op says of its arguments which range of which cell they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_CELL = "_functional_booster_cell"  # where a meta storage has its cell: it lives as long as its memory
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_FILLING = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_"}
_FILLING |= {"geometric_", "bernoulli_"}


@dataclass(eq=False)
class Cell:
    """Memory that a tape makes: ``nbytes`` on ``device``; ``constant``: a copy of a tensor that was there before."""

    tape: Tape
    nbytes: int
    device: torch.device
    filled: bool = False
    constant: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class View:
    """A tensor: a range of a cell."""

    cell: Cell
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False

    @property
    def covers(self) -> bool:
        """Whether it is all of its cell, each element once."""
        dense = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1
        size = math.prod(self.shape)
        return size * self.dtype.itemsize == self.cell.nbytes and (size == 0 or (dense == size and not self.offset))


@dataclass(frozen=True, eq=False)
class Op:
    """``run(*args, **kwargs)``, in which a View stands for each tensor; ``made``: what it returns, None for a view.

    ``operands``: cells whose values it computes with; ``reads``: those, and cells of which it changes a part alone;
    ``covers``: those that it overwrites whole. ``draws``: the generator that it draws from, which has the state
    ``seed`` before, if not that in which the last op left it. ``stored``: the tensor of a file that it reads.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[View | None, ...]
    operands: frozenset[Cell]
    reads: frozenset[Cell]
    writes: frozenset[Cell]
    covers: frozenset[Cell]
    draws: torch.Generator | None = None
    seed: torch.Tensor | None = None
    stored: Any = None


@dataclass(eq=False)
class Tape:
    """Ops in order. ``marks``: of each generator the state in which recording left it, to notice who changed it."""

    ops: list[Op] = field(default_factory=list)
    marks: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(
        self,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        made: Sequence[View | None],
        writes: set[Cell],
        filling: bool,
        **extra: Any,
    ) -> None:
        """Record an op; ``filling``: what it writes, its first argument, it does not read."""
        given = views((args, kwargs))
        covers = {view.cell for view in given[:1] if filling and view.covers}
        others = frozenset(view.cell for view in (given[1:] if filling else given))
        reads = frozenset((writes | others) - (covers - others))
        self.ops.append(
            Op(run, args, kwargs, tuple(made), others, reads, frozenset(writes), frozenset(covers), **extra)
        )
        if _name(run) not in _EMPTY:
            for cell in (*writes, *(view.cell for view in made if view is not None)):
                cell.filled = True

    def seed_of(self, generator: torch.Generator) -> torch.Tensor | None:
        """The generator's state, if it is another than recording left; from then on it is one draw further.

        A seed that is set again is noticed by this draw.
        """
        state, mark = generator.get_state(), self.marks.get(id(generator))
        if mark is not None and torch.equal(state, mark):
            return None
        torch.empty(1, device=generator.device).uniform_(generator=generator)
        self.marks[id(generator)] = generator.get_state()
        return state


def views(values: Any) -> list[View]:
    """The Views in arguments, in order."""
    return [leaf for leaf in torch_pytree.tree_leaves(values) if isinstance(leaf, View)]


def cell_of(tensor: torch.Tensor) -> Cell | None:
    """The cell that a tensor is a range of; None for one that no tape made."""
    return getattr(tensor.untyped_storage(), _CELL, None) if torch._C._has_storage(tensor) else None


def view_of(tensor: torch.Tensor) -> View | None:
    """A tensor as a range of its cell; None for one that no tape made."""
    cell = cell_of(tensor)
    return None if cell is None else _view(tensor, cell)


def recording() -> Recorder | None:
    """The recorder that is active in this thread."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, Recorder)), None)


@contextlib.contextmanager
def paused() -> Generator[None]:
    """A context in which this thread's recorder, if there is one, lets everything pass."""
    recorder = recording()
    before = recorder is not None and recorder.paused
    try:
        if recorder is not None:
            recorder.paused = True
        yield
    finally:
        if recorder is not None:
            recorder.paused = before


class Recorder(TorchDispatchMode):
    """Within it, what makes or changes tensors without values goes onto the tape; tensors with values are as ever.

    ``evaluate(view)`` gives a value now, where Python asks for one: ``item``, ``equal``, a shape that depends on it;
    ``draw(tape)`` brings the generators to where eager initialization has them.
    """

    def __init__(self, tape: Tape, evaluate: Callable[[View], torch.Tensor], draw: Callable[[Tape], None]) -> None:
        super().__init__()
        self.tape, self._evaluate, self._draw, self.paused = tape, evaluate, draw, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self.paused:
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        lazy = [tensor for tensor in tensors if cell_of(tensor) is not None]
        random = torch.Tag.nondeterministic_seeded in func.tags
        written = _written(func, args, kwargs)
        factory = not tensors and any(argument.name == "device" for argument in func._schema.arguments)
        if not lazy and not factory and (not random or written):
            if random:
                self._draw(self.tape)
            return func(*args, **kwargs)
        if any(cell_of(tensor) is None for tensor in written) or not _gives_tensors(func):
            return func(*self.values(args), **self.values(kwargs))
        try:
            return self._record(func, args, kwargs, written, random, factory)
        except NotImplementedError:
            if written or random:
                raise
            return func(*self.values(args), **self.values(kwargs))

    def values(self, given: Any) -> Any:
        """Arguments with values in place of tensors without."""

        def value(leaf: Any) -> Any:
            view = view_of(leaf) if isinstance(leaf, torch.Tensor) else None
            return leaf if view is None else self._evaluate(view)

        return torch_pytree.tree_map(value, given)

    def _record(self, func: Any, args: Any, kwargs: Any, written: list[Any], random: bool, factory: bool) -> Any:
        twins: dict[int, torch.Tensor] = {}
        args, kwargs = torch_pytree.tree_map_only(torch.Tensor, lambda t: self._twin(t, twins), (args, kwargs))
        given = torch_pytree.tree_map_only(torch.Tensor, self._view, (args, kwargs))
        known = views(given)
        device = known[0].cell.device if known else torch.get_default_device()
        if factory or kwargs.get("device") is not None:
            wanted = torch.device(kwargs.get("device") or device)
            device = device if wanted.type == "meta" else wanted
            given[1]["device"], kwargs["device"] = device, torch.device("meta")
            kwargs.pop("pin_memory", None)
        writes = {cell for tensor in written if (cell := cell_of(tensor)) is not None}
        out = func(*args, **kwargs)
        made = [self._made(leaf, device) for leaf in _tensors(out)]
        if any(view is not None for view in made) or writes:
            extra: dict[str, Any] = {}
            if random:
                generator = next((leaf for leaf in torch_pytree.tree_leaves(given) if _is_generator(leaf)), None)
                generator = generator or default_generator(device)
                extra = {"draws": generator, "seed": self.tape.seed_of(generator)}
            self.tape.add(func, given[0], given[1], made, writes, _name(func) in _FILLING, **extra)
        return out

    def fill(self, tensor: torch.Tensor, run: Callable[..., Any], *args: Any, **extra: Any) -> None:
        """Record ``run(tensor, *args)``, a function of Python that overwrites the tensor, as one op."""
        view = self._view(tensor)
        if "draws" in extra:
            extra["draws"] = extra["draws"] or default_generator(view.cell.device)
            extra["seed"] = self.tape.seed_of(extra["draws"])
        self.tape.add(run, (view, *args), {}, (), {view.cell}, True, **extra)

    def _made(self, tensor: torch.Tensor, device: torch.device) -> View | None:
        """A new cell, for what shares no other's memory."""
        storage = tensor.untyped_storage()
        if getattr(storage, _CELL, None) is not None:
            return None
        cell = Cell(self.tape, storage.nbytes(), device)
        setattr(storage, _CELL, cell)
        return _view(tensor, cell)

    def _view(self, tensor: torch.Tensor) -> View:
        view = view_of(tensor)
        assert view is not None
        if view.cell.tape is not self.tape:
            raise ValueError(
                f"a tensor of shape {view.shape} was made in another LazyInitContext: enter that one again to go on, "
                "or materialize it"
            )
        return view

    def _twin(self, tensor: torch.Tensor, twins: dict[int, torch.Tensor]) -> torch.Tensor:
        """The tensor, or one without values whose cell holds a copy of its values."""
        if cell_of(tensor) is not None:
            return tensor
        if tensor.is_meta:
            raise ValueError(f"a meta tensor of shape {tuple(tensor.shape)} was made outside of the LazyInitContext")
        if id(tensor) not in twins:
            twin = torch.empty_like(tensor, device="meta")
            copy = tensor.detach().clone()
            cell = Cell(self.tape, twin.untyped_storage().nbytes(), tensor.device, True, copy)
            setattr(twin.untyped_storage(), _CELL, cell)
            twins[id(tensor)] = twin
        return twins[id(tensor)]


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that draws on a device where none is named."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    module.init()
    return module.default_generators[device.index if device.index is not None else module.current_device()]


def _name(run: Callable[..., Any]) -> str:
    """The name of an op, without its overload; of a function of Python, nothing."""
    return run.overloadpacket.__name__ if isinstance(run, torch._ops.OpOverload) else ""


def _view(tensor: torch.Tensor, cell: Cell) -> View:
    place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return View(cell, tensor.dtype, *place, tensor.is_conj())


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op changes."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _gives_tensors(func: Any) -> bool:
    return all("Tensor" in str(returned.type) for returned in func._schema.returns)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch_pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)
