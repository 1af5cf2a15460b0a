"""Precision: dtype policies, loss scaling, and the mixtures that have names."""

from .loss_scaling import ConstantScaling, DynamicScaling, LossScale, Scaling, resumed, scale_gradient
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
from .numbers import check_number
from .policy import Policy, autocasting, cast, cast_arguments, is_float
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
    "check_number",
    "compressed",
    "is_float",
    "precision_of",
    "resumed",
    "scale_gradient",
    "stochastic_round",
]
