"""Collectives on real processes: the programs of the virtual mesh, with its numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import test_compressed_collectives as compressed
import torch
import torch.distributed as dist
from processes import RankError, run_on_ranks
from test_collectives import PROGRAMS, assert_close, inputs, loss_of, numbers, several
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad, vmap

import functional_booster as fb
from functional_booster.sharding import collectives as c
from functional_booster.sharding.mesh import Mesh, mesh_of, real_mesh, spmd, virtual_mesh

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes

Results = dict[str, torch.Tensor]


def forms(name: str) -> dict[str, Any]:
    """A program, its derivatives and its batched forms, each from x (R, R) and a batch of them (3, R, R)."""
    program, loss = PROGRAMS[name], loss_of(PROGRAMS[name])
    return {
        "value": lambda x, batch: program(x),
        "gradient": lambda x, batch: fb.grad(loss)(x),
        "second": lambda x, batch: grad(lambda x: grad(loss)(x).square().sum())(x),
        "batched": lambda x, batch: vmap(program, in_dims=1, out_dims=1)(batch.movedim(0, 1)),
        "batched gradient": lambda x, batch: vmap(grad(loss), in_dims=2)(batch.movedim(0, 2)),
        "gradient of the batch": lambda x, batch: grad(lambda batch: vmap(loss)(batch).sum())(batch),
        "remat": lambda x, batch: grad(loss_of(fb.remat(program)))(x),
    }


EAGER = ("value", "gradient", "second", "batched", "batched gradient", "gradient of the batch", "remat")
TRACED = ("value", "gradient", "gradient, traced", "remat, traced")


def on_this_rank(names: Sequence[str], sizes: dict[str, int], which: Sequence[str]) -> dict[str, Results]:
    mesh = real_mesh(sizes, "cpu")
    x, batch = inputs(mesh=mesh)[mesh.place], inputs(3, mesh=mesh)[(slice(None), *mesh.place)]

    def found(name: str, form: str) -> torch.Tensor:
        fn = forms(name)[form.removesuffix(", traced")]
        if not form.endswith(", traced"):
            return spmd(fn, mesh)(x, batch)
        fresh = fb.jit(lambda x, batch: fn(x, batch) * 1)  # a graph returns no input that is handed through
        return spmd(fresh.lower, mesh)(x, batch).module(x, batch)[0]

    return {name: {form: found(name, form) for form in which} for name in names}


def check_against_the_virtual_mesh(names: Sequence[str], sizes: dict[str, int], which: Sequence[str]) -> None:
    mesh = virtual_mesh(**sizes)
    x, batch = inputs(mesh=mesh), inputs(3, mesh=mesh).movedim(0, 2)
    ranks = run_on_ranks(mesh.size, on_this_rank, names, sizes, which)
    for name in names:
        for form in {form.removesuffix(", traced") for form in which}:
            expected = spmd(forms(name)[form], mesh)(x, batch)
            for rank, found in enumerate(ranks):
                for one in {form, f"{form}, traced"} & {*which}:
                    assert_close(found[name][one], expected[divmod(rank, sizes["b"])])


def test_two_ranks_equal_the_virtual_mesh_traced_too() -> None:
    check_against_the_virtual_mesh([*PROGRAMS], {"a": 1, "b": 2}, TRACED)


def test_four_ranks_equal_the_virtual_mesh() -> None:
    check_against_the_virtual_mesh([*PROGRAMS], {"a": 2, "b": 2}, EAGER)


@pytest.mark.parametrize("sizes", [{"a": 4, "b": 1}, {"a": 1, "b": 4}], ids=str)
def test_an_axis_of_one_rank_beside_one_of_four(sizes: dict[str, int]) -> None:
    check_against_the_virtual_mesh(["several"], sizes, TRACED)


# Collectives that compress: the same bits.


def compressed_forms(name: str) -> dict[str, Any]:
    """A program, its gradient and its batched forms, each from x (R, D) and a batch of them (3, R, D)."""
    program, loss = compressed.PROGRAMS[name], compressed.loss_of(compressed.PROGRAMS[name])
    formats = compressed.E4M3, compressed.E5M2
    return {
        "value": lambda x, batch: program(x, *formats),
        "gradient": lambda x, batch: fb.grad(loss)(x),
        "batched": lambda x, batch: vmap(lambda x: program(x, *formats))(batch),
        "batched gradient": lambda x, batch: vmap(grad(loss), in_dims=1)(batch.movedim(0, 1)),
    }


def compressed_on_this_rank(sizes: dict[str, int]) -> dict[str, Results]:
    mesh = real_mesh(sizes, "cpu")
    x, batch = compressed.inputs(mesh=mesh)[mesh.place], compressed.inputs(3, mesh=mesh)[(slice(None), *mesh.place)]

    def traced(x: torch.Tensor, batch: torch.Tensor, name: str) -> torch.Tensor:
        lowered = fb.jit(fb.grad(compressed.loss_of(compressed.PROGRAMS[name]))).lower(x)
        assert {one.dtype for one in lowered.collectives} >= {torch.uint8}
        return lowered.module(x)[0]

    return {
        name: {
            **{form: spmd(fn, mesh)(x, batch) for form, fn in compressed_forms(name).items()},
            "traced": spmd(lambda x, batch, name=name: traced(x, batch, name), mesh)(x, batch),
        }
        for name in compressed.PROGRAMS
    }


@pytest.mark.parametrize("sizes", [{"a": 1, "b": 2}, {"a": 2, "b": 2}], ids=str)
def test_compressed_collectives_have_the_bits_of_the_virtual_mesh(sizes: dict[str, int]) -> None:
    mesh = virtual_mesh(**sizes)
    x, batch = compressed.inputs(mesh=mesh), compressed.inputs(3, mesh=mesh).movedim(0, 2)
    ranks = run_on_ranks(mesh.size, compressed_on_this_rank, sizes)
    for name in compressed.PROGRAMS:
        expected = {form: spmd(fn, mesh)(x, batch) for form, fn in compressed_forms(name).items()}
        expected["traced"] = expected["gradient"]
        for rank, found in enumerate(ranks):
            for form, value in found[name].items():
                assert torch.equal(value, expected[form][divmod(rank, sizes["b"])]), (name, form)


DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.complex64)


def moved(shape: tuple[int, ...]) -> list[Results]:
    """For each dtype, every collective that has a meaning for it, on values that are not contiguous."""
    mesh = real_mesh({"a": 2, "b": 2}, "cpu")
    values = [drawn(dtype, shape, mesh)[mesh.place] for dtype in DTYPES]
    return [spmd(lambda x: of_dtype(x.transpose(0, -1)), mesh)(value) for value in values]


def drawn(dtype: torch.dtype, shape: tuple[int, ...], mesh: Mesh) -> torch.Tensor:
    values = numbers(*mesh.shape, *shape) * 3
    return torch.complex(values, values.cos()).to(dtype) if dtype.is_complex else values.to(dtype)


def of_dtype(x: torch.Tensor) -> Results:
    found = {
        "all_gather": c.all_gather(x, ("a", "b"), dim=-1),
        "all_to_all": c.all_to_all(x, "a", split_dim=0, concat_dim=1),
        "ppermute": c.ppermute(x, "b", [(1, 0)]),
        "broadcast": c.broadcast(x, "b", 1),
        "enter": c.enter(x, "a"),
    }
    if x.dtype != torch.bool:
        found |= {"psum": c.psum(x, ("a", "b")), "psum_scatter": c.psum_scatter(x, "b", dim=1)}
    if not x.is_complex():
        found |= {"pmax": c.pmax(x, ("a", "b")), "pmin": c.pmin(x, "a")}
    return found


def test_dtypes() -> None:
    mesh, shape = virtual_mesh(a=2, b=2), (4, 2, 2)
    ranks = run_on_ranks(4, moved, shape)
    for number, dtype in enumerate(DTYPES):
        expected = spmd(lambda x: of_dtype(x.transpose(0, -1)), mesh)(drawn(dtype, shape, mesh))
        for rank, found in enumerate(ranks):
            for name, value in found[number].items():
                exact = expected[name][divmod(rank, 2)]
                assert value.dtype == exact.dtype
                assert value.is_contiguous() or name in ("enter", "all_gather", "all_to_all", "psum_scatter"), name
                torch.testing.assert_close(value, exact)


def moved_bytes() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each collective that moves makes of float8 numbers and of their bytes."""
    mesh = real_mesh({"a": 2}, "cpu")
    data = torch.arange(16, dtype=torch.uint8).view(4, 4) * (5 + mesh.place[0])

    def everywhere(x: torch.Tensor) -> Results:
        return {
            "all_gather": c.all_gather(x, "a"),
            "all_to_all": c.all_to_all(x, "a", split_dim=0, concat_dim=0),
            "broadcast": c.broadcast(x, "a", 1),
            "ppermute": c.ppermute(x, "a", [(1, 0), (0, 1)]),
        }

    as_bytes, as_float8 = spmd(everywhere, mesh)(data), spmd(everywhere, mesh)(data.view(torch.float8_e5m2))
    return [(value, as_float8[name].view(torch.uint8)) for name, value in as_bytes.items()]


def test_float8_moves_as_bytes() -> None:
    for found in run_on_ranks(2, moved_bytes):
        for as_bytes, as_float8 in found:
            assert torch.equal(as_bytes, as_float8)


def shapes_of_nothing() -> Results:
    mesh = real_mesh({"a": 2, "b": 1}, "cpu")
    scalar, empty = torch.tensor(float(mesh.place[0])), torch.zeros(0, 3)

    def program(scalar: torch.Tensor, empty: torch.Tensor) -> Results:
        return {
            "index": c.axis_index(("a", "b")),
            "size": torch.tensor(c.axis_size(("b", "a"))),
            "sum": c.psum(scalar, "a"),
            "gathered": c.all_gather(scalar, "a", tiled=False),
            "sent": c.ppermute(scalar, "a", [(0, 1)]),
            "empty": c.all_gather(empty, "a", dim=1),
            "parts": c.psum_scatter(empty, "a"),
        }

    return spmd(program, mesh)(scalar, empty)


def test_scalars_and_empty_tensors() -> None:
    for rank, found in enumerate(run_on_ranks(2, shapes_of_nothing)):
        assert (found["index"].item(), found["index"].dtype, found["size"].item()) == (rank, torch.int32, 2)
        assert found["sum"].item() == 1.0
        assert found["gathered"].tolist() == [0.0, 1.0]
        assert found["sent"].item() == 0.0
        assert (found["empty"].shape, found["parts"].shape) == ((0, 6), (0, 3))


def regions() -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """A layer with collectives in it, twice, in one jitted gradient."""
    mesh = real_mesh({"a": 1, "b": 2}, "cpu")
    layer = fb.region(lambda w, x: x + c.leave(torch.tanh(c.enter(x, "b") @ w) @ w.T, "b"))
    rematted = fb.remat(lambda w, x: c.all_gather(c.psum_scatter(x @ w, "b"), "b").sin())

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return rematted(w, layer(w, layer(w, x))).square().sum()

    w, x = inputs(mesh=mesh)[mesh.place], numbers(2, 2, seed=1)
    gradient = fb.grad(loss, argnums=(0, 1))
    lowered = spmd(fb.jit(gradient).lower, mesh)(w, x)
    found = [(one.op, one.count, one.bytes) for one in lowered.collectives]
    return found, lowered.module(w, x), list(spmd(gradient, mesh)(w, x))


def test_lowered_counts_the_collectives_of_regions_too() -> None:
    for found, traced, run in run_on_ranks(2, regions):
        # leave of two layers and the transpose of two enters; psum_scatter and all_gather, again in the backward, and
        # the transposes of both. (R, R) = (2, 2) float64; a scattered part is half of that.
        assert sorted(found) == [
            ("all_gather_into_tensor", 3, 3 * 32),
            ("all_reduce", 4, 4 * 32),
            ("reduce_scatter_tensor", 3, 3 * 16),
        ]
        for value, exact in zip(traced, run, strict=True):
            assert_close(value, exact)


def lowered_ops() -> list[str]:
    """The nodes that a program's collectives leave in its graph."""
    mesh = real_mesh({"a": 1, "b": 2}, "cpu")
    graph = spmd(lambda x: fb.jit(several).lower(x), mesh)(inputs(mesh=mesh)[mesh.place]).graph
    return [node.target._opname for node in graph.nodes if getattr(node.target, "namespace", "") == "_c10d_functional"]


def test_a_graph_waits_for_each_collective_apart() -> None:
    for ops in run_on_ranks(2, lowered_ops):
        started = [op for op in ops if op != "wait_tensor"]
        assert len(started) * 2 == len(ops)
        assert set(started) == {"all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor"}


def refused(sizes: dict[str, int]) -> list[str]:
    mesh, told = real_mesh(sizes, "cpu"), []
    for call in (lambda x: c.psum_scatter(x, "a"), lambda x: c.psum(x, "tp"), lambda x: c.ppermute(x, "a", [(0, 5)])):
        with pytest.raises((ValueError, NameError)) as raised:
            spmd(call, mesh)(torch.zeros(3))
        told.append(str(raised.value))
    return told


def test_errors_are_the_same_on_all_ranks() -> None:
    first, second = run_on_ranks(2, refused, {"a": 2})
    assert first == second
    assert first[0].startswith("dim: 0, where x has size 3, expected a multiple of 2")
    assert first[1] == "axis 'tp' is not declared: the mesh has ('a',)"
    assert first[2].startswith("perm: [(0, 5)]")


def layouts() -> tuple[bool, int]:
    """A layout has one mesh in a world, and none after it."""
    same = real_mesh({"a": 2, "b": 1}, "cpu") is real_mesh({"a": 2, "b": 1}, "cpu")
    summed = spmd(lambda x: c.psum(x, "a"), real_mesh({"a": 2, "b": 1}, "cpu"))(torch.ones(()))
    return same, int(summed)


def descending() -> Mesh:
    return mesh_of(DeviceMesh("cpu", [1, 0], mesh_dim_names=("a",)))


def test_meshes() -> None:
    assert run_on_ranks(2, layouts) == [(True, 2)] * 2
    assert run_on_ranks(2, layouts) == [(True, 2)] * 2
    with pytest.raises(ValueError, match=r"ranks of the DeviceMesh must ascend along each dim, got \[1, 0\]"):
        run_on_ranks(2, descending)


# The processes themselves.


def rank_and_sum(x: float) -> tuple[int, int, float]:
    total = torch.tensor(x)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"on {rank}")
    dist.all_reduce(torch.ones(()))


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("goodbye", flush=True)
        os._exit(3)
    dist.all_reduce(torch.ones(()))


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("two arguments")


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def test_ranks_run_together() -> None:
    assert run_on_ranks(2, rank_and_sum, 1.5) == [(0, 2, 3.0), (1, 2, 3.0)]
    assert run_on_ranks(4, rank_and_sum, 1.5) == [(rank, 4, 6.0) for rank in range(4)]
    assert run_on_ranks(1, rank_and_sum, 1.5) == [(0, 1, 1.5)]


def test_what_a_rank_raises_is_raised_here() -> None:
    with pytest.raises(KeyError, match="on 1") as raised:
        run_on_ranks(2, fail_on, 1)
    assert "raised on rank 1 of 2" in raised.value.__notes__[0]
    assert "in fail_on" in raised.value.__notes__[0]
    with pytest.raises(RankError, match=r"(?s)raised on rank 0 of 1:.*Unpicklable: two arguments"):
        run_on_ranks(1, raise_unpicklable)
    assert run_on_ranks(2, rank_and_sum, 1.0) == [(0, 2, 2.0), (1, 2, 2.0)]


def test_a_rank_that_dies_or_sleeps_is_an_error() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 died with exit status 3.*goodbye"):
        run_on_ranks(2, die_on, 1)
    with pytest.raises(RankError, match="no answer within 2 seconds from rank 0 of 1"):
        run_on_ranks(1, sleep_on, 0, timeout=2.0)
    assert run_on_ranks(1, rank_and_sum, 1.0) == [(0, 1, 1.0)]
