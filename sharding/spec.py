"""PartitionSpec: which mesh axes split which dim of a leaf."""

from __future__ import annotations

from typing import TypeAlias

AxisNames: TypeAlias = str | tuple[str, ...] | None


class PartitionSpec(tuple[AxisNames, ...]):
    """``P("tp", None)``: an entry a dim, each None, an axis name, or several names (split by the first, then the next).

    Dims beyond the entries are not split. Raises TypeError for an entry of another type and ValueError where one axis
    stands twice: an axis can split a leaf once.
    """

    __slots__ = ()

    def __new__(cls, *entries: AxisNames) -> PartitionSpec:
        seen: set[str] = set()
        for position, entry in enumerate(entries):
            names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            for name in names:
                if not isinstance(name, str):
                    raise TypeError(
                        f"PartitionSpec: entry {position} is {entry!r}, expected None, a name or a tuple of names"
                    )
                if name in seen:
                    raise ValueError(f"PartitionSpec: axis {name!r} stands twice in {entries!r}")
                seen.add(name)
        return super().__new__(cls, entries)

    def __getnewargs__(self) -> tuple[AxisNames, ...]:  # type: ignore[override]  # copies are built entry by entry
        return tuple(self)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


P = PartitionSpec
