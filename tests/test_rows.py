"""rows: any number of rows over any number of ranks and microbatches; each counts once, and what stands in does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_booster.kernels import tree
from functional_booster.sharding.mesh import Mesh, Replicated, virtual_mesh
from functional_booster.sharding.rows import Microbatch, StandIn, portion, share_out

SCALE = torch.tensor(2.0)  # a 0-d leaf, which goes to each rank


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(2.0 * rows).view(rows, 2), "row": torch.arange(rows), "scale": SCALE}


def places(mesh: Mesh) -> list[tuple[int, ...]]:
    return [tuple(place) for place in torch.cartesian_prod(*map(torch.arange, mesh.shape)).view(mesh.size, -1).tolist()]


def seen(one: Microbatch, place: tuple[int, ...]) -> list[int]:
    """The rows that count on a rank."""
    counts = True if one.counts is None else bool(one.counts[place])
    return one.batch["row"][place].tolist() if counts else []


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 5))
def test_a_portion_is_consecutive_and_a_row_longer_at_most(rows: int, parts: int, start: int) -> None:
    found = [portion(range(start, start + rows), parts, which) for which in range(parts)]
    assert [row for part in found for row in part] == list(range(start, start + rows))
    sizes = [len(part) for part in found]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(st.integers(1, 30), st.sampled_from([{"dp": 1}, {"dp": 4}, {"a": 2, "b": 3}]), st.integers(1, 4))
def test_virtual_ranks_see_each_row_once_in_the_microbatch_of_its_process(rows: int, axes: Any, number: int) -> None:
    """On every rank along other axes, and with all leaves cut alike."""
    mesh, data = virtual_mesh(**axes, tp=2), tuple(axes)
    shared = share_out(batch_of(rows), mesh, data, number)
    for place in places(mesh):
        rank = int(torch.tensor(place[:-1]) @ torch.tensor([3, 1][-len(data) :]))
        own = portion(range(rows), mesh.extent(data), rank)
        for index in range(number):
            counted = [row for one in shared if one.index == index for row in seen(one, place)]
            assert counted == list(portion(own, number, index))
    for one in shared:
        assert isinstance(one.batch["scale"], Replicated) and one.batch["scale"].value is SCALE
        assert torch.equal(one.batch["x"][..., 0], 2.0 * one.batch["row"])  # what stands in is of the batch, too
        assert one.batch["x"].shape[: len(mesh.shape)] == mesh.shape


@given(st.integers(1, 9), st.integers(1, 6), st.booleans())
def test_processes_go_through_all_microbatches(rows: int, number: int, across: bool) -> None:
    """Alone, there is nobody to wait for those that are empty."""
    mesh = Mesh((("dp", 2),), ("group",), (1,)) if across else Mesh(())
    shared = share_out(batch_of(rows), mesh, ("dp",) if across else (), number)
    assert [one.index for one in shared] == list(range(number if across else min(number, rows)))
    assert [seen(one, ()) for one in shared] == [list(portion(range(rows), number, one.index)) for one in shared]
    assert all(len(one.batch["row"]) for one in shared)


def test_a_stand_in_counts_in_no_microbatch() -> None:
    shared = share_out(StandIn(batch_of(1)), Mesh((("dp", 2),), ("group",), (1,)), ("dp",), 2)
    assert [seen(one, ()) for one in shared] == [[], []]
    for mesh in (Mesh(()), virtual_mesh(dp=2)):
        with pytest.raises(ValueError, match="batch: a StandIn, which is for a process beside others"):
            share_out(StandIn(batch_of(1)), mesh, ("dp",))


def test_a_stand_in_moves_as_any_batch() -> None:
    moved = tree.map(lambda leaf: leaf.to(torch.float64), StandIn({"x": torch.ones(1, 2)}))
    assert isinstance(moved, StandIn) and moved.batch["x"].dtype == torch.float64
