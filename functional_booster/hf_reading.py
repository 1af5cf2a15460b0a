"""Reading weights in Hugging Face's form: names and shapes first, then what a rank needs, slice by slice.

safetensors, one file or several beside an index; nothing is unpickled, unless it is asked for: then by torch's
``weights_only`` unpickler.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple

import torch

from .checkpoint import conversions, leaves
from .checkpoint.folders import Folder, Local, file, folder
from .checkpoint.leaves import Leaf, Piece
from .checkpoint.tensor_files import Stored, read_head, read_part
from .hf_entries import Entry
from .models.hf import Source

_PICKLES = (".bin", ".pt", ".pth")
_CHUNK = 2**24  # bytes of two tensors that are looked at at once
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Weights:
    """Tensors in files: ``tensors`` are their shapes and dtypes by name, ``read(name, slices)`` gives a part of one.

    ``files``: the name of the file that each is in; ``metadata``: what stands in the index, or in the file; ``beside``:
    the folder that they are in.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    files: Mapping[str, str]
    read: Callable[[str, Slices], torch.Tensor]
    metadata: Mapping[str, Any]
    beside: Folder


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
def open_weights(path: Any, stem: str = "model", weights_only: bool = False) -> Generator[Weights]:
    """The weights of a directory (``stem``: what their files' names begin with), a file, or an index file.

    ``path`` may be an fsspec URL. Raises FileNotFoundError where there are none, ValueError for pickles without
    ``weights_only`` and for files that are damaged.
    """
    place, name = _found(path, stem)
    with contextlib.ExitStack() as stack:
        yield _opened(path, place, name, weights_only, stack)


Fits = list[tuple[Entry, str]]


def compare(entries: Sequence[Entry], weights: Weights, ignored: Callable[[str], bool]) -> tuple[Report, Fits]:
    """(what does not fit, the entries that do with the name of their tensor).

    Of several names of an entry that are there, all must hold the same numbers. Floating-point numbers fit a dtype in
    which all that are finite stay so; what a narrow one such as float16 is to hold is read for that. Others fit their
    own dtype alone.
    """
    missing, mismatched, fits = [], [], []
    known = {name for entry in entries for name in entry.names}
    for entry in entries:
        found = [name for name in entry.names if name in weights.tensors]
        faults = [f"{name}: {fault}" for name in found if (fault := _fault(entry, name, found[0], weights))]
        mismatched += faults
        if not found:
            missing.append(entry.names[0])
        elif not faults:
            fits.append((entry, found[0]))
    unexpected = [name for name in weights.tensors if name not in known and not ignored(name)]
    return Report(missing, unexpected, mismatched), fits


def fill(fits: Fits, weights: Weights) -> None:
    """Write what fits into the leaves, in place: of each only the pieces that this process has, one at a time."""
    for entry, name in fits:
        for source, leaf in entry.parts:
            for piece in leaves.held(leaf):
                leaves.write(leaf, piece, _read(weights, name, source, leaf, piece))


def head_of(place: Folder, file: str, stream: BinaryIO) -> tuple[dict[str, Stored], dict[str, str]]:
    """(tensors by name, metadata) of a safetensors file that is open. Raises ValueError where it is damaged."""
    try:
        return read_head(stream, place.size(file) or 0)
    except ValueError as error:
        raise ValueError(f"{place}: {file} is damaged: {error}") from error


def _fault(entry: Entry, name: str, first: str, weights: Weights) -> str | None:
    """Why a tensor does not fit an entry; ``first``: another one of the same entry."""
    shape, dtype = weights.tensors[name]
    if shape != entry.shape:
        return f"shape {shape}, expected {entry.shape}"
    if not conversions.converts(dtype, entry.dtype):
        return f"{dtype}, expected {entry.dtype}"
    if name != first and weights.tensors[first][0] == shape and _differ(weights, first, name):
        return f"differs from {first}, to which it is tied"
    parts = _parts(shape) if conversions.narrows(dtype, entry.dtype) else ()
    if any(conversions.overflow(weights.read(name, part), entry.dtype) for part in parts):
        return conversions.beyond(entry.dtype)
    return None


def _read(weights: Weights, name: str, source: Source, leaf: Leaf, piece: Piece) -> torch.Tensor:
    """A piece of a leaf, in any shape."""
    if not leaf.shape:
        return weights.read(name, ())
    width = leaf.size // leaf.shape[0]
    first, last = piece.start // width, -(-piece.stop // width)
    rows = weights.read(name, source.rows(leaf.shape, first, last))
    rows = rows.mT if source.transposed else rows
    if piece.stop - piece.start < leaf.size:
        rows = rows.reshape(-1)[piece.start - first * width : piece.stop - first * width]
    return rows


def _differ(weights: Weights, one: str, other: str) -> bool:
    parts = _parts(weights.tensors[one][0])
    return any(not torch.equal(weights.read(one, part), weights.read(other, part)) for part in parts)


def _parts(shape: tuple[int, ...]) -> Iterator[Slices]:
    """Some rows each."""
    if not shape:
        return iter([()])
    rows = max(1, _CHUNK // (8 * max(1, math.prod(shape[1:]))))
    return ((slice(first, first + rows),) for first in range(0, shape[0], rows))


def _found(path: Any, stem: str) -> tuple[Folder, str]:
    """What transformers would open, a file or an index: one file before an index, safetensors before pickles."""
    place = folder(path)
    if place.is_file():
        return file(path)
    names = place.names()
    if not names and not place.exists():
        raise FileNotFoundError(f"{path} does not exist")
    pickled = f"pytorch_{stem}.bin"
    usual = (f"{stem}.safetensors", f"{stem}.safetensors.index.json", pickled, f"{pickled}.index.json")
    for name in usual:
        if name in names:
            return place, name
    prefixed = (f"{stem}.*.safetensors.index.json", f"{stem}.*.safetensors")  # as with a prefix of save_model's
    others = next((found for one in prefixed if (found := [name for name in names if PurePath(name).match(one)])), [])
    if len(others) == 1:
        return place, others[0]
    if others:
        raise ValueError(f"{path} holds several weights: {', '.join(others)}; name one of them")
    raise FileNotFoundError(f"{path} holds no weights: expected {usual[0]}, or {usual[1]} and the files that it names")


def _opened(path: Any, place: Folder, file: str, weights_only: bool, stack: contextlib.ExitStack) -> Weights:
    metadata: dict[str, Any] = {}
    names, homes = [file], None
    if file.endswith(".index.json"):
        metadata, homes = _read_index(place, file)
        names = sorted(set(homes.values()))
        if lost := [name for name in names if place.size(name) is None]:
            raise FileNotFoundError(f"{path}: missing {', '.join(lost)}, which {file} names")
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    files: dict[str, str] = {}
    readers: dict[str, Callable[[Slices], torch.Tensor]] = {}
    for one in names:
        if one.endswith(_PICKLES):
            found = _pickled(place, one, weights_only, stack)
        else:
            found, described = _safe(place, one, stack)
            metadata = metadata or described
        for name, shape, dtype, read in found:
            tensors[name], files[name], readers[name] = (shape, dtype), one, read
    if homes is not None and homes.keys() != tensors.keys():
        differing = ", ".join(sorted(homes.keys() ^ tensors.keys()))
        raise ValueError(f"{path}: {file} and the files that it names do not hold the same tensors: {differing}")
    return Weights(tensors, files, lambda name, slices: readers[name](slices), metadata, place)


Found = list[tuple[str, tuple[int, ...], torch.dtype, Callable[[Slices], torch.Tensor]]]


def _safe(place: Folder, file: str, stack: contextlib.ExitStack) -> tuple[Found, dict[str, str]]:
    stream = stack.enter_context(place.open(file))
    tensors, metadata = head_of(place, file, stream)

    def reading(name: str) -> Callable[[Slices], torch.Tensor]:
        return lambda slices: read_part(stream, tensors[name], slices)

    return [(name, stored.shape, stored.dtype, reading(name)) for name, stored in tensors.items()], metadata


def _pickled(place: Folder, file: str, weights_only: bool, stack: contextlib.ExitStack) -> Found:
    if not weights_only:
        raise ValueError(
            f"{place}: {file} is a pickle, which can run any code when it is read: expected safetensors. To read it "
            "with torch.load(weights_only=True), which builds tensors alone, ask for weights_only=True"
        )
    source = place.path / file if isinstance(place, Local) else stack.enter_context(place.open(file))
    in_parts = isinstance(place, Local) and zipfile.is_zipfile(source)  # not in torch's form of before 1.6, nor at URLs
    try:
        values = torch.load(source, map_location="cpu", weights_only=True, mmap=in_parts)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{place}: {file}: it holds more than tensors, or is damaged, and is not read") from error
    except OSError:
        raise
    except Exception as error:  # whatever odd bytes make of the unpickler's own errors
        raise ValueError(f"{place}: {file} is damaged: {error}") from error
    if not isinstance(values, Mapping) or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise ValueError(f"{place}: {file}: expected a dict of tensors by name")

    def reading(value: torch.Tensor) -> Callable[[Slices], torch.Tensor]:
        return lambda slices: value[slices]

    return [(name, tuple(value.shape), value.dtype, reading(value)) for name, value in values.items()]


def _read_index(place: Folder, file: str) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        with place.open(file) as stream:
            index = json.loads(stream.read())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {file} is damaged: {error}") from error
    homes = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(homes, dict) or not all(isinstance(name, str) for name in homes.values()):
        raise ValueError(f"{place}: {file} is damaged: it has no weight_map of file names")
    if outside := [name for name in homes.values() if PurePath(name).name != name]:
        raise ValueError(f"{place}: {file}: {outside[0]!r} is not a file beside it")
    metadata = index.get("metadata")
    return metadata if isinstance(metadata, dict) else {}, homes
