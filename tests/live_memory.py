"""Live: how many bytes of tensors are alive at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from functional_booster.kernels import tree


class Live(TorchDispatchMode):
    """Within it, ``peak`` is the most bytes that were alive at once of what torch allocated meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves((args, kwargs)) if is_tensor(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree.leaves(out):
            if is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in known:
                self.count(leaf.untyped_storage())
        return out

    def count(self, storage: Any) -> None:
        pointer, size = storage.data_ptr(), storage.nbytes()
        if not pointer or not size or pointer in self.known:  # tensors on the meta device have no memory
            return
        self.known.add(pointer)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.freed, pointer, size)

    def freed(self, pointer: int, size: int) -> None:
        self.known.discard(pointer)
        self.now -= size


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
