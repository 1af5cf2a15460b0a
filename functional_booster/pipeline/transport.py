"""How activations and gradients get from rank to rank."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

Tensors = list[torch.Tensor]


class Transport(Protocol):
    """The transfers of one rank: those between two ranks arrive in the order in which they were sent."""

    def send(self, peer: int, values: Tensors) -> None:
        """Start to send tensors to a rank; does not wait until they are received."""
        ...

    def receive(self, peer: int, like: Sequence[torch.Tensor]) -> Callable[[], Tensors]:
        """Start to receive from a rank tensors of these shapes, strides and dtypes; the result waits for them."""
        ...

    def finish(self) -> None:
        """Wait until everything sent has left."""
        ...


@dataclasses.dataclass(frozen=True)
class Mailboxes:
    """The transport of ``rank`` among ranks that are one process."""

    rank: int
    boxes: dict[tuple[int, int], collections.deque[Tensors]]  # by (from, to), shared by all ranks

    def send(self, peer: int, values: Tensors) -> None:
        self.boxes.setdefault((self.rank, peer), collections.deque()).append(values)

    def receive(self, peer: int, like: Sequence[torch.Tensor]) -> Callable[[], Tensors]:
        values = self.boxes[peer, self.rank].popleft()
        return lambda: values

    def finish(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Processes:
    """The transport of this process among those of a ``torch.distributed`` group, whose ranks are the pipeline's.

    Sends and receives overlap with compute; the tensors of one transfer travel together. ``device`` is where received
    tensors are put; ``sent`` keeps alive what is on its way.
    """

    group: dist.ProcessGroup
    device: torch.device
    sent: list[tuple[Any, Tensors]] = dataclasses.field(default_factory=list)

    def send(self, peer: int, values: Tensors) -> None:
        self.sent[:] = [(works, held) for works, held in self.sent if not all(work.is_completed() for work in works)]
        if values:
            held = [_in_memory_order(value) for value in values]
            self.sent.append((self._started(dist.isend, held, peer), held))

    def receive(self, peer: int, like: Sequence[torch.Tensor]) -> Callable[[], Tensors]:
        values = [_empty(one, self.device) for one in like]
        works = self._started(dist.irecv, [_in_memory_order(value) for value in values], peer) if values else []

        def wait() -> Tensors:
            for work in works:
                work.wait()
            return values

        return wait

    def finish(self) -> None:
        for works, _ in self.sent:
            for work in works:
                work.wait()
        self.sent.clear()

    def _started(self, op: Callable[..., Any], tensors: Tensors, peer: int) -> list[Any]:
        return dist.batch_isend_irecv([dist.P2POp(op, each, group=self.group, group_peer=peer) for each in tensors])


_met: dict[tuple[str, torch.device], dist.ProcessGroup] = {}


def connected(name: str, device: torch.device) -> dist.ProcessGroup:
    """The process group of this name, whose ranks have met: NCCL wants that of all before it lets two talk."""
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    if _met.get((name, device)) is not group:  # a name is given again once its group was destroyed
        dist.all_reduce(torch.zeros((), device=device), group=group)
        _met[name, device] = group
    return group


def _in_memory_order(value: torch.Tensor) -> torch.Tensor:
    """The elements as they lie in memory, (N,): a view, where they lie side by side."""
    value = value if _is_dense(value) else value.contiguous()
    flat = value.as_strided((value.numel(),), (1,))
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def _empty(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    if _is_dense(like):
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the elements lie side by side in memory, each at a place of its own."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
