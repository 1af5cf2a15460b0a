"""The Gantt chart of a pipeline."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .actions import Kind, Schedule
from .simulation import Timeline, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOKS = {  # label, colour
    Kind.FORWARD: ("forward", "#4c78a8"),
    Kind.BACKWARD: ("backward", "#54a24b"),
    Kind.INPUT_GRAD: ("input gradient", "#72b7b2"),
    Kind.WEIGHT_GRAD: ("weight gradient", "#e4a33c"),
}


def draw(what: Schedule | Timeline, path: str | os.PathLike[str] | None = None) -> Figure:
    """The Gantt chart of a schedule (``simulate``d with ``Costs()``) or of a timeline, as a matplotlib Figure.

    A row is a rank, a box an action with its microbatch's number; a colour is what it does, and the paler, the later
    the chunk of the rank. White is idle time: the title says how much. Saved to ``path``, as its ending says, if given.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timeline = simulate(what) if isinstance(what, Schedule) else what
    schedule, makespan = timeline.schedule, timeline.makespan
    begin = min(span.start for row in timeline.spans for span in row)
    longest = max(map(len, timeline.spans))
    size = min(16.0, max(6.0, 0.3 * longest)), 1.4 + 0.36 * schedule.ranks
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    for rank, spans in enumerate(timeline.spans):
        held = schedule.held_by(rank)
        for span in spans:
            pale = 0.55 * held.index(span.action.stage) / max(1, len(held) - 1)
            colour = [one + pale * (1 - one) for one in to_rgb(_LOOKS[span.action.kind][1])]
            box = (span.start - begin, span.end - span.start)
            axes.broken_barh([box], (rank - 0.45, 0.9), facecolors=[colour], edgecolor="white", linewidth=0.5)
            if longest <= 120:  # else they would overlap
                label = str(span.action.microbatch)
                axes.text(box[0] + box[1] / 2, rank, label, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, makespan), ylim=(schedule.ranks - 0.5, -0.5), xlabel="time", ylabel="rank")
    axes.set_yticks(range(schedule.ranks))
    axes.set_title(f"{schedule.name}, {schedule.microbatches} microbatches: {timeline.bubble:.1%} idle")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    drawn = {span.action.kind for spans in timeline.spans for span in spans}
    handles = [Patch(color=colour, label=label) for kind, (label, colour) in _LOOKS.items() if kind in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
