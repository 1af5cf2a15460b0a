"""The safetensors format: a header in JSON, and the bytes of the tensors, one after the other.

The library writes and opens whole files of this machine; here tensors are written as they come, and parts of them read,
from any file system. Whoever knows safetensors opens the files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Any, BinaryIO

import torch

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
KINDS = {name: dtype for dtype, name in DTYPES.items()}
PARALLEL = hasattr(os, "preadv")  # not on Windows
_LONGEST = 100_000_000  # bytes of a header, as in the library
_BLOCK = 2**24  # bytes of rows that are read for some columns of theirs


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, ``start`` being the position of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError for a dtype that safetensors does not have."""
    if dtype not in DTYPES:
        raise TypeError(f"{name}: {dtype}, which safetensors does not have")


def head(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """(what stands before the tensors, {name: position of its first byte}); they follow in the order given.

    Each is aligned to its dtype if the widest come first. Raises TypeError for a dtype that safetensors does not have.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    size = 0
    starts = {}
    for name, (dtype, shape) in tensors.items():
        check_dtype(name, dtype)
        starts[name], end = size, size + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}


def read_head(stream: BinaryIO, size: int) -> tuple[dict[str, Stored], dict[str, str]]:
    """(tensors by name, metadata) of a file of ``size`` bytes. Raises ValueError where it is damaged, or no such file.

    As the library does, it refuses tensors that overlap, or do not make up the file.
    """
    length = int.from_bytes(stream.read(8), "little")
    if not 0 < length <= min(_LONGEST, size - 8):
        raise ValueError(f"its header would have {length} bytes")
    try:
        header = json.loads(stream.read(length))
        metadata = header.pop("__metadata__", None) or {}
        spans = sorted((entry["data_offsets"], name) for name, entry in header.items())
        tensors = {name: _stored(name, header[name], 8 + length) for _, name in spans}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its header is none of safetensors ({type(error).__name__}: {error})") from error
    end = 8 + length
    for name, tensor in tensors.items():
        if tensor.start != end:
            raise ValueError(f"{name} begins at byte {tensor.start}, expected {end}")
        end += tensor.nbytes
    if end != size:
        raise ValueError(f"it has {size} bytes, expected {end}")
    return tensors, {str(key): str(value) for key, value in metadata.items()}


def read_part(stream: BinaryIO, stored: Stored, part: tuple[slice, ...] = ()) -> torch.Tensor:
    """A tensor, or the rows ``(rows,)`` or the columns ``(slice(None), columns)`` of it, in the host's memory.

    Beside the result it takes some rows' memory at most. Raises ValueError where the file ends too early.
    """
    if not part:
        return _read(stream, stored.start, stored.shape, stored.dtype)
    rows, columns = range(*part[0].indices(stored.shape[0])), part[1:]
    width = math.prod(stored.shape[1:])

    def lines(first: int, stop: int) -> torch.Tensor:
        shape = (stop - first, *stored.shape[1:])
        return _read(stream, stored.start + first * width * stored.dtype.itemsize, shape, stored.dtype)

    wanted = range(*columns[0].indices(stored.shape[1])) if columns else None
    if wanted is None or wanted == range(stored.shape[1]):
        return lines(rows.start, rows.stop)
    found = torch.empty(len(rows), len(wanted), *stored.shape[2:], dtype=stored.dtype)
    step = max(1, _BLOCK // max(1, width * stored.dtype.itemsize))
    for first in range(rows.start, rows.stop, step):
        stop = min(first + step, rows.stop)
        found[first - rows.start : stop - rows.start] = lines(first, stop)[:, columns[0]]
    return found


def read_at(stream: BinaryIO, at: int, data: memoryview) -> None:
    """Fill ``data`` from byte ``at`` on; of a file of this machine, threads may do so at once.

    Raises ValueError where the file ends too early.
    """
    done = 0
    while done < len(data):
        if PARALLEL and isinstance(stream, FileIO):
            got = os.preadv(stream.fileno(), [data[done:]], at + done)
        else:
            stream.seek(at + done)
            got = stream.readinto(data[done:])  # type: ignore[attr-defined]
        if not got:
            raise ValueError("it ends too early")
        done += got


def as_bytes(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    return memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read(stream: BinaryIO, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    found = torch.empty(shape, dtype=dtype)
    read_at(stream, at, as_bytes(found))
    return found


def _stored(name: str, entry: Mapping[str, Any], base: int) -> Stored:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
        raise ValueError(f"{name} has shape {list(shape)} at {begin} to {end}")
    if entry["dtype"] not in KINDS:
        raise ValueError(f"{name} has dtype {entry['dtype']!r}, which is not known")
    stored = Stored(KINDS[entry["dtype"]], shape, base + begin)
    if stored.nbytes != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes, expected {stored.nbytes}")
    return stored
