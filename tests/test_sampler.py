"""sampler: which examples a batch holds, on which rank, in which order."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from functional_booster.sampler import Sampler, shuffled, stream

SEEDS = st.integers(-(2**63), 2**64)


@st.composite
def samplers(draw: st.DrawFn) -> Sampler:
    ranks, batch_size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    length, drop_last = draw(st.integers(1, 100)), draw(st.booleans())
    rows = ranks * batch_size
    assume(length >= rows or not drop_last)
    return Sampler(length, batch_size, draw(st.booleans()), draw(SEEDS), drop_last, 0, ranks)


def ranks_of(sampler: Sampler) -> list[Sampler]:
    return [replace(sampler, rank=rank) for rank in range(sampler.world_size)]


def epoch_of(sampler: Sampler, epoch: int) -> list[int]:
    """All examples of an epoch, in order of batches and ranks."""
    positions = range(epoch * len(sampler), (epoch + 1) * len(sampler))
    return [row for p in positions for rank in ranks_of(sampler) for row in rank.batch_at(p)]


def assert_uniform(found: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square, whose mean is n - 1 and variance 2 (n - 1)."""
    chi_square, freedom = ((found - expected) ** 2 / expected).sum(), len(found) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@settings(max_examples=25)
@given(samplers(), st.integers(0, 5))
def test_ranks_are_disjoint_and_cover_the_epoch(sampler: Sampler, epoch: int) -> None:
    examples = epoch_of(sampler, epoch)
    assert len(set(examples)) == len(examples)
    assert set(examples) <= set(range(sampler.length))
    left_out = sampler.length % sampler.global_batch_size if sampler.drop_last else 0
    assert len(examples) == sampler.length - left_out
    if not sampler.shuffle:
        assert examples == list(range(sampler.length - left_out))


@settings(max_examples=25)
@given(samplers(), st.integers(0, 200))
def test_ranks_have_as_many_batches_and_shares_that_differ_by_one_row_at_most(sampler: Sampler, position: int) -> None:
    shares = [len(rank.batch_at(position)) for rank in ranks_of(sampler)]
    assert sampler.batch_size >= shares[0] >= max(1, shares[-1]) and shares[-1] >= shares[0] - 1
    assert shares == sorted(shares, reverse=True)
    epoch, number = sampler.locate(position)
    assert (epoch * len(sampler) + number, number < len(sampler)) == (position, True)
    if number < len(sampler) - 1 or sampler.drop_last:
        assert set(shares) == {sampler.batch_size}
    assert len({len(rank) for rank in ranks_of(sampler)}) == 1


@settings(max_examples=25)
@given(samplers(), st.integers(0, 200), st.integers(1, 6))
def test_a_global_batch_is_the_same_on_any_number_of_ranks(sampler: Sampler, position: int, ranks: int) -> None:
    rows = sampler.global_batch_size
    assume(rows % ranks == 0)
    other = replace(sampler, batch_size=rows // ranks, world_size=ranks)
    expected = sampler.global_batch_at(position)
    assert other.global_batch_at(position) == expected
    for some in (sampler, other):
        assert [row for rank in ranks_of(some) for row in rank.batch_at(position)] == expected


@settings(max_examples=25)
@given(st.integers(1, 300), SEEDS, st.integers(0, 2**40))
def test_an_order_is_a_bijection(length: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(np.arange(length), length, seed, epoch)) == list(range(length))


def test_a_long_order_is_a_bijection_and_any_part_of_it_can_be_had_alone() -> None:
    length = 100_003
    order = shuffled(np.arange(length), length, 5, 2)
    assert np.array_equal(np.sort(order), np.arange(length))
    assert np.array_equal(shuffled(np.arange(60_000, 60_100), length, 5, 2), order[60_000:60_100])


@settings(max_examples=25)
@given(st.integers(2**40, 2**62))
def test_a_data_set_may_be_huge(length: int) -> None:
    sampler = Sampler(length, 64, shuffle=True, drop_last=True)
    for position in (0, len(sampler) - 1, 7 * len(sampler)):
        rows = sampler.batch_at(position)
        assert len(set(rows)) == 64
        assert all(0 <= row < length for row in rows)


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(shuffled(np.arange(50), 50, seed, epoch)) for seed in range(-10, 10) for epoch in range(20)}
    assert len(orders) == 20 * 20
    ends = {Sampler(50, 50, True, seed).batch_at(0)[0] for seed in range(200)}
    assert len(ends) > 40


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize("by", ["seed", "epoch"])
def test_all_orders_are_equally_likely(length: int, by: str) -> None:
    orders = dict.fromkeys(itertools.permutations(range(length)), 0)
    expected = 30
    for number in range(expected * len(orders)):
        seed, epoch = (number, 0) if by == "seed" else (7, number)
        orders[tuple(shuffled(np.arange(length), length, seed, epoch).tolist())] += 1
    assert_uniform(np.array(list(orders.values())), np.full(len(orders), expected))


@pytest.mark.parametrize("length", [9, 31, 1000])
def test_examples_land_evenly_and_neighbours_part(length: int) -> None:
    """Where an example lands, and how far its neighbour is from it, are uniform: chi-square over 2,000 epochs."""
    epochs, bins = 2000, min(length, 20)
    starts = np.array([shuffled(np.array([3, 4]), length, 11, epoch) for epoch in range(epochs)])
    gaps = (starts[:, 1] - starts[:, 0]) % length  # 1 to length - 1, each as likely
    for values, low in ((starts[:, 0], 0), (starts[:, 1], 0), (gaps, 1)):
        count = length - low
        found = np.bincount((values - low) * bins // count, minlength=bins)
        sizes = np.bincount(np.arange(count) * bins // count, minlength=bins) * epochs / count
        assert_uniform(found[sizes > 0], sizes[sizes > 0])


def test_an_order_is_odd_as_often_as_even() -> None:
    def odd(order: np.ndarray) -> bool:
        return bool(np.triu(order[:, None] > order, 1).sum() % 2)

    for length in (9, 25, 30):  # of these, two are squares of odd numbers
        share = np.mean([odd(shuffled(np.arange(length), length, 3, epoch)) for epoch in range(400)])
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(400)


def test_an_order_never_changes_between_versions() -> None:
    """Known answers: a run that is resumed with a later version must go on in the same order."""
    assert shuffled(np.arange(10), 10, 1024, 0).tolist() == [7, 1, 5, 3, 6, 8, 9, 4, 0, 2]
    assert stream(1024, 3, 1) == 18437198449783023083


def test_streams_are_distinct_by_seed_epoch_batch_and_rank() -> None:
    streams = {
        Sampler(24, 2, seed=seed, rank=rank, world_size=3).stream_at(position)
        for seed in (0, 1, -1, 2**32, 2**32 + 1)
        for rank in range(3)
        for position in range(4 * 5)
    }
    assert len(streams) == 5 * 3 * 4 * 5
    assert all(0 <= seed < 2**64 for seed in streams)
    assert stream(0, 1) != stream(0, 1, 0) != stream(2**32, 1)
    assert stream(0, 2**32) != stream(0, 0, 1)


def test_a_position_may_be_a_tensor() -> None:
    sampler = Sampler(20, 3, shuffle=True, seed=2)
    assert sampler.batch_at(torch.tensor(9)) == sampler.batch_at(9) == sampler.batch_at(np.int64(9))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": 0}, ValueError, "length: 0, expected at least 1"),
        ({"batch_size": 0}, ValueError, "batch_size: 0, expected at least 1"),
        ({"batch_size": -3}, ValueError, "batch_size: -3, expected at least 1"),
        ({"batch_size": 2.0}, TypeError, r"batch_size: expected a whole number, got 2\.0"),
        ({"batch_size": True}, TypeError, "batch_size: expected a whole number, got True"),
        ({"batch_size": None}, TypeError, "batch_size: expected a whole number, got None"),
        ({"seed": "a"}, TypeError, "seed: expected a whole number, got 'a'"),
        ({"world_size": 0}, ValueError, "world_size: 0, expected at least 1"),
        ({"rank": -1}, ValueError, "rank: -1, expected at least 0"),
        ({"rank": 2}, ValueError, "rank: 2, expected 0 to 1, as world_size is 2"),
        (
            {"length": 7, "batch_size": 4, "drop_last": True},
            ValueError,
            "drop_last: 7 examples make no batch of batch_size 4 x 2 ranks = 8 rows",
        ),
    ],
)
def test_a_bad_argument_is_one_clear_error(arguments: dict, error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"length": 8, "batch_size": 2, "world_size": 2, **arguments}
    with pytest.raises(error, match=message):
        Sampler(**options)


def test_a_bad_position_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="position: -1, expected at least 0"):
        Sampler(8, 2).batch_at(-1)
    with pytest.raises(TypeError, match=r"position: expected a whole number, got 1\.5"):
        Sampler(8, 2).batch_at(1.5)  # pyrefly: ignore[bad-argument-type]
