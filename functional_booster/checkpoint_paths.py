"""What lies at a path that somebody names: a checkpoint of our own form, of a run, of Hugging Face's."""

from __future__ import annotations

import os
from pathlib import Path

from . import checkpoint, run_folder
from .checkpoint.folders import Folder, file, folder


def native(path: str) -> str | None:
    """The path of the native checkpoint: ``path`` itself, a run's own, or the newest numbered one; None: there is none.

    ``path`` may be an fsspec URL.
    """
    for place in (path, f"{path.rstrip('/')}/{run_folder.CHECKPOINT}"):
        if folder(place).size(checkpoint.MANIFEST) is not None:
            return place
    return checkpoint.latest(path)


def safetensors(path: str) -> tuple[Folder, list[str]]:
    """The folder and the names of files of weights in Hugging Face's form: ``path`` itself, or those in it.

    Raises FileNotFoundError where there are none.
    """
    place = folder(path)
    if not place.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if place.is_file():
        place, name = file(path)
        names = [name]
    else:
        names = [name for name in place.names() if not name.startswith(".")]
    found = [name for name in names if name.endswith(".safetensors")]
    if not found:
        raise FileNotFoundError(f"{path} is no checkpoint: expected {checkpoint.MANIFEST}, or safetensors, in it")
    return place, found


def run_of(path: str) -> Path | None:
    """The folder of the run that a native checkpoint is of: ``path``, or one above it; None: it is of none."""
    if "://" in path:
        return None
    above = (Path(path), *Path(os.path.abspath(path)).parents[:1])
    return next((place for place in above if (place / run_folder.CONFIG).is_file()), None)
