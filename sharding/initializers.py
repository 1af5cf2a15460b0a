"""Initializers: ``(key, shape, dtype) -> Tensor``, frozen values that compare and hash, as ArrayInfo needs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from functional_booster.kernels import random

from .abstract import Initializer


def normal(std: float = 0.02) -> Initializer:
    """Normal, mean 0, standard deviation ``std``."""
    return _Scaled("normal", std)


def truncated_normal(std: float = 0.02) -> Initializer:
    """Normal, mean 0, cut at two standard deviations; ``std`` is the one before the cut."""
    return _Scaled("truncated_normal", std)


def uniform(scale: float) -> Initializer:
    """Uniform in [-scale, scale)."""
    return _Scaled("uniform", scale)


def zeros(key: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, on the key's device."""
    return torch.zeros(shape, dtype=dtype, device=key.device)


def ones(key: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Ones, on the key's device."""
    return torch.ones(shape, dtype=dtype, device=key.device)


@dataclass(frozen=True)
class _Scaled:
    """A draw times a scale, in float32 (float64 for float64), then rounded to the dtype."""

    law: str
    scale: float

    def __post_init__(self) -> None:
        if not self.scale >= 0:
            raise ValueError(f"{self.law}: the scale must not be negative, got {self.scale}")

    def __call__(self, key: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        if self.law == "normal":
            draw = random.normal(key, shape, exact)
        elif self.law == "truncated_normal":
            draw = random.truncated_normal(key, -2.0, 2.0, shape, exact)
        else:
            draw = random.uniform(key, shape, exact, -1.0, 1.0)
        return (draw * self.scale).to(dtype)
