"""Attention: softmax(Q K^T * scale + mask) V, by fused kernels where they have a rule, written out elsewhere.

(Vaswani et al. 2017, section 3.2.1.) Query heads share key-value heads in groups (Ainslie et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F

from . import graph
from .flash_attention import flash_attention


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    dropout: Callable[[torch.Tensor], torch.Tensor] | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> torch.Tensor: ...


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    dropout: None = ...,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``explicit``, by a fused kernel where there is one for what is asked: the same up to rounding.

    Without ``options`` and ``return_lse`` the library's kernels serve, and a ``dropout`` has the weights written out.
    With them, ``flash_attention`` does, which has them all (window, documents, bias, dropout_rate, dropout_key,
    offset) in memory linear in tokens; it takes neither ``attn_mask`` nor ``dropout``: ValueError.
    """
    if return_lse or options:
        for name, given in (("attn_mask", attn_mask), ("dropout", dropout)):
            if given is not None:
                asked = sorted(options) + ["return_lse"] * return_lse
                raise ValueError(f"{name}: not together with {', '.join(asked)}; see bias, documents, dropout_key")
        out, lse = flash_attention(query, key, value, is_causal=is_causal, scale=scale, **options)
        return (out, lse) if return_lse else out
    if dropout is not None or lacks_fused(query):
        return explicit(query, key, value, attn_mask, is_causal, scale, dropout=dropout)
    grouped = key.shape[-3] != query.shape[-3]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def lacks_fused(query: torch.Tensor) -> bool:
    """Where torch's fused attention has no rule: forward mode, second derivatives, and vmap on CPU."""
    active = graph.transforms()
    return "Jvp" in active or active.count("Grad") > 1 or (query.device.type == "cpu" and "Vmap" in active)


def explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention with its weights written out: the reference, and what the fused kernels lack.

    query (..., H, Tq, D), key (..., Hkv, Tk, D), value (..., Hkv, Tk, Dv) with H a multiple of Hkv; ``attn_mask`` is
    bool (True: attend) or additive, broadcastable to (..., H, Tq, Tk); ``sinks`` (H,) are logits of a place without
    a value; ``dropout`` is applied to the weights. The softmax is in float32 at least. A row whose mask lets it attend
    to nothing gives 0.
    """
    if key.dim() > 2 and (repeats := query.shape[-3] // key.shape[-3]) > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        attn_mask = allowed if attn_mask is None else _both(attn_mask, allowed)
    dead = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        dead = ~attn_mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        dead = (attn_mask == -math.inf).all(-1, keepdim=True)
        scores = (scores + attn_mask).masked_fill(dead, 0.0)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    if dead is not None:
        weights = weights.masked_fill(dead, 0.0)
    return (weights if dropout is None else dropout(weights)) @ value


def _both(mask: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -math.inf)
