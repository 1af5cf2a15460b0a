"""What a functionalized module's torch calls go through: one TorchFunctionMode around its forward.

Random functions draw from the call's key, a fresh one at every site (``module_randomness``); torch's global generators
are never read. Weights that are marked for fp8 are multiplied in fp8, and operands of several dtypes are brought
together. Functions that write their operands unseen by torch's version counters (batch statistics) are noted. Each
function that is treated apart has its handler in ``_HANDLERS``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from functional_booster.kernels import random
from functional_booster.precision import fp8, is_float
from functional_booster.precision.fp8 import Fp8Weight
from functional_booster.sharding import environment

from . import module_randomness
from .sync_batch_norm import sync_batch_norm


class ModuleMode(TorchFunctionMode):
    """Keyed randomness, fp8 products and noted writes for what ``module`` calls of torch in a ``with`` block.

    ``key`` is an int32 (2,) key or None; the n-th site that draws uses ``fold_in(key, n)``. A block is one site, and
    the sites in it draw from its key in the same way. ``values`` are the module's by name; where one is an Fp8Weight,
    the module holds its plain tensor, and the products with it are in fp8. ``written`` collects the ids of tensors
    that were written unseen by their version counters. Raises ValueError where a site draws without a key, and
    NotImplementedError for random functions that have no keyed form; both name the module that drew.
    """

    def __init__(self, module: nn.Module, key: torch.Tensor | None, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.key = key
        self.marks = {id(value.value): value for value in values.values() if isinstance(value, Fp8Weight)}
        self.sites = 0
        self.written: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, func, *args, **(kwargs or {}))

    def draw(self, what: str) -> torch.Tensor:
        """The key of the next site."""
        if self.key is None:
            raise ValueError(f"{self.caller()} draws random numbers ({what}): apply needs a key, key=None was given")
        self.sites += 1
        return random.fold_in(self.key, self.sites - 1)

    def marked(self, value: Any) -> Any:
        """The Fp8Weight whose plain tensor this is; another value as it is."""
        return self.marks.get(id(value), value)

    @contextlib.contextmanager
    def block(self) -> Generator[None]:
        """The sites inside count on their own, from the key of one site outside: so blocks can be traced apart."""
        key, sites = self.key, self.sites
        if key is not None:
            self.key, self.sites = self.draw("a block"), 0
        try:
            yield
        finally:
            self.key, self.sites = key, sites + 1

    def caller(self) -> str:
        """The innermost of the module's submodules on the Python stack, by name and type, for errors."""
        names = {id(submodule): name for name, submodule in self.module.named_modules()}
        frame = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if id(owner) in names:
                return f"{names[id(owner)] or 'the module'} ({type(owner).__name__})"
            frame = frame.f_back
        return f"the module ({type(self.module).__name__})"


def _product(mode: ModuleMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    marked = {name: mode.marked(value) for name, value in kwargs.items()}
    return _of_one_dtype(mode, func, *map(mode.marked, args), **marked)


def _of_one_dtype(mode: ModuleMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that refuses operands of several dtypes, such as a weight that is kept in its own: in the widest of
    them, its result in the dtype that the step computes in."""
    dtypes = {value.dtype for value in (*args, *kwargs.values()) if is_float(fp8.plain(value))}
    if len(dtypes) < 2:
        return func(*args, **kwargs)
    wide = functools.reduce(torch.promote_types, dtypes)

    def widened(value: Any) -> Any:
        return value.to(wide) if is_float(fp8.plain(value)) and value.dtype != wide else value

    result = func(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()})
    compute = environment.current().compute
    return result.to(compute) if compute in dtypes else result


def _embedding(mode: ModuleMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    found = func(*args, **kwargs)
    return found.to(environment.current().compute or found.dtype)


def _batch_norm(
    mode: ModuleMode,
    func: Any,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    scope = environment.current()
    axes = tuple(axis.name for axis in scope.axes if axis.size > 1 and axis.name in scope.data_axes)
    if training and axes:
        return sync_batch_norm(input, running_mean, running_var, weight, bias, momentum, eps, axes)
    if training:
        mode.written.update((id(running_mean), id(running_var)))
    # The statistics, which a forward in training writes, stay as they are.
    wide = running_mean.dtype if running_mean is not None else _widest(input, weight, bias)
    operands = (value if value is None else value.to(wide) for value in (weight, bias))
    return func(input.to(wide), running_mean, running_var, *operands, training, momentum, eps).to(input.dtype)


def _widest(*values: torch.Tensor | None) -> torch.dtype:
    return functools.reduce(torch.promote_types, (value.dtype for value in values if value is not None))


def _instance_norm(
    mode: ModuleMode,
    func: Any,
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if use_input_stats:
        mode.written.update((id(running_mean), id(running_var)))
    wide = running_mean.dtype if running_mean is not None else _widest(input, weight, bias)
    operands = (value if value is None else value.to(wide) for value in (weight, bias))
    return func(input.to(wide), running_mean, running_var, *operands, use_input_stats, momentum, eps).to(input.dtype)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **module_randomness.HANDLERS,
    **dict.fromkeys((F.linear, torch.addmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _product),
    **dict.fromkeys((F.layer_norm, F.rms_norm, F.group_norm, F.conv1d, F.conv2d, F.conv3d), _of_one_dtype),
    F.embedding: _embedding,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
}
