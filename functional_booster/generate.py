"""Text from a language model, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from functional_booster.kernels import random, tree
from functional_booster.models.model import Model, Tree

from .arguments import check_model
from .optim.validate import check_integer, check_scalar
from .state import TrainState, check_params


@torch.no_grad()
def generate(
    model: Model,
    params: Tree,
    prompt: torch.Tensor,
    *,
    key: torch.Tensor | None = None,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> torch.Tensor:
    """Continue ``prompt`` (B, T) int64 by at most ``max_new_tokens`` tokens: (B, T + N) int64, prompt included.

    temperature 0 takes the likeliest token; else tokens are drawn by ``key`` from the logits over the temperature, cut
    to the ``top_k`` likeliest, then to the fewest that hold ``top_p`` of the probability (Holtzman et al. 2020). What
    row b draws depends on the key, b and row b alone. A row ends at ``eos_token_id`` and is filled with
    ``pad_token_id`` (by default the eos); all rows ended, it stops. Having outgrown the model's longest row, it reads
    the latest tokens only. Every token costs a forward pass over the row. Raises TypeError or ValueError, naming the
    argument.
    """
    check_model(model)
    _check_params(model, params)
    _check_prompt(model, params, prompt)
    _check_options(model, key, max_new_tokens, temperature, top_k, top_p, eos_token_id, pad_token_id)
    window = _longest(model) or prompt.shape[1] + max_new_tokens
    last_logits = _last_logits(model)
    rows = torch.arange(prompt.shape[0], device=prompt.device)
    ended = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    tokens = prompt.clone()
    for index in range(max_new_tokens):
        logits = last_logits(params, tokens[:, -window:])
        if key is None or temperature == 0:
            chosen = logits.argmax(-1)
        else:
            chosen = _sample(random.fold_in(key.to(rows.device), index), rows, _cut(logits / temperature, top_k, top_p))
        if eos_token_id is not None:
            fill = eos_token_id if pad_token_id is None else pad_token_id
            chosen = torch.where(ended, fill, chosen)
            ended = ended | (chosen == eos_token_id)
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
        if eos_token_id is not None and bool(ended.all()):
            break
    return tokens


def _last_logits(model: Model) -> Callable[[Tree, torch.Tensor], torch.Tensor]:
    """The function from tokens (B, T) to the logits (B, V) at the last, in float32 at least."""

    def fused(params: Tree, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(model.hidden(params, tokens)[:, -1], model.head(params))  # type: ignore[misc]

    def full(params: Tree, tokens: torch.Tensor) -> torch.Tensor:
        outputs: Any = model.apply(params, tokens)
        return getattr(outputs, "logits", outputs)[:, -1]

    chosen = full if model.hidden is None or model.head is None else fused

    def last(params: Tree, tokens: torch.Tensor) -> torch.Tensor:
        logits = chosen(params, tokens)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    return last


def _cut(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Logits (B, V) with -inf at the tokens that are out."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        out = probs.cumsum(-1) - probs >= top_p  # what lies before it holds top_p already; never true of the first
        logits = logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)
    return logits


def _sample(key: torch.Tensor, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """One token a row, (B,) int64; each row has a key of its own."""
    return torch.func.vmap(lambda row, values: random.categorical(random.fold_in(key, row), values))(rows, logits)


def _longest(model: Model) -> int | None:
    """The longest row that the model reads, in tokens, where it has one."""
    return getattr(model.config, "max_position_embeddings", None)


def _check_params(model: Model, params: Tree) -> None:
    if isinstance(params, TrainState):
        raise TypeError("params: TrainState, expected a tree of parameters: state.params")
    check_params(params, model.abstract)


def _check_prompt(model: Model, params: Tree, prompt: Any) -> None:
    if not isinstance(prompt, torch.Tensor) or prompt.dtype != torch.int64:
        given = prompt.dtype if isinstance(prompt, torch.Tensor) else type(prompt).__name__
        raise TypeError(f"prompt: {given}, expected a tensor of torch.int64")
    if prompt.dim() != 2 or prompt.numel() == 0:
        raise ValueError(f"prompt: shape {tuple(prompt.shape)}, expected (B, T), a row at least and a token in each")
    if prompt.shape[1] > (_longest(model) or prompt.shape[1]):
        raise ValueError(
            f"prompt: {prompt.shape[1]} tokens a row, but the model reads {_longest(model)}: cut it to the latest"
        )
    for leaf in tree.leaves(params)[:1]:
        if leaf.device != prompt.device:
            raise ValueError(f"prompt: on {prompt.device}, expected {leaf.device}, as params")
    size = getattr(model.config, "vocab_size", None)
    if size is not None and (prompt.min() < 0 or prompt.max() >= size):
        raise ValueError(
            f"prompt: tokens from {int(prompt.min())} to {int(prompt.max())}, but the vocabulary is 0 to {size - 1}"
        )


def _check_options(
    model: Model,
    key: torch.Tensor | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eos_token_id: int | None,
    pad_token_id: int | None,
) -> None:
    check_integer("max_new_tokens", max_new_tokens)
    check_scalar("temperature", temperature)
    if temperature > 0 and key is None:
        raise ValueError("key: missing; sampling needs one (temperature=0 takes the likeliest token without)")
    if key is not None:
        random.fold_in(key, 0)  # raises TypeError for what is no key
    if top_k is not None:
        check_integer("top_k", top_k, minimum=1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: {top_p}, expected a number in (0, 1] or None")
    size = getattr(model.config, "vocab_size", None)
    for name, token in (("eos_token_id", eos_token_id), ("pad_token_id", pad_token_id)):
        if token is not None and not 0 <= token < (size or token + 1):
            raise ValueError(f"{name}: {token}, expected a token below the vocabulary's {size}")
    if pad_token_id is not None and eos_token_id is None:
        raise ValueError("pad_token_id: given without eos_token_id, after which it would be filled in")
