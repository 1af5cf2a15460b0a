"""One conformance suite for every transformation, and equality with torch.optim and with optax's equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from functional_booster import optim, schedules
from functional_booster.kernels import flat, transforms, tree

Tree = tree.Tree
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def make_params(dtype: torch.dtype = torch.float64, seed: int = 0) -> Tree:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.normal(size=shape), dtype=dtype)

    return {"block": {"weight": draw(3, 5), "bias": draw(5)}, "head": [draw(70), draw()], "none": draw(0, 4)}


def make_grads(params: Tree, step: int) -> Tree:
    """Gradients that depend on the parameters, so that an error at one step is felt at the next."""
    noise = make_params(seed=100 + step)
    return tree.map(lambda p, n: (0.3 * p.detach() + n).to(p.dtype), params, noise)


def train(tx: optim.GradientTransformation, params: Tree, steps: int) -> tuple[Tree, Any]:
    state = tx.init(params)
    for step in range(steps):
        updates, state = tx.update(make_grads(params, step), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def train_torch(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], params: Tree, steps: int) -> Tree:
    leaves, structure = tree.flatten(params)
    tensors = [leaf.clone().requires_grad_() for leaf in leaves]
    optimizer = make(tensors)
    for step in range(steps):
        grads = make_grads(tree.unflatten(structure, tensors), step)
        for tensor, grad in zip(tensors, tree.leaves(grads), strict=True):
            tensor.grad = grad
        optimizer.step()
    return tree.unflatten(structure, [tensor.detach() for tensor in tensors])


def assert_trees_close(actual: Tree, expected: Tree, **tolerance: Any) -> None:
    assert tree.structure(actual) == tree.structure(expected)
    tolerance = tolerance or {"rtol": 0.0, "atol": 0.0}
    for name, left, right in zip(tree.names(actual), tree.leaves(actual), tree.leaves(expected), strict=True):
        torch.testing.assert_close(left, right, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


# Each as torch.optim spells it and as we do.

probabilities = st.floats(0.0, 0.99)
adam_options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.1),
        "betas": st.tuples(probabilities, st.floats(0.5, 0.9999)),
        "eps": st.sampled_from([1e-8, 1e-4]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)


@st.composite
def sgd_options(draw: st.DrawFn) -> dict[str, Any]:
    momentum = draw(st.sampled_from([0.0, 0.5, 0.95]))
    nesterov = momentum > 0 and draw(st.booleans())
    return {
        "lr": draw(st.floats(1e-4, 0.1)),
        "momentum": momentum,
        "nesterov": nesterov,
        "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3, 1.0])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "maximize": draw(st.booleans()),
    }


@settings(deadline=None, max_examples=15)
@given(options=adam_options, decoupled=st.booleans())
def test_adam_and_adamw_equal_torch(options: dict[str, Any], decoupled: bool) -> None:
    cls, alias = (torch.optim.AdamW, optim.adamw) if decoupled else (torch.optim.Adam, optim.adam)
    ours = dict(options)
    b1, b2 = ours.pop("betas")
    params = make_params()
    expected = train_torch(lambda tensors: cls(tensors, **options), params, 25)
    assert_trees_close(train(alias(ours.pop("lr"), b1, b2, **ours), params, 25)[0], expected, **EXACT)


@settings(deadline=None, max_examples=25)
@given(options=sgd_options())
def test_sgd_equals_torch(options: dict[str, Any]) -> None:
    params = make_params()
    expected = train_torch(lambda tensors: torch.optim.SGD(tensors, **options), params, 25)
    ours = dict(options)
    tx = optim.sgd(ours.pop("lr"), ours.pop("momentum"), ours.pop("nesterov"), **ours)
    assert_trees_close(train(tx, params, 25)[0], expected, **EXACT)


@pytest.mark.parametrize("eps_root", [0.0, 1e-6])
def test_scale_by_adam_follows_optax_equations(eps_root: float) -> None:
    b1, b2, eps, rng = 0.8, 0.95, 1e-3, np.random.default_rng(0)
    tx = optim.scale_by_adam(b1, b2, eps, eps_root)
    params = torch.zeros(6, dtype=torch.float64)
    state, mu, nu = tx.init(params), np.zeros(6), np.zeros(6)
    for step in range(1, 21):
        g = rng.normal(size=6)
        mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g**2
        expected = mu / (1 - b1**step) / (np.sqrt(nu / (1 - b2**step) + eps_root) + eps)
        update, state = tx.update(torch.from_numpy(g), state)
        np.testing.assert_allclose(update.numpy(), expected, rtol=1e-12)


# The conformance suite: every transformation passes the same laws.


def rates(step: torch.Tensor) -> torch.Tensor:
    return 0.1 / (step + 1)


def by_prefix(params: Tree) -> Tree:
    return tree.map_with_name(lambda name, leaf: name.split(".")[0], params)


def matrices(params: Tree) -> Tree:
    return tree.map(lambda leaf: len(leaf.shape) > 1, params)


TRANSFORMATIONS: dict[str, Callable[[], optim.GradientTransformation]] = {
    "identity": optim.identity,
    "scale": lambda: optim.scale(0.5),
    "scale_by_schedule": lambda: optim.scale_by_schedule(rates),
    "scale_by_learning_rate": lambda: optim.scale_by_learning_rate(rates),
    "scale_by_adam": optim.scale_by_adam,
    "amsgrad": lambda: optim.scale_by_adam(amsgrad=True, eps_root=1e-8),
    "adam_without_eps": lambda: optim.scale_by_adam(eps=0.0),
    "mu_dtype": lambda: optim.scale_by_adam(mu_dtype=torch.bfloat16),
    "trace": lambda: optim.trace(0.9, nesterov=True),
    "dampened_trace": lambda: optim.trace(0.9, dampening=0.5),
    "add_decayed_weights": lambda: optim.add_decayed_weights(0.1, mask=matrices),
    "clip_by_global_norm": lambda: optim.clip_by_global_norm(0.5),
    "clip": lambda: optim.clip(0.1),
    "set_to_zero": optim.set_to_zero,
    "apply_every": lambda: optim.apply_every(2),
    "adamw": lambda: optim.adamw(schedules.cosine_warmup(0.1, 10, 2), weight_decay=0.1, mask=matrices, maximize=True),
    "sgd": lambda: optim.sgd(0.1, 0.9),
    "masked": lambda: optim.masked(optim.adamw(0.1, mask=tree.by_name("weight")), tree.by_name("block")),
    "mask_of_a_mask": lambda: optim.masked(
        optim.masked(optim.trace(0.9), matrices), {"block": True, "head": False, "none": False}
    ),
    "partition": lambda: optim.partition(
        {"block": optim.adamw(0.1, mask=matrices), "head": optim.sgd(0.1), "none": optim.set_to_zero()}, by_prefix
    ),
    "clipped_partition": lambda: optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.partition({"a": optim.adam(0.1), "b": optim.trace(0.5)}, {"block": "a", "head": ["b", "a"], "none": "b"}),
    ),
    "named_chain": lambda: optim.named_chain(("clip", optim.clip(0.1)), ("adam", optim.adam(rates))),
    "inject_hyperparams": lambda: optim.inject_hyperparams(optim.adamw)(rates, weight_decay=0.1),
    "scale_by_trust_ratio": optim.scale_by_trust_ratio,
    "scale_by_lars": lambda: optim.scale_by_lars(0.1),
    "scale_by_factored_rms": lambda: optim.scale_by_factored_rms(0.9, 1e-10, 4),
    "scale_by_confidence": optim.scale_by_confidence,
    "lamb": lambda: optim.lamb(0.1, weight_decay=0.1, mask=matrices),
    "lars": lambda: optim.lars(0.1, weight_decay=0.1, mask=matrices),
    "adafactor": lambda: optim.adafactor(None, 2, momentum=0.9, weight_decay=0.1),
    "came": lambda: optim.came(0.1, weight_decay=0.1, mask=matrices),
    "lion": lambda: optim.lion(0.1, mask=matrices),
    "muon": lambda: optim.muon(0.1, ns_steps=2, ns_dtype=None),
    "ema": lambda: optim.chain(optim.adamw(0.1), optim.ema(rates, torch.float32)),
    "added": lambda: optim.added(optim.trace(0.9), optim.chain(optim.set_to_zero(), optim.add_decayed_weights(0.1))),
    "undamped_ema": lambda: optim.trace(0.9, dampening=0.9, dampen_first=True),
    "adagrad": lambda: optim.adagrad(0.1, lr_decay=0.1),
    "adadelta": lambda: optim.adadelta(0.1),
    "rmsprop": lambda: optim.rmsprop(0.1, centered=True, momentum=0.5),
    "nadam": lambda: optim.nadam(0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda: optim.radam(0.1, b2=0.9),
    "adamax": lambda: optim.adamax(0.1, weight_decay=0.1, mask=matrices),
    "asgd": lambda: optim.asgd(0.1, t0=2.0),
    "rprop": lambda: optim.rprop(0.1),
    "bare_pair": lambda: optim.chain(tuple(optim.trace(0.9))[:2], optim.scale(0.1)),
    "empty_chain": optim.chain,
}
every = pytest.mark.parametrize("tx", [make() for make in TRANSFORMATIONS.values()], ids=list(TRANSFORMATIONS))


@every
def test_update_on_a_flat_tree_is_the_flat_update(tx: optim.GradientTransformation) -> None:
    params = make_params()
    labels = tree.unflatten(tree.structure(params), optim.leaf_labels(tx, params))
    layout = flat.plan(params, labels)
    flat_params = flat.ravel(params, layout)
    state, flat_state = tx.init(params), tx.init(flat_params)
    for step in range(4):
        grads = make_grads(params, step)
        updates, state = tx.update(grads, state, params)
        flat_updates, flat_state = tx.update(flat.ravel(grads, layout), flat_state, flat_params)
        assert_trees_close(flat_updates, flat.ravel(updates, layout), **EXACT)  # sums of leaves in another order
        params, flat_params = optim.apply_updates(params, updates), optim.apply_updates(flat_params, flat_updates)
    assert_trees_close(flat.unravel(flat_params), params, **EXACT)


@every
def test_one_trace_serves_every_step(tx: optim.GradientTransformation) -> None:
    """Traced on fake tensors, which have no values: what reads one, a host sync, fails here."""
    params = make_params()
    arguments = (make_grads(params, 0), tx.init(params), params)
    leaves, structure = tree.flatten(arguments)

    def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return tree.leaves(tx.update(*tree.unflatten(structure, tensors)))

    graph = make_fx(step, tracing_mode="fake")(*leaves)
    out = tree.structure(tx.update(*arguments))
    state = tx.init(params)
    for number in range(4):
        grads = make_grads(params, number)
        expected = tx.update(grads, state, params)
        assert_trees_close(tree.unflatten(out, graph(*tree.leaves((grads, state, params)))), expected)
        updates, state = expected
        params = optim.apply_updates(params, updates)


@every
def test_vmap_over_states_is_a_loop_over_states(tx: optim.GradientTransformation) -> None:
    members = [make_params(seed=seed) for seed in range(3)]
    states = [train(tx, member, member_index)[1] for member_index, member in enumerate(members)]  # counts differ
    grads = [make_grads(member, 7) for member in members]
    one_by_one = [tx.update(*arguments) for arguments in zip(grads, states, members, strict=True)]
    together = transforms.vmap(tx.update)(
        *(tree.map(lambda *rows: torch.stack(rows), *rows) for rows in (grads, states, members))
    )
    for index, expected in enumerate(one_by_one):
        assert_trees_close(tree.map(lambda leaf, index=index: leaf[index], together), expected, rtol=1e-14, atol=1e-16)
    fresh = transforms.vmap(tx.init)(tree.map(lambda *rows: torch.stack(rows), *members))
    assert_trees_close(tree.map(lambda leaf: leaf[1], fresh), tx.init(members[1]))


@every
def test_state_keeps_its_structure_shapes_and_dtypes(tx: optim.GradientTransformation) -> None:
    params = make_params(torch.float32)
    state = tx.init(params)
    updates, after = tx.update(make_grads(params, 0), state, params)
    for old, new in ((state, after), (params, updates)):
        assert tree.structure(new) == tree.structure(old)
        assert [(x.shape, x.dtype) for x in tree.leaves(new)] == [(x.shape, x.dtype) for x in tree.leaves(old)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_has_storage_of_its_own(dtype: torch.dtype) -> None:
    """A state may be donated, and then is overwritten: it shares nothing with itself, the parameters or the rate."""
    params, rate = make_params(dtype), torch.tensor(0.1, dtype=dtype)
    for tx in (
        optim.adamw(rate, amsgrad=True),
        optim.sgd(rate, 0.9),
        optim.inject_hyperparams(optim.adamw)(rate, b1=rate),
    ):
        state = tx.init(params)
        for now in (state, tx.update(make_grads(params, 0), state, params)[1]):
            leaves = [leaf for leaf in tree.leaves((now, params, rate)) if leaf.numel() > 0]
            assert len({leaf.data_ptr() for leaf in leaves}) == len(leaves)


@every
def test_an_update_writes_into_none_of_its_arguments(tx: optim.GradientTransformation) -> None:
    params = make_params()
    arguments = (make_grads(params, 0), train(tx, params, 2)[1], params)
    before = tree.map(torch.clone, arguments)
    tx.update(*arguments)
    assert_trees_close(arguments, before)


@pytest.mark.parametrize("make", [optim.adamw, optim.sgd, lambda lr: optim.chain(optim.clip_by_global_norm(lr))])
def test_a_tree_without_leaves_is_legal(make: Callable[[float], optim.GradientTransformation]) -> None:
    tx = make(0.1)
    assert tx.update({}, tx.init({}), {})[0] == {}


# Gradients of zero, and gradients through updates.


@pytest.mark.parametrize("make", [optim.adam, optim.sgd, lambda lr: optim.adam(lr, amsgrad=True)])
def test_zero_gradients_change_nothing(make: Callable[[float], optim.GradientTransformation]) -> None:
    params = make_params()
    tx, zeros = make(0.1), tree.map(torch.zeros_like, params)
    updates, state = tx.update(zeros, tx.init(params), params)
    updates, _ = tx.update(zeros, state, params)
    assert_trees_close(optim.apply_updates(params, updates), params)


@pytest.mark.parametrize(
    "make",
    [
        lambda lr: optim.adamw(lr, weight_decay=0.1),
        lambda lr: optim.adam(schedules.cosine_warmup(lr, 10, 2), amsgrad=True),
        lambda lr: optim.sgd(lr, 0.9, nesterov=True),
        lambda lr: optim.chain(optim.clip_by_global_norm(0.5), optim.scale_by_learning_rate(lr)),
        optim.inject_hyperparams(optim.adam),
    ],
)
def test_the_gradient_of_the_learning_rate_is_the_difference_quotient(make: Callable[..., Any]) -> None:
    """Through three steps, with one element that never has a gradient."""
    target = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    used = torch.tensor([1.0, 3.0, 0.1, 0.0], dtype=torch.float64)

    def loss(params: Tree) -> torch.Tensor:
        return (used * (params["x"] - target) ** 2).sum()

    def after_training(lr: torch.Tensor) -> torch.Tensor:
        tx, params = make(lr), {"x": torch.full((4,), 0.3, dtype=torch.float64)}
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(transforms.grad(loss)(params), state, params)
            params = optim.apply_updates(params, updates)
        return loss(params)

    lr = torch.tensor(0.05, dtype=torch.float64)
    gradient = transforms.grad(after_training)(lr)
    step = 1e-4
    quotient = (after_training(lr + step) - after_training(lr - step)) / (2 * step)
    torch.testing.assert_close(gradient, quotient, rtol=1e-4, atol=0.0)


def test_learning_rates_of_an_ensemble_by_vmap() -> None:
    params, lrs = make_params(), torch.tensor([0.1, 0.01, 0.3], dtype=torch.float64)

    def run(lr: torch.Tensor) -> Tree:
        return train(optim.adamw(lr), params, 3)[0]

    together = transforms.vmap(run)(lrs)
    for index, lr in enumerate(lrs.tolist()):
        expected = train(optim.adamw(lr), params, 3)[0]
        assert_trees_close(tree.map(lambda leaf, index=index: leaf[index], together), expected, **EXACT)


# What each is for.


def test_masks_and_partitions_leave_frozen_leaves_bitwise_alone() -> None:
    params = make_params()
    frozen = tree.by_name("bias|head")
    txs = (
        optim.chain(optim.adamw(0.1), optim.masked(optim.set_to_zero(), frozen)),
        optim.partition({True: optim.set_to_zero(), False: optim.adamw(0.1)}, frozen),
    )
    for tx in txs:
        after, _ = train(tx, params, 5)
        for name, leaf in tree.named_leaves(after).items():
            unchanged = torch.equal(leaf, tree.named_leaves(params)[name])
            assert unchanged == ("bias" in name or "head" in name or leaf.numel() == 0), name


def test_a_partition_is_each_optimizer_on_its_own_leaves() -> None:
    params = make_params()
    txs = {"block": optim.adamw(0.1), "head": optim.sgd(0.2), "none": optim.identity()}
    after, _ = train(optim.partition(txs, by_prefix), params, 5)
    assert_trees_close(after["block"], train(optim.adamw(0.1), params, 5)[0]["block"])
    assert_trees_close(after["head"], train(optim.sgd(0.2), params, 5)[0]["head"])


def test_decay_reaches_only_the_masked_leaves() -> None:
    params = make_params()
    tx = optim.add_decayed_weights(0.5, mask=matrices)
    updates, _ = tx.update(tree.map(torch.zeros_like, params), tx.init(params), params)
    expected = tree.map(lambda p: 0.5 * p if len(p.shape) > 1 else torch.zeros_like(p), params)
    assert_trees_close(updates, expected)


@settings(deadline=None, max_examples=20)
@given(max_norm=st.floats(1e-3, 50.0), scale=st.floats(1e-6, 1e6))
def test_clipping_equals_torch(max_norm: float, scale: float) -> None:
    grads = tree.map(lambda p: p * scale, make_params())
    tensors = [leaf.clone() for leaf in tree.leaves(grads)]
    for tensor in tensors:
        tensor.grad = tensor.clone()
    norm = torch.nn.utils.clip_grad_norm_(tensors, max_norm)
    torch.testing.assert_close(optim.global_norm(grads), norm, rtol=1e-13, atol=0.0)
    tx = optim.clip_by_global_norm(max_norm)
    clipped, _ = tx.update(grads, tx.init(grads))
    for ours, tensor in zip(tree.leaves(clipped), tensors, strict=True):
        torch.testing.assert_close(ours, tensor.grad, rtol=1e-12, atol=0.0)


def test_the_norm_of_huge_gradients_is_finite() -> None:
    grads = {"x": torch.full((16,), 1e20), "y": torch.full((9,), 1e20, dtype=torch.bfloat16)}
    norm = optim.global_norm(grads)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(5e20), rtol=2e-3, atol=0.0)
    clipped, _ = optim.clip_by_global_norm(1.0).update(grads, ())
    torch.testing.assert_close(optim.global_norm(clipped), torch.tensor(1.0), rtol=2e-3, atol=0.0)


def test_the_norm_of_nothing_and_its_derivative_at_zero_are_zero() -> None:
    assert optim.global_norm({}) == 0.0
    gradient = transforms.grad(optim.global_norm)({"x": torch.zeros(3), "y": torch.zeros(2)})
    assert_trees_close(gradient, {"x": torch.zeros(3), "y": torch.zeros(2)})


@settings(deadline=None, max_examples=10)
@given(k=st.integers(1, 4))
def test_apply_every_hands_out_the_sum(k: int) -> None:
    tx, params = optim.apply_every(k), make_params()
    state, total = tx.init(params), tree.map(torch.zeros_like, params)
    for step in range(9):
        grads = make_grads(params, step)
        total = tree.map(torch.add, total, grads)
        updates, state = tx.update(grads, state)
        due = step % k == k - 1
        assert_trees_close(updates, total if due else tree.map(torch.zeros_like, params), rtol=1e-14, atol=1e-15)
        total = tree.map(torch.zeros_like, params) if due else total


def test_the_state_reports_the_learning_rate_of_the_last_update() -> None:
    params, schedule = make_params(), schedules.linear(1.0, 0.0, 10)
    assert optim.learning_rate(optim.chain(optim.trace(0.9)).init(params)) is None
    for steps in (1, 2, 5):
        rate = optim.learning_rate(train(optim.partition({"": optim.adamw(schedule)}, ""), params, steps)[1])
        assert rate is not None
        assert rate.dtype == torch.float32
        torch.testing.assert_close(rate, torch.tensor(schedule(steps - 1)), rtol=1e-7, atol=0.0)


def test_injected_hyperparameters_are_used_and_can_be_replaced() -> None:
    params = make_params()
    injected = optim.inject_hyperparams(optim.adamw)(0.1, b1=0.8, weight_decay=0.01)
    state, plain = injected.init(params), optim.adamw(0.1, b1=0.8, weight_decay=0.01)
    plain_state = plain.init(params)
    for step in range(6):
        if step == 3:
            state = state._replace(hyperparams={**state.hyperparams, "learning_rate": 0.03, "b1": torch.tensor(0.5)})
            plain = optim.adamw(0.03, b1=0.5, weight_decay=0.01)
        updates, state = injected.update(make_grads(params, step), state, params)
        expected, plain_state = plain.update(make_grads(params, step), plain_state, params)
        assert_trees_close(updates, expected, **EXACT)
    assert state.hyperparams["learning_rate"].dtype == torch.float64


def test_injected_schedules_follow_the_count_and_static_arguments_stay() -> None:
    params = make_params()
    make = optim.inject_hyperparams(optim.adamw, static_args="mask")
    tx = make(rates, weight_decay=0.1, mask=matrices)
    expected = train(optim.adamw(rates, weight_decay=0.1, mask=matrices), params, 4)[0]
    after, state = train(tx, params, 4)
    assert_trees_close(after, expected, rtol=1e-7, atol=0.0)  # the schedule's rate has float32
    assert state.hyperparams["learning_rate"] == pytest.approx(0.1 / 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensor_hyperparameters_keep_their_digits_in_low_precision(dtype: torch.dtype) -> None:
    """bfloat16 has 8 bits: 0.999 in it is 1."""
    params = make_params(dtype)
    tx, injected = optim.adamw(1e-3, weight_decay=0.1), optim.inject_hyperparams(optim.adamw)(1e-3, weight_decay=0.1)
    after, state = train(tx, params, 5)
    assert_trees_close(train(injected, params, 5)[0], after)
    assert all(leaf.dtype == dtype for leaf in tree.leaves(after))
    assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(state[0].nu))
    assert all(bool((leaf > 0).all()) for leaf in tree.leaves(state[0].nu))


def test_moments_may_have_their_own_dtype() -> None:
    params = make_params(torch.float32)
    after, state = train(optim.adamw(1e-2, mu_dtype=torch.bfloat16), params, 5)
    assert {leaf.dtype for leaf in tree.leaves(state[0].mu)} == {torch.bfloat16}
    assert_trees_close(after, train(optim.adamw(1e-2), params, 5)[0], rtol=0.0, atol=5e-4)  # 1 % of five steps of 1e-2


def test_apply_updates_keeps_dtypes_and_what_has_no_update() -> None:
    params = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.arange(3)}
    after = optim.apply_updates(params, {"a": torch.full((2,), 1.0 / 3.0), "b": None})
    assert after["b"] is params["b"]
    torch.testing.assert_close(after["a"], torch.full((2,), 4.0 / 3.0).to(torch.bfloat16))


def test_leaves_lie_together_only_where_they_are_treated_alike() -> None:
    params = make_params(torch.float32)

    def buckets(tx: Any) -> list[list[str]]:
        labels = tree.unflatten(tree.structure(params), optim.leaf_labels(tx, params))
        return sorted([slot.name for slot in slots] for slots in flat.plan(params, labels).buckets.values())

    assert buckets(optim.adamw(0.1)) == [["block.bias", "block.weight", "head.0", "head.1", "none"]]
    assert buckets(optim.adamw(0.1, mask=matrices)) == [["block.bias", "head.0", "head.1"], ["block.weight", "none"]]
    assert len(buckets(TRANSFORMATIONS["partition"]())) == 4
    assert len(buckets(TRANSFORMATIONS["bare_pair"]())) == 5


untyped: Any = optim  # arguments of wrong types on purpose
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "negative rate": (lambda: untyped.adamw(-1.0), ValueError, "learning_rate: got -1.0"),
    "rate of nan": (lambda: untyped.sgd(math.nan), ValueError, "learning_rate: got nan"),
    "rate as text": (lambda: untyped.adam("fast"), TypeError, "learning_rate: got str 'fast'"),
    "rate as bool": (lambda: untyped.adam(True), TypeError, "learning_rate: got bool True"),
    "rate as vector": (lambda: untyped.adam(torch.ones(2)), ValueError, r"learning_rate: got a tensor of shape \(2,\)"),
    "b1": (lambda: untyped.adam(0.1, b1=1.0), ValueError, r"b1: got 1.0, expected a finite number in \[0, 1\)"),
    "b2": (lambda: untyped.adamw(0.1, b2=-0.1), ValueError, "b2: got -0.1"),
    "eps": (lambda: untyped.adamw(0.1, eps=-1.0), ValueError, "eps: got -1.0"),
    "decay": (lambda: untyped.adamw(0.1, weight_decay=-0.1), ValueError, "weight_decay: got -0.1"),
    "momentum": (lambda: untyped.sgd(0.1, -0.9), ValueError, "momentum: got -0.9"),
    "nesterov": (lambda: untyped.sgd(0.1, nesterov=True), ValueError, "nesterov: got momentum=0.0"),
    "max_norm": (lambda: untyped.clip_by_global_norm(-1.0), ValueError, "max_norm: got -1.0"),
    "k": (lambda: untyped.apply_every(0), ValueError, "k: got 0, expected an int at least 1"),
    "schedule": (lambda: untyped.scale_by_schedule(0.1), TypeError, "step_size_fn: got float 0.1"),
    "no transformation": (lambda: untyped.chain(optim.scale(1.0), 3), TypeError, "a transformation is .* got int"),
    "twice a name": (
        lambda: untyped.named_chain(("a", optim.clip(1.0)), ("a", optim.clip(1.0))),
        ValueError,
        "expected each once",
    ),
    "static_args": (lambda: untyped.inject_hyperparams(optim.adamw, "msk"), ValueError, r"static_args: got \['msk'\]"),
    "no schedule": (
        lambda: untyped.inject_hyperparams(optim.adamw)(0.1, mask=matrices),
        TypeError,
        "mask: got a function",
    ),
    "mask leaf": (
        lambda: untyped.masked(optim.scale(1.0), {"block": 1, "head": True, "none": True}).init(make_params()),
        TypeError,
        "mask: the leaf 'block' is int",
    ),
    "mask structure": (
        lambda: untyped.masked(optim.scale(1.0), {"blocks": True}).init(make_params()),
        ValueError,
        "block",
    ),
    "label": (
        lambda: untyped.partition({"a": optim.scale(1.0)}, {"block": "a", "head": "b", "none": "a"}).init(
            make_params()
        ),
        ValueError,
        "param_labels: 'head' has the label 'b', expected one of",
    ),
    "no params": (lambda: untyped.add_decayed_weights(0.1).update(make_params(), ()), ValueError, "params: got None"),
    "other chain": (
        lambda: untyped.chain(optim.clip(1.0)).update(make_params(), ()),
        ValueError,
        "the state has 0 parts",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=list(BAD))
def test_bad_input_is_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        (lambda step: None, TypeError, "schedule: it gave NoneType at a step, expected a number or a 0-d tensor"),
        (
            lambda step: torch.ones(3),
            ValueError,
            r"schedule: it gave a tensor of shape \(3,\) at a step",
        ),
    ],
)
def test_a_schedule_that_gives_no_number(schedule: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        optim.sgd(schedule).init({"x": torch.ones(2)})
