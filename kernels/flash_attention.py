"""Flash attention: softmax(Q K^T scale + bias) V in blocks, so that memory is linear in tokens (Dao et al. 2022; 2023).

With s the scores, -inf where a query does not see a key, lse = logsumexp(s), p = exp(s - lse), m the dropout's mask, 0
or 1 / (1 - rate), do and dlse the cotangents::

    out = (p m) v                      dv = (p m)^T do
    delta = sum(do out) - dlse         ds = p ((do v^T) m - delta)       dq = scale ds k       dk = scale ds^T q

Query heads share key-value heads in groups (Ainslie et al. 2023). Besides causal masks it has what the library's fused
kernels lack: sliding windows, documents, a bias, dropout by key, and the lse that partial attentions are joined by. On
a GPU Triton kernels walk the blocks that are seen. Elsewhere, in float64, in forward mode and under second derivatives
this is plain torch, quadratic in tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import graph, random, threefry
from .primitive import leading_dims, primitive


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout_rate: float = 0.0,
    dropout_key: torch.Tensor | None = None,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query (..., H, Tq, D), key and value (..., K, Tk, D), K dividing H -> out (..., H, Tq, D), which lies in memory
    as (..., Tq, H, D), and lse (..., H, Tq) in float32 at least. A query that sees nothing has out 0 and lse -inf.

    Query i stands at key i + ``offset``: by itself at the front, as ``scaled_dot_product_attention`` has it. Causal, it
    sees keys up to its own place; in a ``window`` those less than that many places away; with ``documents`` (..., T)
    integers those of its own document, a run of equal numbers, and nothing where the number is negative (padding).
    ``bias``, broadcastable to (..., H, Tq, Tk), is added to the scores and is a constant: it has no gradient. Weights
    are dropped as ``random.dropout(weights, dropout_rate, dropout_key)`` does. ``scale``, by default D**-0.5, is
    positive.

    Raises TypeError for dtypes that differ, ValueError for shapes and numbers that do not fit, NotImplementedError for
    a bias whose gradient is asked for.
    """
    _check(query, key, value, window, documents, dropout_rate, dropout_key, offset)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale: {scale}, expected a positive number")
    lead, heads = query.shape[:-3], query.shape[-3]
    shape = (*lead, heads, query.shape[-2], key.shape[-2])
    bias = None if bias is None else _checked_bias(bias, shape).expand(shape).reshape(-1, *shape[-3:])
    spans = None if documents is None else spans_of(documents.expand(*lead, -1)).reshape(-1, 2, shape[-1])
    dropped = 0 if dropout_key is None else round(dropout_rate * 2**16)
    reach = None if window is None else window - 1
    # Neither forward mode nor second derivatives are in the op: the plain form has both.
    active = graph.transforms()
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]] = (
        by_torch if "Jvp" in active or active.count("Grad") > 1 else _forward
    )
    out, lse = run(
        *(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)),
        spans,
        bias,
        dropout_key if dropped else None,
        scale,
        reach,
        0 if is_causal else reach,
        offset,
        dropped,
    )
    return out.unflatten(0, lead) if len(lead) != 1 else out, lse.unflatten(0, lead) if len(lead) != 1 else lse


def spans_of(documents: torch.Tensor) -> torch.Tensor:
    """Numbers (..., T) -> (..., 2, T) int32: where each token's document starts, and where it ends; (T, 0) for none."""
    size = documents.shape[-1]
    place = torch.arange(size, device=documents.device)
    changes = documents[..., 1:] != documents[..., :-1]
    edge = torch.ones_like(documents[..., :1], dtype=torch.bool)
    first = torch.where(torch.cat([edge, changes], -1), place, 0).cummax(-1).values
    end = torch.where(torch.cat([changes, edge], -1), place + 1, size).flip(-1).cummin(-1).values.flip(-1)
    padding = documents < 0
    return torch.stack([first.masked_fill(padding, size), end.masked_fill(padding, 0)], -2).to(torch.int32)


def documents_of(cumulative: torch.Tensor, tokens: int) -> torch.Tensor:
    """Cumulative lengths (N + 1,), from 0 on, of documents packed into ``tokens`` -> (tokens,) int32, -1 behind."""
    place = torch.arange(tokens, dtype=cumulative.dtype, device=cumulative.device)
    number = torch.searchsorted(cumulative[1:].contiguous(), place, right=True)
    return torch.where(place < cumulative[-1], number, -1).to(torch.int32)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    documents: torch.Tensor | None,
    dropout_rate: float,
    dropout_key: torch.Tensor | None,
    offset: int,
) -> None:
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise TypeError(f"query, key, value: {query.dtype}, {key.dtype}, {value.dtype}, expected one floating dtype")
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.dim() < 3 or key.shape != value.shape or query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"{shapes}: expected (..., H, Tq, D), (..., K, Tk, D) and the same")
    if query.shape[-1] != key.shape[-1] or not key.shape[-3] or query.shape[-3] % key.shape[-3]:
        raise ValueError(f"{shapes}: expected one D, and query heads in groups of equal size")
    if window is not None and window < 1:
        raise ValueError(f"window: {window}, expected a token at least")
    if documents is not None and (query.shape[-2] != key.shape[-2] or documents.shape[-1] != key.shape[-2] or offset):
        raise ValueError(f"documents {tuple(documents.shape)}, {shapes}, offset {offset}: expected (..., T) of both")
    if dropout_key is not None:
        random._check_key(dropout_key)
        random._check_probability("dropout_rate", dropout_rate)


def _checked_bias(bias: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    if bias.dim() > len(shape) or any(size not in (1, whole) for size, whole in sizes):
        raise ValueError(f"bias: {tuple(bias.shape)} cannot be broadcast to (..., H, Tq, Tk) {shape}")
    if bias.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("bias: flash_attention has no gradient of it; attention.explicit has")
    return bias


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    spans: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    offset: int,
) -> torch.Tensor:
    """(..., H, Tq, Tk), of wide operands, -inf where a query does not see a key."""
    scores = query @ key.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    row = torch.arange(query.shape[-2], device=query.device)[:, None] + offset
    column = torch.arange(key.shape[-2], device=query.device)
    seen = torch.ones_like(row + column, dtype=torch.bool)
    if left is not None:
        seen = seen & (column >= row - left)
    if right is not None:
        seen = seen & (column <= row + right)
    if spans is not None:
        first, end = spans[..., None, :, :, None].unbind(-3)
        seen = seen & (column >= first) & (column < end)
    return torch.where(seen, scores, -math.inf)


def _wide(query: torch.Tensor, *shared: torch.Tensor) -> list[torch.Tensor]:
    """In float32 at least, and shared heads once for each query head."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[-3] // shared[0].shape[-3]
    return [query.to(dtype), *(x.to(dtype).repeat_interleave(group, -3) for x in shared)]


def _multiplier(draw: torch.Tensor | None, dropped: int, weights: torch.Tensor) -> torch.Tensor | float:
    """The dropout's mask: 0, or what makes up for the others."""
    if draw is None:
        return 1.0
    shape = weights.shape[-4:]
    keep = threefry.bits(draw, None, 0, tuple(shape), random._strides(shape), 16) > dropped - 2**15 - 1
    return keep * (2**16 / (2**16 - dropped) if dropped < 2**16 else 0.0)


def by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: torch.Tensor | None,
    bias: torch.Tensor | None,
    draw: torch.Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    offset: int,
    dropped: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op in plain torch: query (*, B, H, Tq, D), key and value (*, B, K, Tk, D), spans (*, B, 2, T) int32, bias
    (*, B, H, Tq, Tk), draw (*, 2). Query i sees keys i + offset - left to i + offset + right."""
    wide, *shared = _wide(query, key, value)
    scores = _scores(wide, shared[0], spans, bias, scale, left, right, offset)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    total = scores.masked_fill(dead, 0.0).logsumexp(-1, keepdim=True)  # which has no gradient where all is -inf
    weights = torch.exp(scores - total)
    lse = total.masked_fill(dead, -math.inf).squeeze(-1)
    return _by_tokens(weights * _multiplier(draw, dropped, weights) @ shared[1], query.dtype), lse


def backward_by_torch(
    cotangent: torch.Tensor,
    lse_cotangent: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: torch.Tensor | None,
    bias: torch.Tensor | None,
    draw: torch.Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    offset: int,
    dropped: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value in plain torch."""
    wide, wide_key, wide_value = _wide(query, key, value)
    cotangent = cotangent.to(wide.dtype)
    scores = _scores(wide, wide_key, spans, bias, scale, left, right, offset)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    multiplier = _multiplier(draw, dropped, weights)
    delta = (cotangent * out.to(wide.dtype)).sum(-1) - lse_cotangent
    grad_scores = weights * (cotangent @ wide_value.transpose(-2, -1) * multiplier - delta[..., None]) * scale
    groups = (key.shape[-3], -1)
    grad_key = (grad_scores.transpose(-2, -1) @ wide).unflatten(-3, groups).sum(-3)
    grad_value = ((weights * multiplier).transpose(-2, -1) @ cotangent).unflatten(-3, groups).sum(-3)
    return tuple(_by_tokens(grad, query.dtype) for grad in (grad_scores @ wide_key, grad_key, grad_value))  # type: ignore[return-value]


def _by_tokens(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(..., H, T, D) that lies in memory as (..., T, H, D), so that heads join without a copy."""
    return x.to(dtype).transpose(-3, -2).contiguous().transpose(-3, -2)


def _empty_by_tokens(x: torch.Tensor) -> torch.Tensor:
    *lead, heads, tokens, size = x.shape
    return x.new_empty((*lead, tokens, heads, size)).transpose(-3, -2)


def _empty(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lse = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    return _empty_by_tokens(query), lse


def _empty_backward(
    cotangent: torch.Tensor, lse_cotangent: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *tensors: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = tensors[:3]
    return _empty_by_tokens(query), _empty_by_tokens(key), _empty_by_tokens(value)


def _on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: torch.Tensor | None,
    bias: torch.Tensor | None,
    draw: torch.Tensor | None,
    *numbers: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    kernels = _kernels(query)
    if kernels is None:
        return by_torch(query, key, value, spans, bias, draw, *numbers)
    out, lse = _empty(query)
    if not key.numel() or not query.numel():
        return out.zero_(), lse.fill_(-math.inf)
    mask = _mask(kernels[0], query, spans, bias, draw, *numbers)
    kernels[0].forward(*_flat(out), lse, *_flat(query, key, value), numbers[0], mask)
    return out, lse


def _backward_on_cuda(
    cotangent: torch.Tensor, lse_cotangent: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *tensors: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value, *rest = tensors
    kernels = _kernels(query)
    if kernels is None:
        return backward_by_torch(cotangent, lse_cotangent, out, lse, *tensors)
    grads = _empty_backward(cotangent, lse_cotangent, out, lse, *tensors)
    if not key.numel() or not query.numel():
        return tuple(grad.zero_() for grad in grads)  # type: ignore[return-value]
    scale, mask = rest[3], _mask(kernels[0], query, *rest)
    grad_query, grad_key, grad_value, out, cotangent = _flat(*grads, out, cotangent)
    lse, lse_cotangent = (x.reshape(out.shape[:-1]).contiguous() for x in (lse, lse_cotangent))
    delta = kernels[1].delta(out, cotangent, lse_cotangent)
    given = (cotangent, lse, delta, *_flat(query, key, value), scale, mask)
    kernels[1].grads_of_keys_and_values(grad_key, grad_value, *given)
    kernels[1].grad_of_queries(grad_query, *given)
    return grads


def _flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Four dims each; what was made here stays a view."""
    return [x.reshape(-1, *x.shape[-3:]) for x in tensors]


def _mask(
    kernels: Any,
    query: torch.Tensor,
    spans: torch.Tensor | None,
    bias: torch.Tensor | None,
    draw: torch.Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    offset: int,
    dropped: int,
) -> Any:
    if spans is not None:
        spans = spans.reshape(-1, *spans.shape[-2:]).contiguous()
    bias = None if bias is None else bias.reshape(-1, *bias.shape[-3:])
    draw = None if draw is None else draw.reshape(-1, 2).contiguous()
    return kernels.Mask(left, right, offset, spans, bias, draw, dropped, query.shape[-4])


def _kernels(query: torch.Tensor) -> Any:
    """The modules of the Triton kernels, forward and backward; None, said once, where they do not serve."""
    if query.dtype == torch.float64:
        warnings.warn(
            "flash_attention: float64 is computed in plain torch, in memory quadratic in tokens", stacklevel=2
        )
        return None
    try:
        from . import flash_attention_backward_triton, flash_attention_triton
    except ModuleNotFoundError:
        message = "flash_attention: without triton it is computed in plain torch, in memory quadratic in tokens"
        warnings.warn(message, stacklevel=2)
        return None
    return flash_attention_triton, flash_attention_backward_triton


def _kept(inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
    return (*outputs, *inputs)


def _gradients(residuals: tuple[Any, ...], *cotangents: torch.Tensor) -> tuple[Any, ...]:
    return (*_backward(*cotangents, *residuals), *(None,) * 8)


_MASK = "Tensor? spans, Tensor? bias, Tensor? draw, float scale, int? left, int? right, int offset, int dropped"

_backward = primitive(
    "flash_attention_backward",
    "(Tensor cotangent, Tensor lse_cotangent, Tensor out, Tensor lse, Tensor query, Tensor key, Tensor value, "
    f"{_MASK}) -> (Tensor, Tensor, Tensor)",
    reference=backward_by_torch,
    cuda=_backward_on_cuda,
    fake=_empty_backward,
    batching=leading_dims,
)

_forward = primitive(
    "flash_attention",
    f"(Tensor query, Tensor key, Tensor value, {_MASK}) -> (Tensor, Tensor)",
    reference=by_torch,
    cuda=_on_cuda,
    fake=_empty,
    batching=leading_dims,
    residuals=_kept,
    backward=_gradients,
)
