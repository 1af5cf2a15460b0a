"""plugin.prepare_dataloader: data ranks share a data set, the same whether they are processes or virtual."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from processes import run_on_ranks

import functional_booster as fb
from functional_booster.plugins import GeminiPlugin
from functional_booster.plugins.dataloaders import share
from functional_booster.sharding.mesh import Mesh
from functional_booster.sharding.rows import StandIn

PLUGINS = (
    fb.TorchDDPPlugin(),
    fb.LowLevelZeroPlugin(stage=1),
    fb.LowLevelZeroPlugin(stage=2, extra_dp_size=2),
    fb.TorchFSDPPlugin(),
    GeminiPlugin(),
)


def places(plugin: Any, ranks: int) -> list[Mesh]:
    """The plugin's real mesh, as each rank has it."""
    axes = tuple(plugin.axes(ranks).items())
    every = itertools.product(*(range(size) for _, size in axes))
    return [Mesh(axes, (None,) * len(axes), place) for place in every]


def read(plugin: Any, mesh: Any, count: int, length: int, batch_size: int, **options: Any) -> list[list[int]]:
    loader = plugin.prepare_dataloader(range(length), batch_size, mesh=mesh, **options)
    batches = itertools.islice(loader.batches(options.get("position", 0)), count)
    return [[] if isinstance(batch, StandIn) else batch.tolist() for batch in batches]


@given(plugin=st.sampled_from(PLUGINS), batch_size=st.integers(1, 3), shuffle=st.booleans(), data=st.data())
def test_virtual_ranks_read_what_processes_read(
    plugin: Any, batch_size: int, shuffle: bool, data: st.DataObject
) -> None:
    """Disjoint and covering, in the order of the ranks, the tail too; and from any position as if never stopped."""
    ranks = 4
    length = data.draw(st.integers(1, 8 * ranks))
    count = 2 * -(-length // (batch_size * ranks))  # two epochs
    settings = (length, batch_size)
    seen = [read(plugin, mesh, count, *settings, shuffle=shuffle) for mesh in places(plugin, ranks)]
    together = read(plugin, fb.virtual_mesh(ranks), count, *settings, shuffle=shuffle)
    assert [list(itertools.chain(*parts)) for parts in zip(*seen, strict=True)] == together
    for epoch in (together[: count // 2], together[count // 2 :]):
        assert sorted(itertools.chain(*epoch)) == list(range(length))
    position = data.draw(st.integers(0, count))
    resumed = read(plugin, fb.virtual_mesh(ranks), count - position, *settings, shuffle=shuffle, position=position)
    assert resumed == together[position:]


def test_the_batches_are_those_that_a_step_takes() -> None:
    """The rows of a virtual mesh's batch go to the ranks that would have read them."""
    plugin, mesh = fb.TorchFSDPPlugin(), fb.virtual_mesh(dp=2, fsdp=2)
    booster = fb.Booster(device="cpu", mixed_precision="fp32", plugin=plugin, mesh=mesh)
    axes = tuple(dict(booster.mesh.axes).items())
    (batch,) = read(plugin, booster.mesh, 1, 12, 3)
    for number, place in enumerate(itertools.product(range(2), range(2))):
        real = Mesh(axes, (None, None), place)
        assert share(real, plugin.data_axes) == (number, 4)
        assert read(plugin, real, 1, 12, 3) == [batch[3 * number : 3 * number + 3]]


def test_a_tail_is_read_or_left_out() -> None:
    plugin, mesh = fb.TorchDDPPlugin(), fb.virtual_mesh(2)
    assert read(plugin, mesh, 3, 11, 2)[-1] == [8, 9, 10]
    assert len(plugin.prepare_dataloader(range(11), 2, drop_last=True, mesh=mesh)) == 2
    with pytest.raises(TypeError, match="batch_size"):
        plugin.prepare_dataloader(range(12), 2.0, mesh=mesh)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="axis 'tp' is not one of TorchDDPPlugin's"):
        plugin.prepare_dataloader(range(12), 2, mesh=fb.virtual_mesh(tp=2))


def test_one_process_reads_everything() -> None:
    assert read(fb.TorchDDPPlugin(), None, 2, 4, 2) == [[0, 1], [2, 3]]


def on_a_process(plugin: Any, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """What this rank reads by the processes, and by the Booster's mesh."""
    booster = fb.Booster(device="cpu", mixed_precision="fp32", plugin=plugin)
    return tuple(read(plugin, mesh, 4, 11, 2, shuffle=True, **options) for mesh in (None, booster.mesh))  # type: ignore[return-value]


@pytest.mark.xdist_group("ranks")
def test_processes_share_a_data_set() -> None:
    """Uneven shares of the tail included; and going on in mid-epoch equals never having stopped."""
    plugin = fb.LowLevelZeroPlugin(extra_dp_size=2)
    ends = run_on_ranks(2, on_a_process, plugin)
    for by_processes, by_mesh in ends:
        assert by_processes == by_mesh
    (first, _), (second, _) = ends
    epoch = [*itertools.chain(*first[:3]), *itertools.chain(*second[:3])]
    assert sorted(epoch) == list(range(11)) and [len(batch) for batch in second[:3]] == [2, 2, 1]
    assert first[3] == run_on_ranks(2, read_on, plugin)[0][0]


def read_on(plugin: Any) -> list[list[int]]:
    return read(plugin, None, 1, 11, 2, shuffle=True, position=3)


def test_the_dataset_and_its_tensors_come_as_a_torch_loader_gives_them() -> None:
    rows = torch.utils.data.TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))
    loader = fb.TorchDDPPlugin().prepare_dataloader(rows, 1, mesh=fb.virtual_mesh(2))
    features, labels = next(iter(loader))
    assert torch.equal(features, torch.tensor([[0.0, 1.0], [2.0, 3.0]])) and labels.tolist() == [0, 1]


def test_ranks_along_other_axes_read_the_same() -> None:
    mesh = [Mesh((("dp", 2), ("tp", 2)), (None, None), place) for place in itertools.product(range(2), range(2))]
    assert [share(each, ("dp",)) for each in mesh] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert not dist.is_initialized()
