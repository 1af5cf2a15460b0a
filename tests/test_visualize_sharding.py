"""The picture of a sharding is read back: where a rank's colour is, are the numbers that the rank holds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

import functional_booster as fb
from functional_booster import visualize
from functional_booster.kernels import flat, tree

TX = fb.optim.adamw(0.01, weight_decay=0.1, mask=fb.optim.matrices)
CASES: dict[str, tuple[Any, Any]] = {
    "single": (None, None),
    "ddp": (fb.TorchDDPPlugin(), fb.virtual_mesh(3)),
    "zero": (fb.LowLevelZeroPlugin(extra_dp_size=2), fb.virtual_mesh(6)),
    "fsdp": (fb.TorchFSDPPlugin(ignored_modules=["norm"]), fb.virtual_mesh(8)),
    "hybrid": (fb.TorchFSDPPlugin(sharding_strategy="HYBRID_SHARD"), fb.virtual_mesh(dp=2, fsdp=3)),
}


def model() -> fb.Model:
    normal = fb.initializers.normal()
    abstract = {
        "h": [{"w": fb.ArrayInfo((9, 30), initializer=normal), "b": fb.ArrayInfo((30,), initializer=normal)}] * 2,
        "norm": {"scale": fb.ArrayInfo((30,), initializer=normal)},
        "table": fb.ArrayInfo((5, 41), initializer=normal, trainable=False),
    }
    return fb.Model(lambda key: fb.initialize(abstract, key), lambda params: params, abstract)


@functools.cache
def state_of(case: str) -> fb.TrainState:
    plugin, mesh = CASES[case]
    return fb.Booster("cpu", "fp32", plugin=plugin, mesh=mesh).init(model(), TX, key=fb.random.key(0))


@functools.cache
def figure_of(case: str) -> Figure:
    return visualize.sharding(state_of(case))


def rank_of(colour: Any, ranks: int) -> int:
    """The rank of a colour: they are spread evenly over viridis."""
    edges = mpl.colors.BoundaryNorm(np.arange(ranks + 1) - 0.5, 256)
    colours = mpl.colormaps["viridis"](edges(np.arange(ranks)))
    return int(np.abs(colours - colour).sum(1).argmin())


def drawn(figure: Figure, ranks: int) -> dict[int, dict[int, tuple[float, float]]]:
    """{row: {rank: (from, to)}} of the coloured boxes."""
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for collection in figure.axes[0].collections:
        if isinstance(collection, PolyCollection) and not collection.get_hatch() and not collection.get_alpha():
            for path, colour in zip(collection.get_paths(), np.asarray(collection.get_facecolor()), strict=True):
                box = path.get_extents()
                row = found.setdefault(round((box.y0 + box.y1) / 2), {})
                rank = rank_of(colour, ranks)
                assert rank not in row
                row[rank] = (box.x0, box.x1)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_its_colour_covers(case: str) -> None:
    state = state_of(case)
    mesh = state.plan.mesh
    rows = drawn(figure_of(case), mesh.size)
    named = [(part, bucket) for part in (state.storage, state.frozen) if part is not None for bucket in part.buffers]
    assert len(rows) == len(named)
    whole = fb.Booster("cpu", "fp32", plugin=CASES[case][0], mesh=CASES[case][1]).full_params(state)
    for row, (part, bucket) in enumerate(_as_drawn(state)):
        held = part.buffers[bucket].reshape(mesh.size, -1)
        values = flat.ravel(_chosen(whole, part.layout), part.layout).buffers[bucket]
        for rank in range(mesh.size):
            start, end = (round(edge * part.layout.size(bucket)) for edge in rows[row][rank])
            assert torch.equal(values[start:end], held[rank])


@pytest.mark.parametrize("case", CASES)
def test_padding_is_hatched(case: str) -> None:
    state = state_of(case)
    hatched: dict[int, float] = {}
    for collection in figure_of(case).axes[0].collections:
        if collection.get_hatch():
            for path in collection.get_paths():
                box = path.get_extents()
                row = round((box.y0 + box.y1) / 2)
                hatched[row] = hatched.get(row, 0.0) + box.x1 - box.x0
    for row, (part, bucket) in enumerate(_as_drawn(state)):
        used = sum(slot.size for slot in part.layout.buckets[bucket])
        assert hatched[row] == pytest.approx(1 - used / part.layout.size(bucket))


def test_an_abstract_state_looks_the_same_and_rows_are_named(tmp_path: Path) -> None:
    booster = fb.Booster("cpu", "fp32", plugin=CASES["fsdp"][0], mesh=CASES["fsdp"][1])
    figure = visualize.sharding(booster.abstract(model(), TX), tmp_path / "sharding.png")
    assert (tmp_path / "sharding.png").read_bytes().startswith(b"\x89PNG")
    assert drawn(figure, 8) == drawn(figure_of("fsdp"), 8)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["h.0", "h.0", "h.1", "h.1", "norm", "table"]
    assert figure.axes[0].get_title() == "TorchFSDPPlugin, 8 ranks"
    offloaded = fb.Booster("cpu", "fp32", plugin=fb.LowLevelZeroPlugin(cpu_offload=True), mesh=fb.virtual_mesh(2))
    axes = visualize.sharding(offloaded.abstract(model(), TX)).axes[0]
    assert axes.get_yticklabels()[0].get_text() == "h.0 ... norm (host)"


def _as_drawn(state: fb.TrainState) -> list[tuple[flat.Flat, str]]:
    """Trained buckets, then frozen ones, in the order of the leaves."""
    parts = [part for part in (state.storage, state.frozen) if part is not None]
    return [(part, bucket) for part in parts for bucket in dict.fromkeys(slot.bucket for slot in part.layout.slots)]


def _chosen(params: Any, layout: flat.Layout) -> Any:
    """The leaves of a layout, None in the others' places."""
    names = {slot.name for slot in layout.slots}
    return tree.partition(params, tree.map_with_name(lambda name, _: name in names, params))[0]
