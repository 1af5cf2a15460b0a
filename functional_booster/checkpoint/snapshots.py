"""The first half of a save: this process's share of a state, in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from functional_booster.donation import refuse_consumed
from functional_booster.kernels import tree
from functional_booster.state import TrainState

from .holdings import holdings, index_of, leaves, to_write
from .manifest import CHUNK, described


@dataclass(frozen=True)
class Piece:
    """Elements of a flattened leaf from ``start`` on: ``values`` (N,), in the host's memory."""

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


def snapshot(state: TrainState, to_host: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu) -> Snapshot:
    """This process's share of the state; together the processes hold everything once. No communication.

    ``to_host`` brings a piece (N,) to the host's memory, contiguous. By default what is there already is not copied:
    the state must not change until it is written. Raises DonatedError for a state that was donated to a step.
    """
    tensors = tree.leaves(state)
    refuse_consumed(tree.names(state), tensors)
    mesh, held = state.plan.mesh, holdings(state)
    pieces = []
    for number, extent in to_write(held, mesh, CHUNK):
        values = tensors[number].detach().contiguous().view(-1)[extent.at : extent.at + extent.size]
        pieces.append(Piece(extent.leaf, extent.start, to_host(values)))
    return Snapshot(
        pieces=tuple(pieces),
        leaves={name: described(shape, dtype) for name, (shape, dtype) in leaves(held).items()},
        step=int(state.step),
        position=int(state.position),
        layout={"plugin": repr(state.plan.plugin), "mesh": dict(mesh.axes), "virtual": mesh.virtual},
        rank=index_of(mesh, mesh.place, mesh.names) if mesh.across else 0,
        ranks=mesh.size if mesh.across else 1,
    )


class HostCopies:
    """Snapshots in memory of their own, which each one takes over from the one before: at most one is in use.

    What comes from a GPU goes to pinned memory.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def snapshot(self, state: TrainState) -> Snapshot:
        """As ``snapshot``; the state may change as soon as this returns."""
        free: dict[tuple[int, bool], list[torch.Tensor]] = {}
        for buffer in self._buffers:
            free.setdefault((len(buffer), buffer.is_pinned()), []).append(buffer)
        used, sources = [], set[torch.device]()

        def to_host(values: torch.Tensor) -> torch.Tensor:
            pinned = values.device.type == "cuda"
            fitting = free.get((values.nbytes, pinned))
            buffer = fitting.pop() if fitting else torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=pinned)
            used.append(buffer)
            sources.add(values.device)
            return buffer.view(values.dtype).copy_(values, non_blocking=pinned)

        with torch.inference_mode(mode=False), torch.no_grad():
            taken = snapshot(state, to_host)
        for device in sources:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self._buffers = used
        return taken
