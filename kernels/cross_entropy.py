"""Cross entropy with its gradient: a token's loss and the gradient of its logits z, in one go over a row.

With y the label, V the vocabulary, s the label smoothing, lse = logsumexp(z), p = exp(z - lse), for z = softcap *
tanh(z' / softcap) where there is a softcap::

    loss     = lse - (1 - s) z[y] - s mean(z) + z_loss lse^2
    dloss/dz = p (1 + 2 z_loss lse) - (1 - s) 1[y] - s / V        times 1 - tanh^2(z' / softcap) for z'

(Szegedy et al. 2016; PaLM, section 5; Gemma 2, section 2.) On a GPU a Triton kernel reads each row twice, the second
time out of the cache, and writes the gradient: elsewhere, and in float64, this is plain torch, open to the compiler.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .primitive import primitive


def losses_and_grads(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (N, V), labels (N,) int64, weights (N,) -> losses (N,) in weights' dtype, float32 at least, and the
    gradient (N, V), in logits' dtype, of their sum weighted by ``weights``.

    A row whose label is ``ignore_index`` has loss and gradients 0, whatever its logits. Not differentiable. Raises
    IndexError on CPU for a label out of range; on a GPU it trips a device assertion.
    """
    arguments = (logits, labels, weights, ignore_index, label_smoothing, z_loss, softcap)
    on_gpu = logits.device.type == "cuda" and weights.dtype == torch.float32 and _kernels() is not None
    return _by_triton(*arguments) if on_gpu else by_torch(*arguments)


def losses_of(
    logits: torch.Tensor,
    log_probs: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """Logits (N, V) after the softcap, and their log_softmax, labels (N,) -> losses (N,), 0 where ignored."""
    losses = F.nll_loss(log_probs, labels, ignore_index=ignore_index, reduction="none")
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * log_probs.mean(-1)
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(-1).square()
    return torch.where(labels != ignore_index, losses, 0)


def by_torch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``losses_and_grads`` in plain torch."""
    dtype, size = logits.dtype, logits.shape[-1]
    counted = (labels != ignore_index)[:, None]
    logits = torch.where(counted, logits, 0).to(weights.dtype)
    slope = None
    if softcap is not None:
        tanh = torch.tanh(logits / softcap)
        logits, slope = softcap * tanh, 1 - tanh.square()
    log_probs = logits.log_softmax(-1)
    losses = losses_of(logits, log_probs, labels, ignore_index, label_smoothing, z_loss)
    grads = log_probs.exp()
    if z_loss:
        grads = grads * (1 + 2 * z_loss * logits.logsumexp(-1, keepdim=True))
    at_label = torch.arange(size, device=labels.device) == labels[:, None]
    grads = torch.where(at_label, grads - (1 - label_smoothing), grads) - label_smoothing / size
    if slope is not None:
        grads = grads * slope
    return losses, torch.where(counted, (grads * weights[:, None]).to(dtype), 0)


def _on_cuda(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = logits.shape[-1]
    legal = ((labels >= 0) & (labels < size)) | (labels == ignore_index)
    torch._assert_async(legal.all(), f"a label is out of range: neither in [0, {size}) nor {ignore_index}")
    losses, grads = _empty(logits, labels, weights, ignore_index, label_smoothing, z_loss, softcap)
    if grads.numel():
        _kernels().losses_and_grads(
            losses,
            grads,
            logits.contiguous(),
            labels.contiguous(),
            weights.contiguous(),
            ignore_index,
            label_smoothing,
            z_loss,
            softcap,
        )
    return losses, grads


def _empty(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return weights.new_empty(labels.shape), logits.new_empty(logits.shape)


def _kernels() -> Any:
    try:
        from . import cross_entropy_triton
    except ModuleNotFoundError:  # torch without triton
        return None
    return cross_entropy_triton


_by_triton = primitive(
    "cross_entropy_losses_and_grads",
    "(Tensor logits, Tensor labels, Tensor weights, int ignore_index, float label_smoothing, float z_loss, "
    "float? softcap) -> (Tensor, Tensor)",
    reference=by_torch,
    cuda=_on_cuda,
    fake=_empty,
)
