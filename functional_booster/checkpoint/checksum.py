"""CRC-32, as zlib computes it, at memory's speed where there is a wheel of ISA-L for the platform."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
