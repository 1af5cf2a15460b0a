"""Which dtypes a load or an export converts, and the numbers that do not survive it."""

from __future__ import annotations

import torch


def converts(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values may become those of another dtype: floating-point numbers may, what counts or indexes may not."""
    return saved == wanted or (saved.is_floating_point and wanted.is_floating_point)


def narrows(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a floating-point dtype has a smaller range than another (bfloat16's counts as that of float32)."""
    both = saved.is_floating_point and wanted.is_floating_point
    return both and torch.finfo(wanted).max < torch.finfo(saved).max / 2


def overflow(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite number of ``values`` would be infinite (or, in fp8, NaN) in a dtype that ``narrows`` theirs."""
    if not narrows(values.dtype, dtype):
        return False
    finite = torch.where(values.isfinite(), values, 0)
    return not bool(finite.to(dtype).to(torch.float32).isfinite().all())


def beyond(dtype: torch.dtype) -> str:
    """What ``overflow`` has found, in words."""
    return f"finite numbers beyond {str(dtype).removeprefix('torch.')}'s {torch.finfo(dtype).max:g}"
