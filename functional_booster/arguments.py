"""What users hand in, checked: one clear error that names the argument, before work starts."""

from __future__ import annotations

from typing import Any

import torch

from . import optim
from .models.model import Model


def check_model(model: Any) -> None:
    """Raise TypeError for what is no Model."""
    if not isinstance(model, Model):
        raise TypeError(
            f"model: {type(model).__name__}, expected a fb.Model; for an nn.Module: fb.functionalize(module)"
        )


def transformation_of(tx: Any) -> optim.GradientTransformation:
    """``optim.as_transformation`` of the argument ``tx``."""
    try:
        return optim.as_transformation(tx)
    except TypeError as error:
        raise TypeError(f"tx: {error}") from None


def device_of(device: str | torch.device | None) -> torch.device:
    """The device, with its number; None: the GPU if there is one, else the CPU. Raises ValueError for others."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'device: {device!r}, expected "cpu", "cuda" or "cuda:N"') from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type != "cuda":
        raise ValueError(f'device: {str(chosen)!r}, expected "cpu", "cuda" or "cuda:N"')
    index = (
        chosen.index if chosen.index is not None else torch.cuda.current_device() if torch.cuda.is_available() else 0
    )
    if index >= torch.cuda.device_count():
        raise ValueError(f"device: {str(chosen)!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)
