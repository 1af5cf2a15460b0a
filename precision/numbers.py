"""Checks of numbers that are arguments."""

from __future__ import annotations

import math
from typing import Any


def check_number(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Require a finite number from ``least`` to ``most``; raises TypeError or ValueError, naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {value!r}, expected a number")
    if not (math.isfinite(value) and least <= value <= most):
        bounds = "a finite number, at least" if most == math.inf else f"a number up to {most:g}, at least"
        raise ValueError(f"{name}: {value!r}, expected {bounds} {least:g}")
