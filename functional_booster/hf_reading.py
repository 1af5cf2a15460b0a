"""Reading weights in Hugging Face's form: names and shapes first, then what a rank needs, slice by slice.

safetensors, one file or several beside an index; nothing is unpickled, unless it is asked for: then by torch's
``weights_only`` unpickler.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from . import leaf_store
from .leaf_store import Entry, Leaf
from .models.hf import Source

_PICKLES = (".bin", ".pt", ".pth")
_CHUNK = 2**24  # bytes of two tensors that are compared at once
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Weights:
    """Tensors in files. ``shapes`` and ``floating`` (whether these are floating-point numbers) by name; ``read(name,
    slices)`` gives a part of one; ``metadata``: what stands in the index, or in the file."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    floating: Mapping[str, bool]
    read: Callable[[str, Slices], torch.Tensor]
    metadata: Mapping[str, Any]


class Report(NamedTuple):
    """What does not fit between a checkpoint and a model: names, and ``mismatched`` with what is wrong."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        lines = [*(f"{name}: missing" for name in self.missing), *(f"{name}: unexpected" for name in self.unexpected)]
        return "\n  ".join(sorted([*lines, *self.mismatched]))


@contextlib.contextmanager
def open_weights(path: Path, stem: str = "model", weights_only: bool = False) -> Generator[Weights]:
    """The weights of a directory (``stem``: what their files' names begin with), a file, or an index file.

    Raises FileNotFoundError where there are none, ValueError for pickles without ``weights_only`` and for files that
    are damaged.
    """
    file = _found(path, stem)
    with contextlib.ExitStack() as stack:
        try:
            yield _opened(path, file, weights_only, stack)
        except SafetensorError as error:
            raise ValueError(f"{path}: a file of the weights is damaged: {error}") from error


def compare(entries: Sequence[Entry], weights: Weights, ignored: Callable[[str], bool]) -> Report:
    """What does not fit. Of several names of an entry that are there, all must hold the same numbers."""
    missing, mismatched = [], []
    known = {name for entry in entries for name in entry.names}
    for entry in entries:
        found = _names(entry, weights)
        if not found:
            missing.append(entry.names[0])
        for name in found:
            if weights.shapes[name] != entry.shape:
                mismatched.append(f"{name}: shape {weights.shapes[name]}, expected {entry.shape}")
            elif weights.floating[name] != entry.dtype.is_floating_point:
                kind = "floating-point numbers" if entry.dtype.is_floating_point else "none"
                mismatched.append(f"{name}: expected {kind}, as {entry.dtype}")
            elif name != found[0] and weights.shapes[found[0]] == entry.shape and _differ(weights, found[0], name):
                mismatched.append(f"{name}: differs from {found[0]}, to which it is tied")
    unexpected = [name for name in weights.shapes if name not in known and not ignored(name)]
    return Report(missing, unexpected, mismatched)


def fill(entries: Sequence[Entry], weights: Weights) -> None:
    """Write what fits into the leaves, in place: of each only the pieces that this process has, one at a time."""
    for entry in entries:
        for name in _names(entry, weights)[:1]:
            if weights.shapes[name] == entry.shape and weights.floating[name] == entry.dtype.is_floating_point:
                for source, leaf in entry.parts:
                    _fill(weights, name, source, leaf)


def _fill(weights: Weights, name: str, source: Source, leaf: Leaf) -> None:
    for piece in leaf_store.held(leaf):
        if not leaf.shape:
            leaf_store.write(leaf, piece, weights.read(name, ()))
            continue
        width = leaf.size // leaf.shape[0]
        first, last = piece.start // width, -(-piece.stop // width)
        rows = weights.read(name, source.rows(leaf.shape, first, last))
        rows = rows.mT if source.transposed else rows
        if piece.stop - piece.start < leaf.size:
            rows = rows.reshape(-1)[piece.start - first * width : piece.stop - first * width]
        leaf_store.write(leaf, piece, rows)


def _names(entry: Entry, weights: Weights) -> list[str]:
    return [name for name in entry.names if name in weights.shapes]


def _differ(weights: Weights, one: str, other: str) -> bool:
    shape = weights.shapes[one]
    if not shape:
        return not torch.equal(weights.read(one, ()), weights.read(other, ()))
    rows = max(1, _CHUNK // (8 * max(1, math.prod(shape[1:]))))
    parts = ((slice(first, first + rows),) for first in range(0, shape[0], rows))
    return any(not torch.equal(weights.read(one, part), weights.read(other, part)) for part in parts)


def _found(path: Path, stem: str) -> Path:
    """What transformers would open, a file or an index: one file before an index, safetensors before pickles."""
    if path.is_file():
        return path
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    pickled = f"pytorch_{stem}.bin"
    usual = (f"{stem}.safetensors", f"{stem}.safetensors.index.json", pickled, f"{pickled}.index.json")
    for name in usual:
        if (path / name).is_file():
            return path / name
    prefixed = (f"{stem}.*.safetensors.index.json", f"{stem}.*.safetensors")  # as with a prefix of save_model's
    others = next((found for pattern in prefixed if (found := list(path.glob(pattern)))), [])
    if len(others) == 1:
        return others[0]
    if others:
        names = ", ".join(sorted(file.name for file in others))
        raise ValueError(f"{path} holds several weights: {names}; name one of them")
    raise FileNotFoundError(f"{path} holds no weights: expected {usual[0]}, or {usual[1]} and the files that it names")


def _opened(path: Path, file: Path, weights_only: bool, stack: contextlib.ExitStack) -> Weights:
    metadata: dict[str, Any] = {}
    files, homes = [file], None
    if file.name.endswith(".index.json"):
        metadata, homes = _read_index(file)
        files = [file.parent / name for name in sorted(set(homes.values()))]
        if lost := [one.name for one in files if not one.is_file()]:
            raise FileNotFoundError(f"{path}: missing {', '.join(lost)}, which {file.name} names")
    shapes: dict[str, tuple[int, ...]] = {}
    floating: dict[str, bool] = {}
    readers: dict[str, Callable[[Slices], torch.Tensor]] = {}
    for one in files:
        if one.suffix in _PICKLES:
            tensors = _pickled(one, weights_only)
        else:
            handle = stack.enter_context(safe_open(one, framework="pt"))
            metadata = metadata or dict(handle.metadata() or {})
            tensors = _safe(handle)
        for name, shape, is_floating, read in tensors:
            shapes[name], floating[name], readers[name] = shape, is_floating, read
    if homes is not None and homes.keys() != shapes.keys():
        differing = ", ".join(sorted(homes.keys() ^ shapes.keys()))
        raise ValueError(f"{path}: {file.name} and the files that it names do not hold the same tensors: {differing}")
    return Weights(path, shapes, floating, lambda name, slices: readers[name](slices), metadata)


Found = Iterator[tuple[str, tuple[int, ...], bool, Callable[[Slices], torch.Tensor]]]


def _safe(handle: Any) -> Found:
    for name in handle.keys():  # noqa: SIM118 (it is no dict)
        part = handle.get_slice(name)
        kind = part.get_dtype()
        shape = tuple(part.get_shape())

        def read(slices: Slices, name: str = name) -> torch.Tensor:
            return handle.get_slice(name)[slices] if slices else handle.get_tensor(name)

        yield name, shape, kind.startswith(("F", "BF")), read


def _pickled(file: Path, weights_only: bool) -> Found:
    if not weights_only:
        raise ValueError(
            f"{file} is a pickle, which can run any code when it is read: expected safetensors. To read it with "
            "torch.load(weights_only=True), which builds tensors alone, ask for weights_only=True"
        )
    try:
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file}: it holds more than tensors, and is not read") from error
    if not isinstance(values, Mapping) or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise ValueError(f"{file}: expected a dict of tensors by name")
    for name, value in values.items():
        yield name, tuple(value.shape), value.is_floating_point(), lambda slices, value=value: value[slices]


def _read_index(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    homes = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(homes, dict) or not all(isinstance(name, str) for name in homes.values()):
        raise ValueError(f"{file} is damaged: it has no weight_map of file names")
    if outside := [name for name in homes.values() if Path(name).name != name]:
        raise ValueError(f"{file}: {outside[0]!r} is not a file beside it")
    metadata = index.get("metadata")
    return metadata if isinstance(metadata, dict) else {}, homes
