"""Optimizers as pure transformations of gradients, after optax: ``init(params)``, ``update(grads, state, params)``."""

from __future__ import annotations

from .accumulation import ApplyEveryState, apply_every
from .adafactor import adafactor, adafactor_decay, clip_by_block_rms, relative_step, scale_by_param_block_rms
from .adagrad import (
    ScaleByAdadeltaState,
    ScaleByRmsState,
    ScaleByRssState,
    adadelta,
    adagrad,
    rmsprop,
    scale_by_adadelta,
    scale_by_rms,
    scale_by_rss,
)
from .adam import ScaleByAdamState, adam, adamw, scale_by_adam
from .adam_variants import (
    ScaleByNadamState,
    adamax,
    nadam,
    radam,
    scale_by_adamax,
    scale_by_nadam,
    scale_by_radam,
)
from .asgd import AsgdState, asgd
from .base import GradientTransformation, apply_updates, as_transformation, identity, leaf_labels, stateless
from .came import ScaleByConfidenceState, came, scale_by_confidence
from .clipping import clip, clip_by_global_norm, global_norm
from .combine import added, chain, named_chain
from .decay import add_decayed_weights, matrices
from .ema import EmaState, averaged, ema
from .factored import FactoredState, scale_by_factored_rms
from .inject import InjectHyperparamsState, inject_hyperparams
from .lamb import lamb, scale_by_trust_ratio
from .lars import lars, scale_by_lars
from .lion import ScaleByLionState, lion, scale_by_lion
from .muon import ScaleByMuonState, muon, scale_by_muon
from .partition import MaskedState, PartitionState, masked, partition
from .rprop import RpropState, rprop
from .scaling import (
    ScaleByLearningRateState,
    ScaleByScheduleState,
    learning_rate,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    set_to_zero,
)
from .sgd import TraceState, sgd, trace

__all__ = [
    "ApplyEveryState",
    "AsgdState",
    "EmaState",
    "FactoredState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "MaskedState",
    "PartitionState",
    "RpropState",
    "ScaleByAdadeltaState",
    "ScaleByAdamState",
    "ScaleByConfidenceState",
    "ScaleByLearningRateState",
    "ScaleByLionState",
    "ScaleByMuonState",
    "ScaleByNadamState",
    "ScaleByRmsState",
    "ScaleByRssState",
    "ScaleByScheduleState",
    "TraceState",
    "adadelta",
    "adafactor",
    "adafactor_decay",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "add_decayed_weights",
    "added",
    "apply_every",
    "apply_updates",
    "as_transformation",
    "asgd",
    "averaged",
    "came",
    "chain",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "ema",
    "global_norm",
    "identity",
    "inject_hyperparams",
    "lamb",
    "lars",
    "leaf_labels",
    "learning_rate",
    "lion",
    "masked",
    "matrices",
    "muon",
    "nadam",
    "named_chain",
    "partition",
    "radam",
    "relative_step",
    "rmsprop",
    "rprop",
    "scale",
    "scale_by_adadelta",
    "scale_by_adam",
    "scale_by_adamax",
    "scale_by_confidence",
    "scale_by_factored_rms",
    "scale_by_lars",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_nadam",
    "scale_by_param_block_rms",
    "scale_by_radam",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "set_to_zero",
    "sgd",
    "stateless",
    "trace",
]
