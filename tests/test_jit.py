"""jit equals eager, takes over donated storage, says when and why it compiles again."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import given
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster.kernels import graph


@pytest.fixture(autouse=True)
def _traced_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run traced graphs uncompiled, but where a test is about the compiler."""
    if "compiler" not in request.keywords:
        monkeypatch.setattr(graph, "compile", lambda traced, examples, options=None: traced)


def update(
    params: dict[str, torch.Tensor], x: torch.Tensor, rate: float = 0.1
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    grads, loss = fb.grad_and_value(lambda p: (torch.tanh(x @ p["w"]) + p["b"]).square().sum())(params)
    return fb.tree.map(lambda p, g: p - rate * g, params, grads), loss


def parameters() -> dict[str, torch.Tensor]:
    return {"w": torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4), "b": torch.ones(4, dtype=torch.float64)}


def close(got: Any, expected: Any) -> None:
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12), got, expected)


@pytest.mark.compiler
def test_compiled_equals_eager_with_donation() -> None:
    step = fb.jit(update, donate=True)
    state, expected = parameters(), parameters()
    x = torch.arange(6, dtype=torch.float64).view(2, 3) / 6
    for _ in range(3):
        state, loss = step(state, x)
        expected, expected_loss = update(expected, x)
        close((state, loss), (expected, expected_loss))
    assert step.compiles == 1


@pytest.mark.compiler
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_compiled_train_step_equals_the_eager_one(family: str) -> None:
    """Regions, fused loss, optimizer and donation through Inductor, with warnings as errors."""
    if family == "gpt2":
        model = fb.models.gpt2(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2)  # with dropout
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = fb.models.llama(vocab_size=40, max_position_embeddings=16, num_key_value_heads=1, **sizes)
    tx, booster = fb.optim.adamw(1e-2), fb.Booster(device="cpu")
    batch = {"input_ids": fb.random.randint(fb.random.key(1), (4, 16), 0, 40).long()}
    results = []
    for compiled in (True, False):
        state = booster.init(model, tx, key=fb.random.key(0))
        step = booster.train_step(model.loss, tx, max_norm=0.5, jit=compiled)
        for _ in range(3):
            state, metrics = step(state, batch)
        results.append((state.params, metrics))
    fb.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4), *results)


class TestTrees:
    def test_nested_arguments_and_results(self) -> None:
        def fn(tree: Any, *, scale: Any) -> Any:
            return {"b": [tree["x"] * scale, None], "a": ({"n": 3}, tree["y"] + 1)}

        tree = {"y": torch.ones(2), "x": torch.arange(3.0), "none": None}
        close(fb.jit(fn)(tree, scale=2), fn(tree, scale=2))

    def test_names_that_differ_by_case(self) -> None:
        def fn(tree: dict[str, torch.Tensor]) -> torch.Tensor:
            return tree["W"] - tree["w"]

        tree = {"W": torch.ones(2), "w": torch.zeros(2)}
        assert torch.equal(fb.jit(fn)(tree), torch.ones(2))

    def test_an_input_handed_through_is_the_same_tensor(self) -> None:
        x = torch.ones(2)
        assert fb.jit(lambda x: x)(x) is x

    @given(st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True, min_size=1), st.integers(0, 5))
    def test_any_dict_order(self, names: list[str], size: int) -> None:
        tree = {name: torch.full((size,), float(ord(name))) for name in names}
        got = fb.jit(lambda t: {n: v * 2 for n, v in t.items()})(tree)
        close(got, {n: v * 2 for n, v in tree.items()})


class TestStatic:
    def test_values_that_are_no_tensors_are_part_of_the_key(self) -> None:
        jitted = fb.jit(lambda x, power: x**power)
        x = torch.tensor([2.0])
        assert jitted(x, 2).item() == 4
        with pytest.warns(fb.RecompileWarning, match=r"<lambda> is compiled again \(time 2\): power was 2 and is 3"):
            assert jitted(x, 3).item() == 8
        assert jitted(x, 2).item() == 4
        assert jitted.compiles == 2

    def test_one_and_true_are_different(self) -> None:
        jitted = fb.jit(lambda x, flag: x + 1 if flag is True else x)
        assert jitted(torch.zeros(1), 1).item() == 0
        with pytest.warns(fb.RecompileWarning):
            assert jitted(torch.zeros(1), True).item() == 1

    def test_unhashable(self) -> None:
        with pytest.raises(TypeError, match=r"options\.x: set is no tensor and cannot be hashed"):
            fb.jit(lambda options: options["y"])({"x": {1}, "y": torch.ones(1)})

    def test_values_that_are_equal_but_differ(self) -> None:
        divided = fb.jit(lambda x, by: x / by)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fb.RecompileWarning)
            assert divided(torch.ones(1), 0.0).item() == float("inf")
            assert divided(torch.ones(1), -0.0).item() == -float("inf")
            for _ in range(3):
                divided(torch.ones(1), float("nan"))
        assert divided.compiles == 3

    def test_autocast_is_part_of_the_key(self) -> None:
        product = fb.jit(lambda x: x @ x)
        with torch.autocast("cpu", torch.bfloat16):
            assert product(torch.ones(2, 2)).dtype == torch.bfloat16
        with pytest.warns(fb.RecompileWarning):
            assert product(torch.ones(2, 2)).dtype == torch.float32

    def test_methods(self) -> None:
        class Scaler:
            factor = 3

            @fb.jit
            def scale(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.factor

        assert Scaler().scale(torch.ones(1)).item() == 3


class TestRecompile:
    @pytest.mark.parametrize(
        ("second", "message"),
        [
            (lambda: ({"w": torch.ones(3)},), r"tree\.w was float32\[2\] .* and is float32\[3\]"),
            (lambda: ({"w": torch.ones(2, dtype=torch.float64)},), r"tree\.w was float32.* and is float64"),
            (lambda: ({"w": torch.ones(2), "v": torch.ones(1)},), r"tree\.v is new"),
            (lambda: ({},), r"tree\.w is gone"),
            (lambda: ({"w": torch.ones(4)[::2]},), r"tree\.w was .*strides \[1\].* and is .*strides \[2\]"),
        ],
    )
    def test_the_warning_says_what_changed(self, second: Any, message: str) -> None:
        jitted = fb.jit(lambda tree: fb.tree.map(lambda leaf: leaf + 1, tree))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jitted({"w": torch.ones(2)})
            jitted({"w": torch.zeros(2)})
        with pytest.warns(fb.RecompileWarning, match=message):
            jitted(*second())

    def test_python_runs_once_a_signature(self) -> None:
        runs = []

        def fn(x: torch.Tensor) -> torch.Tensor:
            runs.append(x.shape)
            return x + 1

        jitted = fb.jit(fn)
        for _ in range(3):
            jitted(torch.ones(2))
        assert len(runs) == 1


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: torch.Tensor


fb.tree.register(Pair, ("left", "right"))


class TestDonation:
    def test_results_take_over_the_storage(self) -> None:
        state = parameters()
        homes = {name: leaf.data_ptr() for name, leaf in state.items()}
        new, _ = fb.jit(update, donate=0)(state, torch.ones(2, 3, dtype=torch.float64))
        assert {name: leaf.data_ptr() for name, leaf in new.items()} == homes

    def test_without_donation_arguments_stay(self) -> None:
        state = parameters()
        fb.jit(update)(state, torch.ones(2, 3, dtype=torch.float64))
        close(state, parameters())

    def test_a_donated_tree_is_refused(self) -> None:
        step, state, x = fb.jit(update, donate=True), parameters(), torch.ones(2, 3, dtype=torch.float64)
        step(state, x)
        with pytest.raises(fb.DonatedError, match=r"params\.b was donated to update"):
            step(state, x)
        with pytest.raises(fb.DonatedError, match=r"was donated to update"):
            fb.jit(lambda t: t["w"] + 1)(state)

    def test_shared_storage_names_both(self) -> None:
        w = torch.ones(3)
        with pytest.raises(ValueError, match=r"tree\.a and tree\.b share storage"):
            fb.jit(lambda tree: fb.tree.map(lambda leaf: leaf + 1, tree), donate=True)({"a": w, "b": w})

    def test_shared_storage_in_a_later_call(self) -> None:
        jitted = fb.jit(lambda tree: fb.tree.map(lambda leaf: leaf + 1, tree), donate=True)
        jitted({"a": torch.ones(3), "b": torch.ones(3)})
        w = torch.ones(3)
        with pytest.raises(ValueError, match=r"tree\.a and tree\.b share storage"):
            jitted({"a": w, "b": w})

    def test_shared_with_an_argument_that_is_not_donated(self) -> None:
        w = torch.ones(3)
        with pytest.raises(ValueError, match="state and other share storage"):
            fb.jit(lambda state, other: state + other, donate=0)(w, w)

    def test_a_swap(self) -> None:
        """Results that are, or look at, donated inputs are copied before anything is written."""
        jitted = fb.jit(lambda p: Pair(p.right, p.left), donate=True)
        swapped = jitted(Pair(torch.zeros(2), torch.ones(2)))
        assert torch.equal(swapped.left, torch.ones(2))
        assert torch.equal(swapped.right, torch.zeros(2))

    def test_a_shifted_view(self) -> None:
        jitted = fb.jit(lambda p: Pair(p.right.flip(0), p.left.view(2)), donate=True)
        out = jitted(Pair(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])))
        assert torch.equal(out.left, torch.tensor([4.0, 3.0]))
        assert torch.equal(out.right, torch.tensor([1.0, 2.0]))

    @pytest.mark.parametrize("donate", [0, 1])
    def test_overlapping_views(self, donate: int) -> None:
        base = torch.arange(6.0)
        with pytest.raises(ValueError, match="a and b share storage"):
            fb.jit(lambda a, b: (a + 1, b * 2), donate=donate)(base[:4], base[2:])
        left, right = fb.jit(lambda a, b: (a + 1, b * 2), donate=donate)(base[:3], base[3:])
        assert torch.equal(left, torch.tensor([1.0, 2.0, 3.0]))
        assert torch.equal(right, torch.tensor([6.0, 8.0, 10.0]))

    def test_a_view_of_a_donated_tensor_is_refused(self) -> None:
        w = torch.ones(4)
        view = w[:2]
        fb.jit(lambda w: w + 1, donate=0)(w)
        with pytest.raises(fb.DonatedError, match="x was donated to <lambda>"):
            fb.jit(lambda x: x * 2)(view)

    def test_no_such_argument(self) -> None:
        with pytest.raises(ValueError, match="donate: argument 1 was not given"):
            fb.jit(lambda x: x + 1, donate=1)(torch.ones(1))


class TestTransforms:
    """Under another transform a jitted function is the function."""

    def test_grad_and_vmap_of_jit(self) -> None:
        fn = fb.jit(lambda x: x.sin().sum())
        x = torch.linspace(0, 1, 4)
        close(fb.grad(fn)(x), x.cos())
        close(fb.vmap(fn)(x[:, None]), x.sin())
        assert fn.compiles == 0

    def test_autograd_through_jit(self) -> None:
        x = torch.linspace(0, 1, 4, requires_grad=True)
        fb.jit(lambda x: x.sin().sum())(x).backward()
        close(x.grad, x.detach().cos())

    def test_jit_in_jit(self) -> None:
        inner = fb.jit(lambda x: x * 2)
        assert fb.jit(lambda x: inner(x) + 1)(torch.ones(1)).item() == 3
        assert inner.compiles == 0


class TestLowered:
    def test_flops_and_memory(self) -> None:
        lowered = fb.jit(lambda a, b: a @ b, donate=()).lower(torch.ones(8, 16), torch.ones(16, 4))
        assert lowered.flops == 2 * 8 * 16 * 4
        assert lowered.memory.arguments == 4 * (8 * 16 + 16 * 4)
        assert lowered.memory.results == lowered.memory.temporary == 4 * 8 * 4

    def test_flops_of_regions_count_each_call(self) -> None:
        body = fb.region(lambda x, w: x @ w)
        x, w = torch.ones(4, 4), torch.ones(4, 4)
        assert fb.jit(lambda x, w: body(body(x, w), w)).lower(x, w).flops == 2 * 2 * 4**3

    def test_temporaries_are_freed(self) -> None:
        def chain(x: torch.Tensor) -> torch.Tensor:
            for _ in range(10):
                x = x.sin()
            return x

        lowered = fb.jit(chain).lower(torch.ones(100))
        assert lowered.memory.temporary == 2 * 400  # a value and its successor

    def test_text(self) -> None:
        text = str(fb.jit(update, donate=True).lower(parameters(), torch.ones(2, 3, dtype=torch.float64)))
        assert text.startswith("update: ")
        assert "torch.ops.aten.tanh" in text

    def test_nothing_is_consumed(self) -> None:
        state = parameters()
        fb.jit(update, donate=True).lower(state, torch.ones(2, 3, dtype=torch.float64))
        close(state, parameters())


def test_asking_for_a_value_names_the_line() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    line = r"asks for the value of a tensor \(test_jit.py, line \d+: if x.sum\(\) > 0:\)"
    with pytest.raises(TypeError, match=f"jit: fn {line}"):
        fb.jit(fn)(torch.ones(2))
    model = fb.Model(lambda key: {"w": torch.ones(2)}, lambda params: fn(params["w"]), {"w": fb.ArrayInfo((2,))})
    booster, tx = fb.Booster("cpu"), fb.optim.sgd(0.1)
    state = booster.init(model, tx, key=fb.random.key(0))
    step = booster.train_step(lambda params, batch: model.apply(params).sum(), tx)
    with pytest.raises(TypeError, match=f"jit: train_step {line}"):  # the user's own line, not the step's
        step(state, {"x": torch.ones(1)})


def test_collectives_are_listed() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    world: Any = dist.group.WORLD
    try:

        def fn(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = funcol.wait_tensor(funcol.all_reduce(x, "sum", world))
            return x

        (found,) = fb.jit(fn).lower(torch.ones(3, 4)).collectives
        assert (found.op, found.count, found.bytes) == ("all_reduce", 2, 2 * 48)
        assert found.axis == world.group_name
        assert fb.jit(lambda x: x + 1).lower(torch.ones(1)).collectives == ()
    finally:
        dist.destroy_process_group()


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="fn: int, expected a function"):
        fb.jit(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="jitted already"):
        fb.jit(fb.jit(lambda x: x))


@pytest.mark.compiler
def test_without_a_compiler_the_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def missing(*args: Any, **kwargs: Any) -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    graph.has_cpp_compiler.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"no C\+\+ compiler was found"):
            got = fb.jit(update)(parameters(), torch.ones(2, 3, dtype=torch.float64))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fb.jit(lambda x: x + 1)(torch.ones(1))
        close(got, update(parameters(), torch.ones(2, 3, dtype=torch.float64)))
    finally:
        graph.has_cpp_compiler.cache_clear()
