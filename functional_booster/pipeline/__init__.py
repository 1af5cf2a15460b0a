"""Pipeline parallelism: schedules as data, one program cut into stages, and one interpreter.

A family of schedules is a pure function of sizes (``gpipe``, ``one_f_one_b``, ``interleaved``, ``zero_bubble_v``). Your
own is a ``Schedule`` of compute actions, completed by ``with_transfers``; ``check`` proves it, ``simulate`` times it,
``draw`` shows it, ``run`` and ``run_rank`` execute it. What they execute is an ``Objective``: a loss function, cut
where ``split`` puts its layers.
"""

from __future__ import annotations

from .actions import Action, Kind, Schedule, looped, v_shaped
from .checking import check
from .gpipe import gpipe
from .interleaved import interleaved
from .interpreter import Outcome, Program, run, run_rank
from .objective import Objective, chain
from .one_f_one_b import one_f_one_b
from .picture import draw
from .plugin import PipelineParallel
from .simulation import Costs, Span, Timeline, simulate
from .splitting import Split, split
from .transfers import with_transfers
from .transport import Processes, Transport
from .zero_bubble_v import zero_bubble_v

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Objective",
    "Outcome",
    "PipelineParallel",
    "Processes",
    "Program",
    "Schedule",
    "Span",
    "Split",
    "Timeline",
    "Transport",
    "chain",
    "check",
    "draw",
    "gpipe",
    "interleaved",
    "looped",
    "one_f_one_b",
    "run",
    "run_rank",
    "simulate",
    "split",
    "v_shaped",
    "with_transfers",
    "zero_bubble_v",
]
