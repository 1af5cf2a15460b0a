"""Memory of the host for large tensors that are about to be filled."""

from __future__ import annotations

import math

import numpy as np
import torch

_ALIGNMENT = 64  # bytes, as torch has it
_LARGE = 2**22  # bytes from which on numpy asks for huge pages


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """``torch.empty``, in huge pages where it is large (on Linux, by numpy's memory).

    To touch new memory by small pages takes longer than to read a checkpoint into it.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE:
        return torch.empty(shape, dtype=dtype)
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + nbytes]).view(dtype).view(shape)
