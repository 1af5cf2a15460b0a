"""``functional-booster inspect``: what a checkpoint holds, of which only the headers are read."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import checkpoint, checkpoint_paths, hf_reading
from .checkpoint.folders import Folder
from .checkpoint.manifest import data_files

_WIDTH = 160  # columns, where there is no terminal


@dataclass(frozen=True)
class Inspect:
    """Show what a checkpoint holds, without loading it: each leaf, and what is known of the whole."""

    path: tyro.conf.Positional[str]
    """A checkpoint, a run's folder, one of numbered checkpoints, of which the newest is shown, or weights in Hugging
    Face's form; or the URL of one of these."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Row:
    """A leaf. ``bytes``: of its values; ``pieces`` it is stored in; ``files`` that hold them."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    pieces: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """``form``: "native" or "hf"; ``facts``: step, position, layout, versions, ... as far as they are known."""

    path: str
    form: str
    facts: dict[str, Any]
    leaves: tuple[Row, ...]

    @property
    def totals(self) -> dict[str, int]:
        """Of all leaves, and of the parameters alone."""
        params = [row for row in self.leaves if self.form == "hf" or row.name.startswith("params.")]
        files = {file for row in self.leaves for file in row.files}
        return {
            "leaves": len(self.leaves),
            "parameters": sum(math.prod(row.shape) for row in params),
            "bytes": sum(row.bytes for row in self.leaves),
            "files": len(files),
        }


def contents(path: str) -> Contents:
    """What is at a path. Raises FileNotFoundError where there is no checkpoint, ValueError for a damaged one."""
    native = checkpoint_paths.native(path)
    return _native(native) if native is not None else _hf(path)


def run(options: Inspect) -> int:
    """Print it; the exit status. Raises as ``contents``."""
    found = contents(options.path)
    if options.json:
        print(json.dumps({**asdict(found), "totals": found.totals}, indent=1))
        return 0
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    table = Table(title=Text(f"{found.path} ({found.form})"), title_justify="left")
    for column, justify in (("leaf", "left"), ("shape", "left"), ("dtype", "left"), ("bytes", "right")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("pieces", justify="right")
    table.add_column("files", overflow="fold")
    for row in found.leaves:
        shape = " x ".join(map(str, row.shape)) or "-"
        cells = (row.name, shape, row.dtype, f"{row.bytes:,}", str(row.pieces), ", ".join(row.files))
        table.add_row(*map(Text, cells))
    console.print(table)
    for name, value in found.facts.items():
        console.print(Text(f"{name:22}{value if isinstance(value, str) else json.dumps(value)}"))
    total = "{leaves:,} leaves, {parameters:,} parameters, {bytes:,} bytes in {files:,} files".format(**found.totals)
    console.print(Text(f"{'total':22}{total}"))
    return 0


def _native(path: str) -> Contents:
    manifest = checkpoint.read_manifest(path)
    files = data_files(manifest)
    rows = []
    for name, leaf in manifest["leaves"].items():
        pieces = leaf.get("pieces", [{"file": 0}])  # the first format has whole leaves
        homes = dict.fromkeys(files[piece["file"]] for piece in pieces)
        size = math.prod(leaf["shape"]) * getattr(torch, leaf["dtype"]).itemsize
        rows.append(Row(name, tuple(leaf["shape"]), leaf["dtype"], size, len(pieces), tuple(homes)))
    known = ("format", "step", "position", "metrics", "layout", "versions")
    return Contents(path, "native", {key: manifest[key] for key in known if key in manifest}, tuple(rows))


def _hf(path: str) -> Contents:
    rows = []
    place, files = checkpoint_paths.safetensors(path)
    for file in files:
        with place.open(file) as stream:
            tensors, _ = hf_reading.head_of(place, file, stream)
        for name, stored in tensors.items():
            dtype = str(stored.dtype).removeprefix("torch.")
            rows.append(Row(name, stored.shape, dtype, stored.nbytes, 1, (file,)))
    return Contents(os.fspath(path), "hf", _config(place), tuple(rows))


def _config(place: Folder) -> dict[str, Any]:
    """What config.json, if there is one, says of the model."""
    if place.size("config.json") is None:
        return {}
    try:
        with place.open("config.json") as stream:
            config = json.loads(stream.read())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}/config.json is damaged: {error}") from error
    known = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version")
    return {key: config[key] for key in known if isinstance(config, dict) and config.get(key) is not None}
