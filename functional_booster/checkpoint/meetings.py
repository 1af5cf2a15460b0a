"""Where processes meet beside the training, as those of a background save do: over the store of torch.distributed.

The main threads go on with their steps, whose collectives and guarded works come in one order on all ranks; a thread
must not be among them. Its meetings have keys, and a connection to the store, of their own.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Generator
from typing import Any

import torch.distributed as dist

from functional_booster import watchdog
from functional_booster.rank_failure import RankFailure, describe

PATIENCE = 3600.0  # seconds for which a process waits for the others, all of them being alive

_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of these in a world


class Meetings:
    """Those of one work. Each process makes one on its main thread, and calls it, on whichever, in the same order.

    ``with meetings(): ...`` is ``watchdog.all_or_none``: where a process fails inside, all raise, the others
    RankFailure. So do all where the watchdog finds one dead.
    """

    def __init__(self, what: str, step: int | None = None) -> None:
        world = watchdog.started()
        assert world is not None, "one process meets nobody"
        self._world, self._what, self._step, self._met = world, what, step, 0
        self._where = what if step is None else f"{what} at step {step}"
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        _counts[world] = _counts.get(world, 0) + 1
        own_connection = world.store.clone()  # the other one may be held by a main thread that waits on it
        self._store = dist.PrefixStore(f"functional_booster/meetings/{_counts[world]}", own_connection)

    @contextlib.contextmanager
    def __call__(self) -> Generator[None]:
        """Around what each process does by itself."""
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        try:
            said = self.exchange("" if error is None else describe(error))
        except (RankFailure, ConnectionError, TimeoutError) as failure:
            raise failure from error
        if error is not None:
            raise error
        for rank, message in enumerate(said):
            if message:
                raise self._failure(rank, f"rank {rank} failed in {self._where}: {message}")

    def close(self) -> None:
        """All is said. The first process, which may hold the store, waits until the others have heard it."""
        with contextlib.suppress(RankFailure, ConnectionError, TimeoutError, RuntimeError):
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                self._await([f"left/{rank}" for rank in range(self._ranks)])
                for rank in range(self._ranks):
                    for name in ("left", *map(str, range(1, self._met + 1))):
                        self._store.delete_key(f"{name}/{rank}")

    def exchange(self, said: str) -> list[str]:
        """What all processes say, by rank."""
        self._met += 1
        keys = [f"{self._met}/{rank}" for rank in range(self._ranks)]
        try:
            self._store.set(keys[self._rank], said)
            self._await(keys)
            return [self._store.get(key).decode() for key in keys]
        except RankFailure:
            raise
        except RuntimeError as lost:
            raise ConnectionError(f"the processes of {self._where} lost each other: {lost}") from lost

    def _await(self, keys: list[str]) -> None:
        pause, until = 0.001, time.monotonic() + PATIENCE
        while not self._store.check(keys):
            if (fault := self._world.verdict) is not None:
                raise self._failure(fault.rank, fault.message)
            if time.monotonic() > until:
                late = [int(key.rpartition("/")[2]) for key in keys if not self._store.check([key])]
                raise TimeoutError(f"ranks {late} have not done their share of {self._where} in {PATIENCE:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _failure(self, rank: int, message: str) -> RankFailure:
        return RankFailure(message, rank, self._what, self._step)
