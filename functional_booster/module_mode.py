"""What a functionalized module's torch calls go through: one TorchFunctionMode around its forward.

Random functions draw from the call's key, a fresh one at every site; torch's global generators are never read. Weights
that are marked for fp8 are multiplied in fp8, and operands of several dtypes are brought together. Functions that write
their operands unseen by torch's version counters (batch statistics) are noted. Each function that is treated apart has
its handler in ``_HANDLERS``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from functional_booster.kernels import attention, random
from functional_booster.precision import fp8, is_float
from functional_booster.precision.fp8 import Fp8Weight
from functional_booster.sharding import environment

from .sync_batch_norm import sync_batch_norm

_SELU_LIMIT = 1.7580993408473766  # scale * alpha of SELU: what alpha dropout sets dropped units to, negated


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


def _dropout(
    mode: ModuleMode, func: Any, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0.0:
        return input
    return _place(input, random.dropout(input, p, mode.draw(f"dropout, p={p}")), inplace)


def _torch_dropout(mode: ModuleMode, func: Any, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return _dropout(mode, F.dropout, input, p, train)


def _channel_dropout(spatial_dims: int | None) -> Callable[..., torch.Tensor]:
    """F.dropout{1,2,3}d: whole channels go, (B, C, ...) or, where torch takes one example, (C, ...)."""

    def handler(
        mode: ModuleMode, func: Any, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        kept_dims = 1 if spatial_dims is not None and input.dim() == spatial_dims + 1 else 2
        ones = input.new_ones(input.shape[:kept_dims] + (1,) * (input.dim() - kept_dims))
        return _place(input, input * random.dropout(ones, p, mode.draw(f"dropout of channels, p={p}")), inplace)

    return handler


def _alpha_dropout(by_channel: bool) -> Callable[..., torch.Tensor]:
    """F.(feature_)alpha_dropout: mean and variance are kept (Klambauer et al. 2017, Self-Normalizing Networks, 3)."""

    def handler(
        mode: ModuleMode, func: Any, input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        shape = input.shape[:2] + (1,) * (input.dim() - 2) if by_channel else input.shape
        keep = random.bernoulli(mode.draw(f"alpha dropout, p={p}"), 1.0 - p, tuple(shape)).to(input.dtype)
        if p == 1.0:
            return _place(input, input * 0.0, inplace)
        scale = ((1.0 - p) * (1.0 + p * _SELU_LIMIT**2)) ** -0.5
        result = scale * (input * keep - _SELU_LIMIT * (1.0 - keep) + _SELU_LIMIT * p)
        return _place(input, result, inplace)

    return handler


def _place(input: torch.Tensor, result: torch.Tensor, inplace: bool) -> torch.Tensor:
    return input.copy_(result) if inplace else result


def _scaled_dot_product_attention(
    mode: ModuleMode,
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p == 0.0 and not attention.lacks_fused(query):
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    def dropout(weights: torch.Tensor) -> torch.Tensor:
        with mode:
            return F.dropout(weights, dropout_p)

    return attention.explicit(query, key, value, attn_mask, is_causal, scale, dropout=dropout if dropout_p else None)


# torch's function answers an active mode by calling the mode again; this twin has its code without that question, so
# that the mode sees the linear layers and the dropout inside.
_multi_head_attention_body = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _multi_head_attention(mode: ModuleMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return _multi_head_attention_body(*args, **kwargs)


def _recurrent(mode: ModuleMode, func: Any, *args: Any) -> Any:
    """lstm, gru, rnn: (input, [sizes], states, flat weights, bias, layers, dropout, training, bidirectional, ...).

    Dropout between layers is inside torch's operator: with it, the operator runs layer by layer.
    """
    place = max(index for index, arg in enumerate(args) if isinstance(arg, (list, tuple)))
    weights, bias, layers, dropout, training, bidirectional = args[place : place + 6]
    if not training or dropout == 0 or layers == 1:
        return func(*args)
    outputs, *sizes, states = args[:place]
    each, directions = len(weights) // layers, 2 if bidirectional else 1
    final = []
    for layer in range(layers):
        if layer:
            outputs = random.dropout(outputs, dropout, mode.draw(f"dropout between layers, p={dropout}"))
        own = slice(layer * directions, (layer + 1) * directions)
        start = states[own] if isinstance(states, torch.Tensor) else tuple(state[own] for state in states)
        options = (bias, 1, 0.0, training, bidirectional, *args[place + 6 :])
        outputs, *last = func(outputs, *sizes, start, weights[layer * each : (layer + 1) * each], *options)
        final.append(last)
    return outputs, *(torch.cat(parts) for parts in zip(*final, strict=True))


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


def _rrelu(mode: ModuleMode, func: Any, *args: Any, training: bool = False, **kwargs: Any) -> torch.Tensor:
    return _unkeyed(mode, func) if training else func(*args, training=training, **kwargs)


def _sized(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.rand, torch.randn: the size as one sequence or as integers."""

    def handler(
        mode: ModuleMode,
        func: Any,
        *size: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> torch.Tensor:
        size = options.pop("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        _refuse_options(mode, func, options)
        values = draw(mode.draw(func.__name__), tuple(size), dtype or torch.get_default_dtype())
        return values.to(device if device is not None else torch.get_default_device())

    return handler


def _like(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.rand_like, torch.randn_like."""

    def handler(
        mode: ModuleMode,
        func: Any,
        input: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> torch.Tensor:
        _refuse_options(mode, func, options)
        values = draw(mode.draw(func.__name__), tuple(input.shape), dtype or input.dtype)
        return values.to(device if device is not None else input.device)

    return handler


def _bernoulli(mode: ModuleMode, func: Any, input: torch.Tensor, **options: Any) -> torch.Tensor:
    _refuse_options(mode, func, options)
    return random.bernoulli(mode.draw("bernoulli"), input).to(input.dtype)


def _refuse_options(mode: ModuleMode, func: Any, options: dict[str, Any]) -> None:
    if given := [name for name, value in options.items() if value is not None and value is not False]:
        raise NotImplementedError(
            f"{mode.caller()} calls {func.__name__} with {', '.join(given)}: it has no keyed form"
        )


def _unkeyed(mode: ModuleMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{mode.caller()} calls {func.__name__}, which draws from torch's global generator and has no keyed form: "
        "hand the random values in as an input"
    )


_UNKEYED = [
    *(torch.randint, torch.randint_like, torch.randperm, torch.multinomial, torch.normal, torch.poisson),
    *(torch.Tensor.bernoulli_, torch.Tensor.multinomial, torch.Tensor.normal_),
    *(torch.Tensor.uniform_, torch.Tensor.random_, torch.Tensor.exponential_, torch.Tensor.geometric_),
    *(torch.Tensor.cauchy_, torch.Tensor.log_normal_),
    *(F.gumbel_softmax, vars(F)["_fractional_max_pool2d"], vars(F)["_fractional_max_pool3d"]),
    *(F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices),
    *(torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
]

_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_UNKEYED, _unkeyed),
    **dict.fromkeys((F.linear, torch.addmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _product),
    **dict.fromkeys((F.layer_norm, F.rms_norm, F.group_norm, F.conv1d, F.conv2d, F.conv3d), _of_one_dtype),
    F.embedding: _embedding,
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
    F.dropout1d: _channel_dropout(1),
    F.dropout2d: _channel_dropout(None),
    F.dropout3d: _channel_dropout(3),
    F.alpha_dropout: _alpha_dropout(by_channel=False),
    F.feature_alpha_dropout: _alpha_dropout(by_channel=True),
    torch.rand: _sized(random.uniform),
    torch.rand_like: _like(random.uniform),
    torch.randn: _sized(random.normal),
    torch.randn_like: _like(random.normal),
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    F.scaled_dot_product_attention: _scaled_dot_product_attention,
    F.multi_head_attention_forward: _multi_head_attention,
    F.rrelu: _rrelu,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}
