"""Precision: dtype policies, loss scaling, and the mixtures that have names."""

from .loss_scaling import ConstantScaling, DynamicScaling, LossScale, Scaling, scale_gradient
from .mixed_precision import (
    NAMES,
    BF16MixedPrecision,
    Fp8,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
    compressed,
    precision_of,
)
from .policy import Policy, autocasting, cast, cast_arguments
from .stochastic_rounding import stochastic_round

__all__ = [
    "NAMES",
    "BF16MixedPrecision",
    "ConstantScaling",
    "DynamicScaling",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "Fp8",
    "LossScale",
    "MixedPrecision",
    "Policy",
    "Scaling",
    "autocasting",
    "cast",
    "cast_arguments",
    "compressed",
    "precision_of",
    "scale_gradient",
    "stochastic_round",
]
