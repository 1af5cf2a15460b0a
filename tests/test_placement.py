"""Gemini's "auto": which chunks stay on the host once a step has shown how much room there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster import placement, testing
from functional_booster.kernels import flat
from functional_booster.sharding import chunks


def booster(**arguments: object) -> fb.Booster:
    plugin = fb.GeminiPlugin(min_chunk_size_m=0, search_range_m=0, hidden_dim=1, **arguments)  # type: ignore[arg-type]
    return fb.Booster("cpu", "fp32", plugin, fb.virtual_mesh(2))


def started(**arguments: object) -> tuple[fb.Booster, testing.Problem, fb.TrainState]:
    chosen, problem = booster(**arguments), testing.small(8)
    return chosen, problem, chosen.init(problem.model, problem.tx, key=problem.key)


def test_all_chunks_begin_on_the_host_and_are_gathered_where_they_are_used() -> None:
    _, _, state = started(placement_policy="auto")
    layout = state.storage.layout
    assert layout.provisional and len(layout.host) > 2
    assert set(layout.host) == {bucket for bucket, axes in layout.axes.items() if axes}
    assert not placement.is_provisional(state)  # nothing to decide on a CPU
    assert not started()[2].storage.layout.provisional


@given(room=st.integers(-10, 10_000))
def test_as_many_of_the_last_chunks_stay_as_there_is_room_for(room: int) -> None:
    layout = _layout()
    held = {bucket: 8 * layout.size(bucket) for bucket in layout.host}
    ordered = sorted(held, key=lambda bucket: [slot.bucket for slot in layout.slots].index(bucket))
    host = chunks.overflowing(layout, held, room)
    assert list(host) == ordered[: len(host)]
    assert not ordered[len(host) :] or sum(held[bucket] for bucket in ordered[len(host) :]) <= room
    assert not host or sum(held[bucket] for bucket in ordered[len(host) - 1 :]) > room


def _layout() -> flat.Layout:
    return started(placement_policy="auto")[2].storage.layout


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_what_is_placed_trains_on_as_if_it_had_always_been_there(fraction: float) -> None:
    chosen, problem, state = started(placement_policy="auto", steady_cuda_cap_ratio=1.0)
    still, _, expected = started()
    kwargs = {"max_norm": problem.max_norm, "jit": False}
    step, other = (each.train_step(problem.loss_fn, problem.tx, **kwargs) for each in (chosen, still))
    state, _ = step(state, problem.batch)
    held = sum(leaf.nbytes for leaf in fb.tree.leaves(state.opt_state) if leaf.dim() > 1)
    state = placement.settled(state, peak=1000, capacity=1000 + int(fraction * held))
    host = state.storage.layout.host
    assert not state.storage.layout.provisional and (len(host) > 0) == (fraction < 1)
    assert fraction == 0 or len(host) < len(state.storage.layout.axes)
    for node in (state.opt_state, state.storage):
        for leaf in fb.tree.leaves(node, is_leaf=lambda node: isinstance(node, flat.Flat)):
            assert not isinstance(leaf, flat.Flat) or leaf.layout == state.storage.layout
    expected, _ = other(expected, problem.batch)
    state, metrics = step(state, problem.batch)
    expected, same = other(expected, problem.batch)
    fb.tree.map(
        lambda got, want: torch.testing.assert_close(got, want, rtol=0, atol=0),
        (chosen.full_params(state), metrics),
        (still.full_params(expected), same),
    )


@pytest.mark.parametrize("argument", ["shard_param_frac", "offload_optim_frac"])
def test_auto_takes_no_fractions(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument}: 0.5 is not supported, .* 'auto' decides"):
        fb.GeminiPlugin(placement_policy="auto", **{argument: 0.5})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0.9, 1e-9])
def test_the_first_step_on_a_gpu_places_the_chunks(ratio: float) -> None:
    plugin = fb.GeminiPlugin(placement_policy="auto", steady_cuda_cap_ratio=ratio, min_chunk_size_m=0, search_range_m=0)
    chosen, problem = fb.Booster("cuda", "fp32", plugin), testing.small(8)
    alone, batch = fb.Booster("cuda", "fp32"), fb.tree.map(lambda leaf: leaf.cuda(), problem.batch)
    states = [each.init(problem.model, problem.tx, key=problem.key) for each in (chosen, alone)]
    steps = [each.train_step(problem.loss_fn, problem.tx, max_norm=problem.max_norm) for each in (chosen, alone)]
    assert all(buffer.device.type == "cpu" for buffer in states[0].storage.buffers.values())
    for _ in range(3):
        (state, _), (expected, _) = (step(state, batch) for step, state in zip(steps, states, strict=True))
        states = [state, expected]
        assert {buffer.device.type for buffer in state.storage.buffers.values()} == {"cuda" if ratio > 0.5 else "cpu"}
    fb.tree.map(
        lambda got, want: torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12),
        chosen.full_params(states[0]),
        alone.full_params(states[1]),
    )
