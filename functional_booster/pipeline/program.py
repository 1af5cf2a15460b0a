"""What a pipeline computes, whatever the schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_booster.kernels import tree

from .actions import Schedule
from .differentiation import Stage

Tree = tree.Tree
Loss = Callable[[Tree, Tree], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Program:
    """What a pipeline computes: the stages one after the other from a microbatch, then the loss.

    ``stages[0](params[0], microbatch)`` gives the activation that ``stages[1]`` gets, a tree of tensors, and so on;
    ``loss_fn(y, microbatch)`` is the 0-d sum of the losses of one microbatch, from the last stage's output.
    """

    stages: Sequence[Stage]
    loss_fn: Loss
    params: Sequence[Tree]
    microbatches: Sequence[Tree]

    def stage(self, stage: int, microbatch: int) -> Stage:
        """A stage as a function of (params, x); the last one goes on to the loss of the microbatch."""
        last = stage + 1 == len(self.stages)

        def call(params: Tree, x: Tree) -> Tree:
            y = self.stages[stage](params, x)
            if last:
                return _require_loss(self.loss_fn(y, self.microbatches[microbatch]))
            return _require_tensors(stage, y)

        return call

    def boundaries(self, microbatch: int) -> tuple[Tree, ...]:
        """What each stage but the last makes of a microbatch, as fake tensors: nothing is computed.

        Parameters count as being where the microbatch is.
        """
        batch = self.microbatches[microbatch]
        device = next((leaf.device for leaf in tree.leaves(batch) if isinstance(leaf, torch.Tensor)), None)
        with FakeTensorMode(allow_non_fake_inputs=True):
            made, x = list[Tree](), _fake(batch, device)
            for stage in range(len(self.stages) - 1):
                x = self.stage(stage, microbatch)(_fake(self.params[stage], device), x)
                made.append(x)
        return tuple(made)

    def signature(self, microbatch: int) -> Hashable:
        """What ``boundaries`` depend on: microbatches of one signature have the same."""
        leaves, structure = tree.flatten(self.microbatches[microbatch])
        return structure, tuple(
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        )

    def require_fit(self, schedule: Schedule) -> None:
        """Raise ValueError where the numbers of stages, params or microbatches are not the schedule's."""
        expected = {"stages": schedule.stages, "params": schedule.stages, "microbatches": schedule.microbatches}
        for name, number in expected.items():
            if (given := len(getattr(self, name))) != number:
                raise ValueError(f"{name}: {given}, expected {number}, as {schedule.name} has")


def _require_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.dim():
        given = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn: returned {given}, expected a 0-d tensor, the sum over the microbatch")
    return loss


def _require_tensors(stage: int, y: Tree) -> Tree:
    for name, leaf in tree.named_leaves(y).items():
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"stages[{stage}]: the output {name!r} is {type(leaf).__name__}, expected a tensor")
    return y


def _fake(values: Tree, device: torch.device | None) -> Tree:
    """Fake tensors, under a mode, in place of tensors."""

    def fake(leaf: Any) -> Any:
        return torch.empty_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf

    return tree.map(fake, values)
