"""Reading: ranges of the leaves' elements, verified, straight to where they are wanted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from zlib import crc32

import torch

from . import manifest
from .data_files import DTYPES, as_bytes
from .folders import Folder, folder


@dataclass(frozen=True)
class Stored:
    """Elements ``start`` to ``stop`` of a flattened leaf, at byte ``offset`` of a file; ``sums``: the CRC-32 of each
    chunk, None where the whole file was verified."""

    file: str
    offset: int
    start: int
    stop: int
    sums: tuple[int, ...] | None


@dataclass(frozen=True)
class Leaf:
    """A saved leaf, and where its elements are: ``pieces`` by their first element."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Stored, ...]


@dataclass
class Reader:
    """A checkpoint that is read. ``bytes_read`` counts what was. A context manager, which closes the files."""

    place: Folder
    leaves: dict[str, Leaf]
    sizes: dict[str, int]
    chunk: int
    bytes_read: int = 0
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _own: threading.local = field(default_factory=threading.local)  # a thread's files, and memory for a chunk

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._files.close()

    def fill_all(self, wanted: Iterable[tuple[str, int, torch.Tensor]]) -> None:
        """``fill`` of each (name, start, out), some at a time."""
        with ThreadPoolExecutor(self.place.readers) as threads:
            for _ in threads.map(lambda each: self.fill(*each), wanted):  # the first error ends it
                pass

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """Put the leaf's elements from ``start`` on into ``out`` (N,), converted to its dtype, on its device.

        Raises ValueError where the data is damaged.
        """
        end, done = start + len(out), start
        for piece in self.leaves[name].pieces:
            if piece.start <= done < min(piece.stop, end):
                upto = min(piece.stop, end)
                self._fill(name, piece, done - piece.start, out[done - start : upto - start])
                done = upto
        if done < end:
            raise ValueError(f"{self.place} is damaged: {name} is not whole")

    def _fill(self, name: str, piece: Stored, begin: int, out: torch.Tensor) -> None:
        """The elements of a piece from ``begin`` on: a chunk at a time, since whole chunks are what can be verified."""
        dtype = self.leaves[name].dtype
        total, each = (piece.stop - piece.start) * dtype.itemsize, self.chunk // dtype.itemsize
        direct = out.device.type == "cpu" and out.dtype == dtype
        stream = self._stream(piece.file)
        for number in range(begin // each, -(-(begin + len(out)) // each)):
            at, length = number * self.chunk, min(self.chunk, total - number * self.chunk)
            first, stop = number * each, number * each + length // dtype.itemsize
            lo, hi = max(first, begin), min(stop, begin + len(out))
            wanted = out[lo - begin : hi - begin]
            whole = direct and (lo, hi) == (first, stop)
            chunk = wanted.view(torch.uint8) if whole else self._scratch_of(out)[:length]
            data = as_bytes(chunk)
            self._read(stream, piece.file, piece.offset + at, data)
            if piece.sums is not None and crc32(data) != piece.sums[number]:
                raise ValueError(f"{self.place}: {piece.file} is damaged: its checksum does not match, in {name}")
            if not whole:
                wanted.copy_(chunk.view(dtype)[lo - first : hi - first])

    def _read(self, stream: BinaryIO, file: str, at: int, data: memoryview) -> None:
        stream.seek(at)
        done = 0
        while done < len(data):
            got = stream.readinto(data[done:])  # type: ignore[attr-defined]
            if not got:
                raise ValueError(f"{self.place}: {file} is damaged: it ends too early")
            done += got
        with self._lock:
            self.bytes_read += done

    def _stream(self, file: str) -> BinaryIO:
        opened = self._own.__dict__.setdefault("files", {})
        if file not in opened:
            check_size(self.place, file, self.sizes[file])
            with self._lock:
                opened[file] = self._files.enter_context(self.place.open(file))
        return opened[file]

    def _scratch_of(self, out: torch.Tensor) -> torch.Tensor:
        """A chunk's memory in the host; a GPU copies from pinned pages by itself."""
        pinned = out.device.type == "cuda"
        scratch = self._own.__dict__.setdefault("scratch", {})
        if pinned not in scratch:
            scratch[pinned] = torch.empty(self.chunk, dtype=torch.uint8, pin_memory=pinned)
        return scratch[pinned]


def reader(place: Folder) -> Reader:
    """The Reader of a checkpoint of either format; raises FileNotFoundError or ValueError for what is none."""
    content = manifest.read(place)
    if content["format"] == manifest.FIRST_FORMAT:
        return _first(place, content)
    files = content["files"]

    def stored(piece: Mapping[str, Any]) -> Stored:
        start, stop = piece["range"]
        return Stored(files[piece["file"]]["name"], piece["offset"], start, stop, tuple(piece["crc32"]))

    leaves = {
        name: Leaf(
            tuple(leaf["shape"]),
            getattr(torch, leaf["dtype"]),
            tuple(sorted(map(stored, leaf["pieces"]), key=lambda piece: piece.start)),
        )
        for name, leaf in content["leaves"].items()
    }
    return Reader(place, leaves, {file["name"]: file["size"] for file in files}, content["chunk"])


def read_tensors(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """{name: whole leaf} of a checkpoint, in the host's memory: of all, or of those ``names``.

    Raises FileNotFoundError or ValueError for what is no checkpoint or damaged, KeyError for an unknown name.
    """
    with reader(folder(path)) as source:
        found = {}
        for name in source.leaves if names is None else names:
            leaf = source.leaves[name]
            found[name] = torch.empty(leaf.shape, dtype=leaf.dtype)
        source.fill_all((name, 0, tensor.view(-1)) for name, tensor in found.items())
        return found


def check_size(place: Folder, file: str, size: int) -> None:
    """Raise ValueError where a data file is not there, or of another size."""
    if (found := place.size(file)) is None:
        raise ValueError(f"{place}: {file} is missing (if another process is saving here, load again)")
    if found != size:
        raise ValueError(f"{place}: {file} is damaged: {found} bytes, expected {size}")


def _first(place: Folder, content: Mapping[str, Any]) -> Reader:
    """A checkpoint of format 1, whose data file is verified as a whole."""
    file = content["data"]
    if place.size(file) is None:
        raise ValueError(f"{place}: {file} is missing (if another process is saving here, load again)")
    with place.open(file) as stream:
        if _sha256(stream) != content["sha256"]:
            raise ValueError(f"{place}: {file} is damaged: its checksum does not match")
        stream.seek(0)
        try:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
            leaves = {
                name: _of_header(header[name], leaf, 8 + length, file) for name, leaf in content["leaves"].items()
            }
        except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
            told = f"{place}: {file} is damaged: it is not what {manifest.MANIFEST} says ({error})"
            raise ValueError(told) from error
    return Reader(place, leaves, {file: place.size(file) or 0}, manifest.CHUNK)


def _of_header(entry: Mapping[str, Any], leaf: Mapping[str, Any], start: int, file: str) -> Leaf:
    shape, dtype = tuple(leaf["shape"]), getattr(torch, leaf["dtype"])
    begin, end = entry["data_offsets"]
    size = math.prod(shape)
    if (entry["dtype"], tuple(entry["shape"]), end - begin) != (DTYPES[dtype], shape, size * dtype.itemsize):
        raise ValueError(f"{entry}, expected {leaf}")
    return Leaf(shape, dtype, (Stored(file, start + begin, 0, size, None),) if size else ())


def _sha256(stream: BinaryIO) -> str:
    found = hashlib.sha256()
    while block := stream.read(manifest.CHUNK):
        found.update(block)
    return found.hexdigest()
