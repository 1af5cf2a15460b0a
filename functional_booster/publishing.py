"""Publishing files of weights: written under fresh hidden names, seen in one moment, or never.

Readers see the new weights when one rename or removal makes them so: of the index, where there are several files, else
of the file itself. What dies before that leaves what was there; what dies later, the new files. Leftovers go with the
next save.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .checkpoint.folders import Folder

_LEFTOVER = re.compile(r"\.[0-9a-f]{16}\.(.+)")


@dataclass(frozen=True)
class Target:
    """Where weights go: ``place / f"{stem}.safetensors"``, or, beyond ``limit`` bytes, files beside an index.

    ``limit`` None: one file, whatever its size, and nothing else in the folder is touched. ``texts``: {name: content}
    of files that are published with the weights; ``metadata`` stands in the index, or else in the file.
    """

    place: Folder
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


def prepared(target: Target, stack: contextlib.ExitStack) -> bool:
    """Make the folder, and hold what is written against other processes until the end; whether it could be held.

    Raises FileExistsError where another one is writing it, or the folder is a file.
    """
    place = target.place
    if place.is_file():
        raise FileExistsError(f"{place} is a file, expected a directory for the weights")
    if place.make():
        stack.callback(place.discard)  # where nothing is in it
    return stack.enter_context(place.exclusive_file(target.single) if target.limit is None else place.exclusive())


def publish(target: Target, fresh: Mapping[str, str], index: dict[str, Any] | None) -> None:
    """Let readers see the fresh files instead of what they saw: in one moment, by one rename or removal."""
    place = target.place
    for name, content in target.texts.items():
        place.put(name, content.encode())
    if index is None:
        place.rename(fresh[target.single], target.single)  # readers prefer it to an index
        place.sync()
        return
    if fresh.keys() & set(place.names()):  # files of the old index: until it goes they must stay
        hidden = {name: fresh[home] for name, home in index["weight_map"].items()}
        place.put(target.index, json.dumps({**index, "weight_map": hidden}, indent=2).encode())
        for name, written in fresh.items():
            place.copy(written, name)
    else:
        for name, written in fresh.items():
            place.rename(written, name)
    place.sync()
    place.put(target.index, (json.dumps(index, indent=2) + "\n").encode())
    place.remove([target.single])
    place.sync()


def clean(target: Target, names: Sequence[str], token: str | None) -> None:
    """Remove what nobody refers to: older files of these weights, and what dead saves left (with ``token``: this one).

    Of a single file that stands for itself only what other saves of it have left.
    """
    ours = re.compile(rf"{re.escape(target.stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(target.suffix)}(\.index\.json)?")
    kept = {*names, *([target.index] if len(names) > 1 else [])}

    def goes(name: str) -> bool:
        if leftover := _LEFTOVER.fullmatch(name):
            mine = target.limit is not None or leftover[1] == target.single
            return mine and (token is None or name.startswith(f".{token}."))
        return target.limit is not None and ours.fullmatch(name) is not None and name not in kept

    target.place.remove([name for name in target.place.names() if goes(name)])


def forget(target: Target, token: str) -> None:
    """Remove the fresh files, unless an index names them already."""
    place = target.place
    with contextlib.suppress(OSError):
        names, named = place.names(), b""
        if target.index in names:
            with place.open(target.index) as stream:
                named = stream.read()
        place.remove([name for name in names if name.startswith(f".{token}.") and name.encode() not in named])
