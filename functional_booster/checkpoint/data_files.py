"""One process's data file: safetensors, written in one pass with its checksums.

The safetensors library writes to local paths only, and takes each tensor's bytes twice; the format itself is a header
in JSON and the bytes of the tensors, one after the other. Any reader of safetensors opens the files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
import zlib
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Any

import torch

from .folders import Folder
from .manifest import CHUNK
from .snapshots import Snapshot

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
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


def write(place: Folder, name: str, taken: Snapshot) -> dict[str, Any]:
    """Write a snapshot's pieces; returns {"file": {name, size}, "pieces": {leaf: [piece, ...]}} as manifests have them.

    Raises TypeError for a dtype that safetensors does not have, OSError where it cannot be written.
    """
    pieces = sorted(taken.pieces, key=lambda piece: -piece.values.itemsize)  # each is aligned to its own dtype, then
    header: dict[str, Any] = {}
    places = []
    size = 0
    for piece in pieces:
        if piece.values.dtype not in DTYPES:
            raise TypeError(f"{piece.leaf}: {piece.values.dtype}, which safetensors does not have")
        shape, count = taken.leaves[piece.leaf]["shape"], len(piece.values)
        whole = count == math.prod(shape)
        key = piece.leaf if whole else f"{piece.leaf}[{piece.start}:{piece.start + count}]"
        header[key] = {
            "dtype": DTYPES[piece.values.dtype],
            "shape": shape if whole else [count],
            "data_offsets": [size, size + piece.values.nbytes],
        }
        places.append(size)
        size += piece.values.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    start = 8 + len(head)
    with place.create(name) as stream, _checksums() as (queue, sums):
        stream.write(len(head).to_bytes(8, "little") + head)
        for chunk in itertools.chain.from_iterable(chunks(piece.values, CHUNK) for piece in pieces):
            queue.put(chunk)
            stream.write(chunk)
    described: dict[str, list[dict[str, Any]]] = {}
    in_order = iter(sums)
    for piece, at in zip(pieces, places, strict=True):
        span = [piece.start, piece.start + len(piece.values)]
        own = list(itertools.islice(in_order, -(-piece.values.nbytes // CHUNK)))
        described.setdefault(piece.leaf, []).append({"offset": start + at, "range": span, "crc32": own})
    return {"file": {"name": name, "size": start + size}, "pieces": described}


@contextlib.contextmanager
def _checksums() -> Generator[tuple[SimpleQueue[memoryview | None], list[int]]]:
    """A queue for chunks, and their CRC-32s, all of them at the end: a thread computes them while others write.

    No executor's, as these take no work while the interpreter exits, when a save may be going on.
    """
    queue: SimpleQueue[memoryview | None] = SimpleQueue()
    sums: list[int] = []
    thread = threading.Thread(target=lambda: sums.extend(map(zlib.crc32, iter(queue.get, None))))
    thread.start()
    try:
        yield queue, sums
    finally:
        queue.put(None)
        thread.join()


def chunks(values: torch.Tensor, size: int) -> Iterator[memoryview]:
    """The bytes of a tensor (N,) in the host's memory, ``size`` at a time."""
    data = as_bytes(values)
    return (data[at : at + size] for at in range(0, len(data), size))


def as_bytes(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor (N,) of the host."""
    return memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
