"""Reading: ranges of the leaves' elements, verified, straight to where they are wanted."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar

import torch

from . import conversions, host_memory, manifest, tensor_files
from .checksum import crc32
from .folders import Folder, folder
from .tensor_files import as_bytes, read_at, read_head

Found = TypeVar("Found")


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


class Vanished(ValueError):
    """A data file is not there: the checkpoint is damaged, unless it was replaced by another one meanwhile."""


@dataclass
class Reader:
    """A checkpoint that is read. A context manager, which closes the files.

    ``bytes_read`` counts what was read; ``lossy``: {leaf: the dtype in which finite numbers of it are infinite}.
    """

    place: Folder
    leaves: dict[str, Leaf]
    sizes: dict[str, int]
    chunk: int
    bytes_read: int = 0
    lossy: dict[str, torch.dtype] = field(default_factory=dict)
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _opened: dict[str, BinaryIO] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _own: threading.local = field(default_factory=threading.local)  # a thread's memory for a chunk

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._files.close()

    def fill_all(self, wanted: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """``fill`` of each (name, start, out), some at a time.

        The files are opened first: on this machine they stay readable then, whatever another process saves here.
        Raises Vanished where one is not there.
        """
        for name, start, out in wanted:
            for piece in self._pieces(name, start, start + len(out)):
                self._open(piece.file)
        with ThreadPoolExecutor(self.place.readers) as threads:
            for _ in threads.map(lambda each: self.fill(*each), wanted):  # the first error ends it
                pass

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """Put the leaf's elements from ``start`` on into ``out`` (N,), converted to its dtype, on its device.

        Raises ValueError where the data is damaged.
        """
        end, done = start + len(out), start
        for piece in self._pieces(name, start, end):
            if piece.start <= done:
                upto = min(piece.stop, end)
                self._fill(name, piece, done - piece.start, out[done - start : upto - start])
                done = upto
        if done < end:
            raise ValueError(f"{self.place} is damaged: {name} is not whole")

    def _pieces(self, name: str, start: int, end: int) -> list[Stored]:
        return [piece for piece in self.leaves[name].pieces if start < piece.stop and piece.start < end]

    def _fill(self, name: str, piece: Stored, begin: int, out: torch.Tensor) -> None:
        """The elements of a piece from ``begin`` on: a chunk at a time, since whole chunks are what can be verified."""
        dtype = self.leaves[name].dtype
        total, each = (piece.stop - piece.start) * dtype.itemsize, self.chunk // dtype.itemsize
        direct = out.device.type == "cpu" and out.dtype == dtype
        stream = self._open(piece.file)
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
                values = chunk.view(dtype)[lo - first : hi - first]
                if conversions.overflow(values, out.dtype):
                    self.lossy[name] = out.dtype
                wanted.copy_(values)

    def _read(self, stream: BinaryIO, file: str, at: int, data: memoryview) -> None:
        try:
            read_at(stream, at, data)
        except FileNotFoundError as error:  # an object store opens nothing
            raise _vanished(self.place, file) from error
        except ValueError as error:
            raise ValueError(f"{self.place}: {file} is damaged: {error}") from error
        with self._lock:
            self.bytes_read += len(data)

    def _open(self, file: str) -> BinaryIO:
        if file not in self._opened:
            try:
                check_size(self.place, file, self.sizes[file])
                self._opened[file] = self._files.enter_context(self.place.open(file))
            except FileNotFoundError as error:
                raise _vanished(self.place, file) from error
        return self._opened[file]

    def _scratch_of(self, out: torch.Tensor) -> torch.Tensor:
        """A chunk's memory in the host; a GPU copies from pinned pages by itself."""
        pinned = out.device.type == "cuda"
        scratch = self._own.__dict__.setdefault("scratch", {})
        if pinned not in scratch:
            scratch[pinned] = torch.empty(self.chunk, dtype=torch.uint8, pin_memory=pinned)
        return scratch[pinned]


def reader(place: Folder, content: Mapping[str, Any]) -> Reader:
    """The Reader of a checkpoint of either format, of which this is the manifest. Raises ValueError for damage."""
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
    wanted = None if names is None else list(names)

    def read(source: Reader) -> dict[str, torch.Tensor]:
        leaves = {name: source.leaves[name] for name in (source.leaves if wanted is None else wanted)}
        found = {name: host_memory.empty(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
        source.fill_all([(name, 0, tensor.view(-1)) for name, tensor in found.items()])
        return found

    return consistent(folder(path), read)


def consistent(
    place: Folder,
    read: Callable[[Reader], Found],
    together: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    alike: Callable[[str], bool] = bool,
) -> Found:
    """``read`` a checkpoint, as one save has left it, however often another process saves there meanwhile.

    Where a file of it goes while it is read, as another manifest has taken its place, it is read anew: each time one
    save more has been completed. Raises Vanished where the manifest is as before. Processes that read together do so
    in a context ``together()``, and tell ``alike`` which save they have read ("": none), which is whether it is one.
    """
    before: dict[str, Any] | None = None
    while True:
        said, found = "", list[Found]()
        with together():
            content = manifest.read(place)
            try:
                with reader(place, content) as source:
                    found.append(read(source))
                said = hashlib.sha256(repr(manifest.data_files(content)).encode()).hexdigest()  # new names each time
            except Vanished:
                if content == before:
                    raise
        if alike(said):
            return found[0]
        before = content


def check_size(place: Folder, file: str, size: int) -> None:
    """Raise ValueError where a data file is not there, or of another size."""
    if (found := place.size(file)) is None:
        raise _vanished(place, file)
    if found != size:
        raise ValueError(f"{place}: {file} is damaged: {found} bytes, expected {size}")


def _vanished(place: Folder, file: str) -> Vanished:
    return Vanished(f"{place}: {file} is missing")


def _first(place: Folder, content: Mapping[str, Any]) -> Reader:
    """A checkpoint of format 1, whose data file is verified as a whole."""
    file = content["data"]
    size = place.size(file) or 0
    with contextlib.ExitStack() as opened:
        try:
            stream = opened.enter_context(place.open(file))
        except FileNotFoundError as error:
            raise _vanished(place, file) from error
        if _sha256(stream) != content["sha256"]:
            raise ValueError(f"{place}: {file} is damaged: its checksum does not match")
        stream.seek(0)
        try:
            tensors, _ = read_head(stream, size)
            leaves = {name: _of_header(tensors[name], leaf, file) for name, leaf in content["leaves"].items()}
        except (ValueError, KeyError) as error:
            told = f"{place}: {file} is damaged: it is not what {manifest.MANIFEST} says ({error})"
            raise ValueError(told) from error
    return Reader(place, leaves, {file: size}, manifest.CHUNK)


def _of_header(stored: tensor_files.Stored, leaf: Mapping[str, Any], file: str) -> Leaf:
    shape, dtype = tuple(leaf["shape"]), getattr(torch, leaf["dtype"])
    if (stored.dtype, stored.shape) != (dtype, shape):
        raise ValueError(f"{stored}, expected {leaf}")
    size = math.prod(shape)
    return Leaf(shape, dtype, (Stored(file, stored.start, 0, size, None),) if size else ())


def _sha256(stream: BinaryIO) -> str:
    found = hashlib.sha256()
    while block := stream.read(manifest.CHUNK):
        found.update(block)
    return found.hexdigest()
