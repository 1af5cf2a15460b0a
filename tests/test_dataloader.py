"""prepare_dataloader: batches of a rank, epoch after epoch, from any position."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from functional_booster.dataloader import Loader, prepare_dataloader
from functional_booster.sharding.rows import StandIn


class Noisy(Dataset):
    """Items that are drawn at random, by all three generators that data sets use."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = torch.rand(()).item(), np.random.rand(), random.random()  # noqa: NPY002 (data sets do)
        worker = get_worker_info()
        return {
            "row": index,
            "noise": torch.tensor(draws, dtype=torch.float64),
            "worker": -1 if worker is None else worker.id,
        }


class Tagged(Dataset):
    """Holds what its worker_init_fn wrote to it."""

    tag = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.tag


def tag(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Tagged)
    info.dataset.tag = 100 * (worker + 1)


def rows(batch: Any) -> list[int]:
    if isinstance(batch, StandIn):
        return []
    return batch["row"].tolist() if isinstance(batch, dict) else batch.tolist()


def epoch(loader: Loader) -> list[list[int]]:
    return [rows(batch) for batch in loader]


def same(a: Any, b: Any, but: str = "worker") -> bool:
    if isinstance(a, StandIn):
        return isinstance(b, StandIn) and same(a.batch, b.batch, but)
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a if name != but)


@settings(max_examples=8)
@given(st.integers(1, 5), st.integers(0, 20), st.integers(2, 4), st.integers(0, 10), st.booleans(), st.data())
def test_resume_at_any_position_equals_never_stopped(
    ranks: int, position: int, batch_size: int, seed: int, drop_last: bool, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": seed, "drop_last": drop_last, "world_size": ranks}
    options["rank"] = data.draw(st.integers(0, ranks - 1))
    loader = prepare_dataloader(Noisy(), batch_size, **options)
    count = len(loader)
    whole = list(itertools.chain(*(loader for _ in range(position // count + 2))))[position:]
    resumed = prepare_dataloader(Noisy(), batch_size, **options, position=position)
    again = list(itertools.chain(resumed, resumed))
    assert len(whole) == len(again) == 2 * count - position % count
    assert all(map(same, whole, again))
    assert all(map(same, whole, loader.batches(position)))
    assert all(same(batch, loader.batch_at(position + n)) for n, batch in enumerate(whole))


@settings(max_examples=10)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 9), st.booleans())
def test_a_run_goes_on_at_another_number_of_ranks(before: int, after: int, position: int, shuffle: bool) -> None:
    def world(ranks: int) -> list[Loader]:
        return [
            prepare_dataloader(range(43), 12 // ranks, shuffle, rank=rank, world_size=ranks, drop_last=True)
            for rank in range(ranks)
        ]

    one = [rows(world(1)[0].batch_at(p)) for p in range(12)]
    first = [itertools.islice(loader.batches(0), position) for loader in world(before)]
    then = [itertools.islice(loader.batches(position), 12 - position) for loader in world(after)]
    steps = itertools.chain(zip(*first, strict=True), zip(*then, strict=True))
    joined = [[row for part in parts for row in rows(part)] for parts in steps]
    assert joined == one


def test_each_loop_is_the_next_epoch_in_a_new_order() -> None:
    loader = prepare_dataloader(range(20), 4, shuffle=True)
    epochs = [epoch(loader) for _ in range(3)]
    assert len({str(e) for e in epochs}) == 3
    assert all(sorted(itertools.chain(*e)) == list(range(20)) for e in epochs)
    assert len(loader) == 5 == len(epochs[0])
    for number in (2, 0, 0, 1):
        loader.set_epoch(number)
        assert epoch(loader) == epochs[number]
    assert epoch(loader) == epochs[2]
    loader.sampler.set_epoch(1)  # as Colossal-AI's users write
    assert epoch(loader) == epochs[1]


def test_a_loop_that_is_left_early_counts() -> None:
    reference = prepare_dataloader(range(20), 4, shuffle=True)
    first, second = epoch(reference), epoch(reference)
    loader = prepare_dataloader(range(20), 4, shuffle=True)
    assert rows(next(iter(loader))) == first[0]
    assert epoch(loader) == second


def test_without_shuffle_every_epoch_is_in_order_with_the_whole_tail() -> None:
    loader = prepare_dataloader(range(10), 4)
    assert epoch(loader) == epoch(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_without_a_row_in_the_tail_gets_a_stand_in(workers: int) -> None:
    """Of a row that another rank has; it is no batch but to a step."""
    options: dict[str, Any] = {"shuffle": True, "world_size": 5, "num_workers": workers}
    before, last = (list(prepare_dataloader(Noisy(), 2, rank=rank, **options)) for rank in (3, 4))
    assert [len(rows(batch)) for batch in before] == [2, 2, 1]  # of 24 rows
    assert [len(rows(batch)) for batch in last] == [2, 2, 0]
    stand_in = last[-1]
    assert isinstance(stand_in, StandIn) and rows(stand_in.batch) == rows(before[-1])
    for misuse in (lambda: stand_in["row"], lambda: [*stand_in], lambda: len(stand_in)):
        with pytest.raises(TypeError, match=r"no row in this global batch.* train_step .*drop_last=True"):
            misuse()
    with pytest.raises(AttributeError, match=r"items: this rank has no row in this global batch"):
        stand_in.items()  # type: ignore[operator]


def test_a_resumed_loop_reads_the_rest_of_its_epoch_also_when_that_is_named() -> None:
    whole = prepare_dataloader(range(20), 4, shuffle=True)
    epochs = [epoch(whole) for _ in range(4)]
    for named in (False, True):
        loader = prepare_dataloader(range(20), 4, shuffle=True, position=torch.tensor(12))  # as TrainState holds it
        seen = []
        for number in (2, 3):
            if named:
                loader.set_epoch(number)
            seen.append(epoch(loader))
        assert seen == [epochs[2][2:], epochs[3]]
    loader = prepare_dataloader(range(20), 4, shuffle=True, position=12)
    loader.set_epoch(1)
    assert epoch(loader) == epochs[1]


def test_reading_from_a_position_does_not_disturb_the_loops() -> None:
    loader = prepare_dataloader(range(20), 4, shuffle=True)
    expected = epoch(loader), epoch(loader)
    loader.set_epoch(0)
    loop = iter(loader)
    seen = [rows(next(loop))]
    assert [rows(b) for b in itertools.islice(loader.batches(7), 2)] == expected[1][2:4]
    assert rows(loader.batch_at(3)) == expected[0][3]
    seen += [rows(batch) for batch in loop]
    assert (seen, epoch(loader)) == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing(persistent: bool) -> None:
    alone = prepare_dataloader(Noisy(), 4, shuffle=True, rank=1, world_size=2)
    loader = prepare_dataloader(
        Noisy(), 4, shuffle=True, num_workers=2, rank=1, world_size=2, persistent_workers=persistent
    )
    if persistent:
        next(iter(alone)), next(iter(loader))  # left early, with batches on their way
    workers = set()
    for _ in range(2):
        expected, found = list(alone), list(loader)
        assert len(found) == len(expected) == 3
        assert all(map(same, expected, found))
        workers |= {worker for batch in found for worker in batch["worker"].tolist()}
    assert workers == {0, 1}
    assert all(map(same, alone.batches(4), itertools.islice(loader.batches(4), 5)))


def test_what_is_drawn_differs_by_seed_epoch_batch_rank_and_row() -> None:
    noise = [
        batch["noise"]
        for seed in (0, 1)
        for rank in range(2)
        for batch in itertools.islice(
            prepare_dataloader(Noisy(), 4, seed=seed, rank=rank, world_size=2, num_workers=2).batches(), 6
        )
    ]
    draws = torch.cat(noise)
    assert draws.shape == (2 * 2 * 6 * 4, 3)
    assert len(draws.flatten().unique()) == draws.numel()


def test_the_main_process_keeps_its_generators() -> None:
    states: list[Callable[[], Any]] = [
        random.getstate,
        lambda: str(np.random.get_state()),  # noqa: NPY002 (data sets draw from it)
        lambda: torch.get_rng_state().tolist(),
    ]
    before = [state() for state in states]
    for workers in (0, 1):
        list(prepare_dataloader(Noisy(), 4, num_workers=workers))
    with pytest.raises(IndexError):
        prepare_dataloader(Broken(), 4).batch_at(0)
    assert [state() for state in states] == before


class Broken(Noisy):
    """Its items cannot be read."""

    def __getitem__(self, index: int) -> Any:
        torch.rand(())
        raise IndexError(f"row {index} is broken")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_comes_through(workers: int) -> None:
    with pytest.raises(IndexError, match="row 0 is broken"):
        list(prepare_dataloader(Broken(), 4, num_workers=workers))


def test_the_users_worker_init_fn_runs_and_finds_the_data_set() -> None:
    loader = prepare_dataloader(Tagged(), 2, num_workers=2, worker_init_fn=tag)
    assert epoch(loader) == [[100, 100], [200, 200]] * 2


def test_what_a_spawned_worker_is_handed_can_be_pickled() -> None:
    loader = prepare_dataloader(Tagged(), 4, num_workers=1, worker_init_fn=tag)
    torchs = loader.loader
    batches, *_ = pickle.loads(pickle.dumps((torchs.dataset, torchs.collate_fn, torchs.worker_init_fn)))
    assert rows(batches[1]) == rows(loader.batch_at(1))


def test_other_arguments_reach_torch() -> None:
    loader = prepare_dataloader(
        range(8), 4, num_workers=1, collate_fn=tuple, prefetch_factor=3, timeout=50, persistent_workers=True
    )
    assert list(loader) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    torchs = loader.loader
    assert (torchs.prefetch_factor, torchs.timeout, torchs.persistent_workers) == (3, 50, True)
    assert (loader.batch_size, loader.dataset) == (4, range(8))
    own = torch.Generator()
    assert prepare_dataloader(range(8), 4, generator=own).loader.generator is own
    with pytest.raises(TypeError, match="no_such_option"):
        prepare_dataloader(range(8), 4, no_such_option=1)


def test_rows_are_read_at_once_where_the_data_set_can() -> None:
    class AtOnce(Noisy):
        def __getitems__(self, rows: list[int]) -> list[int]:
            return [row + 100 for row in rows]

    assert epoch(prepare_dataloader(AtOnce(), 12)) == [list(range(100, 112)), list(range(112, 124))]
    data = Subset(TensorDataset(torch.arange(10) * 2), range(3, 9))
    assert [batch[0].tolist() for batch in prepare_dataloader(data, 3)] == [[6, 8, 10], [12, 14, 16]]


def test_a_distributed_sampler_class_decides_the_order() -> None:
    def loader(rank: int, **more: Any) -> Loader:
        return prepare_dataloader(
            range(10), 2, shuffle=True, distributed_sampler_cls=DistributedSampler, rank=rank, world_size=2, **more
        )

    ours = loader(1)
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1, shuffle=True)  # pyrefly: ignore[bad-argument-type]
    for number in (0, 3):
        ours.set_epoch(number)
        sampler.set_epoch(number)
        expected = [batch.tolist() for batch in DataLoader(range(10), 2, sampler=sampler)]  # pyrefly: ignore
        assert epoch(ours) == expected
    assert (len(ours), ours.batch_size) == (3, 2)
    with pytest.raises(TypeError, match="batches: DistributedSampler decides the order, which has no positions"):
        ours.batches(0)
    with pytest.raises(TypeError, match="batch_at: DistributedSampler decides the order"):
        ours.batch_at(0)
    with pytest.raises(ValueError, match="position: 3, but the order of a distributed_sampler_cls has no positions"):
        loader(0, position=3)


def test_workers_under_a_distributed_sampler_draw_apart() -> None:
    options: dict[str, Any] = {"distributed_sampler_cls": DistributedSampler, "world_size": 2, "num_workers": 2}
    noise = [
        batch["noise"]
        for rank in range(2)
        for loader in [prepare_dataloader(Noisy(), 6, rank=rank, **options)]
        for _ in range(2)
        for batch in loader
    ]
    draws = torch.cat(noise)
    assert len(draws.flatten().unique()) == draws.numel() == 2 * 2 * 12 * 3


class Stream(IterableDataset):
    """Numbers without end."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dataset": Stream()}, TypeError, "dataset: Stream has no __len__, expected a length .*islice"),
        ({"dataset": iter("ab")}, TypeError, "dataset: str_ascii_iterator has no __len__, expected"),
        ({"dataset": {1, 2}}, TypeError, "dataset: set has no __getitem__, expected"),
        ({"dataset": {"train": [1], "test": [2]}}, TypeError, r"dataset: a dict with the keys \['train', 'test'\]"),
        ({"dataset": []}, ValueError, "dataset: this list is empty"),
        ({"batch_size": 0}, ValueError, "batch_size: 0, expected at least 1"),
        ({"batch_size": 11, "drop_last": True}, ValueError, "drop_last: 10 examples make no batch of batch_size 11"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank: 2, expected 0 to 1"),
        ({"position": -1}, ValueError, "position: -1, expected at least 0"),
        ({"seed": 0.5}, TypeError, r"seed: expected a whole number, got 0\.5"),
        ({"sampler": [1]}, TypeError, "sampler: the order is made here; give distributed_sampler_cls"),
        ({"batch_sampler": [[1]]}, TypeError, "batch_sampler: the order is made here"),
    ],
)
def test_a_bad_argument_is_one_clear_error(arguments: dict, error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"dataset": range(10), "batch_size": 2, **arguments}
    with pytest.raises(error, match=message):
        prepare_dataloader(**options)


def test_a_bad_epoch_or_position_is_a_clear_error() -> None:
    loader = prepare_dataloader(range(10), 2)
    with pytest.raises(ValueError, match="epoch: -1, expected at least 0"):
        loader.set_epoch(-1)
    with pytest.raises(ValueError, match="position: -1, expected at least 0"):
        loader.batches(-1)
