"""Collectives whose numbers travel as fp8, on virtual meshes: near what they are without, and exact where fp8 is.

And gradients that are summed in a wider dtype than they have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collectives import Case, cases, numbers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vjp, vmap

import functional_booster as fb
from functional_booster.kernels import block_scale, flat
from functional_booster.kernels.flat import Flat
from functional_booster.sharding import collectives as c
from functional_booster.sharding import environment, shards
from functional_booster.sharding.mesh import Mesh, spmd, virtual_mesh

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MOVES = ["all_gather", "all_to_all", "ppermute"]
SUMS = ["psum", "pmean", "psum_scatter"]
MESH = virtual_mesh(a=2, b=3)

Program = Callable[..., torch.Tensor]
Format = torch.dtype | None


def _ring(x: torch.Tensor, wire: Format, cotangent_wire: Format) -> torch.Tensor:
    pairs = [(rank, rank + 1) for rank in range(c.axis_size("b") - 1)]
    return c.ppermute(x, "b", pairs, wire=wire, cotangent_wire=cotangent_wire)


def _cast(x: torch.Tensor, wire: Format, cotangent_wire: Format) -> torch.Tensor:
    return c.all_gather(x, "b", dtype=torch.bfloat16, wire=wire, cotangent_wire=cotangent_wire).to(x.dtype)


# For x (R, 40) on axes "a" and "b", where the number of ranks divides R: a rank's part is no whole number of blocks.
PROGRAMS: dict[str, Program] = {
    "psum": lambda x, to, back: c.psum(x, ("a", "b"), wire=to, cotangent_wire=back),
    "pmean": lambda x, to, back: c.pmean(x[:, :7], "b", wire=to, cotangent_wire=back),
    "all_gather": lambda x, to, back: c.all_gather(x, ("b", "a"), dim=1, wire=to, cotangent_wire=back),
    "all_gather, cast": _cast,
    "psum_scatter": lambda x, to, back: c.psum_scatter(x, ("a", "b"), wire=to, cotangent_wire=back),
    "all_to_all": lambda x, to, back: c.all_to_all(x, "b", split_dim=0, concat_dim=1, wire=to, cotangent_wire=back),
    "ppermute": _ring,
    "there alone": lambda x, to, back: c.psum_scatter(c.all_gather(x, "b", wire=to), "b", wire=back),
    "back alone": lambda x, to, back: c.psum(c.all_gather(x, "b", cotangent_wire=back), "a", cotangent_wire=to),
}
programs = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def inputs(*lead: int, mesh: Mesh = MESH) -> torch.Tensor:
    return numbers(*lead, *mesh.shape, 2 * mesh.size, 40)


def loss_of(program: Program, wire: Format = E4M3, cotangent_wire: Format = E5M2) -> Program:
    """A scalar whose gradient is the same however it is evaluated: the value itself is the cotangent."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = program(x, wire, cotangent_wire)
        return (y * y).sum() / 2

    return loss


def compressed(case: Case, wire: torch.dtype | None, cotangent_wire: torch.dtype | None = None) -> Case:
    return replace(case, options={**case.options, "wire": wire, "cotangent_wire": cotangent_wire})


def across(case: Case) -> int:
    """The axes with several ranks."""
    return sum(case.mesh.extent(axis) > 1 for axis in case.axes)


def whole(case: Case, seed: int = 0) -> torch.Tensor:
    """Whole numbers that both formats hold exactly, as they do the sums of two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (*case.mesh.shape, *case.shape), generator=generator).double()


formats = st.sampled_from([E4M3, E5M2])


class TestErrors:
    """Bounds from the largest magnitudes and the number of axes that a value crosses."""

    @given(cases(MOVES), formats, st.integers(-80, 80), st.integers(0, 9))
    @settings(max_examples=25)
    def test_what_moves_is_encoded_once(self, case: Case, fp8: torch.dtype, middle: int, seed: int) -> None:
        values = case.values(seed) * torch.exp2(case.values(seed + 1) * 4 + middle)
        got, exact = spmd(compressed(case, fp8), case.mesh)(values), case.defined(values)
        assert got.shape == exact.shape and got.dtype == exact.dtype
        largest = values.abs().amax() if values.numel() else 0.0
        if across(case):
            of_block = {E4M3: 2.0**-17, E5M2: 2.0**-31}[fp8] * largest
            relative = {E4M3: 2.0**-4, E5M2: 2.0**-3}[fp8]
            assert ((got - exact).abs() <= (exact.abs() * relative).clamp(min=of_block)).all()
        else:
            assert torch.equal(got, exact)

    @given(cases(SUMS), formats, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(0, 9))
    @settings(max_examples=40)
    def test_each_rounding_of_a_sum_is_that_of_its_terms(
        self, case: Case, fp8: torch.dtype, dtype: torch.dtype, seed: int
    ) -> None:
        """Of k axes: k roundings of a scattered sum, one more where the sums are gathered.

        A rounding moves a value by at most u = 2^-4 or 2^-3 of the largest magnitude of its block. The terms of ranks
        whose largest magnitudes are A_r are off by u times the sum S of all A_r, their sums by that and u (S + u S)...
        """
        values = (case.values(seed) * torch.exp2(case.values(seed + 1) * 4)).to(dtype)
        got = spmd(compressed(case, fp8), case.mesh)(values).double()
        exact, axes = case.defined(values.double()), across(case)
        sizes = values.double().abs().flatten(len(case.mesh.shape)) if case.shape else values.double().abs()[..., None]
        largest = sizes.amax(-1).sum() if values.numel() else torch.zeros(())
        largest = largest / (case.mesh.extent(case.axes) if case.name == "pmean" else 1)
        roundings = axes + (case.name != "psum_scatter" and axes > 0)
        unit = {E4M3: 2.0**-4, E5M2: 2.0**-3}[fp8]
        of_dtype = (2 * axes + 2) * torch.finfo(dtype).eps + case.mesh.size * 2.0**-23 * (dtype != torch.float64)
        bound = ((1 + unit) ** roundings * (1 + of_dtype) - 1 + 1e-14) * largest
        assert ((got - exact).abs() <= bound).all()

    @given(cases(MOVES), formats, formats)
    @settings(max_examples=25)
    def test_exact_where_fp8_is(self, case: Case, fp8: torch.dtype, back: torch.dtype) -> None:
        values = whole(case)
        assert torch.equal(spmd(compressed(case, fp8, back), case.mesh)(values), case.defined(values))

    @given(st.integers(2, 16), st.lists(st.integers(0, 5), max_size=3), formats)
    @settings(max_examples=25)
    def test_sums_are_taken_wide(self, ranks: int, shape: list[int], fp8: torch.dtype) -> None:
        """Terms that fp8 holds, whose sums it does not: 1 and 1024 on every other rank."""
        mesh = virtual_mesh(a=ranks)
        case = Case("psum_scatter", mesh, ("a",), (ranks, *shape), {"dim": 0, "tiled": False})
        factors = 1024.0 ** (torch.arange(ranks, dtype=torch.float64) % 2)
        values = torch.einsum("r...,r->r...", whole(case), factors)
        assert torch.equal(spmd(compressed(case, fp8), mesh)(values), case.defined(values))

    @programs
    def test_it_does_round(self, program: Program) -> None:
        x = inputs()
        rounded, exact = (spmd(grad(loss_of(program, *wires)), MESH)(x) for wires in ((E4M3, E5M2), (None, None)))
        assert not torch.equal(rounded, exact)
        torch.testing.assert_close(rounded, exact, rtol=0.5, atol=0.5 * exact.abs().max().item())

    @given(cases(SUMS), formats)
    @settings(max_examples=15)
    def test_all_ranks_have_the_same_sum(self, case: Case, fp8: torch.dtype) -> None:
        case = replace(case, name="psum", options={})
        got = spmd(compressed(case, fp8), case.mesh)(case.values())
        places = [case.mesh.names.index(axis) for axis in case.axes]
        assert torch.equal(got.amax(places), got.amin(places))

    @pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
    @pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
    def test_what_is_not_finite_arrives_on_every_rank(self, value: float, fp8: torch.dtype) -> None:
        x = torch.ones(2, 3, 6, 40)
        x[1, 2, 4, 5] = value
        for name in ("psum", "pmean", "all_gather"):
            got = spmd(lambda x, name=name: PROGRAMS[name](x, fp8, None), MESH)(x)
            on_ranks = (~got.isfinite()).flatten(2).any(-1)
            assert on_ranks.all() if name != "pmean" else on_ranks.tolist() == [[False] * 3, [True] * 3]
        scattered = spmd(lambda x: c.psum_scatter(x, ("a", "b"), wire=fp8), MESH)(x)
        assert (~scattered.isfinite()).flatten(2).any(-1).tolist() == [[False] * 3, [False, True, False]]


class TestTransposes:
    """A cotangent takes the way back in the other format."""

    @given(cases([*MOVES, "psum", "psum_scatter"]), formats, formats)
    @settings(max_examples=40)
    def test_they_are_the_compressed_transposes(self, case: Case, fp8: torch.dtype, back: torch.dtype) -> None:
        values, options = case.values(), dict(case.options)
        cotangents = numbers(*case.defined(values).shape, seed=1)
        name = {"all_gather": "psum_scatter", "psum_scatter": "all_gather"}.get(case.name, case.name)
        if name == "all_to_all":
            options |= {"split_dim": options["concat_dim"], "concat_dim": options["split_dim"]}
        if name == "ppermute":
            options["perm"] = [(to, source) for source, to in options["perm"]]
        transposed = compressed(replace(case, name=name, options=options), back)
        pulled = spmd(lambda x, g: vjp(compressed(case, fp8, back), x)[1](g)[0], case.mesh)(values, cotangents)
        assert torch.equal(pulled, spmd(transposed, case.mesh)(cotangents))

    @given(cases(MOVES + SUMS), formats)
    @settings(max_examples=15)
    def test_each_way_alone(self, case: Case, fp8: torch.dtype) -> None:
        values = case.values()
        cotangents = numbers(*case.defined(values).shape, seed=1)

        def run(wire: Format, cotangent_wire: Format) -> tuple[torch.Tensor, torch.Tensor]:
            def both(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                y, pull = vjp(compressed(case, wire, cotangent_wire), x)[:2]
                return y, pull(g)[0]

            return spmd(both, case.mesh)(values, cotangents)

        (value, gradient), (there, _), (_, back) = run(None, None), run(fp8, fp8), run(fp8, fp8)
        only_there, only_back = run(fp8, None), run(None, fp8)
        assert torch.equal(only_there[0], there) and torch.equal(only_back[1], back)
        torch.testing.assert_close(only_there[1], gradient)
        torch.testing.assert_close(only_back[0], value)

    @given(cases(MOVES + SUMS), formats, formats)
    @settings(max_examples=15)
    def test_twice_transposed_is_the_collective(self, case: Case, fp8: torch.dtype, back: torch.dtype) -> None:
        values = case.values()
        cotangents = torch.zeros_like(case.defined(values))

        def twice(x: torch.Tensor, g: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            return vjp(lambda g: vjp(compressed(case, fp8, back), x)[1](g)[0], g)[1](h)[0]

        got = spmd(twice, case.mesh)(values, cotangents, values)
        expected = spmd(compressed(case, fp8, back), case.mesh)(values)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    def test_gathered_in_one_dtype_and_summed_in_another(self) -> None:
        """float32 masters, bfloat16 weights: what is sent is encoded, what comes back is summed in float32."""
        x, g = torch.randn(4, 70), torch.randn(4, 280).bfloat16()

        def gathered(x: torch.Tensor) -> torch.Tensor:
            return c.all_gather(x, "a", dtype=torch.bfloat16, wire=E4M3, cotangent_wire=E5M2)

        got, gradient = spmd(lambda x, g: (gathered(x), vjp(gathered, x)[1](g)[0]), virtual_mesh(a=4))(x, g)
        low = spmd(lambda x: c.all_gather(x.bfloat16(), "a", wire=E4M3), virtual_mesh(a=4))(x)
        assert got.dtype == torch.bfloat16 and torch.equal(got, low)
        terms = block_scale.encode(g.view(4, 4, 70), E5M2)
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, block_scale.decode_sum(terms, 70, E5M2, torch.float32))


class TestTransforms:
    """The same bits in every order of transforms, and where nothing but the mesh is known."""

    @programs
    def test_batches(self, program: Program) -> None:
        def run(x: torch.Tensor) -> torch.Tensor:
            return program(x, E4M3, E5M2)

        loss, batch = loss_of(program), inputs(3)
        each, gradients = (torch.stack([spmd(fn, MESH)(x) for x in batch]) for fn in (run, grad(loss)))
        inner = batch.permute(1, 2, 3, 0, 4)  # the batch as a dim of each rank's value
        assert torch.equal(vmap(spmd(run, MESH))(batch), each)
        assert torch.equal(spmd(vmap(run, in_dims=1), MESH)(inner).movedim(2, 0), each)
        assert torch.equal(vmap(spmd(grad(loss), MESH))(batch), gradients)
        assert torch.equal(spmd(vmap(grad(loss), in_dims=1), MESH)(inner).movedim(2, 0), gradients)
        summed = spmd(grad(lambda x: vmap(loss, in_dims=1)(x).sum()), MESH)(inner)
        assert torch.equal(summed.permute(3, 0, 1, 2, 4), gradients)

    @programs
    def test_a_gradient_taken_outside_of_the_mesh(self, program: Program) -> None:
        loss, batch = loss_of(program), inputs(2)
        outside = grad(lambda x: spmd(loss, MESH)(x).sum())
        expected = torch.stack([spmd(grad(loss), MESH)(x) for x in batch])
        assert torch.equal(outside(batch[0]), expected[0])
        assert torch.equal(vmap(outside)(batch), expected)
        assert torch.equal(fb.grad(lambda x: spmd(loss, MESH)(x).sum())(batch[0]), expected[0])

    @programs
    def test_traced_and_rematerialised(self, program: Program) -> None:
        x = inputs()
        expected = spmd(grad(loss_of(program)), MESH)(x)
        (lowered,) = fb.jit(spmd(grad(loss_of(program)), MESH)).lower(x).module(x)
        assert torch.equal(lowered, expected)
        rematted = fb.remat(lambda x: program(x, E4M3, E5M2))
        assert torch.equal(spmd(grad(loss_of(lambda x, *wires: rematted(x))), MESH)(x), expected)

    @programs
    def test_backward_does_not_ask_the_environment(self, program: Program) -> None:
        loss = loss_of(program)

        def pulled_elsewhere(x: torch.Tensor) -> torch.Tensor:
            value, pull = vjp(loss, x)[:2]
            with environment.bind(axes=()):
                return pull(torch.ones_like(value))[0]

        assert torch.equal(spmd(pulled_elsewhere, MESH)(inputs()), spmd(grad(loss), MESH)(inputs()))


class TestWhatIsNotCompressed:
    @given(cases([*MOVES, "psum", "psum_scatter"]), st.sampled_from([torch.int64, torch.bool, torch.complex64]))
    @settings(max_examples=20)
    def test_other_numbers(self, case: Case, dtype: torch.dtype) -> None:
        if dtype == torch.bool and case.name in SUMS:
            return
        values = (case.values() * 100).to(dtype)
        plain, wired = spmd(case, case.mesh)(values), spmd(compressed(case, E4M3, E4M3), case.mesh)(values)
        assert torch.equal(plain, wired)

    @programs
    def test_an_axis_of_one_rank(self, program: Program) -> None:
        """On a virtual mesh and on a real one nothing is rounded; beside another axis it changes nothing."""
        sizes, x = (("a", 1), ("b", 1)), numbers(4, 40)
        for mesh, local in ((Mesh(sizes), x[None, None]), (Mesh(sizes, (None, None), (0, 0)), x)):
            rounded, exact = (
                spmd(grad(loss_of(program, *wires)), mesh)(local) for wires in ((E4M3, E5M2), (None, None))
            )
            assert torch.equal(rounded, exact)

    def test_beside_an_axis_of_several(self) -> None:
        x = numbers(3, 6, 40)
        for name in ("psum", "psum_scatter"):
            one = spmd(lambda x, name=name: getattr(c, name)(x, ("a", "b"), wire=E5M2), virtual_mesh(a=1, b=3))(x[None])
            assert torch.equal(
                one[0], spmd(lambda x, name=name: getattr(c, name)(x, "b", wire=E5M2), virtual_mesh(b=3))(x)
            )

    def test_float8_itself_moves_as_it_is(self) -> None:
        x = inputs().to(E4M3)
        got = spmd(lambda x: c.all_gather(x, ("a", "b"), wire=E5M2), MESH)(x)
        expected = x.view(torch.uint8).flatten(0, 2).expand(2, 3, -1, -1)
        assert got.dtype == E4M3 and torch.equal(got.view(torch.uint8), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: c.psum(x, "a", wire=torch.bfloat16), r"^wire: torch.bfloat16, expected a format .*float8_e4m3fn"),
        (lambda x: c.all_gather(x, "a", cotangent_wire=cast(Any, "e5m2")), r"^cotangent_wire: 'e5m2', expected"),
        (lambda x: c.all_gather(x, "a", dtype=E4M3), r"^x: a gather of torch.float64 in torch.float8_e4m3fn, expected"),
        (lambda x: c.all_gather(x, "a", reduce_dtype=E5M2), r"^x: a gather of torch.float64 in torch.float8_e5m2"),
        (lambda x: c.psum({"w": x.to(E4M3)}, "a"), r"^w: a sum in torch.float8_e4m3fn, expected a wider dtype"),
        (lambda x: c.pmax(x.to(E4M3), "a"), r"^x: torch.float8_e4m3fn has no order"),
    ],
)
def test_errors(call: Program, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        spmd(call, MESH)(inputs())


def test_a_trace_moves_bytes() -> None:
    """4 ranks, 80 elements: 20 a rank, with one scale (21 bytes); 80 elements of one rank have three (83 bytes)."""
    mesh = Mesh((("a", 4),), ("a",), (0,))
    with FakeTensorMode():
        for name, expected in {
            "psum": {("all_to_all_single", 4 * 21), ("all_gather_into_tensor", 4 * 21)},
            "psum_scatter": {("all_to_all_single", 4 * 21)},
            "all_gather": {("all_gather_into_tensor", 4 * 83)},
            "all_to_all": {("all_to_all_single", 4 * 21)},
            "ppermute": {("all_to_all_single", 83)},
        }.items():
            options: dict[str, Any] = {"all_to_all": {"split_dim": 0, "concat_dim": 0}, "ppermute": {"perm": [(1, 0)]}}
            call = fb.jit(lambda x: getattr(c, name)(x, "a", wire=E5M2, **options.get(name, {})))  # noqa: B023
            lowered = spmd(call.lower, mesh)(torch.empty(80, dtype=torch.bfloat16))
            assert {(one.op, one.bytes) for one in lowered.collectives} == expected, name
            assert {one.dtype for one in lowered.collectives} == {torch.uint8}


RANKS, SIZE, BUCKET = 64, 256, "float32:0"  # ranks of axis "a", numbers of a rank's part of a buffer
WHOLE = flat.plan({"w": fb.ArrayInfo((RANKS * SIZE,))}, {"w": 0})
SPLIT = replace(WHOLE, split=((BUCKET, ("a",)),))
SUMMED = {  # how plugins sum gradients over ranks, from one that each rank has of the whole, on each rank its part
    "join": lambda g, dtype, wire: vjp(
        lambda part: shards.join(Flat({BUCKET: part}, SPLIT), g.dtype, dtype, cotangent_wire=wire).buffers[BUCKET],
        torch.zeros(SIZE, dtype=dtype),
    )[1](g)[0],
    "scatter": lambda g, dtype, wire: shards.scatter(Flat({BUCKET: g}, SPLIT), dtype, wire).buffers[BUCKET],
    "total": lambda g, dtype, wire: shards.part(
        replace(shards.total(Flat({BUCKET: g}, WHOLE), ("a",), dtype, wire), layout=SPLIT)
    ).buffers[BUCKET],
}


@pytest.mark.parametrize("how", SUMMED)
class TestGradients:
    def summed(self, how: str, g: torch.Tensor, dtype: torch.dtype, wire: Format = None) -> torch.Tensor:
        return spmd(lambda g: SUMMED[how](g, dtype, wire), virtual_mesh(a=RANKS))(g).flatten()

    @given(st.integers(0, 2**31))
    @settings(max_examples=4)
    def test_a_mean_over_64_ranks_loses_nothing_to_bfloat16(self, how: str, seed: int) -> None:
        """Summed in float32: what float32 loses (64 additions). In bfloat16 far more is lost, of the same terms."""
        terms = numbers(RANKS, RANKS * SIZE, seed=seed).bfloat16()
        exact, kept = terms.double().mean(0), RANKS * 2.0**-24 * terms.double().abs().mean(0)
        wide = self.summed(how, terms, torch.float32) / RANKS
        assert wide.dtype == torch.float32
        assert ((wide.double() - exact).abs() <= kept).all()
        low = self.summed(how, terms, torch.bfloat16).double() / RANKS
        assert ((low - exact).abs() > kept).float().mean() > 0.9

    @pytest.mark.parametrize("wire", [E4M3, E5M2], ids=str)
    def test_compressed(self, how: str, wire: torch.dtype) -> None:
        """Each term is encoded once, and their total, where every rank gets it whole, once more."""
        terms = numbers(RANKS, RANKS * SIZE).bfloat16()
        rows = terms.view(RANKS, RANKS, SIZE)
        message = block_scale.encode(rows if how == "join" else rows.float(), wire)
        expected = block_scale.decode_sum(message, SIZE, wire, torch.float32)
        if how == "total":
            expected = block_scale.decode(block_scale.encode(expected, wire), SIZE, wire, torch.float32)
        assert torch.equal(self.summed(how, terms, torch.float32, wire), expected.flatten())


def test_parameters_are_joined_compressed() -> None:
    parts = numbers(4, 100).float()
    layout = replace(flat.plan({"w": fb.ArrayInfo((400,))}, {"w": 0}, 4), split=((BUCKET, ("a",)),))
    assert layout.size(BUCKET) == 512
    padded = torch.nn.functional.pad(parts, (0, 28))
    joined = spmd(lambda x: shards.join(Flat({BUCKET: x}, layout), torch.bfloat16, wire=E4M3), virtual_mesh(a=4))
    got = joined(padded).buffers[BUCKET]
    expected = block_scale.decode(block_scale.encode(padded.bfloat16(), E4M3), 128, E4M3, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.flatten().expand(4, -1))
