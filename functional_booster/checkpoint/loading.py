"""Loading: what a process holds of the target is read into place, whatever layout or precision it was saved under."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from functional_booster import watchdog
from functional_booster.kernels import flat, tree
from functional_booster.precision import ConstantScaling
from functional_booster.state import TrainState

from . import background, conversions, host_memory, leaves
from .folders import folder
from .leaves import Leaf
from .manifest import described
from .meetings import Meetings
from .reader import Reader, consistent


@dataclass(frozen=True)
class LoadReport:
    """Names of leaves: ``missing`` from the checkpoint (they kept the values of ``like``), ``unexpected`` in it (left
    out), ``cast`` from another floating-point dtype."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]


@overload
def load(
    path: str | os.PathLike[str], like: TrainState, device: Any, *, strict: Literal[True] = True
) -> TrainState: ...
@overload
def load(
    path: str | os.PathLike[str], like: TrainState, device: Any, *, strict: Literal[False]
) -> tuple[TrainState, LoadReport]: ...
def load(
    path: str | os.PathLike[str], like: TrainState, device: Any, *, strict: bool = True
) -> TrainState | tuple[TrainState, LoadReport]:
    """The saved state with the structure and layout of ``like`` (leaves: ArrayInfo or tensors), on ``device``.

    A process reads the slices that it holds, and nothing else. Floating-point leaves (parameters, buffers and optimizer
    state alike) take the dtype of ``like``: precision is the target's. With ``strict=False`` it returns (state,
    LoadReport): leaves that the checkpoint does not have keep the values of ``like``, and it may have others.

    Raises FileNotFoundError for a path that is no checkpoint; ValueError where the data is damaged, or, with the whole
    list, where leaves are missing or unexpected, or (which no ``strict`` allows) of another shape or kind of dtype, or
    hold finite numbers that would be infinite in a narrower dtype. On processes, each must call it, and where it fails
    on one of them, the others raise RankFailure. Where others save to ``path`` meanwhile, it is one of their states.
    """
    alone = not like.plan.mesh.across

    def together() -> contextlib.AbstractContextManager[None]:
        return watchdog.all_or_none("load", alone=alone)

    def read(source: Reader) -> tuple[TrainState, LoadReport]:
        fresh = _counters_of_before(source)
        report = _fit(source, leaves.of_state(like), fresh, strict)
        return _filled(source, like, fresh, torch.device(device)), report

    with together():
        background.settle()  # it may be this one that is being written
        place = folder(path)
    state, report = consistent(place, read, together, bool if alone else _all_alike)
    return state if strict else (state, report)


def _all_alike(said: str) -> bool:
    """Whether all processes say the same, and something."""
    if watchdog.started() is None:
        return bool(said)
    with contextlib.closing(Meetings("load")) as meetings:
        heard = meetings.exchange(said)
    return all(heard) and len(set(heard)) == 1


def _counters_of_before(source: Reader) -> dict[str, torch.Tensor]:
    """The leaves of a loss scale, where it was written before it had counters, when no run scaled its loss."""
    if source.leaves.pop("loss_scale", None) is None:
        return {}
    return tree.named_leaves({"loss_scale": ConstantScaling().init()})


def _fit(source: Reader, targets: Mapping[str, Leaf], fresh: Mapping[str, torch.Tensor], strict: bool) -> LoadReport:
    """What differs; raises ValueError with the whole list of what may not."""
    wanted = {name: (leaf.shape, leaf.dtype) for name, leaf in targets.items()}
    saved = {name: (leaf.shape, leaf.dtype) for name, leaf in source.leaves.items()}
    saved |= {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in fresh.items()}
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    problems, cast = [], []
    if strict:
        problems += [f"{name}: not in the checkpoint" for name in missing]
        problems += [f"{name}: not in the model and optimizer" for name in unexpected]
    else:
        lost = "not in the checkpoint, and an abstract `like` has no value to keep: give a state"
        problems += [f"{name}: {lost}" for name in missing if not isinstance(targets[name].buffer, torch.Tensor)]
    for name in wanted.keys() & saved.keys():
        (shape, dtype), (expected, kind) = saved[name], wanted[name]
        if shape != expected or not conversions.converts(dtype, kind):
            problems.append(f"{name}: {_text(shape, dtype)}, expected {_text(expected, kind)}")
        elif dtype != kind:
            cast.append(name)
    if problems:
        raise _unfit(source, problems)
    return LoadReport(tuple(sorted(missing)), tuple(sorted(unexpected)), tuple(sorted(cast)))


@torch.inference_mode(mode=False)  # as any state's: its tensors are trained
@torch.no_grad()
def _filled(source: Reader, like: TrainState, fresh: Mapping[str, torch.Tensor], device: torch.device) -> TrainState:
    """``like`` with new tensors, each range of elements read once and copied to all of this process's ranks."""
    state = tree.map(lambda node: _empty(node, device), like, is_leaf=leaves.is_flat)
    old = leaves.of_state(like)
    wanted: list[tuple[str, int, torch.Tensor]] = []
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, leaf in leaves.of_state(state).items():
        for piece in leaves.held(leaf):
            if name in fresh:
                leaves.write(leaf, piece, fresh[name].view(-1)[piece.start : piece.stop])
            elif name not in source.leaves:
                leaves.write(leaf, piece, leaves.read(old[name], piece))
            else:
                first, *rest = leaves.copies(leaf, piece)
                wanted.append((name, piece.start, first.view(-1)))
                others += ((copy, first) for copy in rest)
    for leaf in leaves.padding(state):
        for copy in (copy for piece in leaves.held(leaf) for copy in leaves.copies(leaf, piece)):
            copy.zero_()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # the threads that read have streams of their own
    source.fill_all(wanted)
    if source.lossy:
        raise _unfit(source, [f"{name}: {conversions.beyond(dtype)}" for name, dtype in source.lossy.items()])
    for copy, first in others:
        copy.copy_(first)
    return state


def _empty(node: Any, device: torch.device) -> Any:
    """A node of a state in fresh memory."""

    def empty(buffer: Any, on_host: bool = False) -> torch.Tensor:
        shape, dtype = tuple(buffer.shape), buffer.dtype
        if device.type == "cpu":
            return host_memory.empty(shape, dtype)
        if on_host:
            return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
        return torch.empty(shape, dtype=dtype, device=device)

    if not leaves.is_flat(node):
        return empty(node)
    return flat.Flat(
        {
            name: None if buffer is None else empty(buffer, name in node.layout.host)
            for name, buffer in node.buffers.items()
        },
        node.layout,
    )


def _unfit(source: Reader, problems: list[str]) -> ValueError:
    return ValueError(f"{source.place} does not fit:\n  " + "\n  ".join(sorted(problems)))


def _text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return "{dtype}{shape}".format(**described(shape, dtype))
