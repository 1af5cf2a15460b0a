"""Checks of scalar arguments: one clear error that names the argument, what was given and what was expected."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch


def check_scalar(
    argument: str, value: Any, minimum: float = 0.0, below: float = math.inf, schedule: bool = False
) -> None:
    """Require a number in [minimum, below), a 0-d tensor (its value is not read), or with ``schedule`` a function.

    Raises TypeError for another type, ValueError for another value or a tensor with dims.
    """
    kinds = "a number, a 0-d tensor or a schedule" if schedule else "a number or a 0-d tensor"
    if isinstance(value, torch.Tensor):
        if len(value.shape) != 0:
            raise ValueError(f"{argument}: got a tensor of shape {tuple(value.shape)}, expected {kinds}")
        return
    if schedule and callable(value):
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{argument}: got {type(value).__name__} {value!r}, expected {kinds}")
    check_real(argument, value, minimum, below)


def check_real(argument: str, value: Any, minimum: float = 0.0, below: float = math.inf) -> None:
    """Require a finite number in [minimum, below); raises ValueError."""
    if not (math.isfinite(value) and minimum <= value < below):
        bound = f"at least {minimum:g}" if below == math.inf else f"in [{minimum:g}, {below:g})"
        raise ValueError(f"{argument}: got {value!r}, expected a finite number {bound}")


def check_integer(argument: str, value: Any, minimum: int = 0, maximum: float = math.inf) -> None:
    """Require an int in [minimum, maximum]; raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument}: got {type(value).__name__} {value!r}, expected an int")
    if not minimum <= value <= maximum:
        bound = f"at least {minimum}" if maximum == math.inf else f"in [{minimum}, {maximum}]"
        raise ValueError(f"{argument}: got {value}, expected an int {bound}")


def check_length(argument: str, value: Any, length: int) -> None:
    """Require a tuple or list of so many values; raises ValueError."""
    if not isinstance(value, tuple | list) or len(value) != length:
        raise ValueError(f"{argument}: got {value!r}, expected {length} numbers")


def check_dtype(argument: str, value: Any) -> None:
    """Require a floating-point dtype or None; raises TypeError."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{argument}: got {value!r}, expected a floating-point dtype or None")
