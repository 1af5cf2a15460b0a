"""Checkpoints: a directory with safetensors and a JSON manifest, published in one moment, opened by any layout.

Every rank writes what it holds, as ranges of the leaves' elements (``leaves``, ``snapshots``, ``saving``), and reads
what it needs (``reader``, ``loading``); resharding is reading. Files are written under new names and synced; then the
manifest that names them takes the old one's place. A crash at any point leaves the old checkpoint whole or the new one.
Nothing is ever unpickled.
"""

from __future__ import annotations

from .background import Saving
from .loading import LoadReport, load
from .manifest import MANIFEST, read_manifest
from .named import named_tensors
from .reader import read_tensors
from .retention import Retention, complete, kept, latest, numbered, prune, remove
from .saving import save, save_async, write
from .snapshots import Piece, Snapshot, snapshot

__all__ = [
    "MANIFEST",
    "LoadReport",
    "Piece",
    "Retention",
    "Saving",
    "Snapshot",
    "complete",
    "kept",
    "latest",
    "load",
    "named_tensors",
    "numbered",
    "prune",
    "read_manifest",
    "read_tensors",
    "remove",
    "save",
    "save_async",
    "snapshot",
    "write",
]
