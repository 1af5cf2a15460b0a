"""One process's data file: safetensors, written in one pass with its checksums.

The safetensors library writes to local paths only, and takes each tensor's bytes twice; the format itself is a header
in JSON and the bytes of the tensors, one after the other. Any reader of safetensors opens the files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Any
from zlib import crc32

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

_BLOCK = 4 * CHUNK  # one write: after each, the thread waits its turn among those that run Python
_THREADS = min(4, os.cpu_count() or 1)  # a CRC-32 takes about as long as a disk


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
        number = itertools.count()
        for block in itertools.chain.from_iterable(chunks(piece.values, _BLOCK) for piece in pieces):
            for at in range(0, len(block), CHUNK):
                queue.put((next(number), block[at : at + CHUNK]))
            stream.write(block)
    described: dict[str, list[dict[str, Any]]] = {}
    in_order = (sums[number] for number in range(len(sums)))
    for piece, at in zip(pieces, places, strict=True):
        span = [piece.start, piece.start + len(piece.values)]
        own = list(itertools.islice(in_order, -(-piece.values.nbytes // CHUNK)))
        described.setdefault(piece.leaf, []).append({"offset": start + at, "range": span, "crc32": own})
    return {"file": {"name": name, "size": start + size}, "pieces": described}


@contextlib.contextmanager
def _checksums() -> Generator[tuple[SimpleQueue[tuple[int, memoryview] | None], dict[int, int]]]:
    """A queue for numbered chunks, and {number: CRC-32}, all of them at the end: threads compute them meanwhile.

    No executor's, as these take no work while the interpreter exits, when a save may be going on.
    """
    queue: SimpleQueue[tuple[int, memoryview] | None] = SimpleQueue()
    sums: dict[int, int] = {}

    def compute() -> None:
        for number, chunk in iter(queue.get, None):
            sums[number] = crc32(chunk)

    threads = [threading.Thread(target=compute) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield queue, sums
    finally:
        for _ in threads:
            queue.put(None)
        for thread in threads:
            thread.join()


def chunks(values: torch.Tensor, size: int) -> Iterator[memoryview]:
    """The bytes of a tensor (N,) in the host's memory, ``size`` at a time."""
    data = as_bytes(values)
    return (data[at : at + size] for at in range(0, len(data), size))


def as_bytes(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor (N,) of the host."""
    return memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
