"""Text as bytes, and batches as a pure function of (seed, position).

The data keeps no state: batch number ``position`` of a run is computed, not iterated to, so that a resumed run reads
exactly what it would have read, and any batch can be looked at without running the ones before.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from .sampler import shuffled

Batch = dict[str, torch.Tensor]

VOCABULARY = 256  # a token is a byte
SEPARATOR = b"\n"  # between two files
_NOT_SOURCE = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
_SNIFFED = 8192  # bytes looked at to tell text from binary, as git does


def text_files(path: str | os.PathLike[str] | None = None, without: str | os.PathLike[str] | None = None) -> list[Path]:
    """The text files at ``path``: the file itself, or every readable one under a folder, sorted by relative name.

    What lies in the folder ``without`` is left out: a run writes there, and its text must not change.

    None stands for the source of Python's standard library (without its tests), which is real text on every machine. A
    file is text when its first 8 KiB hold no NUL byte; hidden files and folders are left out. Raises FileNotFoundError
    for a missing path, PermissionError for an unreadable file, ValueError where there is no text; all name the path.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
    if not root.exists():
        raise FileNotFoundError(f"{root}: no such file or folder, expected a text file or a folder of them")
    if root.is_file():
        try:
            if not _is_text(root):
                raise ValueError(f"{root}: holds NUL bytes, expected a text file")
        except PermissionError:
            raise PermissionError(f"{root}: no permission to read it") from None
        return [root]
    if not root.is_dir():
        raise ValueError(f"{root}: a device or a pipe, expected a text file or a folder of them")
    relative = (file.relative_to(root) for file in root.rglob("*.py" if path is None else "*"))
    wanted = (name for name in relative if not any(part.startswith(".") for part in name.parts))
    if path is None:
        wanted = (name for name in wanted if _NOT_SOURCE.isdisjoint(name.parts))
    files = [root / name for name in sorted(wanted, key=Path.as_posix)]
    if without is not None:
        skipped = Path(without).resolve()
        files = [file for file in files if skipped not in file.resolve().parents]
    texts = [file for file in files if file.is_file() and _is_readable_text(file)]
    if not texts:
        raise ValueError(f"{root}: no readable text file in this folder")
    return texts


def bytes_of(files: Iterable[str | os.PathLike[str]]) -> torch.Tensor:
    """The files' bytes joined by a newline: uint8 (N,). Raises ValueError, naming the files, when all are empty."""
    paths = [Path(file) for file in files]
    contents = [path.read_bytes() for path in paths]
    if not any(contents):
        raise ValueError(f"{', '.join(map(str, paths)) or 'no files'}: empty, expected text")
    return torch.frombuffer(bytearray(SEPARATOR.join(contents)), dtype=torch.uint8)


def split(text: torch.Tensor, fraction: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """(train, validation): the last ``fraction`` of the text is held out, in one piece so that nothing leaks.

    Raises ValueError for a fraction outside (0, 1).
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction: {fraction}, expected a number between 0 and 1")
    held_out = math.ceil(len(text) * fraction)
    return text[: len(text) - held_out], text[len(text) - held_out :]


def unigram_entropy(text: torch.Tensor) -> float:
    """The entropy of the text's byte frequencies, in nats per byte: the loss of the best model without context."""
    counts = torch.bincount(text, minlength=VOCABULARY).double()
    frequencies = counts[counts > 0] / counts.sum()
    return -(frequencies * frequencies.log()).sum().item()


def indices(position: int, batch_size: int, size: int, seed: int) -> torch.Tensor:
    """Which of ``size`` examples batch number ``position`` holds: int64 (batch_size,), a pure function.

    Epochs follow one another without a seam: each visits every example once, in its own random order, and a batch that
    reaches the end of one goes on with the next, so that nothing is dropped or padded and every batch has one shape.
    """
    if not 0 < batch_size <= size:
        raise ValueError(f"batch_size: {batch_size}, expected 1 to {size}, the number of examples")
    if position < 0:
        raise ValueError(f"position: {position}, expected a number of batches")
    epoch, start = divmod(position * batch_size, size)
    here = min(batch_size, size - start)
    rows = shuffled(np.arange(start, start + here), size, seed, epoch)
    then = shuffled(np.arange(batch_size - here), size, seed, epoch + 1)
    return torch.from_numpy(np.concatenate([rows, then]))


def batches(
    text: torch.Tensor, batch_size: int, length: int, seed: int = 0, device: str | torch.device = "cpu"
) -> Callable[[int], Batch]:
    """``position -> {"input_ids", "labels"}``, both int64 (B, T): windows of ``length`` bytes side by side in the text.

    Labels are the input itself; the loss shifts them by one, as Hugging Face's models do. A rest of the text shorter
    than a window is never read. Raises ValueError when the text is too short for one batch.
    """
    if length < 2:
        raise ValueError(f"length: {length}, expected at least 2 bytes, one to read and one to predict")
    if len(text) < length:
        raise ValueError(f"text: {len(text)} bytes are too few for one window of length {length}")
    windows = text[: len(text) // length * length].view(-1, length)
    if not 0 < batch_size <= len(windows):
        raise ValueError(
            f"batch_size: {batch_size}, but {len(text)} bytes of text hold {len(windows)} windows of length {length}"
        )

    def batch(position: int) -> Batch:
        ids = windows[indices(position, batch_size, len(windows), seed)].long()
        if torch.device(device).type == "cuda":
            ids = ids.pin_memory()  # without it the copy would wait for the device
        ids = ids.to(device, non_blocking=True)
        return {"input_ids": ids, "labels": ids}

    return batch


def _is_readable_text(file: Path) -> bool:
    try:
        return _is_text(file)
    except OSError:
        return False


def _is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" not in opened.read(_SNIFFED)
