"""What the model families share: linear layers on a tensor-parallel axis, norms, rotary positions, attention.

Weights lie as ``F.linear`` has them, (out, in). Shapes: B batch, T tokens, D model, H heads, K key-value heads, d head
dim. Over the axis "tp" a column-parallel layer holds some rows of its weight (some heads, some neurons), a row-parallel
layer some columns; every size is read off the weights at hand, so that the same code runs on the whole and on a part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from functional_booster.kernels import attention as attention_kernel
from functional_booster.kernels import gated, random
from functional_booster.kernels import layer_norm as layer_norm_kernel
from functional_booster.kernels import rms_norm as rms_norm_kernel
from functional_booster.precision import fp8
from functional_booster.sharding import sequence, tensor
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.collectives import axis_index, axis_size, enter, psum_scatter
from functional_booster.sharding.environment import current
from functional_booster.sharding.initializers import normal, ones, zeros
from functional_booster.sharding.spec import P

Params = dict[str, Any]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def column_parallel(out: int, into: int, std: float, bias: bool, grain: int = 1, uneven: str = "pad") -> Params:
    """The abstract (out, into) linear layer whose outputs are split over "tp", in whole grains (see ArrayInfo)."""
    split: dict[str, Any] = {"grain": grain, "uneven": uneven}
    info = {"weight": ArrayInfo((out, into), spec=P("tp", None), initializer=normal(std), **split)}
    return info | ({"bias": ArrayInfo((out,), spec=P("tp"), initializer=zeros, **split)} if bias else {})


def row_parallel(out: int, into: int, std: float, bias: bool, grain: int = 1) -> Params:
    """The abstract (out, into) linear layer whose inputs are split over "tp"; its bias is whole on every rank."""
    info = {"weight": ArrayInfo((out, into), spec=P(None, "tp"), initializer=normal(std), grain=grain)}
    return info | ({"bias": ArrayInfo((out,), initializer=zeros)} if bias else {})


def embedding(rows: int, width: int, std: float) -> Params:
    """The abstract (rows, width) table."""
    return {"weight": ArrayInfo((rows, width), initializer=normal(std))}


def vocabulary(rows: int, width: int, std: float) -> Params:
    """The abstract (rows, width) table whose rows are split over "tp"."""
    return {"weight": ArrayInfo((rows, width), spec=P("tp", None), initializer=normal(std))}


def norm(width: int, bias: bool) -> Params:
    """The abstract scale, and shift, of a norm."""
    info = {"weight": ArrayInfo((width,), initializer=ones)}
    return info | ({"bias": ArrayInfo((width,), initializer=zeros)} if bias else {})


def linear(params: Params, x: torch.Tensor) -> torch.Tensor:
    """(..., in) -> (..., out). Over "tp" with column-parallel weights: invariant or varying -> varying."""
    return product(x, params["weight"], params.get("bias"))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` in x's dtype; in the wider of both where the weight is kept in another one."""
    if weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        return F.linear(x, weight, bias)
    wide = torch.promote_types(x.dtype, weight.dtype)
    out = F.linear(x.to(wide), weight if weight.dtype == wide else weight.to(wide))
    return (out if bias is None else out + bias).to(x.dtype)


def looked_up(table: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    """Rows of a table (V, D), in the dtype that the step computes in, whatever the table is kept in."""
    found = table[rows] if isinstance(rows, slice) else F.embedding(rows, table)
    return found.to(current().compute or found.dtype)


def embedded(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Tokens (B, T) int64 in a table (V, D), over "tp" this rank's part of it -> those of this rank, (B, t, D)."""
    if "tp" in sequence.token_axes():
        sequence.own_tokens(ids)  # raises where the ranks do not divide T
        found = psum_scatter(tensor.partial_lookup(table, ids, "tp"), "tp", dim=1)
    else:
        found = tensor.lookup(table, sequence.own_tokens(ids), "tp")
    return found.to(current().compute or found.dtype)


def linear_and_leave(params: Params, x: torch.Tensor) -> torch.Tensor:
    """(B, T, in) -> (B, t, out) with row-parallel weights: varying -> invariant over "tp". The bias is added once."""
    out = sequence.rows(product(x, params["weight"]), "tp")
    return (out + params["bias"]).to(out.dtype) if "bias" in params else out


def heads(layers: Sequence[Params], x: torch.Tensor, head_dim: int) -> list[torch.Tensor]:
    """Project x (B, T, D) by several layers, as one matrix product, and split: a (B, H, T, d) for each of them."""
    return [part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in together(layers, x)]


def together(layers: Sequence[Params], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``linear`` of x (..., in) by several layers, as one matrix product: an (..., out) for each of them."""
    return joined(layers, x).split([len(layer["weight"]) for layer in layers], dim=-1)


def joined(layers: Sequence[Params], x: torch.Tensor) -> torch.Tensor:
    """``together``, its results side by side."""
    bias = torch.cat([layer["bias"] for layer in layers]) if "bias" in layers[0] else None
    return product(x, torch.cat([layer["weight"] for layer in layers]), bias)


def gated_mlp(params: Params, x: torch.Tensor, activation: str) -> torch.Tensor:
    """down(activation(gate(x)) * up(x)): (B, T, D) -> (B, T, D), invariant over "tp". (Shazeer 2020.)"""
    layers = [params[name] for name in ("gate_proj", "up_proj", "down_proj")]
    weights = [layer["weight"] for layer in layers]
    if activation in ("silu", "swish") and fp8.fuses(*weights) and not any("bias" in layer for layer in layers):
        return sequence.rows(fp8.swiglu_mlp(x, *weights), "tp")
    return linear_and_leave(params["down_proj"], gated.gated(joined(layers[:2], x), activation))


def layer_norm(params: Params, x: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the last dim, in x's dtype; statistics in float32 at least (Ba et al. 2016)."""
    return layer_norm_kernel.layer_norm(x, params["weight"], params["bias"], eps)


def rms_norm(params: Params, x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dim, in x's dtype; statistics in float32 at least (Zhang and Sennrich 2019)."""
    return rms_norm_kernel.rms_norm(x, params["weight"], eps)


def add_rms_norm(params: Params, x: torch.Tensor, more: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm`` of x + more, and the sum."""
    return rms_norm_kernel.add_rms_norm(x, more, params["weight"], eps)


def dropout(x: torch.Tensor, p: float, key: torch.Tensor | None) -> torch.Tensor:
    """Dropout by key; the identity without a key or at p = 0."""
    return x if key is None or p == 0 else random.dropout(x, p, key)


def dropout_of_tokens(x: torch.Tensor, p: float, key: torch.Tensor | None) -> torch.Tensor:
    """Dropout of x (B, t, D), this rank's tokens: what one device drops of (B, T, D)."""
    axes = sequence.token_axes()
    if key is None or p == 0 or not axes:
        return dropout(x, p, key)
    whole = (x.shape[0], x.shape[1] * axis_size(axes), x.shape[2])
    return random.dropout(x, p, key, global_shape=whole, start=(0, sequence.first_token(x.shape[1]), 0))


def of_own_groups(layer: Params, each: int) -> Params:
    """A layer of key-value heads, ``each`` rows in all, as heads of this rank use it: one that "tp" does not split is
    shared, and its gradient a sum over ranks."""
    return enter(layer, "tp") if tensor.splits("tp") and len(layer["weight"]) == each else layer


def own_groups(x: torch.Tensor, queries: int, heads: int, groups: int) -> torch.Tensor:
    """Key-value heads (B, K, T, d) for this rank's ``queries`` of all ``heads``, in ``groups``: of heads that "tp" does
    not split, one for each query. The others are as they are."""
    if not tensor.splits("tp") or x.shape[1] != groups:
        return x
    places = axis_index("tp").to(x.device, torch.int64) * queries + torch.arange(queries, device=x.device)
    return x.index_select(1, places.clamp_max(heads - 1) // (heads // groups))


def rotary_tables(frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, (B or 1, 1, T, d/2) float32, of frequencies (d/2,) at positions (B or 1, T)."""
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    p: float = 0.0,
    key: torch.Tensor | None = None,
    heads: int | None = None,
) -> torch.Tensor:
    """Causal attention: q (B, H, T, d), k and v (B, K, T, d), K dividing H -> (B, T, H * d).

    ``mask`` (B, 1, T, T) is added to the scores and must be causal itself (``padding_mask``). ``p`` and ``key`` drop
    attention weights, as of all ``heads`` (None: H), of which "tp" and "sp" leave this rank some. Where "sp" splits
    tokens, q, k and v hold those of this rank, and so does the result.
    """
    mine = q.shape[1]
    if "sp" in sequence.token_axes():
        if k.shape[1] % axis_size("sp"):
            k, v = (one.repeat_interleave(mine // one.shape[1], 1) for one in (k, v))
        q, k, v = (sequence.to_heads(one, "sp") for one in (q, k, v))
    drop = None if key is None or p == 0 else functools.partial(_dropout_of_heads, p, key, heads or mine, mine)
    out = attention_kernel.attention(q, k, v, mask, is_causal=mask is None, scale=scale, dropout=drop)
    return sequence.to_tokens(out.transpose(1, 2), "sp").flatten(2)


def _dropout_of_heads(p: float, key: torch.Tensor, heads: int, mine: int, weights: torch.Tensor) -> torch.Tensor:
    """Dropout of attention weights (B, h, T, T): what one device drops of (B, ``heads``, T, T)."""
    if not tensor.splits("tp") and "sp" not in sequence.token_axes():
        return random.dropout(weights, p, key)
    first = axis_index("tp") * mine if tensor.splits("tp") else 0
    first = first + (axis_index("sp") * weights.shape[1] if "sp" in sequence.token_axes() else 0)
    whole = (weights.shape[0], heads, *weights.shape[2:])
    return random.dropout(weights, p, key, global_shape=whole, start=(0, first, 0, 0))


def padding_mask(attention_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(B, T), nonzero at real tokens -> (B, 1, T, T), 0 where a token may look and -inf elsewhere.

    Causal; padding is hidden from every token but itself, so that no row is empty (an empty softmax is NaN).
    """
    size = attention_mask.shape[1]
    ones_ = torch.ones(size, size, dtype=torch.bool, device=attention_mask.device)
    itself = torch.eye(size, dtype=torch.bool, device=attention_mask.device)
    visible = (ones_.tril() & (attention_mask != 0)[:, None, None, :]) | itself
    return torch.where(visible, 0.0, -math.inf).to(dtype)


def check_tokens(
    input_ids: torch.Tensor,
    limit: tuple[str, int],
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> None:
    """Raise TypeError or ValueError unless ids are (B, T) int64 with T within the limit, and mask and positions fit."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype != torch.int64:
        given = input_ids.dtype if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids: {given}, expected a tensor of torch.int64")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids: shape {tuple(input_ids.shape)}, expected (B, T)")
    name, most = limit
    if input_ids.shape[1] > most:
        raise ValueError(f"input_ids: {input_ids.shape[1]} tokens a row, but {name} is {most}")
    batch, size = input_ids.shape
    if attention_mask is not None and tuple(attention_mask.shape) != (batch, size):
        raise ValueError(f"attention_mask: shape {tuple(attention_mask.shape)}, expected {(batch, size)}")
    if position_ids is not None:
        if tuple(position_ids.shape) not in ((batch, size), (1, size)):
            raise ValueError(
                f"position_ids: shape {tuple(position_ids.shape)}, expected {(batch, size)} or {(1, size)}"
            )
        if position_ids.dtype != torch.int64:
            raise TypeError(f"position_ids: {position_ids.dtype}, expected torch.int64")


def dropout_key(key: torch.Tensor | None, train: bool, *rates: float) -> torch.Tensor | None:
    """The key when there is something to drop, else None. Raises ValueError when it is missing in training."""
    if not train or not any(rates) or current().evaluating:
        return None
    if key is None:
        raise ValueError("key: missing; a model with dropout needs one when train=True (or set its dropouts to 0)")
    return key


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype that norms, softmax and losses are computed in: float32 for half precision, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)
