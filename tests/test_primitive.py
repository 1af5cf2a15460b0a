"""Laws of the primitive helper: a toy op is differentiated, batched, traced and compiled like torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from functional_booster.kernels.primitive import leading_dims, one_by_one, primitive

Op = Callable[..., torch.Tensor]


def _scaled_sine(batching: str) -> Op:
    """x -> scale * sin(rate * x), whose derivative is another primitive, itself differentiable in plain torch ops."""
    rule = {"leading": leading_dims, "each": one_by_one}[batching]
    slope = primitive(
        f"test_slope_{batching}",
        "(Tensor x, Tensor scale, float rate) -> Tensor",
        reference=lambda x, scale, rate: scale * rate * torch.cos(rate * x),
        batching=rule,
        backward=lambda kept, g: (
            -g * kept[1] * kept[2] ** 2 * torch.sin(kept[2] * kept[0]),
            g * kept[2] * torch.cos(kept[2] * kept[0]),
            None,
        ),
    )
    return primitive(
        f"test_sine_{batching}",
        "(Tensor x, Tensor scale, float rate) -> Tensor",
        reference=lambda x, scale, rate: scale * torch.sin(rate * x),
        batching=rule,
        backward=lambda kept, g: (g * slope(*kept), g * torch.sin(kept[2] * kept[0]), None),
    )


OPS = {name: _scaled_sine(name) for name in ("leading", "each")}

divide = primitive(
    "test_divide",
    "(Tensor x, Tensor y) -> (Tensor, Tensor)",
    reference=lambda x, y: (x / y, (x / y).floor()),
    residuals=lambda inputs, outputs: ("x / y", inputs[1], outputs[0]),
    backward=lambda kept, g, _: (g / kept[1], -g * kept[2] / kept[1]),
)
opaque = primitive("test_opaque", "(Tensor x) -> Tensor", reference=lambda x: x * 2)
signs = primitive("test_signs", "(Tensor x) -> Tensor", reference=lambda x: (x > 0).to(torch.int32))


def plain(x: torch.Tensor, scale: torch.Tensor, rate: float) -> torch.Tensor:
    return scale * torch.sin(rate * x)


@pytest.fixture(params=sorted(OPS))
def op(request: pytest.FixtureRequest) -> Op:
    return OPS[request.param]


def points(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gradcheck(op: Op) -> None:
    x, scale = points(3, 2).requires_grad_(), points(3, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, scale: op(x, scale, 1.7), (x, scale))
    assert torch.autograd.gradgradcheck(lambda x, scale: op(x, scale, 1.7), (x, scale))


def test_func_grad_equals_autograd_and_second_derivatives(op: Op) -> None:
    x, scale = points(4), points(4, seed=1)
    for order in (1, 2):
        mine, theirs = lambda x: op(x, scale, 0.5).sum(), lambda x: plain(x, scale, 0.5).sum()
        for _ in range(order):
            mine, theirs = _derivative(mine), _derivative(theirs)
        torch.testing.assert_close(mine(x), theirs(x))


def _derivative(fn: Op) -> Op:
    return lambda x: grad(fn)(x).square().sum()


@given(x_dim=st.sampled_from([None, 0, 1]), scale_dim=st.sampled_from([None, 0, 1]), size=st.integers(1, 3))
@pytest.mark.parametrize("name", sorted(OPS))
def test_vmap_of_op_and_of_its_gradient(name: str, x_dim: int | None, scale_dim: int | None, size: int) -> None:
    if x_dim is None and scale_dim is None:
        return
    op = OPS[name]
    x = points(3) if x_dim is None else points(size, 3).movedim(0, x_dim)
    scale = points(3, seed=1) if scale_dim is None else points(size, 3, seed=1).movedim(0, scale_dim)

    def both(fn: Op) -> list[torch.Tensor]:
        value = vmap(lambda x, s: fn(x, s, 2.0), in_dims=(x_dim, scale_dim))(x, scale)
        grads = vmap(grad(lambda x, s: fn(x, s, 2.0).square().sum(), argnums=(0, 1)), in_dims=(x_dim, scale_dim))(
            x, scale
        )
        return [value, *grads]

    torch.testing.assert_close(both(op), both(plain))


def test_nested_vmap_and_grad_of_vmap(op: Op) -> None:
    x, scale = points(2, 3, 4), points(3, 4, seed=1)

    def nested(fn: Op) -> torch.Tensor:
        return vmap(lambda rows: vmap(lambda r, s: fn(r, s, 1.0))(rows, scale))(x)

    torch.testing.assert_close(nested(op), nested(plain))
    mine, theirs = (
        grad(lambda scale, fn=fn: vmap(lambda r: fn(r, scale, 1.0))(x).square().sum()) for fn in (op, plain)
    )
    torch.testing.assert_close(mine(scale), theirs(scale))


def test_traced_on_fake_tensors_it_is_one_node(op: Op) -> None:
    x, scale = points(4), points(4, seed=1)
    traced = make_fx(grad(lambda x: op(x, scale, 1.5).sum()), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    targets = [str(node.target) for node in traced.graph.nodes if "functional_booster" in str(node.target)]
    assert [target.split(".")[1].rsplit("_", 1)[0] for target in targets] == ["test_sine", "test_slope"]
    for run in (traced, torch.compile(traced, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(run(x), grad(lambda x: plain(x, scale, 1.5).sum())(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what Dynamo itself does
def test_under_dynamo_and_aot_autograd(op: Op) -> None:
    x, scale = points(4).requires_grad_(), points(4, seed=1)
    compiled = torch.compile(lambda x: op(x, scale, 1.5).sum(), fullgraph=True, backend="aot_eager")
    (mine,), (theirs,) = (torch.autograd.grad(fn(x), x) for fn in (compiled, lambda x: plain(x, scale, 1.5).sum()))
    torch.testing.assert_close(mine, theirs)


def test_residuals_may_be_outputs_and_static_values() -> None:
    x, y = points(3).requires_grad_(), (points(3, seed=1).abs() + 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: divide(x, y)[0], (x, y))
    quotient, whole = vmap(divide, in_dims=(0, None))(points(2, 3), y.detach())
    torch.testing.assert_close((quotient, whole), (points(2, 3) / y.detach(), (points(2, 3) / y.detach()).floor()))


def test_without_backward_a_gradient_is_an_error_that_names_the_op() -> None:
    x = points(3)
    with pytest.raises(NotImplementedError, match="functional_booster::test_opaque has no derivative"):
        grad(lambda x: opaque(x).sum())(x)
    with pytest.raises(NotImplementedError, match="functional_booster::test_opaque has no derivative"):
        opaque(x.clone().requires_grad_()).sum().backward()
    torch.testing.assert_close(grad(lambda x: (opaque(x.detach()) * x).sum())(x), 2 * x)


def test_integer_outputs_are_constants() -> None:
    x = points(5)
    torch.testing.assert_close(grad(lambda x: (signs(x) * x).sum())(x), (x > 0).to(x.dtype))
    torch.testing.assert_close(vmap(grad(lambda x: signs(x) * x))(x), (x > 0).to(x.dtype))


def test_the_registration_passes_torchs_own_checks() -> None:
    ops = torch.ops.functional_booster
    for raw, args in (
        (ops.test_sine_each, (points(3), points(3, seed=1), 0.5)),
        (ops.test_divide, (points(3), points(3))),
    ):
        torch.library.opcheck(raw.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_the_cuda_implementation_is_the_one_that_runs_there() -> None:
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    op = primitive("test_by_device", "(Tensor x) -> Tensor", reference=lambda x: x * 2, cuda=thrice)
    x = torch.ones(3)
    assert op(x).tolist() == [2, 2, 2] and op(x.cuda()).tolist() == [3, 3, 3]
