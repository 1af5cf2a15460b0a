"""The optimizers that are not elementwise, against what they are published to be, alone and across ranks; and
Colossal-AI's optimizers by name. (That each is a lawful transformation is in test_optim.)"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_on_ranks
from transformers.optimization import Adafactor as HuggingFaceAdafactor

import functional_booster as fb
from functional_booster import checkpoint, optim, optimizers, testing
from functional_booster.kernels import flat, tree
from functional_booster.optim import leaves
from functional_booster.optim.muon import NS_COEFFS
from functional_booster.sharding import shards
from functional_booster.sharding.mesh import Replicated, spmd
from functional_booster.testing.problem import labelled, loss_of, residual
from functional_booster.torch_optim import from_torch

Tree = tree.Tree
Array = np.ndarray[Any, Any]
EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-13}
SHAPES = {"a": (3, 5), "b": (17,), "c": (2, 4, 3), "d": (1, 1), "e": (), "f": (8, 2)}


def make_params(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {name: torch.tensor(rng.normal(size=shape), dtype=dtype) for name, shape in SHAPES.items()}


def make_grads(params: Tree, step: int) -> Tree:
    noise = make_params(seed=100 + step)
    return {name: (0.3 * p.detach() + noise[name]).to(p.dtype) for name, p in params.items()}


def train(tx: optim.GradientTransformation, params: Tree, steps: int = 8) -> Tree:
    state = tx.init(params)
    for step in range(steps):
        updates, state = tx.update(make_grads(params, step), state, params)
        params = optim.apply_updates(params, updates)
    return params


def train_torch(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], params: Tree, steps: int = 8
) -> Tree:
    tensors = {name: torch.nn.Parameter(value.clone()) for name, value in params.items()}
    optimizer = make(list(tensors.values()))
    for step in range(steps):
        for name, grad in make_grads(tensors, step).items():
            tensors[name].grad = grad
        optimizer.step()
    return {name: tensor.detach() for name, tensor in tensors.items()}


def train_by_hand(rule: Callable[[Array, Array, dict[str, Any], int], Array], params: Tree, steps: int = 8) -> Tree:
    """``rule(p, g, memory of the leaf, t) -> new p``, in numpy."""
    memory: dict[str, dict[str, Any]] = {name: {} for name in params}
    for step in range(steps):
        grads = make_grads(params, step)
        params = {
            name: torch.as_tensor(rule(p.numpy(), grads[name].numpy(), memory[name], step + 1))
            for name, p in params.items()
        }
    return params


def assert_close(actual: Tree, expected: Tree, **tolerance: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, **(tolerance or EXACT), msg=lambda text, name=name: f"{name}: {text}"
        )


def size(x: Array) -> float:
    return math.sqrt(float((x**2).sum()))


def rms(x: Array) -> float:
    return math.sqrt(float((x**2).mean()))


# The papers' equations.


def lamb_by_hand(lr: float, wd: float, debias: bool = True, eps: float = 1e-6) -> Any:
    """You et al. 2020, algorithm 2, with phi the identity."""

    def rule(p: Array, g: Array, past: dict[str, Any], t: int) -> Array:
        past["m"] = 0.9 * past.get("m", 0) + 0.1 * g
        past["v"] = 0.999 * past.get("v", 0) + 0.001 * g * g
        m, v = (past["m"] / (1 - 0.9**t), past["v"] / (1 - 0.999**t)) if debias else (past["m"], past["v"])
        r = m / (np.sqrt(v) + eps) + wd * p
        return p - lr * size(p) / size(r) * r

    return rule


def lars_by_hand(lr: float, wd: float, eta: float, momentum: float) -> Any:
    """You et al. 2017, algorithm 1."""

    def rule(p: Array, g: Array, past: dict[str, Any], t: int) -> Array:
        local = eta * size(p) / (size(g) + wd * size(p))
        past["v"] = momentum * past.get("v", 0) + lr * local * (g + wd * p)
        return p - past["v"]

    return rule


def came_by_hand(lr: float, wd: float) -> Any:
    """Luo et al. 2023, algorithm 2; a leaf without two dims has plain second moments, and no confidence."""

    def average(past: dict[str, Any], key: str, beta: float, squares: Array) -> Array:
        if squares.ndim < 2:
            past[key] = beta * past.get(key, 0) + (1 - beta) * squares
            return past[key]
        for side, axis in (("R", -1), ("C", -2)):
            past[key + side] = beta * past.get(key + side, 0) + (1 - beta) * squares.mean(axis)
        row, col = past[key + "R"], past[key + "C"]
        return row[..., :, None] * col[..., None, :] / row.mean(-1)[..., None, None]

    def rule(p: Array, g: Array, past: dict[str, Any], t: int) -> Array:
        u = g / np.sqrt(average(past, "v", 0.999, g * g + 1e-30))
        u = u / max(1.0, rms(u))
        past["m"] = m = 0.9 * past.get("m", 0) + 0.1 * u
        step = m if p.ndim < 2 else m / np.sqrt(average(past, "U", 0.9999, (u - m) ** 2 + 1e-16))
        return p - lr * (step + wd * p)

    return rule


def lion_by_hand(lr: float, wd: float) -> Any:
    """Chen et al. 2023, algorithm 2."""

    def rule(p: Array, g: Array, past: dict[str, Any], t: int) -> Array:
        m = past.get("m", np.zeros_like(g))
        past["m"] = 0.99 * m + 0.01 * g
        return p - lr * (np.sign(0.9 * m + 0.1 * g) + wd * p)

    return rule


def muon_by_hand(lr: float, wd: float, nesterov: bool, factor: Callable[[int, int], float]) -> Any:
    """Jordan et al. 2024."""
    a, b, c = NS_COEFFS

    def solved(x: Array) -> Array:
        x = x / max(size(x), 1e-8)
        for _ in range(5):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        return x

    def rule(p: Array, g: Array, past: dict[str, Any], t: int) -> Array:
        past["m"] = m = 0.95 * past.get("m", 0) + 0.05 * g
        m = 0.95 * m + 0.05 * g if nesterov else m
        stack = m.reshape(-1, *m.shape[-2:])
        steps = [solved(x) if x.shape[0] <= x.shape[1] else solved(x.T).T for x in stack]
        return p - lr * (factor(*p.shape[-2:]) * np.stack(steps).reshape(p.shape) + wd * p)

    return rule


def only_matrices(params: Tree) -> Tree:
    return {name: value for name, value in params.items() if value.dim() > 1}


@pytest.mark.parametrize("debias", [True, False])
def test_lamb_is_the_papers(debias: bool) -> None:
    tx = optim.lamb(0.05, weight_decay=0.1, debias=debias)
    assert_close(train(tx, make_params()), train_by_hand(lamb_by_hand(0.05, 0.1, debias), make_params()))


def test_lars_is_the_papers() -> None:
    tx = optim.lars(0.5, 0.1, trust_coefficient=0.01, momentum=0.8)
    assert_close(train(tx, make_params()), train_by_hand(lars_by_hand(0.5, 0.1, 0.01, 0.8), make_params()))


def test_came_is_the_papers() -> None:
    tx = optim.came(0.05, weight_decay=0.1)
    expected = train_by_hand(came_by_hand(0.05, 0.1), make_params())
    assert_close(train(tx, make_params()), expected, rtol=1e-9, atol=1e-11)  # u - m cancels


def test_lion_is_the_papers() -> None:
    assert_close(
        train(optim.lion(0.05, weight_decay=0.1), make_params()), train_by_hand(lion_by_hand(0.05, 0.1), make_params())
    )


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("adjust", "factor"),
    [
        ("original", lambda rows, columns: math.sqrt(max(1, rows / columns))),
        ("match_rms_adamw", lambda rows, columns: 0.2 * math.sqrt(max(rows, columns))),
    ],
)
def test_muon_is_the_papers(nesterov: bool, adjust: str, factor: Any) -> None:
    params = only_matrices(make_params())
    tx = optim.chain(
        optim.scale_by_muon(nesterov=nesterov, ns_dtype=None, adjust_lr_fn=adjust),
        optim.add_decayed_weights(0.1),
        optim.scale_by_learning_rate(0.05),
    )
    state, ours, expected = tx.init(params), params, params
    memory: dict[str, dict[str, Any]] = {name: {} for name in params}
    rule = muon_by_hand(0.05, 0.1, nesterov, factor)
    for step in range(5):
        noise = make_params(seed=100 + step)
        grads = {name: noise[name] for name in params}
        updates, state = tx.update(grads, state, ours)
        ours = optim.apply_updates(ours, updates)
        expected = {
            name: torch.as_tensor(rule(p.numpy(), grads[name].numpy(), memory[name], step + 1))
            for name, p in expected.items()
        }
    assert_close(ours, expected, rtol=1e-9, atol=1e-11)  # five steps of the iteration, each three products


def test_muon_is_torchs_in_bfloat16() -> None:
    """torch iterates in bfloat16, whatever the parameters are."""
    torch.manual_seed(0)
    module: Any = torch.nn.Linear(12, 20, bias=False).double()
    theirs = copy.deepcopy(module)
    optimizer = torch.optim.Muon(theirs.parameters(), lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    converted = from_torch(
        torch.optim.Muon(module.parameters(), lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
        {module.weight: "w"},
    )
    params = {"w": module.weight.detach().clone()}
    state = converted.tx.init(params)
    for step in range(5):
        grad = torch.randn(20, 12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        theirs.weight.grad = grad
        optimizer.step()
        updates, state = converted.tx.update({"w": grad}, state, params)
        params = optim.apply_updates(params, updates)
    torch.testing.assert_close(params["w"], theirs.weight.detach(), **EXACT)


hugging_face = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([None, 0.05]),
        "beta1": st.sampled_from([None, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "scale_parameter": st.booleans(),
        "clip_threshold": st.sampled_from([1.0, 0.5]),
        "decay_rate": st.sampled_from([-0.8, -0.5]),
    }
)


@settings(deadline=None, max_examples=5)
@given(options=hugging_face)
def test_adafactor_is_hugging_faces(options: dict[str, Any]) -> None:
    """Also by Colossal-AI's name, and with a rate that is given, which Colossal-AI forgets."""
    params, relative = make_params(), options["lr"] is None
    expected = train_torch(lambda p: HuggingFaceAdafactor(p, relative_step=relative, **options), params)
    assert_close(train_torch(lambda p: optimizers.Adafactor(p, **options), params), expected)
    tx = optim.adafactor(
        options["lr"],
        1,
        -options["decay_rate"],
        multiply_by_parameter_scale=options["scale_parameter"],
        clipping_threshold=options["clip_threshold"],
        momentum=options["beta1"],
        weight_decay=options["weight_decay"],
    )
    assert_close(train(tx, params), expected)


def test_adafactor_warms_up_as_hugging_faces() -> None:
    expected = train_torch(lambda p: HuggingFaceAdafactor(p, warmup_init=True), make_params())
    assert_close(train_torch(lambda p: optimizers.Adafactor(p, warmup_init=True), make_params()), expected)


# What all of the family have in common.

FAMILY: dict[str, Callable[..., optim.GradientTransformation]] = {
    "lamb": lambda **options: optim.lamb(0.01, eps=1e-5, **options),
    "lars": lambda **options: optim.lars(0.5, **options),
    "adafactor": lambda **options: optim.adafactor(0.01, 2, **options),
    "adafactor_momentum": lambda **options: optim.adafactor(0.01, 2, momentum=0.9, **options),
    "came": lambda **options: optim.came(0.01, **options),
    "lion": lambda **options: optim.lion(0.01, **options),
    "muon": lambda **options: optim.muon(0.01, ns_dtype=None, adam_eps=1e-5, **options),
}
family = pytest.mark.parametrize("make", FAMILY.values(), ids=FAMILY)


@family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_gradients_change_nothing_but_by_decay(make: Any, dtype: torch.dtype) -> None:
    params = make_params(dtype)
    tx, zeros = make(weight_decay=0.0), tree.map(torch.zeros_like, params)
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(zeros, state, params)
        assert_close(optim.apply_updates(params, updates), params, rtol=0.0, atol=0.0)


@family
def test_decay_reaches_only_the_masked_leaves(make: Any) -> None:
    params = make_params()
    chosen = {name: name in ("a", "c") for name in params}
    masked = train(make(weight_decay=0.5, mask=chosen), params, 1)
    without, everywhere = (
        train(make(weight_decay=0.0, mask=chosen), params, 1),
        train(make(weight_decay=0.5), params, 1),
    )
    for name in params:
        assert torch.equal(masked[name], (everywhere if chosen[name] else without)[name]), name
    assert not torch.equal(masked["a"], without["a"])


@family
def test_frozen_leaves_stay(make: Any) -> None:
    params = make_params()
    frozen = tree.by_name("a|b")
    after = train(optim.partition({True: optim.set_to_zero(), False: make()}, frozen), params, 3)
    alone = train(make(), {name: value for name, value in params.items() if name not in ("a", "b")}, 3)
    assert_close(after, {**params, **alone}, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("alias", [optim.lamb, optim.adafactor, optim.came, optim.muon])
def test_hyperparameters_may_be_injected(alias: Any) -> None:
    """Under jit as well: nothing looks at their values."""
    params = make_params()
    tx = optim.inject_hyperparams(alias)(learning_rate=0.01)
    with testing.traced():
        updates, _ = fb.jit(tx.update)(make_grads(params, 0), tx.init(params), params)
    direct = alias(0.01)
    assert_close(updates, direct.update(make_grads(params, 0), direct.init(params), params)[0])


def test_asgd_follows_a_schedule_and_a_mask() -> None:
    """torch.optim.ASGD's rule under a scheduler, written out: torch has it in float32. Two leaves decay."""

    def by_hand(weight_decay: float) -> Any:
        def rule(p: Array, g: Array, past: dict[str, Any], t: int) -> Array:
            new = p * (1 - 0.2 * past.get("eta", 0.1)) - past.get("eta", 0.1) * (g + weight_decay * p)
            rate = 0.1 / t
            past["eta"] = rate / (1 + 0.2 * rate * t) ** 0.75
            return new

        return rule

    params, mask = make_params(), tree.by_name("a|c")
    with_decay, without = (train_by_hand(by_hand(decay), params) for decay in (0.5, 0.0))
    expected = {name: (with_decay if name in ("a", "c") else without)[name] for name in params}
    assert_close(
        train(optim.asgd(lambda step: 0.1 / (1 + step.double()), 0.2, weight_decay=0.5, mask=mask), params), expected
    )


def test_a_leaf_of_zeros_moves_by_the_update_itself() -> None:
    """Biases begin at zero: a trust ratio of 0 would keep them there."""
    params = {"bias": torch.zeros(4, dtype=torch.float64)}
    grads = {"bias": torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)}
    for tx, expected in (
        (optim.chain(optim.scale_by_trust_ratio(), optim.scale(-0.1)), -0.1 * grads["bias"]),
        (optim.lars(0.1, 0.5), -0.1 * grads["bias"]),
    ):
        assert_close(tx.update(grads, tx.init(params), params)[0], {"bias": expected})


def test_factored_state_is_small() -> None:
    params = {"w": torch.zeros(300, 200), "thin": torch.zeros(300, 100), "b": torch.zeros(300)}
    factored = optim.adafactor(0.1).init(params)[0]
    assert {
        name: tuple(v.shape) for name, v in tree.named_leaves((factored.row, factored.col, factored.full)).items()
    } == {
        "0.w": (300, 1),
        "1.w": (1, 200),
        "2.b": (300,),
        "2.thin": (300, 100),
    }


def test_ema_is_the_average_of_the_parameters() -> None:
    params = make_params()
    tx = optim.chain(optim.adamw(0.1), optim.ema(0.8))
    state, average = tx.init(params), params
    for step in range(5):
        updates, state = tx.update(make_grads(params, step), state, params)
        params = optim.apply_updates(params, updates)
        average = {name: 0.8 * average[name] + 0.2 * params[name] for name in params}
        assert_close(optim.averaged(state), average)
    with pytest.raises(ValueError, match=r"opt_state: it has 0 averages of fb\.optim\.ema, expected one"):
        optim.averaged(optim.adamw(0.1).init(params))


def test_ema_of_bfloat16_does_not_stand_still() -> None:
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    tx = optim.ema(0.999)
    state = tx.init(params)
    for _ in range(100):
        _, state = tx.update({"w": torch.ones(3, dtype=torch.bfloat16)}, state, params)
    expected = torch.full((3,), 2 - 0.999**100)
    torch.testing.assert_close(state.average["w"], expected, rtol=1e-5, atol=0.0)


# Across ranks: what a rank holds of a leaf is wherever the cut falls.


@st.composite
def cut_trees(draw: st.DrawFn) -> tuple[flat.Flat, fb.Mesh]:
    """A Flat of leaves that are cut anywhere, over one or two axes, in buckets that may hold the same shapes."""
    mesh = fb.virtual_mesh(a=draw(st.integers(1, 3)), b=draw(st.integers(1, 3)))
    axes = draw(st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "a")]))
    block = draw(st.lists(st.lists(st.integers(1, 15), min_size=2, max_size=3), min_size=1, max_size=3))
    blocks = [block] * draw(st.integers(1, 4)) + [[[5, 40]]]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    values = [[torch.tensor(rng.normal(size=shape)) for shape in shapes] for shapes in blocks]
    labels = [[place if place else None] * len(shapes) for place, shapes in enumerate(blocks)]
    layout = flat.plan(values, labels, mesh.extent(axes))
    split = tuple((name, axes) for name, slots in layout.buckets.items() if slots[0].offset is not None)
    layout = flat.Layout(layout.structure, layout.slots, layout.multiple, split)
    return flat.ravel(values, layout), mesh


@settings(deadline=None, max_examples=15)
@given(case=cut_trees())
def test_leaves_across_ranks_are_whole_leaves(case: tuple[flat.Flat, fb.Mesh]) -> None:
    whole, mesh = case
    plain = flat.unravel(whole)

    def local(whole: flat.Flat) -> tuple[Any, ...]:
        mine = shards.part(whole)
        norms, rows = leaves.norms(mine)[0], leaves.sums((lambda leaf: leaf.square().sum(-1),), mine)[0]
        scaled = leaves.scaled(mine, norms)
        shaped = tree.map(torch.mul, mine, leaves.expand(tree.map(lambda row: row.unsqueeze(-1), rows), mine))
        moved = leaves.transformed(
            lambda stack: torch.linalg.vector_norm(stack, dim=-1, keepdim=True) * stack.flip(-2), mine
        )
        joined = [flat.unravel(shards.join(parts)) for parts in (scaled, shaped, moved)]
        return tuple(map(Replicated, (norms, rows, *joined)))

    norms, rows, scaled, shaped, moved = spmd(local, mesh)(Replicated(whole))
    for leaf, norm, row, by_norm, by_row, flipped in zip(
        *(tree.leaves(each) for each in (plain, norms, rows, scaled, shaped, moved)), strict=True
    ):
        torch.testing.assert_close(norm, torch.linalg.vector_norm(leaf), **EXACT)
        torch.testing.assert_close(row, leaf.square().sum(-1), **EXACT)
        torch.testing.assert_close(by_norm, leaf * leaf.norm(), **EXACT)
        torch.testing.assert_close(by_row, leaf * leaf.square().sum(-1, keepdim=True), **EXACT)
        torch.testing.assert_close(flipped, leaf.norm(dim=-1, keepdim=True) * leaf.flip(-2), **EXACT)


PLUGINS: dict[str, Any] = {
    "ddp": fb.TorchDDPPlugin(),
    "zero1": fb.LowLevelZeroPlugin(precision="fp32", cpu_offload=True),
    "zero2": fb.LowLevelZeroPlugin(stage=2, precision="fp32", extra_dp_size=2, reduce_bucket_size_in_m=0.0001),
    "fsdp": fb.TorchFSDPPlugin(),
    "gemini": fb.GeminiPlugin(
        precision="fp32", min_chunk_size_m=0.0001, search_range_m=0, hidden_dim=8, offload_optim_frac=0.5
    ),
}


def wide(rows: int, tx: Any, max_norm: float | None, width: int = 13, depth: int = 3) -> testing.Problem:
    """A Problem whose matrices lie across ranks."""
    model, key = residual(6, 4, width, depth, frozen=True, twice=True), fb.random.key(width)
    batch = labelled(key, rows, 6, 4, 0.2)
    return testing.Problem(model, loss_of(model), tx, batch, max_norm, key=key)


@family
@settings(deadline=None, max_examples=3)
@given(
    plugin=st.sampled_from(list(PLUGINS.values())),
    ranks=st.sampled_from([2, 4, 6]),
    max_norm=st.sampled_from([None, 0.1]),
    width=st.integers(9, 18),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_a_step_on_ranks_is_the_step_on_one_device(
    make: Any, plugin: Any, ranks: int, max_norm: float | None, width: int, decay: float
) -> None:
    """State too: what the family keeps of a leaf is what it keeps on one device."""
    problem = wide(ranks, make(weight_decay=decay), max_norm, width)
    testing.step_equals_one_device(plugin, fb.virtual_mesh(**plugin.axes(ranks)), problem)


def at_home_or_away(kind: str, away: bool, precision: str) -> Any:
    """A plugin whose master weights and optimizer state, all or half of them, are in the host's memory, or not."""
    if kind == "gemini":
        sizes: dict[str, Any] = {"min_chunk_size_m": 0.0001, "search_range_m": 0, "hidden_dim": 8}
        return fb.GeminiPlugin(precision=precision, offload_optim_frac=0.5 if away else 0.0, **sizes)
    if kind == "fsdp":
        return fb.TorchFSDPPlugin(cpu_offload=away)
    return fb.LowLevelZeroPlugin(stage=int(kind[-1]), precision=precision, cpu_offload=away)


def trained_with(kind: str, away: bool, precision: str, problem: testing.Problem, ranks: int | None) -> Any:
    """(metrics, all leaves of the state) after two steps: on ``ranks`` virtual ranks, or on this one process."""
    plugin = at_home_or_away(kind, away, precision)
    mesh = None if ranks is None else fb.virtual_mesh(**plugin.axes(ranks))
    booster = fb.Booster(problem.device, precision if kind == "fsdp" else None, plugin=plugin, mesh=mesh)
    state = booster.init(problem.model, problem.tx, key=problem.key)
    assert bool(state.storage.layout.host) == away
    step = booster.train_step(problem.loss_fn, problem.tx, max_norm=problem.max_norm, jit=False)
    for _ in range(2):
        state, metrics = step(state, problem.batch)
    return metrics, checkpoint.named_tensors(state)


AWAY: dict[str, Callable[..., optim.GradientTransformation]] = {
    **FAMILY,
    "adamw": lambda **options: optim.adamw(0.01, eps=1e-5, **options),
    "sgd": lambda **options: optim.sgd(0.1, 0.9, **options),
}


@settings(deadline=None, max_examples=8)
@given(
    kind=st.sampled_from(["zero1", "zero2", "fsdp", "gemini"]),
    name=st.sampled_from(sorted(AWAY)),
    ranks=st.sampled_from([2, 4]),
    max_norm=st.sampled_from([None, 0.1]),
    decay=st.sampled_from([0.0, 0.1]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
)
def test_where_state_lives_changes_no_bit(
    kind: str, name: str, ranks: int, max_norm: float | None, decay: float, precision: str
) -> None:
    problem = wide(ranks, AWAY[name](weight_decay=decay), max_norm, depth=1)
    away, here = (trained_with(kind, place, precision, problem, ranks) for place in (True, False))
    for one, other in zip(away, here, strict=True):
        assert one.keys() == other.keys()
        for leaf, value in one.items():
            torch.testing.assert_close(value, other[leaf], rtol=0, atol=0, equal_nan=True)  # fp16 may begin by overflow


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "lion", "came"])
@pytest.mark.parametrize("kind", ["zero1", "fsdp", "gemini"])
def test_state_in_the_hosts_memory_is_updated_as_on_the_gpu(kind: str, name: str, precision: str) -> None:
    """To the rounding of the two devices."""
    problem = wide(2, AWAY[name](weight_decay=0.1), 0.1, depth=2)
    problem = dataclasses.replace(
        problem, batch=tree.map(lambda leaf: leaf.cuda(), problem.batch), key=problem.key.cuda()
    )
    away, here = (trained_with(kind, place, precision, problem, None) for place in (True, False))
    tolerance: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-3} if precision == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
    for one, other in zip(away, here, strict=True):
        for leaf, value in one.items():
            torch.testing.assert_close(value.cpu(), other[leaf].cpu(), **tolerance)


@pytest.mark.parametrize("name", sorted(AWAY))
def test_names_of_the_state_do_not_depend_on_how_much_weights_decay(name: str) -> None:
    """Nor on the direction: a run may go on with other numbers."""
    params = make_params()
    names = [tree.names(AWAY[name](weight_decay=decay).init(params)) for decay in (0.0, 0.1)]
    assert names[0] == names[1]
    if name in ("adamw", "sgd"):
        assert tree.names(AWAY[name](maximize=True).init(params)) == names[0]


def test_matrices_do_lie_across_ranks() -> None:
    """Else the law above says little."""
    booster = fb.Booster("cpu", "fp32", plugin=PLUGINS["fsdp"], mesh=fb.virtual_mesh(dp=1, fsdp=2))
    state = booster.abstract(wide(2, optim.lion(0.1), None).model, FAMILY["lamb"]())
    layout = state.storage.layout
    parts = {bucket: layout.size(bucket) // 2 for bucket in layout.buckets}
    assert any((slot.offset or 0) % parts[slot.bucket] + slot.size > parts[slot.bucket] for slot in layout.slots)


@pytest.mark.parametrize(
    ("law", "name", "plugin"),
    [
        (testing.replicas_are_equal, "lamb", "zero2"),
        (testing.replicas_are_equal, "came", "zero2"),
        (testing.jit_equals_eager, "adafactor_momentum", "zero2"),
        (testing.jit_equals_eager, "muon", "fsdp"),
        (testing.load_inverts_save, "came", "zero2"),
        (testing.load_inverts_save, "muon", "fsdp"),
    ],
)
def test_other_laws_hold(law: Callable[..., None], name: str, plugin: str) -> None:
    """Muon without replicas: on virtual ranks of a CPU, products of the same matrices may differ in the last bit."""
    problem = wide(4, FAMILY[name](weight_decay=0.1), 0.1, depth=1)
    law(PLUGINS[plugin], fb.virtual_mesh(**PLUGINS[plugin].axes(4)), problem)


def on_processes() -> None:
    """Both ways in which leaves across ranks are whole: sums over ranks, and matrices dealt out."""
    tx = optim.partition({True: FAMILY["muon"](), False: FAMILY["came"]()}, tree.by_name("blocks"))
    testing.virtual_equals_real(PLUGINS["fsdp"], None, wide(2, tx, 0.1, depth=1))


@pytest.mark.xdist_group("ranks")
def test_processes_are_virtual_ranks() -> None:
    run_on_ranks(2, on_processes)


def test_averages_of_sharded_parameters_are_whole_leaves() -> None:
    problem = wide(4, optim.chain(optim.adamw(0.1), optim.ema(0.5)), None)
    plugin = PLUGINS["fsdp"]
    averages = []
    for booster in (fb.Booster("cpu"), fb.Booster("cpu", plugin=plugin, mesh=fb.virtual_mesh(**plugin.axes(4)))):
        state = booster.init(problem.model, problem.tx, key=problem.key)
        step = booster.train_step(problem.loss_fn, problem.tx, jit=False)
        for _ in range(2):
            state, _ = step(state, problem.batch)
        averages.append(tree.named_leaves(booster.full_params(state.replace(storage=optim.averaged(state.opt_state)))))
    assert "opt_state.1.average.blocks.0.w" in checkpoint.named_tensors(state)
    assert averages[0].keys() >= {"blocks.0.w", "scale"}


# By Colossal-AI's names.

NAMED: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "HybridAdam": (
        lambda p: optimizers.HybridAdam(p, lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    ),
    "HybridAdam, L2": (
        lambda p: optimizers.HybridAdam(p, lr=0.05, weight_decay=0.1, adamw_mode=False),
        lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    ),
    "CPUAdam": (optimizers.CPUAdam, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0)),
    "FusedAdam": (optimizers.FusedAdam, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0)),
    "FusedSGD": (
        lambda p: optimizers.FusedSGD(p, 0.05, 0.9, 0.5, 0.1),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, 0.5, 0.1),
    ),
    "FusedSGD, Nesterov": (
        lambda p: optimizers.FusedSGD(p, 0.05, 0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True),
    ),
    "Adafactor": (optimizers.Adafactor, HuggingFaceAdafactor),
}


@pytest.mark.parametrize(("ours", "theirs"), NAMED.values(), ids=NAMED)
def test_colossals_names_step_as_what_they_are(ours: Any, theirs: Any) -> None:
    assert_close(train_torch(ours, make_params()), train_torch(theirs, make_params()))


def test_colossals_names_of_published_rules() -> None:
    def undecayed(p: Array, g: Array, past: dict[str, Any], t: int) -> Array:
        """Adam without bias correction."""
        past["m"] = 0.9 * past.get("m", 0) + 0.1 * g
        past["v"] = 0.999 * past.get("v", 0) + 0.001 * g * g
        return p - 0.05 * past["m"] / (np.sqrt(past["v"]) + 1e-8)

    def decayed_late(p: Array, g: Array, past: dict[str, Any], t: int) -> Array:
        past["v"] = 0.9 * past["v"] + 0.5 * g if past else g
        return p - 0.05 * (past["v"] + 0.1 * p)

    params = make_params()
    for make, rule in (
        (lambda p: optimizers.HybridAdam(p, lr=0.05, bias_correction=False), undecayed),
        (lambda p: optimizers.FusedSGD(p, 0.05, 0.9, 0.5, 0.1, wd_after_momentum=True), decayed_late),
        (lambda p: optimizers.Lamb(p, lr=0.05, weight_decay=0.1), lamb_by_hand(0.05, 0.1, debias=False)),
        (lambda p: optimizers.Lamb(p, lr=0.05, weight_decay=0.1, bias_correction=True), lamb_by_hand(0.05, 0.1)),
        (lambda p: optimizers.Lamb(p, lr=0.05, eps=1e-8, adam=True), undecayed),
        (
            lambda p: optimizers.Lars(p, lr=0.5, momentum=0.9, eeta=0.01, weight_decay=0.1),
            lars_by_hand(0.5, 0.1, 0.01, 0.9),
        ),
        (lambda p: optimizers.Lion(p, lr=0.05, weight_decay=0.1), lion_by_hand(0.05, 0.1)),
    ):
        assert_close(train_torch(make, params), train_by_hand(rule, params))
    expected = train_by_hand(came_by_hand(0.05, 0.1), params)
    made = train_torch(lambda p: optimizers.CAME(p, lr=0.05, weight_decay=0.1), params)
    assert_close(made, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("nvlamb", [False, True])
def test_fused_lamb_clips_all_gradients_together(nvlamb: bool) -> None:
    """Without decay, and without ``use_nvlamb``, it is Adam."""
    params = ours = make_params()
    first = {name: make_params(seed=100)[name] + 0.3 * p for name, p in params.items()}
    norm = math.sqrt(sum(float(g.square().sum()) for g in first.values()))
    ours = train_torch(lambda p: optimizers.FusedLAMB(p, lr=0.05, weight_decay=0.0, use_nvlamb=nvlamb), params, 1)
    for name, p in params.items():
        g = (first[name] / (norm + 1e-6)).numpy()
        step = g / (np.abs(g) + 1e-6)
        ratio = size(p.numpy()) / size(step) if nvlamb else 1.0
        torch.testing.assert_close(ours[name], torch.as_tensor(p.numpy() - 0.05 * ratio * step), **EXACT)


def test_fused_lamb_without_averaging() -> None:
    """Then a step is 1 / (1 - b1) as long, before decay."""
    params = make_params()
    summed = train_torch(lambda p: optimizers.FusedLAMB(p, lr=0.05, weight_decay=0.1, grad_averaging=False), params, 1)
    norm = math.sqrt(sum(float(g.square().sum()) for g in make_grads(params, 0).values()))
    for name, p in params.items():
        g = (make_grads(params, 0)[name] / (norm + 1e-6)).numpy()
        r = 10 * g / (np.abs(g) + 1e-6) + 0.1 * p.numpy()
        expected = p.numpy() - 0.05 * size(p.numpy()) / size(r) * r
        torch.testing.assert_close(summed[name], torch.as_tensor(expected), **EXACT)


BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "HybridAdam": lambda p: optimizers.HybridAdam(p, lr=0.05, weight_decay=0.1),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=0.05),
    "Lars": lambda p: optimizers.Lars(p, lr=0.5, momentum=0.9, weight_decay=0.1),
    "CAME": lambda p: optimizers.CAME(p, lr=0.01, weight_decay=0.1),
    "Adafactor": lambda p: optimizers.Adafactor(p, lr=0.05, beta1=0.9),
    "Lion": lambda p: optimizers.Lion(p, lr=0.01, weight_decay=0.1),
}
by_name = pytest.mark.parametrize("make", BY_NAME.values(), ids=BY_NAME)


def small_module() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()


def two_groups(make: Any, module: torch.nn.Sequential) -> torch.optim.Optimizer:
    return make([{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.02}])


X, Y = (torch.linspace(-1, 1, 4 * n, dtype=torch.float64).reshape(4, n).sin() for n in (5, 3))


def steps(module: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    dtype = next(module.parameters()).dtype
    for _ in range(count):
        optimizer.zero_grad()
        F.mse_loss(module(X.to(dtype)), Y.to(dtype)).backward()
        optimizer.step()


@by_name
def test_boost_goes_on_from_earlier_steps(make: Any) -> None:
    """Param groups, a scheduler, moments of before: as if nobody had boosted."""
    alone, module = small_module(), small_module()
    plain, given = two_groups(make, alone), two_groups(make, module)
    for each, optimizer in ((alone, plain), (module, given)):
        steps(each, optimizer, 2)
    schedules = [fb.lr_scheduler.CosineAnnealingLR(each, 6) for each in (plain, given)]
    booster = fb.Booster("cpu")
    model, handle, _, _, schedule = booster.boost(module, given, lr_scheduler=schedules[1])
    for _ in range(3):
        steps(alone, plain, 1)
        schedules[0].step()
        handle.zero_grad()
        booster.backward(F.mse_loss(model(X), Y), handle)
        handle.step()
        schedule.step()
    assert_close(model.state_dict(), alone.state_dict())


@by_name
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_state_dict_holds_all(make: Any, dtype: torch.dtype) -> None:
    """To the bit, averages in float32 of a float16 parameter too, which torch's loading would round."""
    alone, module = small_module().to(dtype), small_module().to(dtype)
    plain, first = two_groups(make, alone), two_groups(make, module)
    steps(alone, plain, 4)
    steps(module, first, 2)
    again = two_groups(make, module)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_close(named_state(again), named_state(first), rtol=0.0, atol=0.0)
    steps(module, again, 2)
    assert_close(module.state_dict(), alone.state_dict(), rtol=0.0, atol=0.0)


def named_state(optimizer: torch.optim.Optimizer) -> Tree:
    return tree.named_leaves(optimizer.state_dict()["state"])


def test_a_state_dict_of_another_optimizer_is_refused() -> None:
    module = small_module()
    theirs, ours = torch.optim.AdamW(module.parameters()), optimizers.HybridAdam(module.parameters())
    for optimizer in (theirs, ours):
        steps(module, optimizer, 1)
    before = named_state(ours)
    for other in (theirs, optimizers.Lion(module.parameters(), lr=0.01)):
        steps(module, other, 1)
        with pytest.raises(ValueError, match=r"state_dict: not a state of this optimizer:\n  parameter 0: "):
            ours.load_state_dict(other.state_dict())
    assert_close(named_state(ours), before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", ["CAME", "Adafactor", "FusedLAMB"])
def test_save_optimizer_is_loaded_under_another_plugin(name: str, tmp_path: Path) -> None:
    """Factors of a matrix lie whole on each rank, though the matrix does not."""

    def boosted(key: str) -> Any:
        plugin, module = PLUGINS[key], small_module()
        booster = fb.Booster("cpu", "fp32", plugin=plugin, mesh=fb.virtual_mesh(**plugin.axes(2)))
        return booster, *booster.boost(module, BY_NAME[name](module.parameters()))[:2]

    def train_on(booster: Any, model: Any, handle: Any) -> None:
        for _ in range(2):
            handle.zero_grad()
            booster.backward(F.mse_loss(model(X), Y), handle)
            handle.step()

    booster, model, handle = boosted("zero1")
    train_on(booster, model, handle)
    booster.save_model(model, f"{tmp_path}/model")
    booster.save_optimizer(handle, f"{tmp_path}/optimizer")
    other, again, loaded = boosted("fsdp")
    other.load_model(again, f"{tmp_path}/model")
    other.load_optimizer(loaded, f"{tmp_path}/optimizer")
    assert_close(named_state_of(loaded), named_state_of(handle), rtol=0.0, atol=0.0)
    for each in ((booster, model, handle), (other, again, loaded)):
        train_on(*each)
    assert_close(again.state_dict(), model.state_dict())


def named_state_of(handle: Any) -> Tree:
    return tree.named_leaves(handle.state_dict()["state"])


def test_bad_arguments_are_named() -> None:
    module = small_module()
    params = list(module.parameters())
    one: Any = 1e-3
    two: Any = (0.9, 0.99)
    for call, error, message in (
        (lambda: optimizers.CAME(params), ValueError, "lr: got None"),
        (
            lambda: optimizers.Adafactor(params, relative_step=False),
            ValueError,
            "lr: got None with relative_step=False",
        ),
        (
            lambda: optimizers.Adafactor(params, lr=0.1, warmup_init=True),
            ValueError,
            "warmup_init: got True with lr=0.1",
        ),
        (lambda: optimizers.FusedAdam(params, amsgrad=True), ValueError, "amsgrad: got True"),
        (lambda: optimizers.FusedLAMB(params, amsgrad=True), ValueError, "amsgrad: got True"),
        (
            lambda: optimizers.HybridAdam(params, nvme_offload_fraction=0.5),
            ValueError,
            "nvme_offload_fraction: got 0.5",
        ),
        (lambda: optimizers.FusedSGD(params, 0.1, nesterov=True), ValueError, "nesterov: got momentum=0"),
        (lambda: optim.scale_by_muon().init({"b": params[1]}), ValueError, r"b: Muon takes matrices, got shape \(7,\)"),
        (lambda: optim.scale_by_muon(adjust_lr_fn="adam"), ValueError, "adjust_lr_fn: got 'adam'"),
        (lambda: optim.scale_by_muon(ns_steps=0), ValueError, "ns_steps: got 0"),
        (lambda: optim.lamb(0.1).update({"w": X}, optim.lamb(0.1).init({"w": X})), ValueError, "params: got None"),
        (lambda: optim.ema(1.0), ValueError, "decay: got 1.0"),
        (lambda: optim.scale_by_factored_rms(0.9, 1e-30, 0), ValueError, "min_dim_size_to_factor: got 0"),
        (lambda: optim.clip_by_block_rms(-1.0), ValueError, "threshold: got -1.0"),
        (lambda: optim.came(0.1, clipping_threshold=0.0), ValueError, "threshold: got 0.0, expected a number above 0"),
        (lambda: optim.came(0.1, eps=one), ValueError, "eps: got 0.001, expected 2 numbers"),
        (lambda: optim.adafactor(decay_rate=-0.8), ValueError, "decay_rate: got -0.8"),
        (lambda: optim.adafactor(momentum=1.5), ValueError, "momentum: got 1.5"),
        (lambda: optim.adagrad(0.1, lr_decay=-1.0), ValueError, "lr_decay: got -1.0"),
        (lambda: optim.lamb(0.1, mu_dtype=torch.int8), TypeError, "mu_dtype: got torch.int8"),
        (lambda: optim.muon(0.1, ns_dtype=torch.int32), TypeError, "ns_dtype: got torch.int32"),
        (lambda: optim.muon(0.1, two), ValueError, r"ns_coeffs: got \(0.9, 0.99\), expected 3 numbers"),
        (lambda: optimizers.HybridAdam(params, lr=-1.0), ValueError, "HybridAdam: learning_rate: got -1.0"),
        (lambda: optimizers.FusedAdam(params, betas=(1.5, 0.9)), ValueError, "FusedAdam: b1: got 1.5"),
        (lambda: optimizers.CAME(params, 0.1, betas=two), ValueError, r"CAME: betas: got \(0.9, 0.99\)"),
        (lambda: optimizers.Adafactor(params, eps=one), ValueError, "Adafactor: eps: got 0.001, expected 2 numbers"),
        (lambda: optimizers.FusedLAMB(params, max_grad_norm=-1), ValueError, "FusedLAMB: max_norm: got -1"),
        (lambda: optimizers.Lion([{"params": params, "lr": -2}], 0.1), ValueError, "Lion: learning_rate: got -2"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_a_bad_param_group_is_not_added() -> None:
    first, second = small_module().parameters(), small_module().parameters()
    optimizer = optimizers.Lamb(first, lr=0.1)
    with pytest.raises(ValueError, match="Lamb: weight_decay: got -1"):
        optimizer.add_param_group({"params": second, "weight_decay": -1})
    assert len(optimizer.param_groups) == 1


def test_a_part_of_a_leaf_must_say_how_it_lies() -> None:
    module = small_module()
    names = {parameter: name for name, parameter in module.named_parameters()}
    converted = from_torch(optimizers.Lamb(module.parameters()), names)
    parts = {name: parameter.detach().reshape(-1)[:2] for name, parameter in module.named_parameters()}
    with pytest.raises(ValueError, match=r"0.bias: shape \(2,\), expected the parameter's, \(7,\)"):
        converted.tx.init({"0.bias": parts["0.bias"]})


def test_a_subclass_with_steps_of_its_own_is_refused() -> None:
    class Mine(optimizers.Lamb):
        def step(self, closure: Any = None) -> None:
            raise NotImplementedError

    module = small_module()
    with pytest.raises(TypeError, match=r"got .*Mine, expected one of .* or of fb.optimizers"):
        from_torch(Mine(module.parameters()), {p: n for n, p in module.named_parameters()})
