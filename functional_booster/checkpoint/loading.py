"""Loading: what a process holds of the target is read into place, whatever layout or precision it was saved under."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from functional_booster import watchdog
from functional_booster.kernels import tree
from functional_booster.precision import ConstantScaling
from functional_booster.state import TrainState

from . import background
from .folders import folder
from .holdings import Holding, holdings, leaves
from .manifest import described
from .reader import Reader, reader


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
    list, where leaves are missing or unexpected, or of another shape or kind of dtype (which no ``strict`` allows). On
    processes, each must call it, and where it fails on one of them, the others raise RankFailure.
    """
    with watchdog.all_or_none("load", alone=not like.plan.mesh.across), _reader(path) as source:
        held = holdings(like)
        fresh = _counters_of_before(source)
        report = _fit(source, held, fresh, tree.leaves(like), strict)
        state = _filled(source, like, held, fresh, torch.device(device))
    return state if strict else (state, report)


def _reader(path: str | os.PathLike[str]) -> Reader:
    background.settle()  # it may be this one that is being written
    return reader(folder(path))


def _counters_of_before(source: Reader) -> dict[str, torch.Tensor]:
    """The leaves of a loss scale, where it was written before it had counters, when no run scaled its loss."""
    if source.leaves.pop("loss_scale", None) is None:
        return {}
    return tree.named_leaves({"loss_scale": ConstantScaling().init()})


def _fit(
    source: Reader, held: Sequence[Holding], fresh: dict[str, torch.Tensor], like: Sequence[Any], strict: bool
) -> LoadReport:
    """What differs; raises ValueError with the whole list of what may not."""
    wanted = leaves(held)
    saved = {name: (leaf.shape, leaf.dtype) for name, leaf in source.leaves.items()}
    saved |= {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in fresh.items()}
    kept = {name for holding, leaf in zip(held, like, strict=True) if _is_tensor(leaf) for name in holding.leaves}
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    problems, cast = [], []
    if strict:
        problems += [f"{name}: not in the checkpoint" for name in missing]
        problems += [f"{name}: not in the model and optimizer" for name in unexpected]
    else:
        lost = "not in the checkpoint, and an abstract `like` has no value to keep: give a state"
        problems += [f"{name}: {lost}" for name in missing if name not in kept]
    for name in wanted.keys() & saved.keys():
        (shape, dtype), (expected, kind) = saved[name], wanted[name]
        if shape != expected or (dtype != kind and not (dtype.is_floating_point and kind.is_floating_point)):
            problems.append(f"{name}: {_text(shape, dtype)}, expected {_text(expected, kind)}")
        elif dtype != kind:
            cast.append(name)
    if problems:
        raise ValueError(f"{source.place} does not fit:\n  " + "\n  ".join(sorted(problems)))
    return LoadReport(tuple(sorted(missing)), tuple(sorted(unexpected)), tuple(sorted(cast)))


@torch.inference_mode(mode=False)  # as any state's: its tensors are trained
@torch.no_grad()
def _filled(
    source: Reader, like: TrainState, held: Sequence[Holding], fresh: dict[str, torch.Tensor], device: torch.device
) -> TrainState:
    """``like`` with new tensors, each range of elements read once and copied to all of this process's ranks."""
    old, structure = tree.flatten(like)
    new, first = [], dict[tuple[str, int, int], torch.Tensor]()
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for holding, leaf in zip(held, old, strict=True):
        home = torch.device("cpu") if holding.host else device
        tensor = torch.zeros(
            holding.shape, dtype=holding.dtype, device=home, pin_memory=holding.host and device.type == "cuda"
        )  # padding is zero
        new.append(tensor)
        values = tensor.view(-1)
        for part in holding.parts:
            for extent in part.extents:
                name, start, size = key = extent.leaf, extent.start, extent.size
                out = values[extent.at : extent.at + size]
                if name in fresh:
                    out.copy_(fresh[name].view(-1)[start : start + size])
                elif name not in source.leaves:
                    out.copy_(leaf.detach().contiguous().view(-1)[extent.at : extent.at + size])
                elif key in first:
                    copies.append((out, first[key]))
                else:
                    first[key] = out
    source.fill_all((name, start, out) for (name, start, _), out in first.items())
    for out, read in copies:
        out.copy_(read)
    return tree.unflatten(structure, new)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return "{dtype}{shape}".format(**described(shape, dtype))
