"""The transforms over trees against torch.func over torch's own pytrees, in float64."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given
from hypothesis import strategies as st

from functional_booster.kernels import transforms, tree

KEYS = st.text("abcdefg", min_size=1, max_size=3)


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHAPES = st.lists(st.integers(0, 3), max_size=3)
TENSORS = st.builds(lambda shape, seed: tensor(*shape, seed=seed), SHAPES, st.integers(0, 99))
PARAMS = st.recursive(
    TENSORS,
    lambda children: (
        st.dictionaries(KEYS, children, min_size=1, max_size=4)
        | st.lists(children, min_size=1, max_size=3)
        | st.tuples(children, children)
    ),
    max_leaves=8,
)


def couple(params: Any) -> torch.Tensor:
    """A scalar in which every leaf has another part, and all leaves meet: a swapped leaf or gradient shows."""
    total = torch.zeros((), dtype=torch.float64)
    for place, leaf in enumerate(tree.leaves(params)):
        total = total + (place + 1) * (leaf**3).sum() + (leaf * (place + 0.5)).sum()
    return total.sin() + total**2


def mlp(params: Any, x: torch.Tensor) -> torch.Tensor:
    """(D,) or (B, D) -> the same with 1 for D; the keys are not in sorted order."""
    hidden = torch.tanh(x @ params["w"] + params["b"])
    return hidden @ params["a"]["out"]


def mlp_params() -> dict[str, Any]:
    return {"w": tensor(3, 4, seed=1), "b": tensor(4, seed=2), "a": {"out": tensor(4, 1, seed=3)}}


def assert_equal(actual: Any, expected: Any) -> None:
    """Same structure, and every leaf the same to the last bit."""
    assert tree.structure(actual) == tree.structure(expected)
    for name, left, right in zip(tree.names(actual), tree.leaves(actual), tree.leaves(expected), strict=True):
        assert torch.equal(left, right), name


def assert_close(actual: Any, expected: Any) -> None:
    """Same structure, and every leaf equal to float64 rounding."""
    assert tree.structure(actual) == tree.structure(expected)
    tree.map(lambda left, right: torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12), actual, expected)


class TestGrad:
    @given(PARAMS)
    def test_equals_torch_func_over_any_tree(self, params: Any) -> None:
        grads, value = transforms.grad_and_value(couple)(params)
        expected, expected_value = torch.func.grad_and_value(couple)(params)
        assert_equal(grads, expected)
        assert torch.equal(value, expected_value)
        assert_equal(transforms.grad(couple)(params), expected)

    def test_static_leaves_stand_still_and_get_none(self) -> None:
        w = tensor(3)
        params = {"w": w, "steps": torch.arange(3), "keep": torch.tensor([True, False, True]), "n": 2, "name": "x"}

        def fn(p: Any) -> torch.Tensor:
            assert p["name"] == "x"
            assert p["none"] is None
            return (p["w"] * p["steps"] * p["keep"]).sum() * p["n"]

        grads = transforms.grad(fn)({**params, "none": None})
        expected = {**dict.fromkeys(params), "w": 2 * torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64), "none": None}
        assert grads.keys() == expected.keys()
        assert_equal(grads, expected)

    @pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (1, 0), (0, 2), (2, -2), ()])
    def test_every_form_of_argnums(self, argnums: Any) -> None:
        args = (mlp_params(), tensor(3, seed=4), {"scale": tensor(seed=5)})

        def fn(params: Any, x: torch.Tensor, extra: Any) -> torch.Tensor:
            return (mlp(params, x) * extra["scale"]).sum()

        every = torch.func.grad(fn, argnums=(0, 1, 2))(*args)
        grads = transforms.grad(fn, argnums)(*args)
        if isinstance(argnums, int):
            assert_equal(grads, every[argnums])
        else:
            assert isinstance(grads, tuple)
            assert_equal(grads, tuple(every[index] for index in argnums))

    def test_keywords_are_passed_and_not_differentiated(self) -> None:
        x = tensor(3)
        grads = transforms.grad(lambda p, *, power, add: (p["x"] ** power + add["c"]).sum())(
            {"x": x}, power=3, add={"c": x}
        )
        assert_close(grads, {"x": 3 * x**2})

    def test_aux_may_hold_anything_and_its_tensors_are_plain(self) -> None:
        def fn(params: Any) -> Any:
            hidden = params["w"] * 2
            return hidden.sum(), {"hidden": hidden, "name": "x", "none": None, "count": [3, hidden.detach().max()]}

        w = tensor(3)
        grads, (value, aux) = transforms.grad_and_value(fn, has_aux=True)({"w": w})
        assert_equal(grads, {"w": torch.full_like(w, 2)})
        assert value.item() == pytest.approx(2 * w.sum().item(), rel=1e-15)
        assert (aux["name"], aux["none"], aux["count"][0]) == ("x", None, 3)
        assert torch.equal(aux["hidden"], 2 * w)
        assert not torch._C._functorch.is_functorch_wrapped_tensor(aux["hidden"])
        assert aux["count"][1].item() == 2 * w.max().item()
        alone, aux_alone = transforms.grad(fn, has_aux=True)({"w": w})
        assert_equal(alone, grads)
        assert torch.equal(aux_alone["hidden"], aux["hidden"])

    def test_a_registered_node_is_differentiated_to_a_node(self) -> None:
        grads = transforms.grad(lambda node: (node.scale * node.weight.sum()) ** 2)(
            Linear(weight=tensor(3), steps=torch.arange(2), scale=2.0)
        )
        assert isinstance(grads, Linear)
        assert grads.steps is None
        assert grads.scale == 2.0
        assert_close(grads.weight, (8 * tensor(3).sum()).expand(3))

    def test_complex_leaves_equal_torch_func(self) -> None:
        z = torch.complex(tensor(3), tensor(3, seed=1))

        def fn(p: Any) -> torch.Tensor:
            return (p["z"].abs() ** 3).sum()

        assert_equal(transforms.grad(fn)({"z": z}), torch.func.grad(fn)({"z": z}))

    def test_outer_autograd_goes_through(self) -> None:
        x = tensor(3).requires_grad_()
        grads, value = transforms.grad_and_value(lambda p: (p["x"] ** 3).sum())({"x": x})
        (value + grads["x"].sum()).backward()
        assert_close(x.grad, (3 * x**2 + 6 * x).detach())

    def test_the_arguments_are_left_alone(self) -> None:
        params, before = mlp_params(), mlp_params()
        transforms.grad(lambda p: mlp(p, tensor(3)).sum())(params)
        assert_equal(params, before)

    @pytest.mark.parametrize(
        ("argnums", "message"),
        [(1, "argnums: 1 is out of range"), (-2, "argnums: -2 is out of range"), ((0, -1), "one argument twice")],
    )
    def test_bad_argnums_are_refused(self, argnums: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            transforms.grad(couple, argnums)({"a": tensor(2)})

    @pytest.mark.parametrize(
        ("result", "given_as"), [(lambda p: p["a"], r"\(2,\)"), (lambda p: 1.0, "float"), (lambda p: p, "dict")]
    )
    def test_a_result_that_is_no_scalar_is_refused(self, result: Any, given_as: str) -> None:
        with pytest.raises(TypeError, match=f"fn must return a 0-d tensor to be differentiated, got {given_as}"):
            transforms.grad(result)({"a": tensor(2)})

    def test_a_missing_aux_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"fn must return \(value, aux\) with has_aux=True, got Tensor"):
            transforms.grad(couple, has_aux=True)({"a": tensor(2)})


@dataclass(frozen=True)
class Linear:
    weight: Any
    steps: Any
    scale: float


tree.register(Linear, ("weight", "steps"), ("scale",))


class TestVjp:
    @given(PARAMS, st.integers(0, 99))
    def test_equals_torch_func_over_any_tree(self, params: Any, seed: int) -> None:
        def fn(p: Any, scale: torch.Tensor) -> Any:
            return {"y": tree.map(lambda leaf: leaf.sin() * scale, p), "total": couple(p)}

        scale = tensor(seed=seed)
        outputs, pull = transforms.vjp(fn, params, scale)
        expected, expected_pull = torch.func.vjp(fn, params, scale)[:2]
        assert_equal(outputs, expected)
        cotangent = tree.map(lambda leaf: torch.full_like(leaf, 0.3) + leaf, outputs)
        # torch's pytrees keep dicts in insertion order: hand over the very structure that fn returned
        like_torch = torch_pytree.tree_map(lambda leaf: torch.full_like(leaf, 0.3) + leaf, expected)
        assert_equal(pull(cotangent), expected_pull(like_torch))

    def test_the_pullback_is_linear_and_can_be_called_again(self) -> None:
        outputs, pull = transforms.vjp(mlp, mlp_params(), tensor(5, 3))
        one, two = tensor(5, 1, seed=7), tensor(5, 1, seed=8)
        combined = pull(2 * one + two)
        assert_close(combined, tree.map(lambda a, b: 2 * a + b, pull(one), pull(two)))
        assert outputs.shape == (5, 1)

    def test_the_cotangents_dict_order_does_not_matter(self) -> None:
        _, pull = transforms.vjp(lambda p: {"x": p["a"] * 2, "y": p["a"] * 3}, {"a": tensor(2)})
        x, y = tensor(2, seed=1), tensor(2, seed=2)
        assert_equal(pull({"y": y, "x": x}), pull({"x": x, "y": y}))
        assert_close(pull({"x": x, "y": y})[0], {"a": 2 * x + 3 * y})

    def test_static_leaves_get_none(self) -> None:
        _, pull = transforms.vjp(lambda p: p["a"] * p["n"], {"a": tensor(2), "n": 3, "none": None})
        (grads,) = pull(torch.ones(2, dtype=torch.float64))
        assert (grads["n"], grads["none"]) == (None, None)
        assert torch.equal(grads["a"], torch.full((2,), 3.0, dtype=torch.float64))

    @pytest.mark.parametrize("cotangent", [[tensor(2)], {"x": tensor(2), "z": tensor(2)}, {"x": tensor(2)}])
    def test_a_cotangent_of_another_structure_is_refused(self, cotangent: Any) -> None:
        _, pull = transforms.vjp(lambda p: {"x": p["a"], "y": p["a"]}, {"a": tensor(2)})
        with pytest.raises(ValueError, match="cotangent: structure"):
            pull(cotangent)


class TestVmap:
    @given(PARAMS, st.integers(1, 4), st.sampled_from([None, 1, 2]))
    def test_equals_a_loop_over_any_tree(self, params: Any, batch: int, chunk_size: int | None) -> None:
        rows = [tree.map(lambda leaf, row=row: leaf + row, params) for row in range(batch)]
        stacked = tree.map(lambda *leaves: torch.stack(leaves), *rows)

        def fn(p: Any) -> Any:
            return {"out": tree.map(torch.sin, p), "sum": couple(p)}

        result = transforms.vmap(fn, chunk_size=chunk_size)(stacked)
        assert_close(result, tree.map(lambda *leaves: torch.stack(leaves), *[fn(row) for row in rows]))

    def test_in_axes_as_prefix_trees_equal_torch_func(self) -> None:
        params = {"w": tensor(3, 5), "b": {"x": tensor(2, 3, seed=1), "y": tensor(4, seed=2)}}
        scale = tensor(5, seed=3)

        def fn(p: Any, s: torch.Tensor) -> torch.Tensor:
            return (p["w"] * s).sum() + (p["b"]["x"] @ p["w"]).sum() * p["b"]["y"].sum()

        for in_axes in [({"w": 1, "b": None}, 0), ({"w": -1, "b": {"x": None, "y": None}}, 0)]:
            ours = transforms.vmap(fn, in_axes)(params, scale)
            assert torch.equal(ours, torch.func.vmap(fn, in_axes)(params, scale))
        shared = transforms.vmap(fn, ({"w": 1, "b": None}, None))(params, scale[0])
        assert torch.equal(shared, torch.func.vmap(fn, ({"w": 1, "b": None}, None))(params, scale[0]))

    def test_leaves_that_are_no_tensors_go_through(self) -> None:
        result = transforms.vmap(lambda p: {"y": p["x"] * p["n"], "name": p["name"], "none": p["none"]})(
            {"x": tensor(3), "n": 2, "name": "layer", "none": None}
        )
        assert torch.equal(result["y"], tensor(3) * 2)
        assert (result["name"], result["none"]) == ("layer", None)

    def test_chunks_are_computed_one_after_another(self) -> None:
        calls = []

        def fn(x: torch.Tensor) -> torch.Tensor:
            calls.append(x.shape)
            return x.sin()

        transforms.vmap(fn, chunk_size=2)(tensor(5, 3))
        assert calls == [(3,), (3,), (3,)]

    def test_out_axes_says_where_the_batch_goes(self) -> None:
        x = tensor(2, 3)
        assert transforms.vmap(lambda row: row * 2, out_axes=1)(x).shape == (3, 2)

    def test_per_sample_gradients_equal_a_loop(self) -> None:
        params, xs, ys = mlp_params(), tensor(5, 3, seed=4), tensor(5, 1, seed=5)

        def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return ((mlp(p, x) - y) ** 2).sum()

        per_sample = transforms.vmap(transforms.grad(loss), (None, 0, 0))(params, xs, ys)
        one_by_one = [torch.func.grad(loss)(params, x, y) for x, y in zip(xs, ys, strict=True)]
        assert_close(per_sample, tree.map(lambda *leaves: torch.stack(leaves), *one_by_one))
        whole = transforms.grad(lambda p: ((mlp(p, xs) - ys) ** 2).sum())(params)
        assert_close(tree.map(lambda leaf: leaf.sum(0), per_sample), whole)

    def test_grad_and_value_inside_vmap_inside_vmap(self) -> None:
        members = tree.map(lambda leaf: torch.stack([leaf, 2 * leaf, -leaf]), mlp_params())
        xs = tensor(4, 3, seed=6)

        def loss(p: Any, x: torch.Tensor) -> Any:
            return mlp(p, x).square().sum(), {"x": x.sum(), "kind": "square"}

        one = transforms.grad_and_value(loss, has_aux=True)
        grads, (value, aux) = transforms.vmap(transforms.vmap(one, (None, 0)), (0, None))(members, xs)
        assert aux["kind"] == "square"
        assert value.shape == aux["x"].shape == (3, 4)
        for member in range(3):
            params = tree.map(lambda leaf, member=member: leaf[member], members)
            for row in range(4):
                expected, expected_value = torch.func.grad_and_value(lambda p, x: loss(p, x)[0])(params, xs[row])
                found = tree.map(lambda leaf, at=(member, row): leaf[at], grads)
                assert_close((found, value[member, row]), (expected, expected_value))

    def test_gradient_of_a_vmap_equals_torch_func(self) -> None:
        xs = tensor(5, 3, seed=4)

        def loss(vmap: Any, p: Any) -> torch.Tensor:
            return vmap(mlp, (None, 0))(p, xs).square().sum()

        ours = transforms.grad(lambda p: loss(transforms.vmap, p))(mlp_params())
        assert_close(ours, torch.func.grad(lambda p: loss(torch.func.vmap, p))(mlp_params()))

    @pytest.mark.parametrize(
        ("in_axes", "error", "message"),
        [
            (({"a": 0},), ValueError, "in_axes: 1 entries for 2 arguments"),
            (("a", 0), TypeError, "in_axes: expected int or None, got 'a'"),
            (({"c": 0}, 0), ValueError, r"extra key"),
            ((0, 0), ValueError, r"in_axes: the batched dims differ in size: \{'0\.a': 2, '1': 3\}"),
            (({"a": 1}, None), ValueError, r"in_axes: dim 1 of argument 0\.a, which has shape \(2,\)"),
            (None, ValueError, "in_axes: None batches no tensor of the 2 arguments"),
            (({"a": None}, None), ValueError, r"in_axes: \(\{'a': None\}, None\) batches no tensor of the 2"),
            ("ab", TypeError, "in_axes: str, expected an int, None, or a tuple"),
            ({0: 0, 1: 0}, TypeError, "in_axes: dict, expected an int, None, or a tuple"),
        ],
    )
    def test_bad_in_axes_are_refused_by_name(self, in_axes: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            transforms.vmap(lambda p, x: p["a"].sum() * x, in_axes)({"a": tensor(2)}, tensor(3))

    def test_keywords_and_arguments_without_tensors_are_refused(self) -> None:
        double = transforms.vmap(lambda x, scale=2: x * scale)
        with pytest.raises(TypeError, match="scale: given by keyword, but in_axes says what is batched by position"):
            double(tensor(3), scale=3)
        with pytest.raises(ValueError, match="in_axes: 0 batches no tensor of the 1 arguments"):
            double(3.0)
        with pytest.raises(ValueError, match="in_axes: 0 batches no tensor of the 0 arguments"):
            double()


class TestComposition:
    def test_hessian_vector_products_agree(self) -> None:
        params = {"w": tensor(3, seed=1), "a": {"b": tensor(2, 2, seed=2)}}
        vector = tree.map(lambda leaf: leaf.cos(), params)
        leaves, structure = tree.flatten(params)
        directions = tree.leaves(vector)

        def gradient(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(tree.leaves(transforms.grad(couple)(tree.unflatten(structure, flat))))

        def slope(p: Any) -> torch.Tensor:
            products = tree.map(lambda g, v: (g * v).sum(), transforms.grad(couple)(p), vector)
            return torch.stack(tree.leaves(products)).sum()

        hessian = torch.func.hessian(lambda *flat: couple(tree.unflatten(structure, flat)), argnums=(0, 1))(*leaves)
        expected = tree.unflatten(
            structure,
            [
                sum(torch.tensordot(block, v, v.dim()) for block, v in zip(row, directions, strict=True))
                for row in hessian
            ],
        )
        forward_over_reverse = torch.func.jvp(gradient, tuple(leaves), tuple(directions))[1]
        _, pull = transforms.vjp(transforms.grad(couple), params)
        assert_close(tree.unflatten(structure, forward_over_reverse), expected)
        assert_close(transforms.grad(slope)(params), expected)
        assert_close(pull(vector)[0], expected)

    def test_third_derivative(self) -> None:
        def derivative(fn: Any) -> Any:
            return lambda p: transforms.grad(fn)(p)["x"]

        x = torch.tensor(0.7, dtype=torch.float64)
        third = derivative(derivative(derivative(lambda p: p["x"] ** 5)))
        assert_close(third({"x": x}), 60 * x**2)


class TestOutermostGradient:
    """Outermost, the gradient is taken on autograd's tape; what that must not change."""

    def test_it_frees_what_only_a_second_derivative_needs(self) -> None:
        alive: list[weakref.ref[Any]] = []
        most = []

        class Square(torch.autograd.Function):
            @staticmethod
            def forward(x: torch.Tensor) -> torch.Tensor:
                return x * x

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
                ctx.save_for_backward(*inputs)

            @staticmethod
            def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
                inner = 2 * ctx.saved_tensors[0]
                alive.append(weakref.ref(inner.untyped_storage()))
                most.append(sum(ref() is not None for ref in alive))
                return cotangent * inner

        def fn(x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = Square.apply(x).cos()
            return x.sum()

        transforms.grad(fn)(torch.ones(3))
        assert len(alive) == 5
        assert max(most) == 1

    def test_a_closure_that_requires_a_gradient_still_gets_it(self) -> None:
        scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        x = torch.tensor(2.0, dtype=torch.float64)
        transforms.grad(lambda x: scale * x**3)(x).backward()  # d/dscale of 3 scale x^2
        assert scale.grad is not None
        assert scale.grad.item() == 12.0

    def test_an_input_that_requires_a_gradient_still_gets_it(self) -> None:
        x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        transforms.grad(lambda x: x**3)(x).backward()
        assert x.grad is not None
        assert x.grad.item() == 12.0

    def test_results_are_plain_tensors(self) -> None:
        x = torch.ones(2)
        grads, (value, aux) = transforms.grad_and_value(lambda x: (x.sum(), {"twice": 2 * x}), has_aux=True)(x)
        assert not any(t.requires_grad for t in (grads, value, aux["twice"]))
        assert torch.equal(transforms.grad(lambda x: torch.zeros(()))(x), torch.zeros(2))
        with torch.no_grad():
            assert torch.equal(transforms.grad(lambda x: x.square().sum())(x), 2 * x)
