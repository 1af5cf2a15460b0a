"""Regions and remat: the same numbers as the plain function under every transform, and the memory that was promised."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functional_booster as fb
from functional_booster.kernels import graph
from functional_booster.sharding import region
from functional_booster.sharding.checkpoint_policies import (
    dots_saveable,
    everything_saveable,
    nothing_saveable,
    save_only_these_names,
)
from functional_booster.sharding.environment import bind

WIDTH, DEPTH = 6, 3


def block(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, x.shape[-1:])
    h = fb.checkpoint_name(torch.tanh(h @ params["up"]), "hidden")
    return x + h @ params["down"]


def stack(layer: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def loss(layers: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for params in layers:
            x = layer(params, x)
        return x.square().sum()

    return loss


@pytest.fixture
def inputs() -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    key = fb.random.key(0)

    def draw(number: int, *shape: int) -> torch.Tensor:
        return fb.random.normal(fb.random.fold_in(key, number), shape, dtype=torch.float64)

    layers = [{"up": draw(2 * i, WIDTH, 9), "down": draw(2 * i + 1, 9, WIDTH)} for i in range(DEPTH)]
    return layers, draw(99, 4, WIDTH)


def assert_equal(got: Any, expected: Any) -> None:
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9), got, expected)


FORMS = {
    "region": fb.region,
    "nothing": fb.remat,
    "dots": lambda fn: fb.remat(fn, dots_saveable),
    "names": lambda fn: fb.remat(fn, save_only_these_names("hidden")),
    "everything": lambda fn: fb.remat(fn, everything_saveable),
    "remat in a region": lambda fn: fb.region(fb.remat(fn)),
}


@pytest.mark.parametrize("outline", [False, True])
@pytest.mark.parametrize("form", FORMS)
class TestSameNumbers:
    """A region or remat is its function: value, gradient, and every composition of transforms."""

    @pytest.fixture(autouse=True)
    def _outlined(self, outline: bool) -> Any:
        with bind(outline=outline):
            yield

    def test_value_and_grad(self, form: str, inputs: Any) -> None:
        assert_equal(fb.grad_and_value(stack(FORMS[form](block)))(*inputs), fb.grad_and_value(stack(block))(*inputs))

    def test_gradient_of_both_arguments(self, form: str, inputs: Any) -> None:
        got = fb.grad(stack(FORMS[form](block)), argnums=(0, 1))(*inputs)
        assert_equal(got, fb.grad(stack(block), argnums=(0, 1))(*inputs))

    def test_autograd(self, form: str, inputs: Any) -> None:
        layers, x = fb.tree.map(lambda leaf: leaf.clone().requires_grad_(), inputs)
        stack(FORMS[form](block))(layers, x).backward()
        got = fb.tree.map(lambda leaf: leaf.grad, (layers, x))
        assert_equal(got, fb.grad(stack(block), argnums=(0, 1))(*inputs))

    def test_vmap_over_parameters(self, form: str, inputs: Any) -> None:
        layers, x = inputs
        several = fb.tree.map(lambda leaf: torch.stack([leaf, 0.5 * leaf, -leaf]), layers)
        got = fb.vmap(fb.grad(stack(FORMS[form](block))), in_axes=(0, None))(several, x)
        for index in range(3):
            one = fb.tree.map(lambda leaf, i=index: leaf[i], several)
            assert_equal(fb.tree.map(lambda leaf, i=index: leaf[i], got), fb.grad(stack(block))(one, x))

    def test_gradient_through_vmap(self, form: str, inputs: Any) -> None:
        layers, x = inputs

        def total(layer: Callable[..., Any]) -> Callable[..., torch.Tensor]:
            return lambda layers, x: fb.vmap(stack(layer), in_axes=(None, 0))(layers, x[:, None]).sum()

        assert_equal(fb.grad(total(FORMS[form](block)))(layers, x), fb.grad(total(block))(layers, x))

    def test_second_derivative(self, form: str, inputs: Any) -> None:
        def penalty(layer: Callable[..., Any]) -> Callable[..., Any]:
            gradient = fb.grad(stack(layer))
            return lambda layers, x: sum(g.square().sum() for g in fb.tree.leaves(gradient(layers, x)))

        assert_equal(fb.grad(penalty(FORMS[form](block)))(*inputs), fb.grad(penalty(block))(*inputs))

    def test_trace(self, form: str, inputs: Any) -> None:
        leaves, structure = fb.tree.flatten(inputs)
        gradient = fb.grad_and_value(stack(FORMS[form](block)))
        traced = graph.trace(lambda *flat: fb.tree.leaves(gradient(*fb.tree.unflatten(structure, flat))), leaves)
        assert_equal(list(traced(*leaves)), fb.tree.leaves(fb.grad_and_value(stack(block))(*inputs)))


def test_the_graph_holds_one_region_for_all_layers(inputs: Any) -> None:
    layers, x = inputs
    lowered = {
        depth: fb.jit(fb.grad(stack(fb.region(block)), argnums=(0, 1))).lower((layers * depth)[:depth], x)
        for depth in (2, 8)
    }
    assert {len(low.regions) for low in lowered.values()} == {2}  # a forward and a backward
    calls = {d: sum(n.target is region.call_op for n in low.graph.nodes) for d, low in lowered.items()}
    assert calls == {2: 4, 8: 16}
    products = [n for n in lowered[8].graph.nodes if n.target is torch.ops.aten.mm.default]
    assert not products  # all of them are inside the regions


@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        (nothing_saveable, 0),
        (save_only_these_names("hidden"), 1),
        (save_only_these_names("other"), 0),
        (dots_saveable, 1),
    ],
)
def test_what_is_saved(policy: Any, saved: int, inputs: Any) -> None:
    """Beyond its inputs a block saves what the policy names, and the backward recomputes the rest."""
    layers, x = inputs
    call = fb.jit(fb.grad(lambda p, x: fb.remat(block, policy)(p, x).square().sum(), argnums=(0, 1)))
    forward, backward = call.lower(layers[0], x).regions.values()
    outputs = next(node for node in forward.nodes if node.op == "output").args[0]
    assert len(outputs) == 1 + saved
    products = sum(node.target is torch.ops.aten.mm.default for node in backward.nodes)
    assert products == 4 + (0 if saved else 1)  # two for each product's gradients; one more to compute "hidden" again


def test_recompute_stays_in_the_backward_under_vmap(inputs: Any) -> None:
    """Inlined, the recomputation hangs on the cotangent, so that no compiler merges it with the forward."""
    layers, x = inputs
    fn = fb.vmap(fb.grad(lambda p, x: fb.remat(block)(p, x).square().sum()), in_axes=(None, 0))
    lowered = fb.jit(fn).lower(layers[0], x[:, None])
    barriers = [n for n in lowered.graph.nodes if "barrier" in str(n.target)]
    tanhs = [n for n in lowered.graph.nodes if n.target is torch.ops.aten.tanh.default]
    assert barriers
    assert len(tanhs) == 2


def test_a_result_that_is_an_input_or_a_view() -> None:
    def awkward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x * y
        return x, z, z.T, z, y[0]

    x, y = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    loss = fb.jit(
        fb.grad(lambda x, y: sum(o.sum() * (i + 1) for i, o in enumerate(fb.region(awkward)(x, y))), argnums=(0, 1))
    )
    plain = fb.grad(lambda x, y: sum(o.sum() * (i + 1) for i, o in enumerate(awkward(x, y))), argnums=(0, 1))
    assert_equal(loss.lower(x, y).module(x, y), list(plain(x, y)))


def test_static_arguments_and_integer_tensors() -> None:
    @fb.region
    def scaled(x: torch.Tensor, index: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        return x[index] * options["factor"]

    x, index = torch.arange(4.0), torch.tensor([0, 2, 2])
    fn = fb.jit(fb.grad(lambda x: (scaled(x, index, {"factor": 2}) + scaled(x, index, {"factor": 3})).sum()))
    lowered = fn.lower(x)
    torch.testing.assert_close(lowered.module(x)[0], torch.tensor([5.0, 0.0, 10.0, 0.0]))


def test_autograd_twice_is_right_or_refused(inputs: Any) -> None:
    layers, x = inputs

    def penalty(layer: Any) -> torch.Tensor:
        w = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(stack(layer)(layers, w), w, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), w)[0]

    assert_equal(penalty(fb.remat(block)), penalty(block))
    with pytest.raises(NotImplementedError, match="second derivative by autograd"):
        penalty(fb.remat(block, dots_saveable))


@pytest.mark.parametrize("functional", [True, False])
def test_what_is_inside_a_block_is_freed(functional: bool, inputs: Any) -> None:
    """Of a remat's inside, no tensor outlives its block: neither in the forward pass nor in the backward."""
    alive: list[weakref.ref[Any]] = []
    most = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            out = x.sin()
            alive.append(weakref.ref(out.untyped_storage()))
            most.append(sum(ref() is not None for ref in alive))
            return out

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs, output)

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            x, _ = ctx.saved_tensors
            return cotangent * x.cos()

    layers, x = inputs

    def watched(params: Any, x: torch.Tensor) -> torch.Tensor:
        return Watched.apply(x) @ params["up"] @ params["down"]

    loss = stack(fb.remat(watched))
    if functional:
        fb.grad(loss, argnums=(0, 1))(layers, x)
    else:
        loss(layers, x.clone().requires_grad_()).backward()
    assert len(alive) == 2 * DEPTH
    assert max(most) == 1


def test_a_policy_must_be_callable() -> None:
    with pytest.raises(TypeError, match="policy: 'dots'"):
        fb.remat(block, "dots")  # type: ignore[arg-type]


def test_an_error_inside_a_region_is_the_functions_own() -> None:
    @fb.region
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("what the function says")

    with pytest.raises(KeyError, match="what the function says"):
        fb.jit(broken).lower(torch.ones(2))


@pytest.mark.parametrize("form", ["region", "nothing", "dots"])
@pytest.mark.parametrize("outline", [False, True])
def test_a_captured_tensor_is_refused_by_name(form: str, outline: bool) -> None:
    """Its gradient would be lost without a word."""

    def loss(scale: torch.Tensor) -> torch.Tensor:
        return FORMS[form](lambda x: (x * scale).sum())(torch.ones(3))

    if form == "region" and not outline:
        assert torch.equal(fb.grad(loss)(torch.ones(3)), torch.ones(3))  # it is the function itself
        return
    with bind(outline=outline), pytest.raises(ValueError, match="scale: a region or remat closes over it"):
        fb.grad(loss)(torch.ones(3))


def test_a_captured_constant_is_fine() -> None:
    table = torch.arange(3.0)
    assert torch.equal(fb.grad(lambda x: fb.remat(lambda x: (x * table).sum())(x))(torch.ones(3)), table)


def test_static_values_that_are_equal_but_differ() -> None:
    scaled = fb.remat(lambda x, factor: x * factor, dots_saveable)
    x = torch.tensor([1, 2])
    assert scaled(x, 1).dtype == torch.int64
    assert scaled(x, 1.0).dtype == torch.float32


@pytest.mark.parametrize("outline", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_integer_results_and_keywords(form: str, outline: bool) -> None:
    def head(x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y = scale * x.sin()
        return {"best": y.argmax(), "value": y.square().sum()}

    def loss(layer: Any) -> Any:
        def fn(x: torch.Tensor, scale: torch.Tensor) -> Any:
            out = layer(x, scale=scale)
            return out["value"] * (1 + out["best"]), out["best"]

        return fn

    inputs = torch.linspace(-1, 1, 5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    expected = fb.grad_and_value(loss(head), argnums=(0, 1), has_aux=True)(*inputs)
    with bind(outline=outline):
        assert_equal(fb.grad_and_value(loss(FORMS[form](head)), argnums=(0, 1), has_aux=True)(*inputs), expected)
