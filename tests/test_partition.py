"""Trees split by PartitionSpecs: unshard is the inverse of shard at any size; errors name leaf, spec and sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_on_ranks

import functional_booster as fb
from functional_booster import P, testing
from functional_booster.sharding.mesh import Mesh, Replicated, real_mesh, spmd
from functional_booster.sharding.partition import local_shape, part_of, shard, unshard, whole_of

Tree = Any


@st.composite
def split_trees(draw: st.DrawFn, max_ranks: int = 64) -> tuple[Mesh, Tree, Tree]:
    """(mesh, values, specs): a tree of any dtypes and sizes, and a legal spec for each leaf."""
    mesh = draw(testing.meshes(max_ranks=max_ranks))
    values = draw(testing.trees(testing.arrays()))
    leaves, structure = fb.tree.flatten(values)
    drawn = [draw(testing.specs(tuple(leaf.shape), mesh)) for leaf in leaves]
    return mesh, values, fb.tree.unflatten(structure, drawn)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def pieces(x: torch.Tensor, spec: P, mesh: Mesh) -> dict[tuple[int, ...], torch.Tensor]:
    """Each rank's part by slicing, in numpy's way: what ``shard`` must make."""
    sizes = dict(mesh.axes)
    found = {}
    for flat in range(mesh.size):
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), mesh.shape))
        index = dict(zip(mesh.names, place, strict=True))
        part = x
        for dim, entry in enumerate(spec):
            axes = (entry,) if isinstance(entry, str) else entry or ()
            ranks = math.prod(sizes[axis] for axis in axes)
            rank = 0
            for axis in axes:
                rank = rank * sizes[axis] + index[axis]
            size = math.ceil(x.shape[dim] / ranks)
            part = part.narrow(dim, min(rank * size, x.shape[dim]), max(0, min(size, x.shape[dim] - rank * size)))
        found[place] = part
    return found


class TestInverse:
    @settings(max_examples=20)
    @given(split_trees())
    def test_unshard_inverts_shard(self, case: Any) -> None:
        mesh, values, specs = case
        fb.tree.map(same, unshard(shard(values, specs, mesh), specs, mesh, values), values)

    @settings(max_examples=20)
    @given(split_trees(max_ranks=12))
    def test_parts_are_slices_padded_with_zeros(self, case: Any) -> None:
        mesh, values, specs = case

        def check(value: torch.Tensor, spec: P, parts: torch.Tensor) -> None:
            assert tuple(parts.shape) == (*mesh.shape, *local_shape(tuple(value.shape), spec, mesh))
            for place, expected in pieces(value, spec, mesh).items():
                got = parts[place]
                inside = tuple(slice(0, size) for size in expected.shape)
                same(got[inside], expected)
                padding = torch.ones_like(got, dtype=torch.bool)
                padding[inside] = False
                assert not got[padding].any()

        fb.tree.map(check, values, specs, shard(values, specs, mesh))

    def test_one_element_and_scalar_on_eight_ranks(self) -> None:
        mesh = fb.virtual_mesh(fsdp=8)
        values = {"one": torch.tensor([3.0]), "scalar": torch.tensor(2)}
        parts = shard(values, {"one": P("fsdp"), "scalar": P()}, mesh)
        assert parts["one"].tolist() == [[3.0]] + [[0.0]] * 7
        assert parts["scalar"].tolist() == [2] * 8

    def test_axes_of_one_dim_split_in_their_order(self) -> None:
        mesh = fb.virtual_mesh(a=2, b=3)
        x = torch.arange(6)
        assert shard(x, P(("a", "b")), mesh).tolist() == [[[0], [1], [2]], [[3], [4], [5]]]
        assert shard(x, P(("b", "a")), mesh).tolist() == [[[0], [2], [4]], [[1], [3], [5]]]

    def test_results_own_their_storage(self) -> None:
        mesh, x = fb.virtual_mesh(a=2), torch.ones(4)
        parts = shard(x, P(), mesh)
        parts[0].zero_()
        assert parts[1].all() and x.all()
        whole = unshard(parts, P(), mesh, (4,))
        parts.zero_()
        assert not whole.any() and whole.data_ptr() != parts.data_ptr()

    def test_abstract_trees_give_specs_and_shapes(self) -> None:
        mesh = fb.virtual_mesh(tp=4)
        infos = {"w": fb.ArrayInfo((6, 3), spec=P("tp")), "b": fb.ArrayInfo((3,))}
        values = fb.tree.map(lambda info: torch.rand(info.shape), infos)
        specs = fb.tree.map(lambda info: info.spec, infos)
        fb.tree.map(same, unshard(shard(values, specs, mesh), specs, mesh, infos), values)


class TestInsidePrograms:
    @settings(max_examples=10)
    @given(split_trees(max_ranks=8))
    def test_gradients(self, case: Any) -> None:
        """Each rank weighs its copy of the whole by its own number; a part's gradient is the sum of these numbers."""
        mesh, values, specs = case
        numbers = torch.arange(1.0, mesh.size + 1, dtype=torch.float64).reshape(mesh.shape)
        for value, spec in zip(fb.tree.leaves(values), fb.tree.leaves(specs), strict=True):
            x = torch.ones(value.shape, dtype=torch.float64)

            def weighed(x: torch.Tensor, number: torch.Tensor, spec: P = spec) -> torch.Tensor:
                part = part_of(x, spec)
                return fb.grad(lambda part: (whole_of(part, spec, tuple(x.shape)) * number).sum())(part)

            got = unshard(spmd(weighed, mesh)(Replicated(x), numbers), spec, mesh, x)
            split = {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
            dims = [dim for dim, axis in enumerate(mesh.names) if axis in split]
            first = tuple(slice(None) if dim in dims else 0 for dim in range(len(mesh.axes)))
            same(got, x * numbers[first].sum())

    def test_padding_has_no_gradient(self) -> None:
        mesh = fb.virtual_mesh(a=4)

        def program(part: torch.Tensor) -> torch.Tensor:
            return fb.grad(lambda part: whole_of(part, P("a"), (5,)).square().sum())(part)

        grads = spmd(program, mesh)(torch.ones(4, 2))
        assert grads.tolist() == [[8.0, 8.0], [8.0, 8.0], [8.0, 0.0], [0.0, 0.0]]

    def test_part_of_transposes_to_the_place_of_the_part(self) -> None:
        def program(x: torch.Tensor) -> torch.Tensor:
            return fb.grad(lambda x: part_of(x, P("a")).sum())(x)

        got = spmd(program, fb.virtual_mesh(a=2))(Replicated(torch.ones(3)))
        assert got.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]

    def test_wrong_part(self) -> None:
        with pytest.raises(
            ValueError, match=r"part: shape \(3,\), expected \(2,\): shape \(7,\) split by P\('a'\) over a=4"
        ):
            spmd(lambda x: whole_of(x, P("a"), (7,)), fb.virtual_mesh(a=4))(torch.ones(4, 3))

    def test_undeclared_axis(self) -> None:
        with pytest.raises(NameError, match="axis 'b' is not declared"):
            spmd(lambda x: part_of(x, P("b")), fb.virtual_mesh(a=2))(torch.ones(2, 3))


MESH = fb.virtual_mesh(dp=2, tp=4)
VALUES = {"h": [{"w": torch.ones(5, 3)}], "s": torch.ones(())}


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        ({"h": [{"w": P("ep")}], "s": P()}, ValueError, r"h\.0\.w: P\('ep'\) names axis 'ep'.*\('dp', 'tp'\)"),
        ({"h": [{"w": P()}], "s": P("tp")}, ValueError, r"s: P\('tp'\) has 1 entries, but shape \(\) has 0 dims"),
        ({"h": [{"w": P(None, None, "tp")}], "s": P()}, ValueError, r"h\.0\.w: .* 3 entries, but shape \(5, 3\) has 2"),
        ({"h": [{"w": P()}]}, ValueError, "specs: another structure than the values"),
        ({"h": [{"w": ("dp",)}], "s": P()}, TypeError, r"specs: h\.0\.w: \('dp',\), expected a PartitionSpec"),
        ({"h": [{"w": P()}], "s": None}, TypeError, "specs: s: None, expected a PartitionSpec"),
    ],
)
def test_errors_name_the_leaf(specs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shard(VALUES, specs, MESH)
    parts = shard(VALUES, fb.tree.map(lambda _: P(), VALUES), MESH)
    with pytest.raises(error, match=message):
        unshard(parts, specs, MESH, VALUES)


def test_parts_of_another_spec() -> None:
    specs = {"h": [{"w": P("tp")}], "s": P()}
    parts = shard(VALUES, specs, MESH)
    message = (
        r"h\.0\.w: parts of shape \(2, 4, 2, 3\), expected \(2, 4, 3, 1\): shape \(5, 3\) split by P\('dp', 'tp'\)"
    )
    with pytest.raises(ValueError, match=message):
        unshard(parts, {"h": [{"w": P("dp", "tp")}], "s": P()}, MESH, VALUES)
    with pytest.raises(ValueError, match="shapes: another structure than the parts"):
        unshard(parts, specs, MESH, {"s": ()})


def on_processes(axes: dict[str, int], seed: int) -> None:
    """On each process: its part is the virtual rank's, and the whole comes back; gradients through it as well."""
    mesh, virtual = real_mesh(axes, "cpu"), fb.virtual_mesh(**axes)
    key = fb.random.key(seed)
    first, *others = axes
    both = P(tuple(axes), None) if others else P(None, first)
    cases = {
        "uneven": ((5, 3), P(first, *others[:1])),
        "both": ((7, 2), both),
        "one": ((1,), P(first)),
        "scalar": ((), P()),
        "empty": ((0, 3), P(first)),
        "replicated": ((3,), P()),
    }
    values: dict[str, torch.Tensor] = {
        name: fb.random.normal(fb.random.fold_in(key, i), shape, dtype=torch.float64)
        for i, (name, (shape, _)) in enumerate(cases.items())
    }
    values["bools"], values["bf16"] = values["uneven"] > 0, values["both"].to(torch.bfloat16)
    specs = {name: spec for name, (_, spec) in cases.items()} | {"bools": cases["uneven"][1], "bf16": both}
    parts = shard(values, specs, mesh)
    fb.tree.map(lambda part, of_all: same(part, of_all[mesh.place]), parts, shard(values, specs, virtual))
    fb.tree.map(same, unshard(parts, specs, mesh, values), values)

    def program(x: torch.Tensor) -> torch.Tensor:
        loss = lambda part: whole_of(part, both, tuple(x.shape)).pow(3).sum()  # noqa: E731
        return fb.grad(loss)(part_of(x, both))

    same(spmd(program, mesh)(values["both"]), spmd(program, virtual)(Replicated(values["both"]))[mesh.place])


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 1, "fsdp": 2}])
def test_on_processes(axes: dict[str, int]) -> None:
    run_on_ranks(math.prod(axes.values()), on_processes, axes, 3)


@pytest.mark.parametrize("entry", [["a", "b"], 0, ("a", 1)])
def test_entries_of_another_type_are_refused(entry: Any) -> None:
    with pytest.raises(TypeError, match=r"PartitionSpec: entry 1 is .*, expected None, a name or a tuple of names"):
        P("c", entry)
