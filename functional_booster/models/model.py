"""Model: a pair of pure functions over a parameter tree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from functional_booster.kernels import tree
from functional_booster.losses import labels_from, linear_next_token
from functional_booster.precision import fp8
from functional_booster.sharding import sequence, tensor
from functional_booster.sharding.abstract import Initialize

from . import layers

Tree = tree.Tree


@dataclass(frozen=True)
class Model:
    """``init(key) -> params``, ``apply(params, *inputs, key=None, train=False, ...) -> outputs``, and what they need.

    ``abstract`` is the tree of ArrayInfo that the parameters fill. ``buffers()`` gives the state that is not trained
    (batch statistics, position tables), in fresh storage; ``apply(..., buffers=tree, mutable=True)`` returns
    ``(outputs, new buffers)``. Language models also have ``hidden(params, input_ids, key=, train=) -> (B, T, D)`` and
    ``head(params) -> (V, D)``, whose product is what ``apply`` returns, and ``loss(params, batch, key=None)`` ->
    (sum, weight), fused over the two; under a plugin that splits them, hidden is of this rank's tokens and head a part
    over "tp". ``batch_norms``: names of the parameters of batch norms. ``state_names``: of a functionalized module
    {name in its state dict: name of the parameter or buffer}, a tied one under several names.
    """

    init: Callable[..., Tree]
    apply: Callable[..., Any]
    abstract: Tree
    buffers: Callable[[], Tree] = dict
    hidden: Any = None
    head: Any = None
    loss: Any = None
    config: Any = None
    name: str = "model"
    batch_norms: frozenset[str] = frozenset()
    state_names: Mapping[str, str] = field(default_factory=dict)

    def leaves(self, key: torch.Tensor) -> Iterator[tuple[str, Any]]:
        """(name, value) of the leaves of ``init(key)``, in any order: one at a time, if ``init`` has a ``leaves(key)``.

        A value that lies in a file may come unread, as a ``StoredTensor``.
        """
        one_by_one = getattr(self.init, "leaves", None)
        yield from tree.named_leaves(self.init(key)).items() if one_by_one is None else one_by_one(key)


def language_model(
    config: Any, abstract: Tree, hidden: Callable[..., torch.Tensor], head: Callable[[Tree], torch.Tensor]
) -> Model:
    """The Model of a causal language model, given what sets it apart: its leaves, its hidden state and its head."""
    parts = _Parts(abstract, hidden, head, config.vocab_size)
    return Model(
        init=Initialize(abstract),
        apply=functools.partial(_logits, parts),
        abstract=abstract,
        hidden=hidden,
        head=head,
        loss=functools.partial(_loss, parts),
        config=config,
        name=config.model_type,
    )


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a causal language model is made of."""

    abstract: Tree
    hidden: Callable[..., torch.Tensor]
    head: Callable[[Tree], torch.Tensor]
    vocab_size: int

    def shared(self, params: Tree) -> Tree:
        """The parameters as ranks that share tokens use them."""
        return sequence.shared(params, self.abstract, "tp")


def _logits(parts: _Parts, params: Tree, *inputs: Any, **options: Any) -> torch.Tensor:
    """Logits (B, T, V), in the parameters' dtype; arguments are those of ``hidden``. Whole on every rank."""
    params = parts.shared(params)
    state = sequence.columns(parts.hidden(params, *inputs, **options), "tp")
    logits = tensor.whole_logits(layers.product(state, parts.head(params)), parts.vocab_size, "tp")
    return logits if "tp" in sequence.token_axes() else sequence.every_token(logits)


def _loss(
    parts: _Parts,
    params: Tree,
    batch: dict[str, torch.Tensor],
    key: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next-token loss (sum, number of valid tokens), fused with the head. With a key it trains: dropout is on.

    ``batch`` holds "input_ids" (B, T) and perhaps "labels" (B, T; by default the input_ids, without padding),
    "attention_mask" and "position_ids"; other entries are left alone. ``options`` are those of ``linear_next_token``.
    Raises KeyError without "input_ids".
    """
    if "input_ids" not in batch:
        raise KeyError(f"batch: 'input_ids' is missing, it has {sorted(batch)}")
    mask = batch.get("attention_mask")
    labels = batch.get("labels")
    if labels is None:
        labels = labels_from(batch["input_ids"], mask, options.get("ignore_index", -100))
    params = parts.shared(params)
    state = parts.hidden(
        params,
        batch["input_ids"],
        attention_mask=mask,
        position_ids=batch.get("position_ids"),
        key=key,
        train=key is not None,
    )
    out = fp8.plain(parts.head(params))  # the fused loss multiplies as it is
    wide = torch.promote_types(state.dtype, out.dtype)
    hidden = sequence.columns(state, "tp").to(wide)
    options |= {"vocab_size": parts.vocab_size} if tensor.splits("tp") else {}
    return linear_next_token(hidden, out.to(wide), labels, **options)
