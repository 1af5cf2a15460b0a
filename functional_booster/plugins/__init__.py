"""Plugins: how a run is laid out over many ranks. Frozen values with pure functions (see ``plugin.Plugin``)."""

from __future__ import annotations

from .arguments import max_norm_under, precision_under
from .gemini import GeminiPlugin
from .hybrid_parallel import HybridParallelPlugin
from .low_level_zero import LowLevelZeroPlugin
from .plugin import Plan, Plugin, plan
from .single import SingleDevice
from .torch_ddp import TorchDDPPlugin
from .torch_fsdp import TorchFSDPPlugin

__all__ = [
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plan",
    "Plugin",
    "SingleDevice",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "max_norm_under",
    "plan",
    "precision_under",
]
