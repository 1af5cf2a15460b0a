"""How activations and gradients get from rank to rank."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from functional_booster.kernels import tree

Tree = tree.Tree


class Transport(Protocol):
    """The transfers of one rank: those between two ranks arrive in the order in which they were sent."""

    def send(self, peer: int, value: Tree) -> None:
        """Start to send a tree of tensors to a rank; does not wait until it is received."""
        ...

    def receive(self, peer: int, like: Callable[[], Tree]) -> Callable[[], Tree]:
        """Start to receive from a rank a tree of the shapes and dtypes of ``like()``; the result waits for it."""
        ...

    def finish(self) -> None:
        """Wait until everything sent has left."""
        ...


@dataclasses.dataclass(frozen=True)
class Mailboxes:
    """The transport of ``rank`` among ranks that are one process."""

    rank: int
    boxes: dict[tuple[int, int], collections.deque[Tree]]  # by (from, to), shared by all ranks

    def send(self, peer: int, value: Tree) -> None:
        self.boxes.setdefault((self.rank, peer), collections.deque()).append(value)

    def receive(self, peer: int, like: Callable[[], Tree]) -> Callable[[], Tree]:
        value = self.boxes[peer, self.rank].popleft()
        return lambda: value

    def finish(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Processes:
    """The transport of this process among those of a ``torch.distributed`` group, whose ranks are the pipeline's.

    Sends and receives overlap with compute. ``device`` is where received tensors are put; ``sent`` keeps alive what is
    on its way.
    """

    group: dist.ProcessGroup
    device: torch.device
    sent: list[tuple[Any, torch.Tensor]] = dataclasses.field(default_factory=list)

    def send(self, peer: int, value: Tree) -> None:
        self.sent[:] = [(work, leaf) for work, leaf in self.sent if not work.is_completed()]
        for leaf in map(torch.Tensor.contiguous, tree.leaves(value)):
            self.sent.append((dist.isend(leaf, group=self.group, group_dst=peer), leaf))

    def receive(self, peer: int, like: Callable[[], Tree]) -> Callable[[], Tree]:
        shapes, structure = tree.flatten(like())
        leaves = [torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in shapes]
        works: list[Any] = [dist.irecv(leaf, group=self.group, group_src=peer) for leaf in leaves]

        def wait() -> Tree:
            for work in works:
                work.wait()
            return tree.unflatten(structure, leaves)

        return wait

    def finish(self) -> None:
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()
