"""One process's data file: safetensors, written in one pass with its checksums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
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
    # Beside the writing, checksums and what comes from a GPU cost no time.
    with ThreadPoolExecutor(2) as beside, place.create(name) as stream:
        stream.write(before)
        staged = Staging(beside)
        for piece, start in zip(pieces, starts.values(), strict=True):
            sums = []
            for chunk in staged.chunks(piece.values):
                wanted = beside.submit(crc32, chunk).result if len(chunk) > _SMALL else partial(crc32, chunk)
                stream.write(chunk)
                sums.append(wanted())
            size = start + piece.values.nbytes
            span = [piece.start, piece.start + len(piece.values)]
            found = {"offset": start, "range": span, "crc32": sums}
            described.setdefault(piece.leaf, []).append(found)
    return {"file": {"name": name, "size": size}, "pieces": described}


class Staging:
    """The bytes of tensors, a chunk at a time; those of a GPU through pinned memory, the next one while one is used."""

    def __init__(self, beside: Executor) -> None:
        self._beside = beside
        self._halves: list[torch.Tensor] = []

    def chunks(self, values: torch.Tensor) -> Iterator[memoryview]:
        """The chunks of a tensor (N,), each of which is to be used before the next one is asked for."""
        if values.device.type == "cpu":
            data = as_bytes(values)
            return (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
        return self._brought(values)

    def _brought(self, values: torch.Tensor) -> Iterator[memoryview]:
        if not self._halves:
            with torch.inference_mode(mode=False):  # another thread writes to them
                self._halves = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=values.is_cuda) for _ in range(2)]
        if values.is_cuda:
            torch.cuda.current_stream(values.device).synchronize()  # that thread has a stream of its own
        parts = values.view(torch.uint8).split(CHUNK)
        halves = [self._halves[number % 2][: len(part)] for number, part in enumerate(parts)]
        coming = self._beside.submit(halves[0].copy_, parts[0])
        for number in range(len(parts)):
            ready = coming.result()
            if number + 1 < len(parts):
                coming = self._beside.submit(halves[number + 1].copy_, parts[number + 1])
            yield as_bytes(ready)
