"""Pictures for people."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .trackers import read_jsonl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
