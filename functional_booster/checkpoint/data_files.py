"""One process's data file: safetensors, written in one pass with its checksums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from .checksum import crc32
from .folders import Folder
from .manifest import CHUNK
from .snapshots import Snapshot
from .tensor_files import as_bytes, head

_SMALL = 2**16  # bytes, whose checksum takes less time than to tell a thread of them


def write(place: Folder, name: str, taken: Snapshot) -> dict[str, Any]:
    """Write a snapshot's pieces; returns {"file": {name, size}, "pieces": {leaf: [piece, ...]}} as manifests have them.

    Raises TypeError for a dtype that safetensors does not have, OSError where it cannot be written.
    """
    pieces = sorted(taken.pieces, key=lambda piece: -piece.values.itemsize)  # each is aligned to its own dtype, then
    tensors = {}
    for piece in pieces:
        shape, count = tuple(taken.leaves[piece.leaf]["shape"]), len(piece.values)
        whole = count == math.prod(shape)
        key = piece.leaf if whole else f"{piece.leaf}[{piece.start}:{piece.start + count}]"
        tensors[key] = (piece.values.dtype, shape if whole else (count,))
    before, starts = head(tensors)
    described: dict[str, list[dict[str, Any]]] = {}
    size = len(before)
    with ThreadPoolExecutor(1) as beside, place.create(name) as stream:  # beside the writing, checksums cost no time
        stream.write(before)
        for piece, start in zip(pieces, starts.values(), strict=True):
            sums: list[Callable[[], int]] = []
            for chunk in chunks(piece.values):
                sums.append(beside.submit(crc32, chunk).result if len(chunk) > _SMALL else partial(crc32, chunk))
                stream.write(chunk)
            size = start + piece.values.nbytes
            span = [piece.start, piece.start + len(piece.values)]
            found = {"offset": start, "range": span, "crc32": [each() for each in sums]}
            described.setdefault(piece.leaf, []).append(found)
    return {"file": {"name": name, "size": size}, "pieces": described}


def chunks(values: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor (N,) in the host's memory, a chunk at a time."""
    data = as_bytes(values)
    return (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
