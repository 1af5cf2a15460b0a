"""The manifest: a JSON file that says what a checkpoint holds, and where each range of each leaf's elements lies.

    {"format": "functional_booster/2",
     "step": 3, "position": 3,                                      updates done, batches consumed
     "versions": {"functional_booster": "0.1.0", "torch": "2.13.0"},
     "layout": {"plugin": "TorchFSDPPlugin(...)", "mesh": {"dp": 1, "fsdp": 2}, "virtual": false},   for people
     "metrics": {"loss": 3.2},                                      where the save was given some
     "chunk": 4194304,                                              bytes that one checksum covers
     "files": [{"name": "state-<16 hex digits>-00000.safetensors", "size": 1234}, ...],
     "leaves": {"params.wte.weight": {"shape": [20, 8], "dtype": "float32", "pieces": [
        {"file": 0, "offset": 1024, "range": [0, 80], "crc32": [123456]}, ...]}, ...}}

A piece: elements ``range`` of the flattened leaf, little-endian, at byte ``offset`` of a file, with a CRC-32 a chunk,
counted from the piece's first byte, so that whoever reads a part can verify it. A piece of another kind (a box, say)
will have another key in the place of ``range``, and is refused by readers that do not know it. Format 1, which had one
data file with whole leaves and a SHA-256, is still read.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .folders import Folder, folder

MANIFEST = "manifest.json"
FORMAT = "functional_booster/2"
FIRST_FORMAT = "functional_booster/1"
CLAIM = f"{MANIFEST}.saving"  # the processes that save together read the token of their files' names in it
CHUNK = 4 * 2**20
_DATA = re.compile(r"state-[0-9a-f]{16}(-\d{5,})?\.safetensors")
_OURS = re.compile(  # what a save that died may leave; names with a suffix are those of older versions
    rf"(\.[0-9a-f]{{16}}\.)?({_DATA.pattern}|state-[0-9a-f]{{16}}-\d{{5,}}\.json|{re.escape(CLAIM)})"
    rf"|\.[0-9a-f]{{16}}\.{re.escape(MANIFEST)}"
    rf"|(state-[0-9a-f]{{16}}-\d{{5,}}\.json|{re.escape(MANIFEST)}|{re.escape(CLAIM)})\.[0-9a-f]{{8}}"
)


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a checkpoint; raises FileNotFoundError or ValueError for a path that is none."""
    return read(folder(path))


def read(place: Folder) -> dict[str, Any]:
    """The manifest in a folder; raises as ``read_manifest``."""
    file = f"{place}/{MANIFEST}"
    try:
        with place.open(MANIFEST) as stream:
            content = stream.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{place} is no checkpoint: it has no {MANIFEST}") from error
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no manifest of a checkpoint: {error}") from error
    form = manifest.get("format") if isinstance(manifest, dict) else None
    fits = _FITS.get(form) if isinstance(form, str) else None
    if fits is None:
        raise ValueError(f"{file} has another format than {FORMAT!r}")
    if wrong := next((key for key, suits in fits.items() if not suits(manifest.get(key))), None):
        raise ValueError(f"{file} is damaged: {wrong!r} is missing, or not what it should be")
    for name, leaf in manifest["leaves"].items():
        for piece in leaf.get("pieces", ()):
            if not _is_piece(piece, manifest, leaf):
                raise ValueError(f"{file} is damaged, or of a newer version: 'leaves': {name} has the piece {piece!r}")
    return manifest


def written(manifest: dict[str, Any]) -> bytes:
    """The JSON of a manifest, a line for each of its keys and for each leaf."""

    def lines(values: dict[str, Any], indent: str) -> str:
        return ",\n".join(f"{indent}{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())

    head = {key: value for key, value in manifest.items() if key != "leaves"}
    leaves = lines(manifest["leaves"], "  ")
    return f'{{\n{lines(head, " ")},\n "leaves": {{\n{leaves}\n }}\n}}\n'.encode()


def data_files(manifest: dict[str, Any]) -> list[str]:
    """The names of its data files."""
    if manifest["format"] == FIRST_FORMAT:
        return [manifest["data"]]
    return [file["name"] for file in manifest["files"]]


def named_files(place: Folder) -> list[str]:
    """The data files that the manifest in a folder names; none without a manifest."""
    try:
        return data_files(read(place))
    except FileNotFoundError:
        return []


def is_ours(name: str) -> bool:
    """Whether only a save can have made a file of this name."""
    return _OURS.fullmatch(name) is not None


def described(shape: Iterable[int], dtype: torch.dtype) -> dict[str, Any]:
    """A leaf, as a manifest describes it."""
    return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_data(name: Any) -> bool:
    return isinstance(name, str) and _DATA.fullmatch(name) is not None


def _is_file(file: Any) -> bool:
    return isinstance(file, dict) and _is_data(file.get("name")) and _is_count(file.get("size"))


def _are_leaves(keys: set[str]) -> Callable[[Any], bool]:
    def fits(leaf: Any) -> bool:
        return (
            isinstance(leaf, dict)
            and leaf.keys() == keys
            and isinstance(leaf["shape"], list)
            and all(map(_is_count, leaf["shape"]))
            and isinstance(getattr(torch, str(leaf["dtype"]), None), torch.dtype)
            and isinstance(leaf.get("pieces", []), list)
        )

    return lambda leaves: isinstance(leaves, dict) and all(map(fits, leaves.values()))


def _is_piece(piece: Any, manifest: dict[str, Any], leaf: dict[str, Any]) -> bool:
    if not (isinstance(piece, dict) and piece.keys() == {"file", "offset", "range", "crc32"}):
        return False
    span, sums = piece["range"], piece["crc32"]
    if not (isinstance(span, list) and len(span) == 2 and all(map(_is_count, (*span, piece["file"], piece["offset"])))):
        return False
    size = (span[1] - span[0]) * getattr(torch, leaf["dtype"]).itemsize
    return (
        span[0] < span[1] <= math.prod(leaf["shape"])
        and piece["file"] < len(manifest["files"])
        and piece["offset"] + size <= manifest["files"][piece["file"]]["size"]
        and isinstance(sums, list)
        and all(map(_is_count, sums))
        and len(sums) == -(-size // manifest["chunk"])
    )


_COUNTERS: dict[str, Callable[[Any], bool]] = {"step": _is_count, "position": _is_count}
_FITS: dict[Any, dict[str, Callable[[Any], bool]]] = {  # what the manifests of each format hold
    FIRST_FORMAT: {
        "data": _is_data,
        "sha256": lambda value: isinstance(value, str),
        **_COUNTERS,
        "leaves": _are_leaves({"shape", "dtype"}),
    },
    FORMAT: {
        **_COUNTERS,
        "chunk": lambda value: _is_count(value) and value > 0 and value % 16 == 0,
        "files": lambda value: isinstance(value, list) and all(map(_is_file, value)),
        "leaves": _are_leaves({"shape", "dtype", "pieces"}),
    },
}
