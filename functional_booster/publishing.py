"""Publishing files: written under fresh hidden names, seen in one moment, or never.

Readers see the new weights when one rename or removal makes them so: of the index, where there are several files, else
of the file itself. What dies before that leaves what was there; what dies later, the new files. Leftovers go with the
next save.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import locking
from .checkpoint.folders import sync

_LEFTOVER = re.compile(r"\.[0-9a-f]{16}\.(.+)")


@dataclass(frozen=True)
class Target:
    """Where weights go: ``directory / f"{stem}.safetensors"``, or, beyond ``limit`` bytes, files beside an index.

    ``limit`` None: one file, whatever its size, and nothing else in the directory is touched. ``texts``: {name:
    content} of files that are published with the weights; ``metadata`` stands in the index, or else in the file.
    """

    directory: Path
    stem: str
    limit: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ".safetensors"

    @property
    def single(self) -> str:
        """The name of the one file, where there is one."""
        return self.stem + self.suffix

    @property
    def index(self) -> str:
        """The name of the index."""
        return f"{self.single}.index.json"

    def names(self, number: int) -> list[str]:
        """The names of so many files."""
        if number == 1:
            return [self.single]
        return [f"{self.stem}-{place:05d}-of-{number:05d}{self.suffix}" for place in range(1, number + 1)]


def prepared(target: Target, stack: contextlib.ExitStack) -> tuple[bool, bool]:
    """Make the directory, and hold it against other processes: (whether it was made, whether it could be held)."""
    directory = target.directory
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file, expected a directory for the weights")
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return made, stack.enter_context(locking.exclusive(directory, wait=target.limit is None))
    except BlockingIOError as error:
        raise FileExistsError(f"{directory}: another process is writing there; nothing was changed") from error


def publish(target: Target, fresh: Mapping[str, str], index: dict[str, Any] | None, token: str) -> None:
    """Let readers see the fresh files instead of what they saw: in one moment, by one rename or removal."""
    directory = target.directory
    for name, content in target.texts.items():
        write_text(directory / name, content)
    if index is None:
        os.replace(directory / fresh[target.single], directory / target.single)  # readers prefer it to an index
        sync(directory)
        return
    if any((directory / name).exists() for name in fresh):  # files of the old index: until it goes they must stay
        hidden = {name: fresh[home] for name, home in index["weight_map"].items()}
        write_text(directory / target.index, json.dumps({**index, "weight_map": hidden}, indent=2))
        for name, written in fresh.items():
            _copied(directory / written, directory / f".{token}.link", directory / name)
    else:
        for name, written in fresh.items():
            os.replace(directory / written, directory / name)
    sync(directory)
    write_text(directory / target.index, json.dumps(index, indent=2) + "\n")
    (directory / target.single).unlink(missing_ok=True)
    sync(directory)


def _copied(source: Path, link: Path, place: Path) -> None:
    """Have the same file in ``place``, too."""
    try:
        os.link(source, link)
    except OSError:  # a file system without links
        shutil.copyfile(source, link)
        sync(link)
    os.replace(link, place)


def clean(target: Target, names: Sequence[str], token: str | None) -> None:
    """Remove what nobody refers to: older files of these weights, and what dead saves left (with ``token``: this one).

    Of a single file that stands for itself only what other saves of it have left.
    """
    ours = re.compile(rf"{re.escape(target.stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(target.suffix)}(\.index\.json)?")
    kept = {*names, *([target.index] if len(names) > 1 else [])}
    for file in list(target.directory.iterdir()):
        leftover = _LEFTOVER.fullmatch(file.name)
        if leftover and (token is None or file.name.startswith(f".{token}.")):
            if target.limit is not None or leftover[1] == target.single:
                file.unlink(missing_ok=True)
        elif target.limit is not None and ours.fullmatch(file.name) and file.name not in kept:
            file.unlink(missing_ok=True)


def forget(target: Target, token: str, made: bool) -> None:
    """Remove the fresh files, unless an index names them already; and the directory, if it was made for them."""
    with contextlib.suppress(OSError):
        index = target.directory / target.index
        named = index.read_text(encoding="utf-8") if index.exists() else ""
        for file in target.directory.glob(f".{token}.*"):
            if file.name not in named:
                file.unlink(missing_ok=True)
        if made:
            target.directory.rmdir()


def write_text(file: Path, content: str) -> None:
    """Put ``content`` in the place of the file, which is whole, old or new, at any moment."""
    fresh = file.with_name(f".{secrets.token_hex(8)}.{file.name}")
    try:
        fresh.write_text(content, encoding="utf-8")
        sync(fresh)
        os.replace(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)
    sync(file.parent)
