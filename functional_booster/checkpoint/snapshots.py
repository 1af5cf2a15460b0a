"""The first half of a save: this process's share of a state, as it lies, or copied to the host's memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from functional_booster.donation import refuse_consumed
from functional_booster.kernels import tree
from functional_booster.state import TrainState

from . import host_memory, leaves
from .manifest import CHUNK, described
from .tensor_files import check_dtype


@dataclass(frozen=True)
class Piece:
    """Elements of a flattened leaf from ``start`` on: ``values`` (N,), contiguous."""

    leaf: str
    start: int
    values: torch.Tensor


@dataclass(frozen=True)
class Snapshot:
    """What process ``rank`` of ``ranks`` writes, and what every manifest says: step, position, layout, leaves, and
    ``metrics``, where there are some."""

    pieces: tuple[Piece, ...]
    leaves: dict[str, dict[str, Any]]
    step: int
    position: int
    layout: dict[str, Any]
    rank: int
    ranks: int
    metrics: dict[str, float] = field(default_factory=dict)


def plain(values: torch.Tensor) -> torch.Tensor:
    """Values as their memory holds them, contiguous: themselves, where they are so."""
    return values.contiguous().resolve_conj().resolve_neg()


def snapshot(state: TrainState, take: Callable[[torch.Tensor], torch.Tensor] = plain) -> Snapshot:
    """This process's share of the state; together the processes hold everything once. No communication.

    ``take`` makes of a piece (N,) what is kept of it, contiguous. By default what is so already is not copied: the
    state must not change until it is written. Raises DonatedError for a state that was donated to a step, TypeError
    for a dtype that safetensors does not have.
    """
    tensors = tree.leaves(state)
    refuse_consumed(tree.names(state), tensors)
    mesh, found = state.plan.mesh, leaves.of_state(state)
    for name, leaf in found.items():
        check_dtype(name, leaf.dtype)
    pieces = [
        Piece(name, piece.start, take(leaves.read(found[name], piece)))
        for name, piece in leaves.to_write(found, mesh, CHUNK)
    ]
    return Snapshot(
        pieces=tuple(pieces),
        leaves={name: described(leaf.shape, leaf.dtype) for name, leaf in found.items()},
        step=int(state.step),
        position=int(state.position),
        layout={"plugin": repr(state.plan.plugin), "mesh": dict(mesh.axes), "virtual": mesh.virtual},
        rank=leaves.index_of(mesh, mesh.place, mesh.names) if mesh.across else 0,
        ranks=mesh.size if mesh.across else 1,
    )


class HostCopies:
    """Copies in memory of the host, which each save takes over from the one before: at most one is in use.

    What comes from a GPU goes to pinned memory.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._used: list[torch.Tensor] = []

    @contextlib.contextmanager
    def renewed(self) -> Generator[HostCopies]:
        """Around the making of copies for a save: nobody needs those of the one before, and their memory is free.

        What this one has no use for is given up.
        """
        for buffer in self._used:
            self._free.setdefault((len(buffer), buffer.is_pinned()), []).append(buffer)
        self._used = []
        try:
            yield self
        finally:
            self._free = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a tensor that comes from ``device``."""
        pinned, nbytes = device.type == "cuda", math.prod(shape) * dtype.itemsize
        fitting = self._free.get((nbytes, pinned))
        if fitting:
            buffer = fitting.pop()
        elif pinned:
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            buffer = host_memory.empty((nbytes,), torch.uint8)
        self._used.append(buffer)
        return buffer.view(dtype).view(shape)

    def snapshot(self, state: TrainState) -> Snapshot:
        """As ``snapshot``, in memory of its own; the state may change as soon as this returns."""
        sources = set[torch.device]()

        def to_host(values: torch.Tensor) -> torch.Tensor:
            sources.add(values.device)
            there = self.empty((len(values),), values.dtype, values.device)
            return there.copy_(values, non_blocking=values.device.type == "cuda")

        with self.renewed(), torch.inference_mode(mode=False), torch.no_grad():
            taken = snapshot(state, to_host)
        for device in sources:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return taken


copies = HostCopies()  # of this process, which has one save in the background at a time
