"""Who is at fault when ranks fail: what each rank reports, and the verdict over all reports, a pure function."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch.distributed as dist


class RankFailure(RuntimeError):
    """A rank failed, died, ended early or went astray. ``rank`` is its number, ``what`` and ``step`` what it did."""

    def __init__(self, message: str, rank: int, what: str, step: int | None) -> None:
        super().__init__(message, rank, what, step)
        self.message, self.rank, self.what, self.step = message, rank, what, step

    def __str__(self) -> str:
        return self.message


class Fault(NamedTuple):
    """Whose fault it is: ``own`` where that rank says so itself. ``count``: the work it was noticed in."""

    own: bool
    count: int
    rank: int
    what: str
    step: int | None
    message: str


class Report(NamedTuple):
    """What a rank tells the others. ``count``: guarded works entered so far, the last one being (what, step).

    ``inside``: seconds in that work, None after it. ``where``: its main thread's line of Python. ``seen``: the newest
    beat of rank 0 that it has read. ``fault``: the last failure that it raised.
    """

    rank: int
    host: str
    pid: int
    beat: int
    seen: int
    count: int
    what: str
    step: int | None
    inside: float | None
    where: str
    ended: bool
    fault: Fault | None

    @property
    def work(self) -> str:
        """The last work, as people say it: "train step 7"."""
        if self.step is None:
            return self.what
        return (
            f"{self.what} {self.step}" if self.what.endswith(("step", "stage")) else f"{self.what} at step {self.step}"
        )

    @property
    def position(self) -> str:
        """Where in the sequence of works the rank stands."""
        if self.count == 0:
            return "before its first step"
        return f"in {self.work}" if self.inside is not None else f"after {self.work}"


def judge(
    me: int, reports: Sequence[Report | None], gone: Collection[int], failed: Collection[int], timeout: float
) -> Fault | None:
    """Whether the rank ``me`` must give up, and through whose fault. Pure.

    ``reports``: of every rank, None where there is none yet. ``gone``: ranks known to be dead. ``failed``: the counts
    of the works that ``me`` itself failed in: those who failed there too are in step with it.
    """
    mine = reports[me]
    assert mine is not None
    others = [report for report in reports if report is not None and report.rank != me]

    hint = " (do they have unequal numbers of batches?)"

    def fault(report: Report, message: str) -> Fault:
        return Fault(False, mine.count, report.rank, report.what, report.step, message)

    told = [other.fault for other in others if other.fault is not None]
    if told := [each for each in told if not (each.own and each.count in failed)]:
        return min(told, key=lambda each: (not each.own, each.count, each.rank))
    for other in others:
        if other.rank in gone and not other.ended:
            return fault(other, f"rank {other.rank} died {other.position}")
    for other in others:
        if mine.inside is not None and other.ended and (other.count < mine.count or other.inside is not None):
            return fault(other, f"rank {other.rank} ended {other.position}, but rank {me} is {mine.position}{hint}")
    peers = [report for report in reports if report is not None and report.count == mine.count > 0]
    for other in peers:
        if (other.what, other.step) != (peers[0].what, peers[0].step):
            first = f"rank {peers[0].rank} is {peers[0].position}"
            return fault(other, f"the ranks part ways: rank {other.rank} is {other.position}, but {first}{hint}")
    if mine.inside is not None and mine.inside > timeout:
        late = f"has not come to {mine.work}, where rank {me} has waited for it for {timeout:g} s"
        for rank, report in enumerate(reports):
            if report is None:
                return Fault(False, mine.count, rank, mine.what, mine.step, f"rank {rank} {late}: it never reported")
            if report.count < mine.count:
                return fault(report, f"rank {rank} {late}: it is {report.position}, at {report.where}")
    return None


def is_lost_connection(error: BaseException) -> bool:
    """Whether this is how a collective ends whose other side is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo/" in str(error)


def describe(error: BaseException) -> str:
    """An exception in one line, as other ranks read it."""
    text = str(error).strip()[:2000]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
