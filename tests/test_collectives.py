"""Collectives on virtual meshes: each is its definition on the array of all ranks, and so are its derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import functional_booster as fb
from functional_booster.sharding import checkpoint_policies, environment
from functional_booster.sharding import collectives as c
from functional_booster.sharding.mesh import Mesh, Replicated, spmd, virtual_mesh

Array = np.ndarray[Any, Any]
Program = Callable[[torch.Tensor], torch.Tensor]


# What each collective is: from the values of the ranks along the axis, in order, to their results.


def on_every_rank(value: Array, ranks: int) -> list[Array]:
    return [value] * ranks


def gathered(values: list[Array], *, dim: int, tiled: bool) -> list[Array]:
    return on_every_rank(np.concatenate(values, dim) if tiled else np.stack(values, dim), len(values))


def scattered(values: list[Array], *, dim: int, tiled: bool) -> list[Array]:
    total, ranks = sum(values[1:], values[0]), range(len(values))
    return np.split(total, len(values), dim) if tiled else [np.take(total, rank, dim) for rank in ranks]


def exchanged(values: list[Array], *, split_dim: int, concat_dim: int, tiled: bool) -> list[Array]:
    if tiled:
        parts = [np.split(value, len(values), split_dim) for value in values]
        return [np.concatenate([part[rank] for part in parts], concat_dim) for rank in range(len(values))]
    return [np.stack([np.take(value, rank, split_dim) for value in values], concat_dim) for rank in range(len(values))]


def permuted(values: list[Array], *, perm: list[tuple[int, int]]) -> list[Array]:
    results = [np.zeros_like(value) for value in values]
    for source, destination in perm:
        results[destination] = values[source]
    return results


DEFINITIONS: dict[str, Callable[..., list[Array]]] = {
    "enter": lambda values: values,
    "leave": lambda values: on_every_rank(np.sum(values, 0), len(values)),
    "psum": lambda values: on_every_rank(np.sum(values, 0), len(values)),
    "pmean": lambda values: on_every_rank(np.sum(values, 0) / len(values), len(values)),
    "pmax": lambda values: on_every_rank(np.max(values, 0), len(values)),
    "pmin": lambda values: on_every_rank(np.min(values, 0), len(values)),
    "all_gather": gathered,
    "psum_scatter": scattered,
    "all_to_all": exchanged,
    "ppermute": permuted,
    "broadcast": lambda values, root: on_every_rank(values[root], len(values)),
}
TUPLES = ("enter", "leave", "psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter")
PLAIN = sorted(set(DEFINITIONS) - {"enter", "leave"})  # whose gradient is that of the function of all ranks' values


@dataclass(frozen=True)
class Case:
    """A collective over some axes of a mesh, for one local shape."""

    name: str
    mesh: Mesh
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    options: dict[str, Any]

    def __call__(self, x: Any) -> Any:
        names = self.axes[0] if len(self.axes) == 1 else self.axes
        return getattr(c, self.name)(x, names, **self.options)

    def defined(self, values: torch.Tensor) -> torch.Tensor:
        """The definition, on the values of all ranks (*mesh, *local)."""
        names, lead = self.mesh.names, len(self.mesh.names)
        others = [name for name in names if name not in self.axes]
        order = [names.index(name) for name in (*others, *self.axes)]
        moved = np.transpose(values.numpy(), (*order, *range(lead, values.dim())))
        ranks = self.mesh.extent(self.axes)
        groups = moved.reshape(self.mesh.size // ranks, ranks, *values.shape[lead:])
        found = np.stack([np.stack(DEFINITIONS[self.name](list(group), **self.options)) for group in groups])
        found = found.reshape(*(self.mesh.shape[place] for place in order), *found.shape[2:])
        return torch.from_numpy(np.transpose(found, (*np.argsort(order), *range(lead, found.ndim))).copy())

    def values(self, seed: int = 0) -> torch.Tensor:
        return numbers(*self.mesh.shape, *self.shape, seed=seed)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """1 to 3 axes, up to 64 ranks."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= 64))
    return virtual_mesh(**dict(zip("abc", sizes, strict=False)))


@st.composite
def cases(draw: st.DrawFn, names: list[str] | None = None) -> Case:
    """A collective with options that fit a mesh and a local shape."""
    name, mesh = draw(st.sampled_from(names or sorted(DEFINITIONS))), draw(meshes())
    axes = draw(st.permutations(mesh.names))
    axes = tuple(axes[: draw(st.integers(1, len(axes))) if name in TUPLES else 1])
    ranks = mesh.extent(axes)
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    options: dict[str, Any] = {}
    if name in ("all_gather", "psum_scatter", "all_to_all"):
        options["tiled"] = draw(st.booleans())
        if options["tiled"] or name != "all_gather":
            shape = shape or [draw(st.integers(1, 3))]
    if name == "all_gather":
        options["dim"] = draw(dims(len(shape) + (not options["tiled"])))
    if name in ("psum_scatter", "all_to_all"):
        split = draw(dims(len(shape)))
        shape[split] = ranks * draw(st.integers(0, 2)) if options["tiled"] else ranks
        options["dim" if name == "psum_scatter" else "split_dim"] = split
    if name == "all_to_all":
        options["concat_dim"] = draw(dims(len(shape)))
    if name == "ppermute":
        sources, destinations = draw(st.permutations(range(ranks))), draw(st.permutations(range(ranks)))
        pairs = draw(st.integers(0, ranks))
        options["perm"] = list(zip(sources[:pairs], destinations[:pairs], strict=True))
    if name == "broadcast":
        options["root"] = draw(st.integers(0, ranks - 1))
    return Case(name, mesh, axes, tuple(shape), options)


def dims(number: int) -> st.SearchStrategy[int]:
    return st.integers(-number, number - 1)


# Programs for the tests that are not about options, on axes "a" and "b" of any sizes, for x (R, R) where the number of
# ranks divides R.


def _parts(x: torch.Tensor) -> torch.Tensor:
    """A dim 1 with a part for each rank along "b"."""
    return x.unflatten(1, (c.axis_size("b"), -1))


PROGRAMS: dict[str, Program] = {
    "enter": lambda x: c.enter(x, "b"),
    "leave": lambda x: c.leave(x, ("a", "b")),
    "psum": lambda x: c.psum(x, ("a", "b")),
    "pmean": lambda x: c.pmean(x, "a"),
    "pmax": lambda x: c.pmax(x, ("b", "a")),
    "pmin": lambda x: c.pmin(x, "b"),
    "all_gather": lambda x: c.all_gather(x, ("b", "a"), dim=1),
    "all_gather, not tiled": lambda x: c.all_gather(x, "a", dim=-1, tiled=False),
    "psum_scatter": lambda x: c.psum_scatter(x, ("a", "b"), dim=-1),
    "psum_scatter, not tiled": lambda x: c.psum_scatter(_parts(x), "b", dim=1, tiled=False),
    "all_to_all": lambda x: c.all_to_all(x, "b", split_dim=1, concat_dim=0),
    "all_to_all, not tiled": lambda x: c.all_to_all(_parts(x), "b", split_dim=1, concat_dim=2, tiled=False),
    "ppermute": lambda x: c.ppermute(x, "b", [(i, i + 1) for i in range(c.axis_size("b") - 1)]),
    "broadcast": lambda x: c.broadcast(x, "b", c.axis_size("b") - 1),
    "several": lambda x: several(x),
}


def several(x: torch.Tensor) -> torch.Tensor:
    """Collectives that feed each other, and meet a value that is no rank's own."""
    y = c.all_gather(x.sin(), ("a", "b"), dim=1)
    z = c.psum_scatter(y * c.axis_index(("a", "b")), ("a", "b"), dim=1) + c.psum(torch.ones_like(x[0]), "a")
    z = z * c.pmean(x, "b") + c.ppermute(z.cos(), "b", [(0, c.axis_size("b") - 1)])
    return c.all_to_all(z, "b", split_dim=1, concat_dim=0) / (1 + c.pmax(z.abs(), "a").sum())


programs = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
MESH = virtual_mesh(a=2, b=3)


def inputs(*lead: int, mesh: Mesh = MESH, seed: int = 0) -> torch.Tensor:
    return numbers(*lead, *mesh.shape, mesh.size, mesh.size, seed=seed)


def loss_of(program: Program) -> Program:
    """A scalar on each rank, with derivatives of every order."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = program(x)
        weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
        return (y.sin() * weights).sum() * (1 + c.axis_index(("a", "b")))

    return loss


def second(loss: Program) -> Program:
    """The gradient of the squared gradient."""
    return grad(lambda x: grad(loss)(x).square().sum())


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@given(cases())
@settings(max_examples=30)
def test_is_its_definition(case: Case) -> None:
    values = case.values()
    assert_close(spmd(case, case.mesh)(values), case.defined(values))


@given(cases(), st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bool]))
@settings(max_examples=25)
def test_dtypes_stay(case: Case, dtype: torch.dtype) -> None:
    values = (case.values() * 3).to(dtype)
    refused = {"pmean": dtype in (torch.int64, torch.int32, torch.bool)}
    refused |= dict.fromkeys(("psum", "leave", "psum_scatter"), dtype == torch.bool)
    if refused.get(case.name):
        with pytest.raises(TypeError, match=r"^w: a (sum|mean) of"):
            spmd(case, case.mesh)({"w": values})
    else:
        exact = case.defined(values).to(dtype)
        torch.testing.assert_close(spmd(case, case.mesh)(values), exact, rtol=1e-5, atol=1e-5)


@given(cases(PLAIN))
@settings(max_examples=15)
def test_gradient_on_a_rank_is_that_of_the_sum_over_ranks(case: Case) -> None:
    values = case.values()
    cotangents = numbers(*case.defined(values).shape, seed=1)
    on_ranks = spmd(lambda x, g: vjp(case, x)[1](g)[0], case.mesh)(values, cotangents)
    assert_close(on_ranks, vjp(spmd(case, case.mesh), values)[1](cotangents)[0])


@given(cases(PLAIN))
@settings(max_examples=15)
def test_second_derivatives_too(case: Case) -> None:
    values = case.values()
    weights = numbers(*case.defined(values).shape, seed=1)

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (case(x).sin() * w).sum()

    def of_all(x: torch.Tensor) -> torch.Tensor:
        return spmd(loss, case.mesh)(x, weights).sum()

    on_ranks = spmd(lambda x, w: second(lambda x: loss(x, w))(x), case.mesh)(values, weights)
    assert_close(on_ranks, second(of_all)(values))


@given(cases(["enter", "leave"]))
@settings(max_examples=15)
def test_enter_and_leave_are_each_others_transpose(case: Case) -> None:
    values, cotangents = case.values(), case.values(seed=1)
    other = Case({"enter": "leave", "leave": "enter"}[case.name], case.mesh, case.axes, case.shape, {})
    pulled = spmd(lambda x, g: vjp(case, x)[1](g)[0], case.mesh)(values, cotangents)
    assert_close(pulled, other.defined(cotangents))
    twice = spmd(lambda x, g, h: vjp(lambda g: vjp(case, x)[1](g)[0], g)[1](h)[0], case.mesh)
    assert_close(twice(values, cotangents, values.cos()), case.defined(values.cos()))


@given(cases())
@settings(max_examples=15)
def test_a_value_that_is_no_ranks_own(case: Case) -> None:
    local = numbers(*case.shape)
    expanded = local.expand(*case.mesh.shape, *case.shape)
    assert_close(spmd(lambda x: case(local), case.mesh)(expanded), case.defined(expanded))
    assert_close(spmd(case, case.mesh)(Replicated(local)), case.defined(expanded))


@given(cases())
@settings(max_examples=15)
def test_one_rank_needs_no_group(case: Case) -> None:
    sizes = tuple((name, 1) for name in case.mesh.names)
    alone = Mesh(sizes, (None,) * len(sizes), (0,) * len(sizes))
    options, shape = dict(case.options), list(case.shape)
    if case.name in ("psum_scatter", "all_to_all"):
        shape[options["dim" if case.name == "psum_scatter" else "split_dim"]] = 1
    if case.name == "ppermute":
        options["perm"] = [(0, 0)][: len(options["perm"])]
    if case.name == "broadcast":
        options["root"] = 0
    one = Case(case.name, Mesh(sizes), case.axes, tuple(shape), options)
    values = one.values()
    local = values.reshape(shape)
    cotangents = numbers(*one.defined(values).shape[len(sizes) :], seed=1)
    result, pull = vjp(spmd(one, alone), local)[:2]
    assert_close(result, one.defined(values).reshape(result.shape))
    expected = spmd(lambda x, g: vjp(one, x)[1](g)[0], one.mesh)(
        values, cotangents.expand(*one.mesh.shape, *result.shape)
    )
    assert_close(pull(cotangents)[0], expected.reshape(shape))


@given(cases(), st.data())
@settings(max_examples=15)
def test_vmap_over_the_mesh_and_on_each_rank(case: Case, data: st.DataObject) -> None:
    batch = [case.values(seed) for seed in range(3)]
    results = [case.defined(values) for values in batch]
    lead = len(case.mesh.names)
    place, out = data.draw(st.integers(0, batch[0].dim())), data.draw(st.integers(0, results[0].dim()))
    over = vmap(spmd(case, case.mesh), in_dims=place, out_dims=out)
    assert_close(over(torch.stack(batch, place)), torch.stack(results, out))
    place, out = data.draw(st.integers(0, len(case.shape))), data.draw(st.integers(0, results[0].dim() - lead))
    on_each = spmd(vmap(case, in_dims=place, out_dims=out), case.mesh)
    assert_close(on_each(torch.stack(batch, lead + place)), torch.stack(results, lead + out))


@given(meshes(), st.data())
@settings(max_examples=20)
def test_index_and_size(mesh: Mesh, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.permutations(mesh.names)))[: data.draw(st.integers(1, len(mesh.names)))]
    along = torch.arange(mesh.extent(axes), dtype=torch.int32).reshape([dict(mesh.axes)[name] for name in axes])
    view = [size if name in axes else 1 for name, size in mesh.axes]
    order = [axes.index(name) for name in mesh.names if name in axes]
    expected = along.permute(order).reshape(view).expand(mesh.shape)
    index, size = spmd(lambda x: (c.axis_index(axes), c.axis_size(axes)), mesh)(torch.zeros(mesh.shape))
    assert torch.equal(index, expected)
    assert index.dtype == torch.int32
    assert size == mesh.extent(axes)


@given(cases(["ppermute", "all_to_all"]))
@settings(max_examples=15)
def test_moves_are_undone_by_their_inverse(case: Case) -> None:
    if case.name == "ppermute":
        options = {"perm": [(to, source) for source, to in case.options["perm"]]}
    else:
        first, then = case.options["split_dim"], case.options["concat_dim"]
        options = {**case.options, "split_dim": then, "concat_dim": first}
    back = Case(case.name, case.mesh, case.axes, case.shape, options)
    values = case.values()
    returned = spmd(lambda x: back(case(x)), case.mesh)(values)
    if case.name == "ppermute" and len(options["perm"]) < case.mesh.extent(case.axes):
        values = torch.where(returned == 0, 0.0, values)
    assert_close(returned, values)


@given(cases(["psum_scatter"]))
@settings(max_examples=10)
def test_scatter_and_gather_are_a_sum(case: Case) -> None:
    def through(x: torch.Tensor) -> torch.Tensor:
        return c.all_gather(case(x), case.axes, dim=case.options["dim"], tiled=case.options["tiled"])

    values = case.values()
    summed = Case("psum", case.mesh, case.axes, case.shape, {})
    assert_close(spmd(through, case.mesh)(values), summed.defined(values))


@given(meshes(), st.sampled_from(["pmax", "pmin"]), st.data())
@settings(max_examples=15)
def test_ties_share_equally(mesh: Mesh, name: str, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.permutations(mesh.names)))[: data.draw(st.integers(1, len(mesh.names)))]
    case = Case(name, mesh, axes, (4,), {})
    values = torch.randint(0, 2, (*mesh.shape, 4), generator=torch.Generator().manual_seed(0)).double()
    reduction = {"pmax": torch.amax, "pmin": torch.amin}[name]
    places = [mesh.names.index(axis) for axis in axes]
    weights = numbers(*values.shape, seed=1)
    expected = grad(lambda x: (reduction(x, places, keepdim=True) * weights).sum())(values)
    assert_close(grad(lambda x: (spmd(case, mesh)(x) * weights).sum())(values), expected)
    assert_close(spmd(grad(lambda x, w: (case(x) * w).sum()), mesh)(values, weights), expected)


@programs
def test_gradcheck(program: Program) -> None:
    mesh = virtual_mesh(a=2, b=2)
    x = inputs(mesh=mesh).requires_grad_()
    assert torch.autograd.gradcheck(spmd(program, mesh), x, fast_mode=True)
    assert torch.autograd.gradgradcheck(spmd(program, mesh), x, fast_mode=True)


@programs
def test_gradcheck_of_the_gradient_on_a_rank(program: Program) -> None:
    mesh = virtual_mesh(a=2, b=2)
    x = inputs(mesh=mesh).requires_grad_()
    assert torch.autograd.gradcheck(spmd(grad(loss_of(program)), mesh), x, fast_mode=True)


@programs
def test_gradients_in_every_order_of_transforms(program: Program) -> None:
    loss, batch = loss_of(program), inputs(3)
    on_ranks = torch.stack([spmd(grad(loss), MESH)(x) for x in batch])
    inner = batch.permute(1, 2, 3, 0, 4)  # the batch as a dim of each rank's value
    assert_close(vmap(spmd(grad(loss), MESH))(batch), on_ranks)
    assert_close(spmd(vmap(grad(loss), in_dims=1, out_dims=1), MESH)(inner).permute(3, 0, 1, 2, 4), on_ranks)
    summed = spmd(grad(lambda x: vmap(loss, in_dims=1)(x).sum()), MESH)(inner)
    assert_close(summed.permute(3, 0, 1, 2, 4), on_ranks)
    assert_close(spmd(fb.grad(loss), MESH)(batch[0]), on_ranks[0])
    outside = grad(lambda x: spmd(loss, MESH)(x).sum())
    assert_close(fb.grad(lambda x: spmd(loss, MESH)(x).sum())(batch[0]), outside(batch[0]))
    assert_close(vmap(outside)(batch), torch.stack([outside(x) for x in batch]))


@programs
def test_traced(program: Program) -> None:
    loss, x = loss_of(program), inputs()
    on_a_rank = spmd(grad(loss), MESH)  # the program's value is in it
    (lowered,) = fb.jit(on_a_rank).lower(x).module(x)
    assert_close(lowered, on_a_rank(x))


def test_second_derivatives_traced() -> None:
    loss, x = loss_of(several), inputs()
    on_ranks = grad(lambda x: spmd(grad(loss), MESH)(x).square().sum())
    assert_close(make_fx(on_ranks)(x)(x), on_ranks(x))


@programs
def test_inside_remat(program: Program) -> None:
    """Two policies: several collectives at once, where some values are saved."""
    plain, x = loss_of(program), inputs()
    policy = (
        checkpoint_policies.dots_saveable if program is PROGRAMS["several"] else checkpoint_policies.nothing_saveable
    )
    loss = loss_of(fb.remat(program, policy))
    assert_close(spmd(grad(loss), MESH)(x), spmd(grad(plain), MESH)(x))
    assert_close(spmd(second(loss), MESH)(x), spmd(second(plain), MESH)(x))

    def outside(loss: Program) -> Program:
        return grad(lambda x: spmd(loss, MESH)(x).sum())

    assert_close(outside(loss)(x), outside(plain)(x))
    batch = inputs(2)
    assert_close(vmap(outside(loss))(batch), vmap(outside(plain))(batch))
    if program is PROGRAMS["several"]:
        (lowered,) = fb.jit(spmd(grad(loss), MESH)).lower(x).module(x)
        assert_close(lowered, spmd(grad(plain), MESH)(x))


@programs
def test_backward_does_not_ask_the_environment(program: Program) -> None:
    loss = loss_of(program)

    def pulled_elsewhere(x: torch.Tensor) -> torch.Tensor:
        value, pull = vjp(loss, x)[:2]
        with environment.bind(axes=()):
            return pull(torch.ones_like(value))[0]

    assert_close(spmd(pulled_elsewhere, MESH)(inputs()), spmd(grad(loss), MESH)(inputs()))


def test_parameters_that_all_ranks_share() -> None:
    weight, x = numbers(6), inputs()
    loss = loss_of(lambda x: several(x))
    shared = spmd(grad(lambda w, x: loss(x * w)), MESH)
    assert_close(shared(Replicated(weight), x), shared(weight.expand(2, 3, 6), x))


def test_a_column_and_a_row_parallel_layer_equal_one_device() -> None:
    up, down, x = numbers(12, 5), numbers(4, 12, seed=1), numbers(7, 5, seed=2)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(c.enter(x.sin(), "tp") @ params["up"].T)
        return c.leave(hidden @ params["down"].T, "tp").square().sum()

    weights = {"up": up, "down": down}
    shards = {"up": torch.stack(up.chunk(4, 0)), "down": torch.stack(down.chunk(4, 1))}
    expected, to_x = fb.grad(loss, argnums=(0, 1))(weights, x)
    mesh = virtual_mesh(tp=4)
    got, to_every_x = spmd(fb.grad(loss, argnums=(0, 1)), mesh)(shards, x.expand(4, *x.shape))
    assert_close(torch.cat(list(got["up"]), 0), expected["up"])
    assert_close(torch.cat(list(got["down"]), 1), expected["down"])
    assert_close(to_every_x, to_x.expand(4, *x.shape))


@given(cases())
@settings(max_examples=10)
def test_trees(case: Case) -> None:
    values = {"b": [case.values(), None], "a": case.values(seed=1)}
    got = spmd(case, case.mesh)(values)
    assert sorted(got) == ["a", "b"]
    assert got["b"][1] is None
    assert_close(got["a"], case.defined(values["a"]))
    assert_close(got["b"][0], case.defined(case.values()))


def test_a_thousand_ranks() -> None:
    mesh = virtual_mesh(a=32, b=32)
    x = numbers(32, 32, 8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        ring = [(i, (i + 1) % 32) for i in range(32)]
        moved = c.ppermute(x, "a", ring) * c.psum(x, ("a", "b"))
        return (moved.square().sum() + c.pmax(moved, "b").sum()) * 1e-6

    assert_close(spmd(grad(loss), mesh)(x), grad(lambda x: spmd(loss, mesh)(x).sum())(x))


def test_the_environment_is_what_it_was() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        assert [axis.name for axis in environment.current().axes] == ["a", "b"]
        raise KeyError("oh")

    x = inputs()
    with pytest.raises(KeyError, match="oh"):
        spmd(fails, MESH)(x)
    assert environment.current() == environment.Environment()
    with pytest.raises(ValueError, match="dim"):
        spmd(grad(lambda x: c.psum_scatter(x, "a", dim=9).sum()), MESH)(x)
    assert environment.current() == environment.Environment()
    assert_close(spmd(PROGRAMS["psum"], MESH)(x), x.sum((0, 1), keepdim=True).expand(x.shape))


def test_undeclared_axes() -> None:
    x = numbers(4)
    assert c.enter(x, "tp") is x
    assert c.leave(x, ("tp", "sp")) is x
    with pytest.raises(NameError, match=r"axis 'tp' is not declared: no mesh is in scope"):
        c.psum(x, "tp")
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: c.psum(x, "tp"),
        lambda x: c.pmean(x, ("a", "tp")),
        lambda x: c.pmax(x, "tp"),
        lambda x: c.pmin(x, "tp"),
        lambda x: c.all_gather(x, "tp"),
        lambda x: c.psum_scatter(x, ("tp", "a")),
        lambda x: c.all_to_all(x, "tp", split_dim=0, concat_dim=0),
        lambda x: c.ppermute(x, "tp", []),
        lambda x: c.broadcast(x, "tp"),
        lambda x: c.axis_index("tp"),
        lambda x: x * c.axis_size("tp"),
    ]
    for call in calls:
        with pytest.raises(NameError, match=r"axis 'tp' is not declared: the mesh has \('a', 'b'\)"):
            spmd(call, MESH)(inputs())
    half = spmd(lambda x: c.leave(x, ("tp", "b")), MESH)(inputs())
    assert_close(half, inputs().sum(1, keepdim=True).expand(inputs().shape))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: c.psum_scatter(x, "a"), ValueError, r"^dim: 0, where x has size 5, expected a multiple of 2, .*'a'"),
        (
            lambda x: c.psum_scatter({"w": [x]}, ("a", "b"), dim=-1, tiled=False),
            ValueError,
            r"^dim: -1, where w.0 has size 7, expected 6, the number of ranks of axis 'a' x 'b'",
        ),
        (
            lambda x: c.all_to_all(x, "b", split_dim=1, concat_dim=0),
            ValueError,
            r"^split_dim: 1, where x has size 7, expected a multiple of 3, the number of ranks of axis 'b'",
        ),
        (lambda x: c.all_to_all(x, "b", split_dim=2, concat_dim=0), ValueError, "^split_dim: 2, but x has 2 dims"),
        (lambda x: c.all_to_all(x, "b", split_dim=0, concat_dim=-3), ValueError, "^concat_dim: -3, but x has 2 dims"),
        (lambda x: c.all_gather(x, "b", dim=2), ValueError, "^dim: 2, but x has 2 dims"),
        (lambda x: c.all_gather({"w": x}, "b", dim=3, tiled=False), ValueError, "^dim: 3, but w has 3 dims"),
        (lambda x: c.all_gather(x[0, 0], "b"), ValueError, "^dim: 0, but x has 0 dims"),
        (lambda x: c.ppermute(x, "b", [(0, 3)]), ValueError, "^perm: .*3 ranks of axis 'b' is a destination"),
        (lambda x: c.ppermute(x, "b", [(-1, 0)]), ValueError, "^perm: .*is a source at most once"),
        (lambda x: c.ppermute(x, "b", [(0, 1), (0, 2)]), ValueError, "^perm: .*is a source at most once"),
        (lambda x: c.ppermute(x, "b", [(0, 1), (2, 1)]), ValueError, "^perm: .*is a destination at most once"),
        (lambda x: c.broadcast(x, "b", root=3), ValueError, "^root: 3, expected one of the 3 ranks of axis 'b'"),
        (lambda x: c.broadcast(x, "b", root=-1), ValueError, "^root: -1"),
        (lambda x: c.psum(x, ("a", "a")), ValueError, "^axis: .* names one axis twice"),
        (lambda x: c.psum(x, cast(Any, ["a"])), TypeError, "^axis: .* expected the name of an axis or a tuple"),
        (lambda x: c.broadcast(x, cast(Any, ("a", "b"))), TypeError, "^axis: .* expected the name of one axis"),
        (lambda x: c.psum(x > 0, "a"), TypeError, "^x: a sum of bools"),
        (lambda x: c.pmean(x.long(), "a"), TypeError, r"^x: a mean of torch.int64"),
        (lambda x: c.pmax(x.to(torch.complex64), "a"), TypeError, "^x: torch.complex64 has no order"),
        (lambda x: c.psum({"w": 1.0}, "a"), TypeError, "^w: float, expected a tensor"),
        (lambda x: c.psum(2, "a"), TypeError, "^x: int, expected a tensor"),
    ],
)
def test_errors(call: Callable[[torch.Tensor], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spmd(call, MESH)(numbers(2, 3, 5, 7))


def test_a_virtual_axis_cannot_be_used_where_its_ranks_are_not() -> None:
    kept: list[Any] = []
    spmd(lambda x: kept.extend(environment.current().axes) or x, MESH)(inputs())
    stale = environment.Axis("a", 2, torch.tensor(0, dtype=torch.int32))
    with environment.bind(axes=(stale,)), pytest.raises(RuntimeError, match="outside of the program that declares it"):
        c.psum(numbers(2), "a")
