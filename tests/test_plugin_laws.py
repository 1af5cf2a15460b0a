"""Our plugins obey the laws of ``functional_booster.testing``; steps also on drawn meshes and models, and 64 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import functional_booster as fb
from functional_booster import testing
from functional_booster.plugins import GeminiPlugin

PLUGINS: dict[str, Any] = {
    "ddp": fb.TorchDDPPlugin(bucket_cap_mb=0.0002),  # a few buckets, and blocks that share one
    "zero1": fb.LowLevelZeroPlugin(stage=1, reduce_bucket_size_in_m=0.00005),
    "zero2": fb.LowLevelZeroPlugin(stage=2, extra_dp_size=2),
    "fsdp": fb.TorchFSDPPlugin(),
    "fsdp-grad-op": fb.TorchFSDPPlugin(sharding_strategy="SHARD_GRAD_OP"),
    "gemini": GeminiPlugin(),
}
each_plugin = pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)


@pytest.mark.parametrize("law", testing.LAWS, ids=lambda law: law.__name__)
@each_plugin
def test_law(plugin: Any, law: Callable[..., None]) -> None:
    """Every kind of leaf, AdamW, dropout and clipping, on four ranks."""
    accumulate = 2 if law is testing.accumulation_equals_whole_batch else 1
    law(plugin, fb.virtual_mesh(**plugin.axes(4)), testing.small(8), accumulate=accumulate)


@each_plugin
def test_drawn_meshes_models_and_splits(plugin: Any) -> None:
    testing.check_plugin(plugin, laws=[testing.step_equals_one_device], max_examples=2)


def test_sixty_four_ranks() -> None:
    """More ranks than most leaves have elements."""
    plugin = fb.LowLevelZeroPlugin(stage=2, extra_dp_size=2)
    mesh = fb.virtual_mesh(**plugin.axes(64))
    problem = testing.small(128)
    testing.unshard_inverts_shard(plugin, mesh, problem)
    testing.accumulation_equals_whole_batch(plugin, mesh, problem, accumulate=2)
