"""Batch normalization whose batch is that of all ranks (Ioffe and Szegedy 2015; as torch.nn.SyncBatchNorm)."""

from __future__ import annotations

import torch

from functional_booster.sharding import environment
from functional_booster.sharding.collectives import psum


def sync_batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    axes: tuple[str, ...],
) -> torch.Tensor:
    """F.batch_norm in training of ``input`` (B, C, ...), over the rows of all ranks along ``axes``.

    ``running_mean`` and ``running_var`` (C,) are updated in place, alike on every rank. Statistics are in float32 at
    least; ranks may have different numbers of rows, processes none at all. Forward: two psums; backward: two psums.

    Raises ValueError on virtual ranks that have different numbers of rows: they take turns, and normalize together.
    """
    scope = environment.current()
    if scope.stands_in and scope.indices:
        raise ValueError(
            "batch: batch normalization is over all ranks' rows, of which virtual ranks must have equally many: set "
            "drop_last=True, or choose another number of rows"
        )
    dims, shape = [0, *range(2, input.dim())], (1, -1, *(1 for _ in input.shape[2:]))
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    counts = 0.0 if scope.stands_in else 1.0
    own = wide.new_full((1,), wide.numel() // wide.shape[1])
    total, count = psum(torch.cat([wide.sum(dims), own]) * counts, axes).split([wide.shape[1], 1])
    mean = total / count
    centered = wide - mean.view(shape)
    variance = psum(centered.square().sum(dims) * counts, axes) / count
    with torch.no_grad():
        for running, batch in ((running_mean, mean), (running_var, variance * count / (count - 1).clamp_min(1))):
            if running is not None:
                running.mul_(1 - momentum).add_(batch.to(running.dtype), alpha=momentum)
    normal = centered * torch.rsqrt(variance + eps).view(shape)
    normal = normal if weight is None else normal * weight.view(shape)
    return (normal if bias is None else normal + bias.view(shape)).to(input.dtype)
