"""The folder of a run: made once, held by one process (the first of a launch), and described by its config.json."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shlex
import types
import typing
from collections.abc import Generator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from . import checkpoint, locking
from .train_options import FREE_ON_RESUME, LAYOUT, Train, flag

CONFIG = "config.json"
CHECKPOINT = "checkpoint"
METRICS = "metrics.jsonl"
LOCK = "lock"
_SAVED = ({field.name for field in fields(Train)} - set(FREE_ON_RESUME)) | {"data"}


@contextlib.contextmanager
def held(out: Path) -> Generator[None]:
    """Keep every other process from training in ``out``. Raises BlockingIOError where one does already."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locking.exclusive(out / LOCK, wait=False))
        except BlockingIOError as error:
            raise BlockingIOError(f"--out: another process trains in {out}") from error
        except OSError as error:
            raise OSError(f"--out: {out} cannot be written: {error}") from error
        yield


def check_new(out: Path) -> None:
    """Raise FileExistsError where ``out`` holds anything but what a run leaves that dies at its very beginning."""
    if (out / CONFIG).exists():
        raise FileExistsError(f"--out: {out} exists already; give --resume to go on with it, or another --out")
    if out.is_dir() and any(file.name not in (LOCK, f"{CONFIG}.new") for file in out.iterdir()):
        raise FileExistsError(f"--out: {out} is not empty, and holds no run; give another --out")


def make(out: Path) -> None:
    """Make the folder. Raises OSError, naming it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out: {out} cannot be written: {error}") from error


def describe(config: Train, text: torch.Tensor) -> dict[str, Any]:
    """What config.json says: the settings, the text they were used on, and with what."""
    settings = asdict(config) | {"data": None if config.data is None else os.fspath(config.data.resolve())}
    return {
        "config": {name: value for name, value in settings.items() if name in _SAVED},
        "text": {"bytes": len(text), "sha256": hashlib.sha256(text.numpy().data).hexdigest()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def write(out: Path, described: dict[str, Any]) -> None:
    """Write config.json, whole or not at all."""
    beside = out / f"{CONFIG}.new"
    beside.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    beside.replace(out / CONFIG)


def read(out: Path) -> dict[str, Any]:
    """config.json of the run in ``out``; raises FileNotFoundError, or ValueError where it is none of this version."""
    path = out / CONFIG
    if not path.exists():
        raise FileNotFoundError(
            f"--resume: {path} does not exist, expected the folder of a run; without --resume it begins"
        )
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        settings = described["config"]
        if wrong := settings.keys() ^ _SAVED:
            raise ValueError(f"settings {sorted(wrong)}")
        hints = typing.get_type_hints(Train)
        if wrong := sorted(name for name in _SAVED if not _is(settings[name], hints[name])):
            raise ValueError(f"{wrong[0]} is {settings[wrong[0]]!r}")
        if described["text"].keys() != {"bytes", "sha256"}:
            raise ValueError("text is not described")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"--resume: {path} is not the config of a run that this version can resume: {error}") from None
    return described


def resumed(given: Train) -> Train:
    """The settings of the run in ``given.out``, with ``given``'s where a resumed run is free."""
    settings = read(given.out)["config"]
    data = settings["data"] if given.data is None else given.data
    free = {name: getattr(given, name) for name in FREE_ON_RESUME}
    return Train(**(settings | free | {"data": None if data is None else Path(data)}))


def check_resumed(config: Train, saved: Train) -> None:
    """Raise ValueError, naming the option, where ``config`` is not as the run began."""
    for name in sorted(_SAVED - {"data", *LAYOUT}):
        now, then = getattr(config, name), getattr(saved, name)
        if now != then:
            raise ValueError(f"{flag(name)}: {now}, but the run in {config.out} began with {then}; leave it out")


def kept(out: Path) -> str:
    """A sentence on what there is to go on from."""
    try:
        step = checkpoint.read_manifest(out / CHECKPOINT)["position"]
    except (OSError, ValueError):
        return f"there is no checkpoint in {out}"
    return f"the checkpoint of step {step} is kept in {out / CHECKPOINT}\n{go_on(out)}"


def go_on(out: Path) -> str:
    """How to go on."""
    command = "functional-booster"
    if dist.is_initialized():
        command = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', 1)} -m functional_booster"
    return f"go on with: {command} train --resume --out {shlex.quote(os.fspath(out))}"


def _is(value: Any, hint: Any) -> bool:
    """Whether what JSON held is a value of the type."""
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_is(value, choice) for choice in typing.get_args(hint))
    if hint in (int, float):
        return not isinstance(value, bool) and isinstance(value, int if hint is int else int | float)
    return isinstance(value, str if hint is Path else hint)
