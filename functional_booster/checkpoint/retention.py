"""Numbered checkpoints, ``root/step-<n>``: which there are, which stay, and the removal of the others."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from functional_booster.optim.validate import check_integer

from . import manifest
from .folders import Folder, folder
from .manifest import FIRST_FORMAT, MANIFEST

_NUMBERED = re.compile(r"step-(\d+)")
Saved = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest ``last``, those of each ``every``-th step, and the ``best`` so many.

    The best have the lowest ``metric``, or, if ``higher``, the highest; without that metric, or with NaN, one is none
    of them. Raises TypeError or ValueError, naming the argument.
    """

    last: int = 1
    every: int | None = None
    best: int = 0
    metric: str = "loss"
    higher: bool = False

    def __post_init__(self) -> None:
        check_integer("last", self.last, minimum=1)
        check_integer("best", self.best, minimum=0)
        if self.every is not None:
            check_integer("every", self.every, minimum=1)


def kept(saved: Saved, keep: Retention) -> set[int]:
    """The steps that stay, of those saved: {step: metrics}. The newest one always does. Pure."""
    stay = set(sorted(saved)[-keep.last :])
    if keep.every is not None:
        stay |= {step for step in saved if step % keep.every == 0}
    sign = -1.0 if keep.higher else 1.0
    scored = {step: sign * metrics[keep.metric] for step, metrics in saved.items() if keep.metric in metrics}
    ranked = sorted(
        (value, -step) for step, value in scored.items() if not math.isnan(value)
    )  # of equal ones the newer
    return stay | {-step for _, step in ranked[: keep.best]}


def latest(root: str | os.PathLike[str]) -> str | None:
    """The path of the newest complete checkpoint ``root/step-<n>``, None where there is none."""
    for step in sorted(_numbered(root), reverse=True):
        if _complete(folder(numbered(root, step))) is not None:
            return numbered(root, step)
    return None


def complete(root: str | os.PathLike[str]) -> dict[int, dict[str, float]]:
    """{step: metrics} of the complete checkpoints ``root/step-<n>``: with a manifest, and the files that it names."""
    found = {step: _complete(folder(numbered(root, step))) for step in _numbered(root)}
    return {step: metrics for step, metrics in found.items() if metrics is not None}


def prune(root: str | os.PathLike[str], keep: Retention) -> list[int]:
    """Remove the checkpoints that do not stay, and what is left of older ones; returns the steps of those removed.

    On processes, one calls it. Others' files, and what is newer than the newest complete checkpoint, are left alone.
    """
    saved = complete(root)
    if not saved:
        return []
    gone = sorted(step for step in _numbered(root) if step < max(saved) and step not in kept(saved, keep))
    return [step for step in gone if _remove(numbered(root, step), whole=step in saved)]


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint. It is none any more from the first moment on: its manifest goes before its data.

    Raises FileNotFoundError or ValueError for a path that is none, OSError where it cannot be removed. Other files in
    the folder stay.
    """
    manifest.read_manifest(path)
    _remove(path, whole=True)


def numbered(root: str | os.PathLike[str], step: int) -> str:
    """The path of the checkpoint of a step."""
    return f"{os.fspath(root).rstrip('/')}/step-{step}"


def _numbered(root: str | os.PathLike[str]) -> list[int]:
    matches = map(_NUMBERED.fullmatch, folder(root).names())
    return [int(match[1]) for match in matches if match is not None and match[1] == str(int(match[1]))]


def _complete(place: Folder) -> dict[str, float] | None:
    """The metrics of the checkpoint in a folder, None where there is none that is complete."""
    before = None
    while True:
        try:
            content = manifest.read(place)
        except (FileNotFoundError, ValueError):
            return None
        if content["format"] == FIRST_FORMAT:
            whole = place.size(content["data"]) is not None
        else:
            whole = all(place.size(file["name"]) == file["size"] for file in content["files"])
        if whole:
            return _metrics(content.get("metrics"))
        if content == before:
            return None
        before = content  # another save may have replaced it since it was read


def _metrics(given: Any) -> dict[str, float]:
    """Those of a manifest; what are no numbers is left out."""
    return {name: value for name, value in (given if isinstance(given, dict) else {}).items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _remove(path: str | os.PathLike[str], whole: bool) -> bool:
    """Remove a checkpoint, or what is left of one (not ``whole``), unless it has become whole; whether it was done."""
    place = folder(path)
    with place.exclusive(wait=True):
        if not whole and MANIFEST in place.names():
            return False
        place.remove([MANIFEST])
        place.sync()
        place.remove(name for name in place.names() if manifest.is_ours(name))
        place.discard()
    return True
