"""fp8: quantisation is exact rounding, linear layers are products of what was quantised, marked weights reach both."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap
from transformers.pytorch_utils import Conv1D

import functional_booster as fb
from functional_booster.kernels import fp8, fp8_cast, tree
from functional_booster.models import layers
from functional_booster.precision.fp8 import EXCLUDED, Fp8Weight, mark, plain
from functional_booster.sharding import region

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B)}  # mantissa bits, bias, bits of the largest number
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = st.sampled_from([1, 2, 3, 8, 16, 17, 33])
SCALINGS = pytest.mark.parametrize("scaling", fp8.SCALINGS)
BOTH = pytest.mark.parametrize("dtype", FORMATS)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """The format's numbers from 0 up, so that the place of each is its bits."""
    mantissa, bias, last = FORMATS[dtype]
    found = []
    for bits in range(last + 1):
        exponent, fraction = bits >> mantissa, (bits & ((1 << mantissa) - 1)) / (1 << mantissa)
        found.append(math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias))
    return torch.tensor(found, dtype=torch.float64)


def scale_of(most: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The least powers of two, from 2**-100 up, that bring numbers of these magnitudes (float64) into the format."""
    fraction, exponent = torch.frexp(most / numbers(dtype)[-1])  # most > largest * 2**n iff the ratio is above 2**n
    scale = torch.where(fraction == 0.5, exponent - 1, exponent)
    return torch.where(most == 0, -100, scale).clamp(min=-100).double().exp2()


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in float64, each element rounded to the nearest of the format's numbers; of two, to the one with even bits."""
    table, size = numbers(dtype), x.abs()
    above = torch.searchsorted(table, size.contiguous()).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    down, up = size - table[below], table[above] - size
    return torch.where((down < up) | ((down == up) & (below % 2 == 0)), table[below], table[above]) * x.sign()


def by_hand(x: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> torch.Tensor:
    """x as fp8 keeps it, in float64."""
    limit = (2 - torch.finfo(dtype).eps) * 2.0**127  # what float32 can hold of it
    wide = x.detach().float().double().clamp(-limit, limit)
    if wide.numel() == 0:
        return wide
    scale = scale_of(wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True), dtype)
    return nearest(wide / scale, dtype) * scale


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers whose rows and columns differ in magnitude, by up to 2**24."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    for dim in range(len(shape)):
        exponents = torch.randint(-12, 1, (shape[dim],), generator=generator).double()
        x = x * exponents.exp2().reshape([-1 if place == dim else 1 for place in range(len(shape))])
    return x.to(dtype)


def assert_product(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """``got`` is a @ b (+ bias), of float64 operands, but for sums in float32 and one rounding to its dtype."""
    offset = torch.zeros(b.shape[-1]).double() if bias is None else bias.double()
    expected, magnitude = a @ b + offset, a.abs() @ b.abs() + offset.abs()
    bound = (a.shape[-1] + 2) * 2.0**-23 * magnitude + 2 * torch.finfo(got.dtype).eps * expected.abs()
    assert got.shape == expected.shape
    assert ((got.double() - expected).abs() <= bound + torch.finfo(got.dtype).smallest_normal).all()


@BOTH
@pytest.mark.parametrize("dim", [None, 0, 1])
@given(
    rows=st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_quantize_rounds_to_the_nearest_number_ties_to_even(
    dtype: torch.dtype, dim: int | None, rows: list[list[float]]
) -> None:
    x = torch.tensor(rows)
    values, scale = fp8_cast.quantize(x, dtype, dim)
    assert values.dtype == dtype and scale.dtype == torch.float32
    assert scale.shape == (torch.Size() if dim is None else x.amax(dim, keepdim=True).shape)
    assert torch.equal(values.double() * scale.double(), by_hand(x, dtype, dim))
    assert torch.equal(values.float().signbit(), x.signbit())
    again, scale_again = fp8_cast.quantize(values.float() * scale, dtype, dim)
    assert torch.equal(again.double() * scale_again.double(), values.double() * scale.double())


@BOTH
def test_every_number_is_kept_and_every_tie_goes_to_even(dtype: torch.dtype) -> None:
    table = numbers(dtype)
    ties = (table[1:] + table[:-1]) / 2
    for exponent in (-80, 0, 70):
        x = torch.cat([table, ties, -ties]).ldexp(torch.tensor(exponent)).float()
        values, scale = fp8_cast.quantize(x, dtype)
        assert scale == 2.0**exponent
        bits = torch.arange(len(table))
        even = bits[:-1] + bits[:-1] % 2
        assert torch.equal(values.view(torch.uint8).long(), torch.cat([bits, even, even + 128]))


@BOTH
@settings(max_examples=30)
@given(seed=st.integers(0, 2**16), exponent=st.integers(-60, 110))
def test_error_bounds(dtype: torch.dtype, seed: int, exponent: int) -> None:
    mantissa, bias, _ = FORMATS[dtype]
    x = drawn(13, 7, seed=seed) * 2.0**exponent
    values, scale = fp8_cast.quantize(x, dtype)
    wide, step = x.double(), scale.item() * 2.0 ** (1 - bias)  # the least normal number
    error = (values.double() * scale.double() - wide).abs()
    assert (
        error <= torch.where(wide.abs() < step, step * 2.0 ** (-1 - mantissa), wide.abs() * 2.0 ** (-1 - mantissa))
    ).all()
    assert scale.item() * torch.finfo(dtype).max / 2 < wide.abs().max() <= scale.item() * torch.finfo(dtype).max


@BOTH
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("given_dtype", FLOATS)
def test_zeros_subnormal_and_largest_numbers_are_finite(
    dtype: torch.dtype, dim: int | None, given_dtype: torch.dtype
) -> None:
    limits = torch.finfo(given_dtype)
    most = min(limits.max, torch.finfo(torch.float32).max)
    for x in ([[0.0, 0.0]], [[limits.tiny / 4, 0.0]], [[most, -most], [1.0, 0.0]], [[1e-40, 1e-42]]):
        tensor = torch.tensor(x, dtype=given_dtype)
        values, scale = fp8_cast.quantize(tensor, dtype, dim)
        assert torch.equal(values.double() * scale.double(), by_hand(tensor, dtype, dim))
        assert scale.isfinite().all() and (scale > 0).all()
    for shape in ((0, 3), (3, 0), (0, 0)):
        values, scale = fp8_cast.quantize(torch.empty(shape, dtype=given_dtype), dtype, dim)
        assert values.shape == shape and (scale == 1).all()
        assert scale.shape == (torch.Size() if dim is None else (1, shape[1]) if dim == 0 else (shape[0], 1))


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = bad
    values, scale = fp8_cast.quantize(x, dtype)
    assert scale.isnan() and (values.float() * scale).isnan().all()
    values, scale = fp8_cast.quantize(x, dtype, 1)
    assert (values.float() * scale).isnan().all(1).tolist() == [False, True, False]
    assert fp8_cast.quantize(torch.full((2,), 1e39, dtype=torch.float64), dtype)[1].isnan()
    weight = torch.ones(5, 4, requires_grad=True)
    for scaling in fp8.SCALINGS:
        out = fp8.linear(x, weight, scaling=scaling)  # type: ignore[arg-type]
        out.sum().backward()
        assert not out[1].isfinite().any() and weight.grad is not None and not weight.grad.isfinite().all()


@pytest.mark.parametrize("by_units", [False, True])
@settings(max_examples=40)
@given(
    shape=st.tuples(SIZES, SIZES, SIZES),
    formats=st.sampled_from([(E4M3, E4M3), (E5M2, E4M3)]),
    rows=st.booleans(),
    columns=st.booleans(),
    bias=st.booleans(),
    out_dtype=st.sampled_from(FLOATS),
    transposed=st.booleans(),
)
def test_scaled_mm(
    by_units: bool,
    shape: tuple[int, int, int],
    formats: tuple[torch.dtype, torch.dtype],
    rows: bool,
    columns: bool,
    bias: bool,
    out_dtype: torch.dtype,
    transposed: bool,
) -> None:
    m, k, n = shape
    a, a_scale = fp8_cast.quantize(drawn(m, k), formats[0], 1 if rows else None)
    b, b_scale = fp8_cast.quantize(drawn(k, n, seed=1), formats[1], 0 if columns else None)
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    offset = drawn(n, seed=2, dtype=out_dtype) if bias else None
    if by_units:  # torch has the units' operator for CPU, too
        got = fp8.by_units(a, a_scale, b, b_scale, offset, out_dtype=out_dtype, fast=True)
    else:
        got = fp8.scaled_mm(a, a_scale, b, b_scale, out_dtype, offset)
    assert got.dtype == out_dtype
    assert_product(got, a.double() * a_scale, b.double() * b_scale, offset)


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 17, 1), (1, 8, 17), (17, 16, 50257), (3, 50257, 8), (16, 32, 48)])
@SCALINGS
def test_the_units_accept_every_size(shape: tuple[int, int, int], scaling: str) -> None:
    m, k, n = shape
    dim = None if scaling == "tensor" else 1
    with FakeTensorMode():  # torch checks there what the units want of shapes and strides
        a, b = torch.empty(m, k, device="cuda"), torch.empty(n, k, device="cuda")
        (a8, a_scale), (b8, b_scale) = fp8_cast.quantize(a, E5M2, dim), fp8_cast.quantize(b, E4M3, dim)
        for dtype in FLOATS:
            bias = torch.empty(n, device="cuda", dtype=dtype)
            out = fp8.by_units(a8, a_scale, b8.t(), b_scale.t(), bias, out_dtype=dtype, fast=True)
            assert (tuple(out.shape), out.dtype, out.device.type) == ((m, n), dtype, "cuda")


Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


def check_linear(case: Case, scaling: Any) -> None:
    """Value and gradients against float64 products of operands quantised by hand."""
    x, weight, bias, cotangent = case
    leaves = [leaf.clone().requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    out = fp8.linear(*leaves, scaling=scaling)
    assert out.dtype == x.dtype and out.shape == (*x.shape[:-1], len(weight))
    out.backward(cotangent)
    along, across = (None, None) if scaling == "tensor" else (1, 0)
    rows, seen = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), cotangent.reshape(-1, len(weight))
    assert_product(out.detach().reshape_as(seen), by_hand(rows, E4M3, along), by_hand(weight, E4M3, along).t(), bias)
    grads = [leaf.grad for leaf in leaves]
    assert [g.dtype for g in grads if g is not None] == [leaf.dtype for leaf in leaves]
    assert grads[0] is not None and grads[1] is not None
    assert_product(grads[0].reshape_as(rows), by_hand(seen, E5M2, along), by_hand(weight, E4M3, across))
    assert_product(grads[1], by_hand(seen, E5M2, across).t(), by_hand(rows, E4M3, across))
    if bias is not None:
        assert grads[2] is not None
        assert_product(grads[2][None], torch.ones(1, len(seen)).double(), seen.double())


@SCALINGS
@settings(max_examples=30)
@given(
    leading=st.sampled_from([(), (1,), (8,), (17,), (3, 5), (2, 0)]),
    into=SIZES,
    out=SIZES,
    bias=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_linear_multiplies_what_was_quantised(
    scaling: str, leading: tuple[int, ...], into: int, out: int, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    x, weight = drawn(*leading, into, seed=seed, dtype=dtype), drawn(out, into, seed=seed + 1, dtype=dtype)
    offset = drawn(out, seed=seed + 2, dtype=dtype) if bias else None
    check_linear((x, weight, offset, drawn(*leading, out, seed=seed + 3, dtype=dtype)), scaling)


@SCALINGS
def test_a_vocabulary_of_gpt2(scaling: str) -> None:
    check_linear((drawn(3, 8), drawn(50257, 8, seed=1), None, drawn(3, 50257, seed=2)), scaling)


@SCALINGS
@pytest.mark.parametrize("shape", [(0, 5, 7), (3, 0, 7), (3, 5, 0)])
def test_empty(scaling: Any, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    leaves = [torch.randn(size, requires_grad=True) for size in ((m, k), (n, k), (n,))]
    out = fp8.linear(*leaves, scaling=scaling)
    expected = F.linear(*leaves)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), leaves))


def test_dtypes_may_differ_and_each_gradient_has_its_own() -> None:
    leaves = (drawn(5, 9, dtype=torch.bfloat16), drawn(4, 9), drawn(4, dtype=torch.float64))
    out = fp8.linear(*leaves)
    assert out.dtype == torch.bfloat16
    grads = grad(lambda *leaves: fp8.linear(*leaves).float().sum(), argnums=(0, 1, 2))(*leaves)
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in leaves]


def loss(scaling: Any) -> Callable[..., torch.Tensor]:
    return lambda x, weight, bias: fp8.linear(x, weight, bias, scaling=scaling).square().sum()


@SCALINGS
@settings(max_examples=10)
@given(
    dims=st.tuples(*[st.sampled_from([None, 0, 1])] * 2, st.sampled_from([None, 0])).filter(
        lambda dims: set(dims) != {None}
    ),
    size=st.integers(1, 2),
    bias=st.booleans(),
)
def test_vmap_is_a_loop_over_members(scaling: Any, dims: tuple[int | None, ...], size: int, bias: bool) -> None:
    if not bias:
        dims = (*dims[:2], None)
        if set(dims) == {None}:
            return
    shapes = ((4, 17), (8, 17), (8,))
    leaves = [
        drawn(*s, seed=n) if d is None else drawn(size, *s, seed=n).movedim(0, d)
        for n, (s, d) in enumerate(zip(shapes, dims, strict=True))
    ]
    members = [
        [leaf if dim is None else leaf.select(dim, index) for leaf, dim in zip(leaves, dims, strict=True)]
        for index in range(size)
    ]

    def forward(x: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return fp8.linear(x, weight, offset if bias else None, scaling=scaling)

    gradient = grad(lambda *leaves: forward(*leaves).square().sum(), argnums=(0, 1, 2) if bias else (0, 1))
    exact: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    out = vmap(forward, in_dims=dims)(*leaves)
    torch.testing.assert_close(out, torch.stack([forward(*member) for member in members]), **exact)
    each = [gradient(*member) for member in members]
    expected = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    torch.testing.assert_close(vmap(gradient, in_dims=dims)(*leaves), expected, **exact)
    whole = grad(lambda *leaves: vmap(forward, in_dims=dims)(*leaves).square().sum(), argnums=(0, 1))(*leaves)
    summed = tuple(e.sum(0) if d is None else e.movedim(0, d) for e, d in zip(expected[:2], dims[:2], strict=True))
    torch.testing.assert_close(whole, summed, **exact)


@SCALINGS
def test_nested_vmap_whose_levels_batch_different_operands(scaling: Any) -> None:
    x, weight, bias = drawn(2, 4, 17), drawn(3, 8, 17, seed=1), drawn(2, 8, seed=2)
    gradient = grad(loss(scaling), argnums=(0, 1, 2))
    got = vmap(lambda x, b: vmap(lambda w: gradient(x, w, b))(weight))(x, bias)
    for i in range(2):
        for j in range(3):
            expected = gradient(x[i], weight[j], bias[i])
            torch.testing.assert_close(tuple(part[i, j] for part in got), expected, rtol=1e-5, atol=1e-5)


def test_a_batch_goes_through_the_units_member_by_member(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, bias = drawn(2, 1, 4, 17), drawn(3, 17, 8, seed=1), drawn(2, 8, seed=2)

    def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        (a8, a_scale), (b8, b_scale) = fp8_cast.quantize(a, E4M3), fp8_cast.quantize(b, E4M3, 0)
        return fp8.scaled_mm(a8, a_scale, b8, b_scale, torch.float32, bias)

    def batched() -> torch.Tensor:
        return vmap(lambda a, bias: vmap(lambda b: product(a[0], b, bias))(b))(a, bias)

    expected = batched()
    monkeypatch.setattr(fp8, "has_units", lambda device: True)
    torch.testing.assert_close(batched(), expected, rtol=1e-5, atol=1e-5)


@SCALINGS
def test_func_grad_is_autograd_and_remat_and_regions_change_nothing(scaling: Any) -> None:
    leaves = drawn(3, 5, 17), drawn(8, 17, seed=1), drawn(8, seed=2)
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(loss(scaling)(*tracked), tracked)
    everything = (0, 1, 2)
    assert_equal(grad(loss(scaling), argnums=everything)(*leaves), expected)
    for policy in (fb.checkpoint_policies.nothing_saveable, fb.checkpoint_policies.dots_saveable):
        assert_equal(grad(fb.remat(loss(scaling), policy), argnums=everything)(*leaves), expected)
    low = fb.jit(fb.grad(region.region(loss(scaling)), argnums=everything)).lower(*leaves)
    assert len(low.regions) == 2
    assert_equal(low.module(*leaves), expected)
    for wanted in range(3):
        one = [leaf.clone().requires_grad_(place == wanted) for place, leaf in enumerate(leaves)]
        loss(scaling)(*one).backward()
        assert [leaf.grad is not None for leaf in one] == [place == wanted for place in range(3)]
        assert_equal([one[wanted].grad], [expected[wanted]])


def assert_equal(got: Any, expected: Any) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


@SCALINGS
def test_what_has_no_derivative_says_so(scaling: Any) -> None:
    x, weight, bias = drawn(3, 5), drawn(4, 5, seed=1), drawn(4, seed=2)
    for place in range(2):
        for other in range(2):

            def gradient(*leaves: torch.Tensor, place: int = place) -> torch.Tensor:
                return grad(lambda *leaves: fp8.linear(*leaves, scaling=scaling).sum(), argnums=place)(*leaves).sum()

            if place == other and scaling == "row":  # the gradient of x is no function of x
                continue
            with pytest.raises(NotImplementedError, match="fp8"):
                grad(gradient, argnums=other)(x, weight, bias)
    with pytest.raises(NotImplementedError, match=r"quantize"):
        grad(lambda x: fp8_cast.quantize(x, E4M3)[1].sum())(x)


def test_errors_name_the_argument() -> None:
    x, weight = torch.ones(3, 5), torch.ones(4, 5)
    eight, scale = fp8_cast.quantize(x, E4M3)
    for error, match, call in (
        (TypeError, "x: torch.int64", lambda: fp8.linear(x.long(), weight)),
        (TypeError, "weight: torch.int64", lambda: fp8.linear(x, weight.long())),
        (TypeError, "bias: torch.int64", lambda: fp8.linear(x, weight, torch.ones(4).long())),
        (ValueError, r"\(3, 5\) and \(5, 4\)", lambda: fp8.linear(x, weight.t())),
        (ValueError, r"expected \(\.\.\., in\)", lambda: fp8.linear(x, weight[0])),
        (ValueError, r"bias: shape \(5,\), expected \(4,\)", lambda: fp8.linear(x, weight, torch.ones(5))),
        (ValueError, "scaling: 'column'", lambda: fp8.linear(x, weight, scaling="column")),  # type: ignore[arg-type]
        (TypeError, "dtype: torch.int8", lambda: fp8_cast.quantize(x, torch.int8)),
        (IndexError, "dim: 2", lambda: fp8_cast.quantize(x, E4M3, 2)),
        (TypeError, "a: torch.float32", lambda: fp8.scaled_mm(x, scale, eight, scale, torch.float32)),
        (ValueError, "a and b", lambda: fp8.scaled_mm(eight, scale, eight, scale, torch.float32)),
        (
            ValueError,
            r"b_scale: shape \(3, 1\), expected \(\) or \(1, 3\)",
            lambda: fp8.scaled_mm(eight, scale, eight.t(), scale.expand(3, 1), torch.float32),
        ),
    ):
        with pytest.raises(error, match=match):
            call()


def weight_of(value: torch.Tensor, scaling: Any = "tensor") -> Any:
    """A marked weight, for calls whose types know of tensors alone."""
    return Fp8Weight(value, scaling)


X, WEIGHT, BIAS = drawn(3, 17), drawn(8, 17, seed=1), drawn(8, seed=2)


@SCALINGS
def test_a_marked_weight_is_multiplied_in_fp8(scaling: Any) -> None:
    w, turned = weight_of(WEIGHT, scaling), weight_of(WEIGHT.t().contiguous(), scaling)
    product, layer = fp8.linear(X, WEIGHT, scaling=scaling), fp8.linear(X, WEIGHT, BIAS, scaling=scaling)
    for got in (F.linear(X, w), X @ w.t(), X @ w.T, X @ w.mT, X @ w.transpose(0, 1), X @ torch.t(w), X @ turned):
        assert torch.equal(got, product)
    for got in (torch.matmul(X, turned), torch.mm(X, turned), X.matmul(turned), X.mm(turned)):
        assert torch.equal(got, product)
    for got in (F.linear(X, w, BIAS), F.linear(X, weight=w, bias=BIAS), torch.addmm(BIAS, X, turned)):
        assert torch.equal(got, layer)
    joined: Any = torch.cat([w, w])
    assert isinstance(joined, Fp8Weight) and joined.scaling == scaling and joined.shape == (16, 17)
    assert not torch.equal(product, F.linear(X, WEIGHT))


def test_everything_else_sees_the_plain_value() -> None:
    w = weight_of(WEIGHT)
    assert (w.shape, w.dtype, w.device, w.dim(), len(w)) == ((8, 17), torch.float32, WEIGHT.device, 2, 8)
    for got, expected in (
        (w + 1, WEIGHT + 1),
        (1 - w, 1 - WEIGHT),
        (X[0] * w, X[0] * WEIGHT),
        (-w, -WEIGHT),
        (w[1:3], WEIGHT[1:3]),
        (w > 0, WEIGHT > 0),
        (w == WEIGHT, WEIGHT == WEIGHT),
        (w.bfloat16(), WEIGHT.bfloat16()),
        (torch.relu(w), torch.relu(WEIGHT)),
        (torch.stack([w, WEIGHT]), torch.stack([WEIGHT, WEIGHT])),
        (torch.cat([w, WEIGHT]), torch.cat([WEIGHT, WEIGHT])),
        (torch.cat([w, w], 1), torch.cat([WEIGHT, WEIGHT], 1)),
        (torch.cat([w, weight_of(WEIGHT, "row")]), torch.cat([WEIGHT, WEIGHT])),
        (w @ X.t(), WEIGHT @ X.t()),
        (torch.addmm(BIAS, X, w.t(), beta=2), torch.addmm(BIAS, X, WEIGHT.t(), beta=2)),
        (F.embedding(torch.tensor([1, 2]), w), WEIGHT[1:3]),
        (F.linear(w, WEIGHT), F.linear(WEIGHT, WEIGHT)),
    ):
        assert type(got) is torch.Tensor and torch.equal(got, expected)


def test_a_marked_weight_is_a_node_of_the_tree() -> None:
    params = {"w": Fp8Weight(WEIGHT, "row"), "b": BIAS}
    leaves, structure = tree.flatten(params)
    back = tree.unflatten(structure, leaves)
    assert tree.names(params) == ["b", "w.value"] and back["w"].value is WEIGHT and back["w"].scaling == "row"
    assert structure != tree.structure({"w": Fp8Weight(WEIGHT), "b": BIAS})
    assert torch.equal(copy.deepcopy(params)["w"].value, WEIGHT)

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, params["w"], params["b"]).square().sum()

    expected = grad(loss("row"), argnums=(1, 2))(X, WEIGHT, BIAS)
    for function in (fn, fb.remat(fn), region.region(fn)):
        grads = fb.grad(function)(params, X)
        assert isinstance(grads["w"], Fp8Weight)
        assert_equal((grads["w"].value, grads["b"]), expected)
    doubled = tree.map(lambda leaf: torch.stack([leaf, 2 * leaf]), params)
    got = fb.vmap(fn, in_axes=(0, None))(doubled, X)
    torch.testing.assert_close(got, torch.stack([fn(params, X), fn(tree.map(lambda leaf: 2 * leaf, params), X)]))


def test_mark() -> None:
    names = [
        *(
            "embed_tokens.weight",
            "wte.weight",
            "model.norm.weight",
            "h.0.ln_1.weight",
            "lm_head.weight",
            "mlp.gate.weight",
        ),
        *("h.0.attn.q.weight", "h.1.attn.q.weight", "mlp.gate_proj.weight", "attn.multihead.weight"),
    ]
    params: dict[str, torch.Tensor] = {name: torch.ones(2, 2) for name in names}
    others = {"bias": torch.ones(2), "ids": torch.ones(2, 2, dtype=torch.int64), "experts": torch.ones(2, 2, 2)}

    def marked(**options: Any) -> list[str]:
        return [name for name, leaf in mark(params | others, **options).items() if isinstance(leaf, Fp8Weight)]

    assert sorted(marked()) == sorted(names[6:])
    assert sorted(marked(exclude=())) == sorted(names)
    assert sorted(marked(exclude=(*EXCLUDED, "h.0", "attn.multi*"))) == ["h.1.attn.q.weight", "mlp.gate_proj.weight"]
    assert sorted(marked(exclude=("h.*.attn", "weight"))) == []
    twice = mark(mark(params), exclude=())
    assert all(isinstance(plain(leaf), torch.Tensor) for leaf in twice.values())
    nested = mark({"h": [{"w": torch.ones(2, 2)}, {"w": torch.ones(2, 2)}]}, ["h.1"], "row")
    assert isinstance(nested["h"][0]["w"], Fp8Weight) and nested["h"][0]["w"].scaling == "row"
    assert isinstance(nested["h"][1]["w"], torch.Tensor)
    with pytest.raises(ValueError, match=r"exclude: 'h\.7', 'q\.h' matches no name"):
        mark(params, ["h.7", "h.0", "q.h"])
    with pytest.raises(TypeError, match="exclude: 'wte'"):
        mark(params, "wte")
    with pytest.raises(ValueError, match="scaling: 'block'"):
        mark(params, scaling="block")  # type: ignore[arg-type]


IDS = torch.randint(0, 33, (2, 9), generator=torch.Generator().manual_seed(0))
LLAMA: dict[str, Any] = {
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2: dict[str, Any] = {"vocab_size": 33, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
OFF: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def hand_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = by_hand(x.reshape(-1, x.shape[-1]), E4M3).float() @ by_hand(weight, E4M3).t().float()
    product = product if bias is None else product + bias.float()
    return product.to(x.dtype).reshape(*x.shape[:-1], -1)


@pytest.fixture(params=["llama", "gpt2"])
def hugging_face(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    if request.param == "llama":
        module: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, attention_bias=True))
    else:
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **OFF, bos_token_id=1, eos_token_id=2))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.eval().double()


def test_a_hugging_face_module_multiplies_marked_weights_in_fp8(hugging_face: Any) -> None:
    reference = copy.deepcopy(hugging_face)
    found = 0
    for name, part in reference.named_modules():
        if isinstance(part, torch.nn.Linear | Conv1D) and name != "lm_head":
            turned = part.weight.t() if isinstance(part, Conv1D) else part.weight
            layer: Any = part
            layer.forward = lambda x, w=turned, b=part.bias: hand_linear(x, w, b)
            found += 1
    model = fb.functionalize(hugging_face)
    params = mark(model.init())
    assert sum(isinstance(leaf, Fp8Weight) for leaf in params.values()) == found > 0
    logits = model.apply(params, IDS).logits
    with torch.no_grad():
        torch.testing.assert_close(logits, reference(IDS).logits, rtol=1e-6, atol=1e-6)
    unmarked = model.apply(model.init(), IDS).logits
    assert 1e-3 < (logits - unmarked).norm() / unmarked.norm() < 0.3


def test_blocks_of_a_hugging_face_module_keep_the_mark(hugging_face: Any) -> None:
    model = fb.functionalize(hugging_face)
    params = model.init()
    first = next(name for name in params if ".0." in name and params[name].dim() == 2)

    def every(params: Any) -> torch.Tensor:
        return model.loss(mark(params, scaling="row"), {"input_ids": IDS})[0]

    def one(params: Any) -> torch.Tensor:
        return model.loss({**params, first: Fp8Weight(params[first])}, {"input_ids": IDS})[0]

    for function, regions in ((every, 1), (one, 2)):  # a block that differs in its marks is traced apart
        low = fb.jit(function).lower(params)
        assert len(low.regions) == regions
        (loss,) = low.module(*tree.leaves(params))
        torch.testing.assert_close(loss, function(params), rtol=1e-9, atol=1e-9)


def test_a_module_of_its_own_with_products_of_every_kind() -> None:
    class Products(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(17, 8)
            self.weight = torch.nn.Parameter(drawn(8, 4, seed=5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) @ self.weight + torch.matmul(torch.ones_like(self.weight).t(), self.weight).sum()

    module = Products()
    model = fb.functionalize(module)
    weight = module.weight.detach()
    inner = fp8.linear(X, module.linear.weight.detach(), module.linear.bias.detach())
    expected = fp8.linear(inner, weight.t()) + fp8.linear(torch.ones(4, 8), weight.t()).sum()
    assert torch.equal(model.apply(mark(model.init()), X), expected)


@pytest.mark.parametrize(("name", "scaling"), [("gpt2", "tensor"), ("llama", "row")])
def test_own_models_with_marked_parameters(name: str, scaling: Any) -> None:
    model = fb.models.gpt2(**GPT2, **OFF) if name == "gpt2" else fb.models.llama(**LLAMA)
    params = model.init(fb.random.key(0))

    def fn(params: Any) -> torch.Tensor:
        return model.loss(mark(params, scaling=scaling), {"input_ids": IDS})[0]

    grads, value = fb.grad_and_value(fn)(params)
    exact, full = fb.grad_and_value(lambda params: model.loss(params, {"input_ids": IDS})[0])(params)
    assert 1e-6 < abs(value - full) / full < 1e-3
    mine, theirs = (torch.cat([leaf.flatten() for leaf in tree.leaves(side)]) for side in (grads, exact))
    assert F.cosine_similarity(mine, theirs, 0) > 0.999
    assert_equal(tree.leaves(fb.grad(fb.remat(fn))(params)), tree.leaves(grads))
    if name == "gpt2":  # the other family takes longer to trace
        low = fb.jit(fb.grad(fn)).lower(params)
        assert len(low.regions) == 2
        torch.testing.assert_close(list(low.module(*tree.leaves(params))), tree.leaves(grads), rtol=1e-4, atol=1e-4)
    ensemble = tree.map(lambda leaf: torch.stack([leaf, leaf / 2]), params)
    torch.testing.assert_close(fb.vmap(fn)(ensemble)[0], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", [None, "activation", "bias", "row", "plain"])
def test_a_gated_mlp_is_fused_where_all_of_it_is_fp8_with_one_scale_a_tensor(other: str | None) -> None:
    sizes = {"gate_proj": (48, 16), "up_proj": (48, 16), "down_proj": (16, 48)}
    plain: Any = {name: {"weight": drawn(*shape, seed=place)} for place, (name, shape) in enumerate(sizes.items())}
    if other == "bias":
        plain["down_proj"]["bias"] = drawn(16, seed=4)
    x, activation = drawn(2, 5, 16, seed=3), "gelu" if other == "activation" else "silu"
    exclude = ("up_proj",) if other == "plain" else ()

    def marked(params: Any) -> Any:
        return mark(params, exclude=exclude, scaling="row" if other == "row" else "tensor")

    def mlp(params: Any, x: torch.Tensor) -> torch.Tensor:
        return layers.gated_mlp(marked(params), x, activation)

    def parts(params: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = layers.together([marked(params)["gate_proj"], marked(params)["up_proj"]], x)
        return layers.linear(marked(params)["down_proj"], layers.ACTIVATIONS[activation](gate) * up)

    graph = fb.jit(mlp).lower(plain, x).graph
    assert ("fp8_cast_swiglu" in str(graph)) is (other is None)
    out, pull = fb.vjp(mlp, plain, x)
    expected, theirs = fb.vjp(parts, plain, x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    cotangent = drawn(2, 5, 16, seed=5)
    for mine, other_grad in zip(tree.leaves(pull(cotangent)), tree.leaves(theirs(cotangent)), strict=True):
        assert F.cosine_similarity(mine.flatten(), other_grad.flatten(), 0) > 0.9999


@pytest.mark.gpu
@SCALINGS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 17, 8), (17, 8, 50257), (64, 64, 48), (0, 8, 8)])
def test_the_gpu_multiplies_to_rounding(scaling: Any, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    leaves = drawn(m, k, dtype=dtype), drawn(n, k, seed=1, dtype=dtype), drawn(n, seed=2, dtype=dtype)
    cotangent = drawn(m, n, seed=3, dtype=dtype)

    def run(device: str) -> list[torch.Tensor]:
        moved = [leaf.to(device).requires_grad_() for leaf in leaves]
        out = fp8.linear(*moved, scaling=scaling)
        return [value.cpu() for value in (out, *torch.autograd.grad(out, moved, cotangent.to(device)))]

    for got, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert (got - expected).norm() <= 5e-3 * expected.norm()
