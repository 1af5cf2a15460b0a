"""Optimizers as pure transformations of gradients, after optax: ``init(params)``, ``update(grads, state, params)``."""

from __future__ import annotations

from .accumulation import ApplyEveryState, apply_every
from .adam import ScaleByAdamState, scale_by_adam
from .aliases import adam, adamw, sgd
from .base import GradientTransformation, apply_updates, as_transformation, identity, leaf_labels, stateless
from .clipping import clip, clip_by_global_norm, global_norm
from .combine import chain, named_chain
from .decay import add_decayed_weights, matrices
from .inject import InjectHyperparamsState, inject_hyperparams
from .momentum import TraceState, trace
from .partition import MaskedState, PartitionState, masked, partition
from .scaling import (
    ScaleByLearningRateState,
    ScaleByScheduleState,
    learning_rate,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    set_to_zero,
)

__all__ = [
    "ApplyEveryState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "MaskedState",
    "PartitionState",
    "ScaleByAdamState",
    "ScaleByLearningRateState",
    "ScaleByScheduleState",
    "TraceState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_every",
    "apply_updates",
    "as_transformation",
    "chain",
    "clip",
    "clip_by_global_norm",
    "global_norm",
    "identity",
    "inject_hyperparams",
    "leaf_labels",
    "learning_rate",
    "masked",
    "matrices",
    "named_chain",
    "partition",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "set_to_zero",
    "sgd",
    "stateless",
    "trace",
]
