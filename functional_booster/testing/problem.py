"""Problem: something small to train, on which laws are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from functional_booster import losses, optim
from functional_booster.kernels import random, tree
from functional_booster.models.model import Model
from functional_booster.sharding import initializers
from functional_booster.sharding.abstract import ArrayInfo, initialize

Tree = tree.Tree


@dataclass(frozen=True)
class Problem:
    """A model, a loss, an optimizer and the global batch of a step, on the device of the batch.

    ``loss_fn(params, batch, key)`` is a sum over rows, returned as (sum, weight) or (sum, weight, aux); without a key
    (None) it drops nothing. Parameters in float64 let laws be checked to rounding. ``apart`` names metrics that a
    plugin defines in its own way: laws that compare two layouts leave them out.
    """

    model: Model
    loss_fn: Callable[..., Any]
    tx: Any
    batch: Tree
    max_norm: float | None = None
    apart: frozenset[str] = frozenset()
    key: torch.Tensor = field(default_factory=lambda: random.key(0), repr=False)

    @property
    def device(self) -> torch.device:
        """Where the batch is."""
        return tree.leaves(self.batch)[0].device


def small(rows: int, *, tx: Any = None, max_norm: float | None = 0.1, seed: int = 0) -> Problem:
    """A Problem that hypothesis did not draw: every kind of leaf, AdamW (or ``tx``), dropout, and clipping."""
    model = residual(3, 3, width=5, depth=2, tied=True, frozen=True, unused=True, twice=True)
    key = random.key(seed)
    return Problem(
        model=model,
        loss_fn=loss_of(model),
        tx=optim.adamw(1e-2, eps=1e-5, weight_decay=0.1) if tx is None else tx,
        batch=labelled(key, rows, 3, 3, 0.3),
        max_norm=max_norm,
        key=key,
    )


def residual(
    features: int,
    classes: int,
    width: int,
    depth: int,
    *,
    tied: bool = False,
    frozen: bool = False,
    unused: bool = False,
    twice: bool = False,
) -> Model:
    """A residual network (N, features) -> (N, classes) in float64, with what layouts stumble over.

    Blocks that repeat, matrices, vectors, scalars, one element; perhaps a leaf that is frozen, one that is never used,
    a block that is used twice, an embedding that is also the head.
    """
    normal = initializers.normal(0.5)

    def info(*shape: int, trainable: bool = True) -> ArrayInfo:
        return ArrayInfo(shape, torch.float64, initializer=normal, trainable=trainable)

    abstract: dict[str, Any] = {
        "embed": {"w": info(features, width)},
        "blocks": [{"w": info(width, width), "b": info(width), "gain": info()} for _ in range(depth)],
        "scale": info(1),
        "shift": info(width, trainable=not frozen),
    }
    abstract |= {} if tied else {"head": {"w": info(width, classes)}}
    abstract |= {"unused": info(3)} if unused else {}

    def apply(params: Any, x: torch.Tensor, *, key: torch.Tensor | None = None, train: bool = False) -> torch.Tensor:
        h = x.to(params["embed"]["w"].dtype) @ params["embed"]["w"]
        for depth, block in enumerate((*params["blocks"], *params["blocks"][: int(twice)])):
            branch = torch.tanh(h @ block["w"] + block["b"])
            if train and key is not None:
                branch = random.dropout(branch, 0.2, random.fold_in(key, depth))
            h = h + block["gain"] * branch
        h = h * params["scale"] + params["shift"]
        return h @ (params["embed"]["w"].T if tied else params["head"]["w"])

    return Model(init=lambda key: initialize(abstract, key), apply=apply, abstract=abstract, name="residual")


def loss_of(model: Model) -> Callable[..., Any]:
    """The cross entropy of a model of ``residual`` as a loss_fn, with the mean logsumexp as its aux."""

    def loss_fn(params: Any, batch: Any, key: torch.Tensor | None = None) -> Any:
        logits = model.apply(params, batch["x"], key=key, train=True)
        total, weight = losses.cross_entropy(logits, batch["y"])
        scale = torch.where(batch["y"] != -100, logits.logsumexp(-1), 0).sum() / weight.clamp_min(1)
        return total, weight, {"logsumexp": scale}

    return loss_fn


def labelled(key: torch.Tensor, rows: int, features: int, classes: int, ignored: float) -> dict[str, torch.Tensor]:
    """x (rows, features) float64 and labels y (rows,) int64, a part of them ignored (-100)."""
    drop = random.bernoulli(random.fold_in(key, 1), ignored, (rows,))
    labels = random.randint(random.fold_in(key, 2), (rows,), 0, classes).long()
    return {
        "x": random.normal(key, (rows, features), dtype=torch.float64),
        "y": torch.where(drop, -100, labels),
    }
