"""The random functions of torch, with the randomness drawn by key: handlers for ``ModuleMode``.

A handler is called as ``handler(mode, function, *args, **kwargs)`` and draws from ``mode.draw``, where the function
would read torch's global generator. Functions without a keyed form are refused by name.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from functional_booster.kernels import attention, random

if TYPE_CHECKING:
    from .module_mode import ModuleMode

_SELU_LIMIT = 1.7580993408473766  # scale * alpha of SELU: what alpha dropout sets dropped units to, negated


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

HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_UNKEYED, _unkeyed),
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
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}
