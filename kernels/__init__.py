"""Compute primitives. Nothing is imported before it is asked for: transformers may find this folder as its own."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KernelFallbackWarning", "choices", "use"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(".choice", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
