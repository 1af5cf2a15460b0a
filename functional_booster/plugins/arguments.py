"""What plugins have in common: how Colossal-AI's arguments are checked, and what some of them mean to a Booster."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import replace
from typing import Any

import torch

from functional_booster.precision import (
    DynamicScaling,
    Fp8,
    MixedPrecision,
    Policy,
    check_number,
    compressed,
    precision_of,
)
from functional_booster.sharding.mesh import Mesh

_SCALING = tuple(field.name for field in dataclasses.fields(DynamicScaling))


def ignore(plugin: Any, *names: str) -> None:
    """Warn, in one warning, of arguments that change no result, and are not as by default. For ``__post_init__``."""
    if given := [name for name in names if getattr(plugin, name) != _default(plugin, name)]:
        warnings.warn(
            f"{type(plugin).__name__}: {', '.join(given)} {'has' if len(given) == 1 else 'have'} no meaning here: "
            "accepted, and without effect",
            stacklevel=4,
        )


def refuse(plugin: Any, **reasons: str) -> None:
    """Raise ValueError, with the reason, for the first of these arguments that is not as by default."""
    for name, reason in reasons.items():
        value, default = getattr(plugin, name), _default(plugin, name)
        if value != default:
            raise ValueError(f"{name}: {value!r} is not supported, expected {default!r}: {reason}")


def check_replicas(extra_dp_size: int, mesh: Mesh) -> None:
    """Raise ValueError where a mesh of axes by name has other replicas than the argument says."""
    if extra_dp_size not in (1, mesh.extent("extra_dp")):
        raise ValueError(f"extra_dp_size: {extra_dp_size}, but the axis 'extra_dp' has another size: {mesh}")


def check_axis(plugin: Any, axis: str, mesh: Mesh) -> None:
    """Raise ValueError where a mesh of axes by name has another number of ranks along one than the argument says."""
    size = getattr(plugin, f"{axis}_size")
    if size not in (None, 1, mesh.extent(axis)):
        raise ValueError(f"{axis}_size: {size}, but the axis {axis!r} has another size: {mesh}")


def shown(plugin: Any) -> str:
    """The plugin with the arguments that are not as by default. For ``__repr__``."""
    default = type(plugin)()
    names = [field.name for field in dataclasses.fields(plugin)]
    given = [f"{name}={value!r}" for name in names if (value := getattr(plugin, name)) != getattr(default, name)]
    return f"{type(plugin).__name__}({', '.join(given)})"


def check_size(plugin: Any, *names: str) -> None:
    """Require finite numbers from 0 on; raises TypeError or ValueError."""
    for name in names:
        check_number(name, getattr(plugin, name), 0.0, math.inf)


def check_fraction(plugin: Any, *names: str) -> None:
    """Require numbers from 0 to 1; raises TypeError or ValueError."""
    for name in names:
        check_number(name, getattr(plugin, name), 0.0, 1.0)


def check_flag(plugin: Any, *names: str) -> None:
    """Require bools; raises TypeError."""
    for name in names:
        if not isinstance(getattr(plugin, name), bool):
            raise TypeError(f"{name}: {getattr(plugin, name)!r}, expected True or False")


def check_precision(plugin: Any) -> None:
    """The precision, the gradient clipping and the loss scaling of a plugin that has them; raises for the wrong ones.

    The arguments of loss scaling have an effect with a precision that scales, and are checked whatever it is.
    """
    precision_of(plugin.precision, "precision")
    check_size(plugin, "max_norm")
    if plugin.norm_type != 2.0:
        raise ValueError(f"norm_type: {plugin.norm_type!r}, expected 2.0: gradients are clipped by the Euclidean norm")
    _scaling(plugin)


def check_hashable(plugin: Any, *names: str) -> None:
    """Require values that can be hashed, as plugins are static values; raises TypeError."""
    for name in names:
        try:
            hash(getattr(plugin, name))
        except TypeError:
            value = getattr(plugin, name)
            raise TypeError(f"{name}: {value!r} cannot be hashed, as every argument of a plugin must be") from None


def check_dtype(argument: str, dtype: Any) -> None:
    """Require None or a floating-point dtype; raises TypeError."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise TypeError(f"{argument}: {dtype!r}, expected a floating-point torch.dtype of 16 bits or more, or None")


def precision_under(plugin: Any, mixed_precision: str | Policy | MixedPrecision | None) -> MixedPrecision:
    """How a run computes: by the Booster's ``mixed_precision`` or the plugin's ``precision``, whichever is given.

    Where neither is, by the ``DEFAULT_PRECISION`` of a plugin that has one, else as the model is. Of a plugin that has
    them: the arguments of loss scaling are those of a precision that is given by name and scales,
    ``master_weights=False`` stores parameters in the compute dtype, ``communication_dtype`` is that of gradients in
    collectives, ``force_outputs_fp32`` that of a boosted module's outputs, ``cast_inputs`` is the precision's,
    ``use_fp8`` has linear layers multiply in fp8, and ``fp8_communication`` has parameters and gradients travel in it.
    Raises ValueError where both are given and differ.
    """
    own = getattr(plugin, "precision", None)
    if own is not None and mixed_precision is not None and precision_of(own) != precision_of(mixed_precision):
        raise ValueError(
            f"mixed_precision: {mixed_precision!r}, but the plugin's precision is {own!r}: give one of them"
        )
    named = (own, mixed_precision, getattr(plugin, "DEFAULT_PRECISION", None))
    given = next((one for one in named if one is not None), None)
    chosen = precision_of(given)
    policy = chosen.policy
    if not getattr(plugin, "master_weights", True):
        policy = replace(policy, param=policy.compute)
    if (dtype := getattr(plugin, "communication_dtype", None)) is not None:
        policy = replace(policy, reduce=dtype)
    if getattr(plugin, "fp8_communication", False):
        policy = compressed(policy)
    if getattr(plugin, "force_outputs_fp32", False):
        policy = replace(policy, output=torch.float32)
    scaling = chosen.scaling
    if hasattr(plugin, "initial_scale"):
        own_scaling = [name for name in _SCALING if getattr(plugin, name) != _default(plugin, name)]
        if isinstance(given, str) and isinstance(scaling, DynamicScaling):
            scaling = _scaling(plugin)
        elif own_scaling and scaling is not None:
            raise ValueError(f"{', '.join(own_scaling)}: given beside a precision that has its own: {scaling}")
        elif own_scaling:
            warnings.warn(f"{', '.join(own_scaling)}: without effect, since {given!r} does not scale", stacklevel=4)
    cast_inputs = chosen.cast_inputs and getattr(plugin, "cast_inputs", True)
    fp8 = Fp8() if chosen.fp8 is None and getattr(plugin, "use_fp8", False) else chosen.fp8
    return replace(chosen, policy=policy, scaling=scaling, fp8=fp8, cast_inputs=cast_inputs)


def _scaling(plugin: Any) -> DynamicScaling:
    """The loss scaling of a plugin that has its arguments; raises TypeError or ValueError for the wrong ones."""
    return DynamicScaling(**{name: getattr(plugin, name) for name in _SCALING})


def max_norm_under(plugin: Any, max_norm: float | None) -> float | None:
    """The norm to clip to: the step's ``max_norm`` or the plugin's (0: none), whichever is given, None for no clipping.

    Raises ValueError where both are given and differ.
    """
    own = getattr(plugin, "max_norm", 0.0) or None
    if own is not None and max_norm is not None and own != max_norm:
        raise ValueError(f"max_norm: {max_norm!r}, but the plugin's is {own!r}: give one of them")
    return own if max_norm is None else max_norm


def _default(plugin: Any, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(plugin) if field.name == name)
