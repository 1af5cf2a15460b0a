"""Lazy initialization: modules of any size described without memory, and materialized tensor by tensor.

``lazy_tape`` has how it is recorded, ``lazy_replay`` how values are made of it, ``lazy_pretrained`` how they are read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from . import lazy_pretrained
from .lazy_pretrained import StoredTensor
from .lazy_replay import draw, evaluate, replay
from .lazy_tape import Recorder, Tape, View, cell_of, recording, view_of


class LazyInitContext:
    """``with LazyInitContext(): module = ...`` describes a module without memory; it gets values where it is used.

    What makes or initializes tensors inside is recorded, on the meta device, and computed when the module is boosted
    (``booster.boost``), functionalized and initialized (``fb.functionalize``, ``booster.init``), or by ``materialize``:
    tensor by tensor, bitwise as it would have been without the context, each rank keeping its share. Inside, tensors
    say that they are on the device that they will be on. Where Python asks for a value (``item``), it is computed then.
    ``from_pretrained`` of transformers, imported before, records the files, which are read slice by slice; it takes
    safetensors.

    ``default_device``: where tensors are made that name no device (None: as without the context). A context may be
    entered again, to go on with its modules; inside of another one it is part of that one. Each context begins with the
    random state of its entry; the generator then moves on, but not as far as with eager initialization. Tensors made
    from Python's numbers or numpy's arrays have their values at once. Raises RuntimeError for a ``default_device``
    that torch does not know. ``tensor_cls``, Colossal-AI's first argument, is refused but for None: there is one way to
    record (ValueError).
    """

    def __init__(self, tensor_cls: type | None = None, default_device: torch.device | str | None = None) -> None:
        if isinstance(tensor_cls, (str, torch.device)):
            raise TypeError(
                f"tensor_cls: {tensor_cls!r}, expected None: name the device, default_device={tensor_cls!r}"
            )
        if tensor_cls is not None:
            raise ValueError(f"tensor_cls: {tensor_cls!r}, expected None: tensors are recorded as they are")
        self._device = None if default_device is None else torch.device(default_device)
        self._tape = Tape()
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> LazyInitContext:
        with contextlib.ExitStack() as stack:
            if self._device is not None:
                stack.enter_context(self._device)
            if recording() is None:
                stack.enter_context(_patched())
                stack.enter_context(Recorder(self._tape, evaluate, draw))
                stack.enter_context(_Claims())
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)

    @staticmethod
    def materialize(module: nn.Module) -> nn.Module:
        """Give a module's parameters and buffers their values, in place, whole; those that have some keep them.

        Returns the module. Parameters stay the objects that they are, tied ones tied. Raises ValueError that names what
        has no recorded values.
        """
        tensors = [*module.named_parameters(), *module.named_buffers()]
        lazy = {name: tensor for name, tensor in tensors if tensor.is_meta or is_lazy(tensor)}
        for name, value in values(lazy, f"{type(module).__name__}: its parameters and buffers", shared=True):
            set_value(lazy[name], tensor_of(value))
        return module


def values(
    tensors: Mapping[str, torch.Tensor], what: str, shared: bool = False
) -> Iterator[tuple[str, torch.Tensor | StoredTensor]]:
    """(name, value) of tensors, each in fresh memory, made or read one at a time, in an order of their own.

    ``shared``: lazy tensors that are views of one memory are that then, too. Raises ValueError, before anything is
    computed, that names those which are on the meta device and were recorded by no LazyInitContext, or never filled;
    ``what`` they are stands in front.
    """
    missing = [name for name, tensor in tensors.items() if tensor.is_meta and view_of(tensor) is None]
    if missing:
        raise ValueError(
            f"{what} are on the meta device and have no values to start from: {', '.join(missing)}; no LazyInitContext "
            "recorded how they are initialized, or they were changed outside of it"
        )
    if empty := [n for n, t in tensors.items() if (cell := cell_of(t)) is not None and not cell.filled and t.numel()]:
        raise ValueError(f"{what}: never initialized: {', '.join(empty)}")
    return _values(tensors, shared)


def _values(tensors: Mapping[str, torch.Tensor], shared: bool) -> Iterator[tuple[str, torch.Tensor | StoredTensor]]:
    recorded: dict[Tape, dict[str, View]] = {}
    for name, tensor in tensors.items():
        if (view := view_of(tensor)) is None:
            yield name, tensor.detach().clone()
        else:
            recorded.setdefault(view.cell.tape, {})[name] = view
    for tape, wanted in recorded.items():
        yield from replay(tape, wanted, shared)


def tensor_of(value: torch.Tensor | StoredTensor) -> torch.Tensor:
    """A value, read if it lies in a file."""
    return value if isinstance(value, torch.Tensor) else value.read()


def resumed(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """The context that goes on with a module that a LazyInitContext recorded; of another module, one without effect."""
    cells = map(cell_of, (*module.parameters(), *module.buffers()))
    tape = next((cell.tape for cell in cells if cell is not None), None)
    if tape is None:
        return contextlib.nullcontext()
    context = LazyInitContext()
    context._tape = tape
    return context


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a LazyInitContext recorded how this tensor gets its values."""
    return cell_of(tensor) is not None


def set_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor without values those of ``value``, and its memory; it stays the object that it is."""
    # As torch.utils.swap_tensors, but that refuses the weak references that an RNN has to its weights.
    torch._C._swap_tensor_impl(tensor, value.requires_grad_(tensor.requires_grad))  # type: ignore[attr-defined]


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a tensor, in fresh memory. Raises as ``values``."""
    ((_, value),) = values({"it": tensor}, "a tensor of the module")
    return tensor_of(value)


class _Claims(TorchFunctionMode):
    """Lazy tensors say that they are where they will be, and give their values to Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None and (func in _PROPERTIES or func in _VALUES) and (cell := cell_of(tensor)) is not None:
            if func in _PROPERTIES:
                return _PROPERTIES[func](cell.device)
            return func(evaluate(view_of(tensor)), *args[1:], **(kwargs or {}))  # type: ignore[arg-type]
        return func(*args, **(kwargs or {}))


_PROPERTIES: dict[Any, Any] = {
    torch.Tensor.device.__get__: lambda device: device,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
}
_VALUES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


_lock = threading.Lock()
_inside: list[contextlib.ExitStack] = []  # how to undo the replacements, once for each context that any thread is in


@contextlib.contextmanager
def _patched() -> Generator[None]:
    """What is recorded by other means than op by op is replaced, while any thread is in a context."""
    with _lock:
        stack = _inside[0] if _inside else contextlib.ExitStack()
        if not _inside:
            stack.enter_context(_trunc_normal_as_one_op())
            stack.enter_context(lazy_pretrained.patched())
        _inside.append(stack)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                stack.close()


@contextlib.contextmanager
def _trunc_normal_as_one_op() -> Generator[None]:
    """It is written in Python, and how often it draws depends on the values."""
    module: Any = nn.init
    original = module._no_grad_trunc_normal_

    def trunc_normal(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> torch.Tensor:
        recorder = recording()
        if recorder is None or recorder.paused or cell_of(tensor) is None:
            return original(tensor, mean, std, a, b, generator)
        recorder.fill(tensor, original, mean, std, a, b, generator, draws=generator)
        return tensor

    module._no_grad_trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        module._no_grad_trunc_normal_ = original
