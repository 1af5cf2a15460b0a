"""The tables of an explanation: what a person reads, as rich renders it."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import torch

from functional_booster.precision import Policy

from .lowered import readable_bytes
from .plugins import Plan
from .rank_memory import Held, Leaf, Work
from .transfers import Transfer

if TYPE_CHECKING:
    from rich.table import Table


def head(plan: Plan, policy: Policy, accumulate: int) -> str:
    """The layout, the dtypes, and the microbatches where there are several."""
    mesh = plan.mesh
    axes = ", ".join(f"{name}={size}" for name, size in mesh.axes)
    where = f"{mesh.size} ranks ({axes})" if mesh.axes else "one device"
    where += f", {accumulate} microbatches a step" if accumulate > 1 else ""
    dtypes = {one.name: getattr(policy, one.name) for one in dataclasses.fields(policy)}
    given = ", ".join(f"{name} {_dtype(dtype)}" for name, dtype in dtypes.items() if dtype is not None)
    return f"{type(plan.plugin).__name__} over {where}\nDtypes: {given or 'as the model has them'}"


def parameters(leaves: tuple[Leaf, ...]) -> Table:
    """The parameters; one row for leaves that differ in numbers of their names, and in buckets, alone."""
    from rich.text import Text

    table = _table("parameter", "", "shape", "dtype", "split over", "bucket", "bytes a rank")
    alike: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", leaf.name)
        alike.setdefault((pattern, leaf.shape, leaf.dtype, leaf.split, leaf.trained), []).append(leaf)
    for (pattern, shape, dtype, split, trained), rows in alike.items():
        buckets = sorted({leaf.bucket for leaf in rows})
        table.add_row(
            Text((pattern if len(rows) > 1 else rows[0].name) + ("" if trained else " (frozen)")),
            f"x {len(rows)}" if len(rows) > 1 else "",
            str(list(shape)),
            _dtype(dtype),
            ", ".join(split) or "whole",
            Text(buckets[0] if len(buckets) == 1 else f"{len(buckets)} buckets"),
            readable_bytes(sum(leaf.bytes for leaf in rows)),
        )
    return table


def sizes(held: Held, work: Work, more: list[tuple[str, str]]) -> Table:
    """What a rank holds, what it takes on top, and ``more`` rows."""
    table = _table("after init", "bytes a rank")
    frozen = [("frozen parameters", held.frozen)] if held.frozen else []
    rows = [("trained parameters", held.parameters), *frozen, ("optimizer state", held.optimizer)]
    rows += [("buffers", held.buffers)] if held.buffers else []
    for name, size in (*rows, ("counters and key", held.counters)):
        table.add_row(name, readable_bytes(size))
    table.add_row("together", readable_bytes(held.total), style="bold")
    for name, size in (("padding", held.padding), ("in the host's memory", held.host)):
        if size:
            table.add_row(f"  of that {name}", readable_bytes(size))
    table.add_section()
    table.add_row("[bold]while a step runs, on top[/bold]", "")
    added = [("parameters, prepared once a step", work.prepared), ("parameters, gathered where used", work.gathered)]
    for name, size in added:
        if size:
            table.add_row(name, readable_bytes(size))
    if work.gathered:
        table.add_row("  the largest bucket of them", readable_bytes(work.largest))
    table.add_row("gradients of a batch", readable_bytes(work.gradients))
    if work.kept != work.gradients:
        table.add_row("  kept of them", readable_bytes(work.kept))
    if work.summed != work.kept:
        table.add_row("gradients, summed over ranks", readable_bytes(work.summed))
    for name, value in more:
        table.add_row(name, value)
    return table


def collectives(moved: tuple[Transfer, ...]) -> Table:
    """What a step moves."""
    table = _table("collectives of a step", "axis", "dtype", "calls", "bytes of results", "bytes sent")
    for one in moved:
        axis = f"{one.axis} ({one.ranks})"
        table.add_row(
            one.op, axis, _dtype(one.dtype), str(one.count), readable_bytes(one.bytes), readable_bytes(one.wire)
        )
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if "bytes" in name or name == "calls" else "left")
    return table


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
