"""Colossal-AI's ``prepare_dataloader``, in an order that is computed: a batch is a function of its position."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from functional_booster.sharding.rows import StandIn

from .sampler import Sampler, stream, whole

Batch = Any


def prepare_dataloader(
    dataset: Any,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    distributed_sampler_cls: Callable[..., Any] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    position: SupportsIndex = 0,
    **kwargs: Any,
) -> Loader:
    """The batches of data rank ``rank`` of ``world_size``, each of ``batch_size`` rows, from ``position`` on.

    The order is a function of (seed, epoch), and a new one each epoch; ``sampler.Sampler`` says how ranks share it, and
    the last batch of an epoch. ``position`` is the number of batches consumed since the start of the run, as
    ``TrainState.position`` holds it. A run goes on exactly, in the middle of an epoch too; on another number of ranks
    with the same global batch, batch_size x world_size.

    Where the last batch of an epoch has fewer rows than there are ranks, a rank that has none gets a ``StandIn``, of
    which a step counts nothing, and which a loop of one's own cannot take for a batch.

    What is drawn at random in making a batch (by ``dataset`` or ``collate_fn``, from the global generators of Python,
    NumPy or torch's CPU) is a function of (seed, epoch, batch, rank): workers differ, and their number changes nothing.
    The main process's generators are left as they were. ``worker_init_fn`` runs as well, first.

    ``distributed_sampler_cls(dataset, num_replicas=, rank=, shuffle=)``, where given, decides the order instead, and
    torch seeds the workers, from (seed, rank). ``kwargs`` go to torch's DataLoader.

    Raises TypeError or ValueError, before anything is read, for a dataset without length and items by number (such as a
    stream), and for what ``Sampler`` refuses.
    """
    length = _length(dataset)
    for name in ("sampler", "batch_sampler"):
        if name in kwargs:
            raise TypeError(f"{name}: the order is made here; give distributed_sampler_cls, or make a torch DataLoader")
    options: dict[str, Any] = {"pin_memory": pin_memory, "num_workers": num_workers, **kwargs}
    # Its own generator, from which torch seeds the workers: else every epoch would draw from the global one.
    own = stream(whole("seed", seed, None), whole("rank", rank, 0))
    options.setdefault("generator", torch.Generator().manual_seed(own))
    if distributed_sampler_cls is not None:
        if whole("position", position, 0):
            raise ValueError(f"position: {position}, but the order of a distributed_sampler_cls has no positions")
        order = distributed_sampler_cls(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        loader = DataLoader(dataset, batch_size=batch_size, sampler=order, drop_last=drop_last, **options)
        return Loader(dataset, batch_size, order, loader)
    sampler = Sampler(length, batch_size, shuffle, seed, drop_last, rank, world_size)
    epochs = Epochs(len(sampler), whole("position", position, 0))
    batches = _Batches(dataset, sampler, options.pop("collate_fn", None) or default_collate)
    options["worker_init_fn"] = functools.partial(_enter_worker, options.get("worker_init_fn"))
    # A batch is one item to torch, and its position the index of it, so that workers keep no place of their own.
    read = functools.partial(DataLoader, batches, batch_size=None, collate_fn=_as_it_is, **options)
    return Loader(dataset, batch_size, epochs, read(sampler=epochs), batches, read)


@dataclass(frozen=True, eq=False)
class Loader:
    """Batches in a loop: each ``iter()`` is the next epoch, in its own order; ``prepare_dataloader`` makes one.

    A loop counts as an epoch once it has begun, also if it is left early, and every rank must begin the same ones: to
    look at a batch take ``batch_at``. ``set_epoch`` names the next epoch instead (it is on ``sampler`` too, as in
    Colossal-AI). Begun at a position in mid-epoch, the first loop reads the rest of that epoch.

    ``loader`` is the torch DataLoader beneath; with persistent workers it has one loop at a time.
    """

    dataset: Any = field(repr=False)
    batch_size: int
    sampler: Any
    loader: DataLoader[Any] = field(repr=False)
    _batches: _Batches | None = field(default=None, repr=False)
    _read: Callable[..., DataLoader[Any]] | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self.loader)

    @property
    def tail(self) -> int:
        """Rows, of all ranks, of an epoch's last batch, where that has fewer than the others; 0 where there is none."""
        return 0 if self._batches is None else self._batches.sampler.tail

    def set_epoch(self, epoch: int) -> None:
        """The next loop is epoch ``epoch`` (from 0); where it began in the middle of that one, it still does."""
        self.sampler.set_epoch(epoch)

    def batch_at(self, position: SupportsIndex) -> Batch:
        """This rank's batch after ``position`` batches of the run, made here and now: a pure function."""
        if self._batches is None:
            raise TypeError(f"batch_at: {type(self.sampler).__name__} decides the order, which has no positions")
        return self._batches[position]

    def batches(self, position: SupportsIndex = 0) -> Iterator[Batch]:
        """``batch_at(position)``, ``batch_at(position + 1)`` and so on without end, read by the workers.

        Epochs follow one another without a pause. Nothing is remembered: ``iter()`` does not notice.
        """
        if self._read is None:
            raise TypeError(f"batches: {type(self.sampler).__name__} decides the order, which has no positions")
        return iter(self._read(sampler=range(whole("position", position, 0), sys.maxsize)))


class Epochs:
    """The positions of one epoch after another's, from ``position`` on: all that a Loader remembers."""

    def __init__(self, batches: int, position: int = 0) -> None:
        self._batches = batches
        self.position = position

    def __iter__(self) -> Iterator[int]:
        # A generator, as torch may ask for several iterators and use one.
        start = self.position
        self.position = start - start % self._batches + self._batches
        yield from range(start, self.position)

    def __len__(self) -> int:
        return self._batches

    def set_epoch(self, epoch: int) -> None:
        """The next epoch is ``epoch``, from its start, or from ``position`` where that lies in it."""
        if whole("epoch", epoch, 0) != self.position // self._batches:
            self.position = epoch * self._batches


@dataclass(frozen=True)
class _Batches:
    """position -> batch, for torch a data set whose items are batches."""

    dataset: Any
    sampler: Sampler
    collate_fn: Callable[[list[Any]], Batch]

    def __getitem__(self, position: SupportsIndex) -> Batch:
        own = self.sampler.batch_at(position)
        rows = own or self.sampler.global_batch_at(position)[-1:]
        with _seeded(self.sampler.stream_at(position)):
            many = getattr(self.dataset, "__getitems__", None)  # torch's protocol for reading rows at once
            batch = self.collate_fn(many(rows) if many else [self.dataset[row] for row in rows])
        return batch if own else StandIn(batch)


@contextlib.contextmanager
def _seeded(seed: int) -> Generator[None]:
    """The global generators of Python, NumPy and torch's CPU start from ``seed``; the main process's are put back."""
    states = None
    if get_worker_info() is None:
        states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
    try:
        random.seed(seed)
        # The third word, as NumPy's generator is Python's and must not repeat it.
        np.random.seed([seed & 2**32 - 1, seed >> 32, 1])  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        if states is not None:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            torch.set_rng_state(states[2])


def _enter_worker(worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # documented as the worker's copy of the user's data set
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _length(dataset: Any) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise TypeError(f"dataset: a {kind} with the keys {[*dataset][:5]}, expected items by number, 0 to length - 1")
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing or isinstance(dataset, IterableDataset):
        raise TypeError(
            f"dataset: {kind} {f'has no {missing[0]}' if missing else 'is a stream'}, expected a length and items by "
            "number, from which any position can be computed; a stream goes into a torch DataLoader of your own, where "
            "each rank takes its share, as in itertools.islice(stream, rank, None, world_size)"
        )
    if not len(dataset):
        raise ValueError(f"dataset: this {kind} is empty")
    return len(dataset)
