"""Patterns of leaf names: which leaves a precision treats apart."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a dotted name has, anywhere, entries that those of one of the patterns match one by one.

    Shell patterns: ``lm_head``, ``h.0`` and ``layers.*.mlp`` match ``lm_head.weight``, ``transformer.h.0.ln_1.bias``
    and ``model.layers.3.mlp.up_proj.weight``.
    """
    path = name.split(".")
    for entries in (pattern.split(".") for pattern in patterns):
        starts = range(len(path) - len(entries) + 1)
        if any(all(map(fnmatchcase, path[start:], entries)) for start in starts):
            return True
    return False


def checked(argument: str, patterns: Any) -> tuple[str, ...]:
    """The patterns as a tuple; raises TypeError, naming the argument, for anything else."""
    if isinstance(patterns, str) or not isinstance(patterns, Collection):
        raise TypeError(f"{argument}: {patterns!r}, expected a tuple of patterns of leaf names, such as ('lm_head',)")
    if wrong := next((pattern for pattern in patterns if not isinstance(pattern, str)), None):
        raise TypeError(f"{argument}: {wrong!r}, expected patterns of leaf names, such as 'lm_head'")
    return tuple(patterns)


def require_matches(argument: str, patterns: Collection[str], names: Sequence[str]) -> None:
    """Raise ValueError, with what there is, for patterns that match none of the names."""
    if idle := [pattern for pattern in patterns if not any(matches(name, (pattern,)) for name in names)]:
        some = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        raise ValueError(f"{argument}: {', '.join(map(repr, idle))} matches no name of the parameter tree: {some}")
