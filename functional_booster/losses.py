"""Losses, each as ``(sum, weight)``: a step divides by the weight of the whole batch, so any split of it agrees.

Sums and softmax are in float32 at least. A token whose label is ``ignore_index`` counts neither in the sum nor in the
weight, and its gradients are 0, whatever its logits are, NaN and infinities too; where all are ignored everything is 0.
A label out of range raises IndexError on CPU; on a GPU it trips a device assertion, since looking would wait for the
device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from functional_booster.kernels import cross_entropy as kernel
from functional_booster.kernels import graph
from functional_booster.sharding import sequence
from functional_booster.sharding.remat import remat
from functional_booster.sharding.tensor import log_softmax_statistics

CHUNK_ELEMENTS = 1 << 27  # logits held at a time by linear_next_token: 512 MiB in float32

Loss = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """What a token's loss is, given its logits z and label y.

    (1 - label_smoothing) * -log p[y] + label_smoothing * mean over V of -log p + z_loss * logsumexp(z)^2, for z capped
    as softcap * tanh(z / softcap). (Szegedy et al. 2016; PaLM, section 5; Gemma 2, section 2.)
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing: {self.label_smoothing}, expected a number in [0, 1]")
        if self.z_loss < 0:
            raise ValueError(f"z_loss: {self.z_loss}, expected a number that is not negative")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap: {self.softcap}, expected a positive number or None")


def labels_from(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, ignore_index: int = -100
) -> torch.Tensor:
    """The labels (B, T) of a text that predicts itself, for ``next_token``: input_ids (B, T), without padding.

    Padding, 0 in attention_mask (B, T), is neither a label nor does it predict one: the first real token after padding
    is ignored too. Raises TypeError for what is no tensor, ValueError for a mask of another shape.
    """
    _check_tensor("input_ids", input_ids)
    if attention_mask is None:
        return input_ids
    _check_tensor("attention_mask", attention_mask)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: shape {tuple(attention_mask.shape)}, expected {tuple(input_ids.shape)}, as input_ids "
            "(or give labels)"
        )
    real = attention_mask != 0
    predicted = F.pad(real[:, :-1], (1, 0), value=True)
    return torch.where(real & predicted, input_ids, ignore_index)


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: torch.Tensor | None = None,
) -> Loss:
    """Cross entropy of logits (..., V) with labels (...) int64: (sum, number of labels that are not ignored).

    ``weights`` (...) multiply each label's loss and count. Raises TypeError or ValueError for dtypes or shapes that do
    not fit.
    """
    options = Options(ignore_index, label_smoothing, z_loss)
    _check("logits", logits, labels, weights)
    counted = _weights(labels, weights, options, logits.dtype)
    losses = _token_losses(logits.flatten(0, -2), labels.flatten(), options).view(labels.shape)
    return (losses * counted).sum(), counted.sum()


def next_token(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: torch.Tensor | None = None,
) -> Loss:
    """Cross entropy of logits (B, T, V) at each token with the label of the next: (sum, number of valid tokens).

    ``labels`` and ``weights`` (B, T) are aligned with the inputs, as Hugging Face has them; the shift happens here.
    Raises as ``cross_entropy``.
    """
    _check("logits", logits, labels, weights, rank=3)
    return cross_entropy(
        logits,
        _next(labels, ignore_index),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        weights=None if weights is None else _next(weights, 0),
    )


def linear_next_token(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    weights: torch.Tensor | None = None,
    vocab_size: int | None = None,
) -> Loss:
    """``next_token(hidden @ head.T, labels)`` without ever holding the logits: hidden (B, T, D), head (V, D).

    ``chunk_size`` tokens at a time (by default as many as keep a chunk's logits at 512 MiB). Gradients are computed in
    the forward pass, when one is wanted, in the operands' dtype with sums over chunks in float32 at least; for float16
    in the backward, from logits that are computed again, since there the cotangent carries the loss scale. Second
    derivatives are right, and forward mode works, at the cost of holding the logits. Raises as ``cross_entropy``.

    Under a plugin that splits: ``vocab_size`` says that ``head`` is this rank's part over "tp" of (vocab_size, D), and
    hidden varying over it; where ranks share tokens, hidden may be of this rank's (B, t, D), labels and weights of all.
    Sums and gradients are then those of the whole; the logits are computed again in the backward.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    _check_tensor("hidden", hidden)
    _check_tensor("labels", labels)
    fewer = hidden.dim() == 3 and labels.dim() == 2 and hidden.shape[1] < labels.shape[1]
    axes = sequence.token_axes() if fewer else ()
    if axes:
        targets = sequence.own_tokens(_next(labels, ignore_index))
        weights = None if weights is None else sequence.own_tokens(_next(weights, 0))
        _check("hidden", hidden, targets, weights, rank=3)
    else:
        _check("hidden", hidden, labels, weights, rank=3)
        targets = _next(labels, ignore_index)
        weights = None if weights is None else _next(weights, 0)
    _check_tensor("head", head)
    if head.dim() != 2 or head.shape[1] != hidden.shape[-1]:
        raise ValueError(f"head: shape {tuple(head.shape)}, expected (V, {hidden.shape[-1]}), as hidden's last dim")
    if head.dtype != hidden.dtype:
        raise TypeError(f"head: {head.dtype}, expected {hidden.dtype}, as hidden")
    if chunk_size is None:
        chunk_size = 1 << max(0, (CHUNK_ELEMENTS // head.shape[0]).bit_length() - 1)
    elif chunk_size < 1:
        raise ValueError(f"chunk_size: {chunk_size}, expected a positive number of tokens")
    counted = _weights(targets, weights, options, hidden.dtype)
    operands = (hidden.flatten(0, 1), head, targets.flatten(), counted.flatten())
    wanted = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    if vocab_size is not None:
        total = _total(*operands, options, chunk_size, remat, functools.partial(_split_token_losses, vocab_size))
    elif hidden.dtype == torch.float16:  # gradients need the cotangent's scale from the start: from the backward
        total = _total(*operands, options, chunk_size, remat)
    elif wanted and "Jvp" not in graph.transforms():
        total = _Fused.apply(*operands, options, chunk_size)[0]
    else:  # also right where a gradient is wanted after all, from outside a vmap; then it costs the logits
        total = _total(*operands, options, chunk_size)
    if axes:
        return sequence.total(total), sequence.total(counted.sum())
    return total, counted.sum()


def mse(prediction: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None = None) -> Loss:
    """Squared error of two tensors of one shape: (sum, number of elements).

    ``weights``, broadcast to that shape, multiply each element's error and count. Raises TypeError for what is no
    tensor, ValueError for shapes that do not fit.
    """
    _check_tensor("prediction", prediction)
    _check_tensor("target", target)
    if prediction.shape != target.shape:
        raise ValueError(f"target: shape {tuple(target.shape)}, expected {tuple(prediction.shape)}, as prediction")
    dtype = torch.promote_types(torch.promote_types(prediction.dtype, target.dtype), torch.float32)
    errors = (prediction.to(dtype) - target.to(dtype)).square()
    if weights is None:
        return errors.sum(), torch.full((), errors.numel(), dtype=dtype, device=errors.device)
    _check_tensor("weights", weights)
    try:
        counted = weights.to(dtype).expand(errors.shape)
    except RuntimeError:
        raise ValueError(
            f"weights: shape {tuple(weights.shape)} does not broadcast to {tuple(errors.shape)}, as prediction"
        ) from None
    return (errors * counted).sum(), counted.sum()


def _check(
    name: str, values: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, rank: int | None = None
) -> None:
    _check_tensor(name, values)
    _check_tensor("labels", labels)
    if weights is not None:
        _check_tensor("weights", weights)
    if not values.is_floating_point():
        raise TypeError(f"{name}: {values.dtype}, expected a floating-point dtype")
    if values.dim() < 2 or (rank is not None and values.dim() != rank):
        raise ValueError(f"{name}: shape {tuple(values.shape)}, expected {rank or 'at least 2'} dims")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels: {labels.dtype}, expected torch.int64")
    for other, tensor in (("labels", labels), ("weights", weights)):
        if tensor is not None and tensor.shape != values.shape[:-1]:
            raise ValueError(f"{other}: shape {tuple(tensor.shape)}, expected {tuple(values.shape[:-1])}, as {name}")


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {type(value).__name__}, expected a torch.Tensor")


def _next(values: torch.Tensor, last: int) -> torch.Tensor:
    """(B, T): each token's successor, and ``last`` at the end. Keeps T, so that the hidden state need not be copied."""
    return F.pad(values[:, 1:], (0, 1), value=last)


def _weights(labels: torch.Tensor, weights: torch.Tensor | None, options: Options, dtype: torch.dtype) -> torch.Tensor:
    dtype = torch.promote_types(dtype, torch.float32)
    valid = labels != options.ignore_index
    return valid.to(dtype) if weights is None else torch.where(valid, weights.to(dtype), 0)


def _masked(values: torch.Tensor, labels: torch.Tensor, options: Options) -> torch.Tensor:
    """Values (N, ...) with 0 in the rows of ignored labels (N), so that 0 * NaN is not met there, backward either."""
    return torch.where((labels != options.ignore_index)[:, None], values, 0)


def _token_losses(logits: torch.Tensor, labels: torch.Tensor, options: Options) -> torch.Tensor:
    """Logits (N, V), labels (N) -> (N), 0 where ignored."""
    logits = _masked(logits, labels, options).to(torch.promote_types(logits.dtype, torch.float32))
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return kernel.losses_of(
        logits, logits.log_softmax(-1), labels, options.ignore_index, options.label_smoothing, options.z_loss
    )


def _split_token_losses(vocab_size: int, logits: torch.Tensor, labels: torch.Tensor, options: Options) -> torch.Tensor:
    """``_token_losses`` of logits (N, V / ranks) of which each rank along "tp" has a part: varying -> invariant."""
    valid = labels != options.ignore_index
    logits = _masked(logits, labels, options).to(torch.promote_types(logits.dtype, torch.float32))
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    found = log_softmax_statistics(logits, labels, vocab_size, "tp")
    losses = found["logsumexp"] - found["at"]
    if options.label_smoothing:
        even = found["logsumexp"] - found["sum"] / vocab_size
        losses = (1 - options.label_smoothing) * losses + options.label_smoothing * even
    if options.z_loss:
        losses = losses + options.z_loss * found["logsumexp"].square()
    return torch.where(valid, losses, 0)


def _total(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    options: Options,
    chunk_size: int,
    wrap: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]] = lambda of_chunk: of_chunk,
    token_losses: Callable[[torch.Tensor, torch.Tensor, Options], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Hidden (N, D), head (V, D), labels and weights (N) -> the weighted sum, 0-d: the definition, chunk by chunk."""

    of_tokens = token_losses or _token_losses

    def of_chunk(h: torch.Tensor, head: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (of_tokens(F.linear(_masked(h, y, options), head), y, options) * w).sum()

    summed = wrap(of_chunk)
    chunks = zip(*(operand.split(chunk_size) for operand in (hidden, labels, weights)), strict=True)
    return torch.stack([summed(h, head, y, w) for h, y, w in chunks]).sum()


class _Fused(torch.autograd.Function):
    """Forward: ``_total``, with its gradients computed on the way; backward: these, times the cotangent."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        options: Options,
        chunk_size: int,
    ) -> tuple[torch.Tensor, ...]:
        losses, grad_hidden, grad_head = [], [], None
        for h, y, w in zip(*(operand.split(chunk_size) for operand in (hidden, labels, weights)), strict=True):
            h = _masked(h, y, options)
            chunk_losses, grad_logits = kernel.losses_and_grads(F.linear(h, head), y, w, *astuple(options))
            losses.append(chunk_losses)
            grad_hidden.append(_masked(grad_logits @ head, y, options))
            part = (grad_logits.mT @ h).to(w.dtype)
            grad_head = part if grad_head is None else grad_head + part
        each = torch.cat(losses)
        return (each * weights).sum(), torch.cat(grad_hidden), grad_head.to(head.dtype), each  # type: ignore[union-attr]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.options, ctx.chunk_size = inputs[4:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:4], *output[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = _Pullback.apply(cotangent, *ctx.saved_tensors, ctx.options, ctx.chunk_size)
        return grads[0], grads[1], None, grads[2], None, None


class _Pullback(torch.autograd.Function):
    """Forward: the kept gradients times the cotangent; backward: the second derivatives, from ``_total`` anew."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        cotangent: torch.Tensor,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        grad_hidden: torch.Tensor,
        grad_head: torch.Tensor,
        losses: torch.Tensor,
        options: Options,
        chunk_size: int,
    ) -> tuple[torch.Tensor, ...]:
        return tuple((cotangent * grad).to(grad.dtype) for grad in (grad_hidden, grad_head, losses))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.options, ctx.chunk_size = inputs[8:]
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cotangent, hidden, head, labels, weights = ctx.saved_tensors

        def total(hidden: torch.Tensor, head: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return _total(hidden, head, labels, weights, ctx.options, ctx.chunk_size)

        def pullback(cotangent: torch.Tensor, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.func.vjp(total, *primals)[1](cotangent)

        grads = torch.func.vjp(pullback, cotangent, hidden, head, weights)[1](cotangents)
        return grads[0], grads[1], grads[2], None, grads[3], None, None, None, None, None
