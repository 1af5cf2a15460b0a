"""Pictures for people."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from functional_booster.kernels import flat
from functional_booster.sharding.mesh import Mesh
from functional_booster.sharding.units import unit_of

from .lowered import readable_bytes
from .pipeline import picture
from .trackers import read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .pipeline import Schedule, Timeline
    from .state import TrainState

Records = Iterable[Mapping[str, Any]]


def loss(
    metrics: str | os.PathLike[str] | Records,
    path: str | os.PathLike[str] | None = None,
    *,
    references: Mapping[str, float] | None = None,
    unit: str = "token",
) -> Figure:
    """The loss curve as a matplotlib Figure (shown by a notebook under
    ``%matplotlib inline``), saved to ``path`` as its ending says if given.

    ``metrics`` is a metrics.jsonl or its records: ``step`` with ``loss`` and ``eval_loss``, where there are any.
    ``references`` are dashed lines to compare with: {label: nats}; ``unit`` is what a loss is counted by, "token" or
    "byte". Raises ValueError when no record has a loss.
    """
    from matplotlib.figure import Figure

    records = read_jsonl(metrics) if isinstance(metrics, str | os.PathLike) else list(metrics)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    drawn = False
    for name, label, style in (("loss", "train", "-"), ("eval_loss", "validation", "o-")):
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o" if len(points) == 1 else style, label=label, markersize=4)
            drawn = True
    if not drawn:
        raise ValueError("metrics: no record has a loss or an eval_loss to draw")
    for label, value in (references or {}).items():
        axes.axhline(value, linestyle="--", color="gray", label=f"{label} {value:.2f}")
    axes.set(xlabel="steps", ylabel=f"loss (nats per {unit})")
    axes.grid(alpha=0.3)
    axes.legend()
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def sharding(state: TrainState, path: str | os.PathLike[str] | None = None) -> Figure:
    """Which rank holds what of a state's parameters, as a matplotlib Figure, saved to ``path`` if given.

    ``state`` may be abstract (``booster.abstract(model, tx)``). A row is a bucket, named by its units, from its first
    element to its last; a colour is a rank. Ranks that hold the same share a row's height; padding is hatched, and
    white lines are where leaves begin.
    """
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm
    from matplotlib.figure import Figure

    mesh = state.plan.mesh
    rows = [(layout, bucket) for layout in state.layouts if layout is not None for bucket in _in_order(layout)]
    figure = Figure(figsize=(7, max(2.2, 1.2 + 0.32 * len(rows))), layout="constrained")
    axes = figure.add_subplot()
    colours = ScalarMappable(BoundaryNorm([rank - 0.5 for rank in range(mesh.size + 1)], 256), "viridis")
    for row, (layout, bucket) in enumerate(rows):
        _draw_bucket(axes, row, layout, bucket, mesh, colours.to_rgba(np.arange(mesh.size)))
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.6), xlabel="part of the bucket", xticks=(0, 0.5, 1))
    axes.set_yticks(range(len(rows)), [_label(layout, bucket) for layout, bucket in rows])
    axes.set_title(f"{type(state.plan.plugin).__name__}, {mesh.size} rank{'s' if mesh.size > 1 else ''}")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    sizes = axes.secondary_yaxis("right")
    sizes.set_yticks(range(len(rows)), [_bytes(layout, bucket) for layout, bucket in rows])
    sizes.tick_params(length=0)
    sizes.spines[:].set_visible(False)
    bar = figure.colorbar(colours, ax=axes, label="rank")
    bar.set_ticks(range(0, mesh.size, math.ceil(mesh.size / 8)))
    bar.ax.tick_params(length=0)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def schedule(what: Schedule | Timeline, path: str | os.PathLike[str] | None = None) -> Figure:
    """The Gantt chart of a pipeline's schedule, or of a run's measured times: ``pipeline.draw``."""
    return picture.draw(what, path)


def _draw_bucket(axes: Axes, row: int, layout: flat.Layout, bucket: str, mesh: Mesh, colours: Any) -> None:
    """Each rank's part of a bucket, along the row; below one another the ranks that hold the same part."""
    split = layout.axes[bucket]
    parts, height = mesh.extent(split), 0.8 * mesh.extent(split) / mesh.size
    order = (*(place for place, name in enumerate(mesh.names) if name not in split), *map(mesh.names.index, split))
    holders = torch.arange(mesh.size).reshape(mesh.shape).permute(order).reshape(-1, parts)
    for replica, ranks in enumerate(holders.tolist()):
        spans = [(part / parts, 1 / parts) for part in range(parts)]
        axes.broken_barh(spans, (row - 0.4 + replica * height, height), facecolors=[colours[rank] for rank in ranks])
    size = layout.size(bucket)
    if layout.buckets[bucket][0].offset is None:
        return
    offset, starts, empty = 0, [], []
    for place, length in enumerate(layout.sections(bucket)):
        if place % 2 == 0:
            starts.append(offset / size)
        elif length:
            empty.append((offset / size, length / size))
        offset += length
    axes.vlines(starts[1:], row - 0.4, row + 0.4, colors="white", linewidth=0.8)
    axes.broken_barh(empty, (row - 0.4, 0.8), facecolors="white", alpha=0.6)
    axes.broken_barh(empty, (row - 0.4, 0.8), facecolors="none", edgecolor="black", hatch="////", linewidth=0.4)


def _in_order(layout: flat.Layout) -> list[str]:
    """The buckets in the order of the leaves."""
    return list(dict.fromkeys(slot.bucket for slot in layout.slots))


def _label(layout: flat.Layout, bucket: str) -> str:
    units = list(dict.fromkeys(unit_of(slot.name) for slot in layout.buckets[bucket]))
    where = " (host)" if bucket in layout.host else ""
    return f"{units[0]} ... {units[-1]}{where}" if len(units) > 1 else f"{units[0]}{where}"


def _bytes(layout: flat.Layout, bucket: str) -> str:
    return readable_bytes(layout.size(bucket) * layout.buckets[bucket][0].dtype.itemsize)
