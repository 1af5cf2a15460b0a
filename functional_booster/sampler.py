"""Which examples a batch holds: a pure function of (seed, epoch, index). Nothing is iterated to, nothing is remembered.

An epoch is the data set in some order, cut into *global batches*: what all ranks together read at one step. Cutting
knows nothing of ranks; a rank takes its slice of a global batch. So a run sees the same global batches on any number of
ranks, as long as their size stays the same, and goes on exactly where it stopped, also on another number of ranks.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from functional_booster.sharding.rows import portion

_ORDER, _MAKING = 0, 1  # what random words are for
_ROUNDS = 24  # with ideal round functions the total variation from uniform is worst, 4e-3, at 8 examples (8! orders)


@dataclass(frozen=True)
class Sampler:
    """The batches of ``length`` examples for ``rank`` of ``world_size`` ranks, each with ``batch_size`` rows a batch.

    Ranks are disjoint and cover the epoch: every example is read once, none twice. The last global batch of an epoch is
    smaller where the sizes do not divide; the ranks' shares of it differ by at most one row, lower ranks have more.
    ``drop_last`` leaves it out. All ranks have equally many batches; in a tail of fewer rows than ranks some are empty.

    Raises TypeError or ValueError for an argument that is out of its range.
    """

    length: int
    batch_size: int
    shuffle: bool = False
    seed: int = 1024
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("batch_size", 1), ("world_size", 1), ("rank", 0), ("seed", None)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        length, ranks, rows = self.length, self.world_size, self.global_batch_size
        if self.rank >= ranks:
            raise ValueError(f"rank: {self.rank}, expected 0 to {ranks - 1}, as world_size is {ranks}")
        sizes = f"batch_size {self.batch_size} x {ranks} ranks = {rows} rows"
        if self.drop_last and length < rows:
            raise ValueError(f"drop_last: {length} examples make no batch of {sizes}, so that nothing would be left")

    @property
    def global_batch_size(self) -> int:
        """Rows of a global batch, the last of an epoch excepted."""
        return self.batch_size * self.world_size

    @property
    def tail(self) -> int:
        """Rows of an epoch's last global batch, where that has fewer than the others; 0 where there is none."""
        return 0 if self.drop_last else self.length % self.global_batch_size

    def __len__(self) -> int:
        """Batches an epoch, the same on every rank."""
        return self.length // self.global_batch_size + (self.tail > 0)

    def locate(self, position: SupportsIndex) -> tuple[int, int]:
        """(epoch, number of the batch in it), both from 0, of the batch after ``position`` batches of the run."""
        return divmod(whole("position", position, 0), len(self))

    def global_batch_at(self, position: SupportsIndex) -> list[int]:
        """The examples that all ranks together read after ``position`` batches, in order of ranks."""
        return self._examples(position, self._rows(position))

    def batch_at(self, position: SupportsIndex) -> list[int]:
        """The examples that this rank reads after ``position`` batches of the run: its slice of the global batch."""
        return self._examples(position, portion(self._rows(position), self.world_size, self.rank))

    def stream_at(self, position: SupportsIndex) -> int:
        """The seed, 64 bits, of what is drawn at random in making this rank's batch after ``position`` batches.

        Distinct by seed, epoch, batch and rank, whatever the number of workers: each batch is made by one.
        """
        return stream(self.seed, *self.locate(position), self.rank)

    def _rows(self, position: SupportsIndex) -> range:
        """The global batch's place in the order of its epoch."""
        _, number = self.locate(position)
        start = number * self.global_batch_size
        return range(start, min(start + self.global_batch_size, self.length))

    def _examples(self, position: SupportsIndex, rows: range) -> list[int]:
        if not self.shuffle:
            return list(rows)
        epoch, _ = self.locate(position)
        return shuffled(np.arange(rows.start, rows.stop), self.length, self.seed, epoch).tolist()


def shuffled(index: np.ndarray, length: int, seed: int, epoch: int) -> np.ndarray:
    """The examples that stand at ``index``, int64 (N,) in [0, length), in an epoch's random order of ``length``.

    A bijection of [0, length), computed index by index: the order is never held, however large the data set. (A Feistel
    network over pairs of digits, with cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.)
    """
    left = math.isqrt(length - 1) + 1
    left += left % 2  # an even side, as turning columns of odd length makes even permutations alone
    right = -(-length // left)
    keys = _round_keys(seed, epoch)
    examples = index.astype(np.uint64)
    outside = np.arange(len(examples))
    while len(outside):  # the grid has a few more cells than there are examples: who lands there goes on
        examples[outside] = _feistel(examples[outside], np.uint64(left), np.uint64(right), keys)
        outside = outside[examples[outside] >= length]
    return examples.astype(np.int64)


def stream(seed: int, *numbers: int) -> int:
    """A seed of 64 bits for (seed, numbers), each taken modulo 2**64; apart from what ``seed`` means for the order."""
    return int(_words(1, _MAKING, seed, *numbers)[0])


def whole(name: str, value: SupportsIndex, least: int | None) -> int:
    """``value``, an integer or an integer 0-d tensor, as an int; raises TypeError or, below ``least``, ValueError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name}: {number}, expected at least {least}")
    return number


def _feistel(cell: np.ndarray, left: np.uint64, right: np.uint64, keys: np.ndarray) -> np.ndarray:
    """A cell of a left x right grid -> another, one to one: columns and rows are turned, each by a random amount."""
    row, column = np.divmod(cell, right)
    for turn in range(0, len(keys), 2):
        row = (row + _mix(column + keys[turn]) % left) % left
        column = (column + _mix(row + keys[turn + 1]) % right) % right
    return row * right + column


def _mix(word: np.ndarray) -> np.ndarray:
    """64 bits that look random in each bit of ``word``. (Stafford's mix 13, the finalizer of SplitMix64, 2014.)"""
    word = (word ^ word >> _30) * _FIRST
    word = (word ^ word >> _27) * _SECOND
    return word ^ word >> _31


_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@functools.lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> np.ndarray:
    return _words(_ROUNDS, _ORDER, seed, epoch)


def _words(count: int, *numbers: int) -> np.ndarray:
    """Random words, uint64 (count,), that ``numbers``, each modulo 2**64, stand for."""
    halves = [number >> shift & 2**32 - 1 for number in numbers for shift in (0, 32)]
    return np.random.SeedSequence(halves).generate_state(count, np.uint64)
