"""Fused updates: torch.optim's numbers, the chain's bits, the Triton kernels equal to both, in place under donation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster.kernels import (
    adamw,
    elementwise_update,
    flat,
    graph,
    in_place,
    lion,
    random,
    sgd_momentum,
    tree,
)
from functional_booster.optim.fused import fused_adamw, fused_lion, fused_sgd

RULES = ("adamw", "lion", "sgd_momentum")
OPS = torch.ops.functional_booster


def coefficients(name: str, factor: Any = 0.5, weight_decay: float = 0.1) -> Any:
    if name == "adamw":
        return adamw.coefficients(torch.tensor(3), 1e-2, 0.9, 0.99, 1e-6, 1e-5, weight_decay, factor)
    if name == "lion":
        return lion.coefficients(1e-2, 0.9, 0.98, weight_decay, factor)
    return sgd_momentum.coefficients(torch.tensor(2), 1e-2, 0.9, True, 0.0, weight_decay, factor)


def arguments(
    name: str,
    size: int,
    dtype: torch.dtype = torch.float32,
    copy: torch.dtype | None = None,
    keep: bool | None = None,
    key: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> list[Any]:
    """What the raw op of a rule takes: param and gradient in ``dtype``, moments in float32 at least."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def drawn(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    second = drawn(wide).square() if name == "adamw" else None
    return [
        drawn(dtype),
        drawn(dtype),
        drawn(wide),
        second,
        None if copy is None else drawn(copy),
        elementwise_update.stacked(coefficients(name), torch.device(device)),
        None if keep is None else torch.tensor(keep, device=device),
        None if key is None else random.key(key, device),
        True,
    ]


def widened(args: list[Any]) -> list[Any]:
    """The arguments in float64, to compare with."""
    return [arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]


@given(
    size=st.integers(0, 40),
    steps=st.integers(1, 4),
    seed=st.integers(0, 9),
    weight_decay=st.sampled_from([0.0, 0.1]),
    factor=st.sampled_from([1.0, 0.25]),
)
def test_the_numbers_are_those_of_torch_optim(
    size: int, steps: int, seed: int, weight_decay: float, factor: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(size, dtype=torch.float64, generator=generator)
    theirs = {name: start.clone().requires_grad_() for name in ("adamw", "sgd_momentum")}
    optimizers = [
        torch.optim.AdamW([theirs["adamw"]], 1e-2, (0.8, 0.95), 1e-6, weight_decay),
        torch.optim.SGD([theirs["sgd_momentum"]], 1e-2, 0.9, 0.3, weight_decay),
    ]
    zero = torch.zeros_like(start)
    mine = elementwise_update.Buffers(start, zero, zero)
    momentum = elementwise_update.Buffers(start, zero)
    for step in range(1, steps + 1):
        grad = torch.randn(size, dtype=torch.float64, generator=generator)
        for param in theirs.values():
            param.grad = grad * factor
        for optimizer in optimizers:
            optimizer.step()
        count = torch.tensor(step)
        coefs = adamw.coefficients(count, 1e-2, 0.8, 0.95, 1e-6, 0.0, weight_decay, factor)
        assert mine.second is not None
        mine = adamw.adamw(mine.param, grad, mine.first, mine.second, coefs)
        rates = sgd_momentum.coefficients(count, 1e-2, 0.9, False, 0.3, weight_decay, factor)
        momentum = sgd_momentum.sgd_momentum(momentum.param, grad, momentum.first, rates)
    torch.testing.assert_close(mine.param, theirs["adamw"].detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(momentum.param, theirs["sgd_momentum"].detach(), rtol=1e-12, atol=1e-14)


def test_lion_is_the_papers() -> None:
    """Chen et al. 2023, program 1."""
    generator = torch.Generator().manual_seed(0)
    weight, grad, momentum = (torch.randn(20, dtype=torch.float64, generator=generator) for _ in range(3))
    got = lion.lion(weight, grad, momentum, lion.coefficients(1e-2, 0.9, 0.99, 0.1))
    update = torch.sign(momentum * 0.9 + grad * 0.1) + weight * 0.1
    torch.testing.assert_close(got.param, weight - 1e-2 * update, rtol=1e-13, atol=0)
    torch.testing.assert_close(got.first, momentum * 0.99 + grad * 0.01, rtol=1e-12, atol=0)
    assert got.second is None and got.copy is None


SCHEDULE = fb.schedules.cosine_warmup(peak=3e-2, total_steps=10, warmup_steps=2)
DECAY: dict[str, Any] = {"weight_decay": 0.1, "mask": fb.optim.matrices}
ASCENT: dict[str, Any] = {"eps_root": 1e-5, "maximize": True}
FORMS: dict[str, tuple[fb.optim.GradientTransformation, Callable[..., Any]]] = {
    "adamw": (fb.optim.adamw(1e-2, b2=0.95, **DECAY), fused_adamw(1e-2, b2=0.95, **DECAY)),
    "adamw ascending": (fb.optim.adamw(SCHEDULE, **ASCENT), fused_adamw(SCHEDULE, **ASCENT)),
    "adamw, rate a tensor": (fb.optim.adamw(torch.tensor(0.1), **DECAY), fused_adamw(torch.tensor(0.1), **DECAY)),
    "lion": (fb.optim.lion(SCHEDULE, **DECAY), fused_lion(SCHEDULE, **DECAY)),
    "momentum": (fb.optim.sgd(SCHEDULE, 0.9, **DECAY), fused_sgd(SCHEDULE, 0.9, **DECAY)),
    "nesterov": (fb.optim.sgd(1e-2, 0.9, True, **DECAY), fused_sgd(1e-2, 0.9, True, **DECAY)),
    "dampened": (fb.optim.sgd(1e-2, 0.9, dampening=0.3), fused_sgd(1e-2, 0.9, dampening=0.3)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_flat", [True, False], ids=["flat", "plain"])
def test_a_fused_form_gives_the_bits_of_its_chain(form: str, dtype: torch.dtype, is_flat: bool) -> None:
    tx, fused = FORMS[form]
    generator = torch.Generator().manual_seed(0)
    plain = {"w": torch.randn(33, 7, generator=generator), "b": torch.randn(5, generator=generator), "frozen": None}
    plain = tree.map(lambda leaf: leaf.to(dtype), plain)
    params = flat.ravel(plain, flat.plan(plain, tx.groups(plain))) if is_flat and tx.groups else plain
    state = tx.init(params)
    mine, mine_state = params, state
    factor = torch.tensor(0.37, dtype=torch.float64)
    for step in range(4):
        grads = tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator).to(dtype), params)
        kept = (mine, mine_state)
        mine, mine_state = fused(grads, mine_state, mine, factor=factor, keep=torch.tensor(step != 2))
        if step == 2:
            assert_same((mine, mine_state), kept)
            continue
        updates, state = tx.update(tree.map(lambda g: g * factor.to(dtype), grads), state, params)
        params = fb.optim.apply_updates(params, updates)
    assert_same((mine, mine_state), (params, state))


def assert_same(mine: Any, expected: Any) -> None:
    assert tree.structure(mine) == tree.structure(expected)
    for name, leaf in tree.named_leaves(mine).items():
        torch.testing.assert_close(leaf, tree.named_leaves(expected)[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", RULES)
def test_a_skipped_update_changes_no_bit(name: str) -> None:
    args = arguments(name, 50, copy=torch.bfloat16, keep=False, key=1)
    args[1][:] = float("nan")
    args[0][3] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)  # a NaN with a payload
    for before, after in zip((args[0], args[2], args[3], args[4]), getattr(OPS, name)(*args), strict=True):
        assert after.numel() == 0 if before is None else torch.equal(bits_of(before), bits_of(after))


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def test_rounding_by_chance_is_by_the_keys_words_and_right_on_average() -> None:
    size = 2000
    param, grad, mu, nu = torch.full((size,), 1.0 + 2**-10), torch.zeros(size), torch.zeros(size), torch.ones(size)
    coefs = adamw.coefficients(torch.tensor(1), 0.0)
    key = random.key(3)
    copy = torch.zeros(size, dtype=torch.bfloat16)
    rounded = adamw.adamw(param, grad, mu, nu, coefs, copy=copy, key=key).copy
    assert rounded is not None
    words = random.bits(key, (size,))
    expected = torch.where((words & 0xFFFF) + 2**13 >= 2**16, 1.0 + 2**-7, 1.0)  # an eighth of the way up
    assert torch.equal(rounded.float(), expected)
    assert abs((rounded.float() - 1).mean() / 2**-7 - 1 / 8) < 4 * (7 / 64 / size) ** 0.5
    stored = adamw.adamw(param.bfloat16(), grad, mu, nu, coefs, key=key).param
    assert torch.equal(stored, param.bfloat16())  # it is a bfloat16 already
    nearest = adamw.adamw(param, grad, mu, nu, coefs, copy=copy).copy
    assert nearest is not None and torch.equal(nearest, param.bfloat16())


@pytest.mark.parametrize("name", RULES)
def test_members_of_a_batch_are_updated_as_each_alone(name: str) -> None:
    update = {"adamw": adamw._update, "lion": lion._update, "sgd_momentum": sgd_momentum._update}[name]
    members = [arguments(name, 11, keep=seed != 1, seed=seed) for seed in range(3)]

    def one(param: torch.Tensor, grad: torch.Tensor, first: torch.Tensor, second: Any, keep: torch.Tensor) -> Any:
        new = update(elementwise_update.Buffers(param, first, second), grad, coefficients(name), keep, None, True)
        return [buffer for buffer in new if buffer is not None]

    picked = [[args[0], args[1], args[2], args[3], args[6]] for args in members]
    batch: list[Any] = [
        None if any(part is None for part in column) else torch.stack(column) for column in zip(*picked, strict=True)
    ]
    together = torch.vmap(one, in_dims=tuple(None if column is None else 0 for column in batch))(*batch)
    for index, args in enumerate(picked):
        for got, expected in zip(together, one(*args), strict=True):
            torch.testing.assert_close(got[index], expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", RULES)
def test_the_in_place_twin_writes_what_the_pure_op_gives(name: str) -> None:
    args = arguments(name, 77, copy=torch.float16, keep=True)
    expected = getattr(OPS, name)(*args)
    getattr(OPS, f"{name}_")(*args)
    for place, value in zip((0, 2, 3, 4), expected, strict=True):
        assert args[place] is None or torch.equal(args[place], value)


def traced(fn: Callable[..., Any], tensors: list[torch.Tensor]) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The rewritten graph, and the ops of this library in it."""
    module = in_place.rewrite(graph.trace(fn, tensors))
    return module, [node.target for node in module.graph.nodes if "functional_booster" in str(node.target)]


def test_donation_makes_the_pure_op_its_twin() -> None:
    args = arguments("adamw", 20, keep=True)
    tensors = args[:4]

    def step(param: torch.Tensor, grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor) -> list[torch.Tensor]:
        loss = (param * grad).sum()
        new_param, new_mu, new_nu, _ = OPS.adamw(param, grad, mu, nu, None, *args[5:])
        for donor, value in ((param, new_param), (mu, new_mu), (nu, new_nu)):
            donor.copy_(value)
        return [loss, new_param.sum()]

    own = [tensor.clone() for tensor in tensors]
    expected = step(*own)
    module, found = traced(step, tensors)
    assert found == [OPS.adamw_.default]
    assert not any(node.target is torch.ops.aten.copy_.default for node in module.graph.nodes)
    given = [tensor.clone() for tensor in tensors]
    for got, value in zip([*module(*given), *given], [*expected, *own], strict=True):
        torch.testing.assert_close(got, value, rtol=0, atol=0)


def test_what_is_read_later_or_kept_is_not_written_over() -> None:
    args = arguments("lion", 20)

    def read_later(param: torch.Tensor, grad: torch.Tensor, mu: torch.Tensor) -> list[torch.Tensor]:
        view = param.view(4, 5)
        new_param, new_mu, _, _ = OPS.lion(param, grad, mu, None, None, *args[5:])
        change = (new_param.view(4, 5) - view).sum()
        param.copy_(new_param)
        mu.copy_(new_mu)
        return [change]

    def one_kept(param: torch.Tensor, grad: torch.Tensor, mu: torch.Tensor) -> list[torch.Tensor]:
        new_param, new_mu, _, _ = OPS.lion(param, grad, mu, None, None, *args[5:])
        param.copy_(new_param)
        return [new_mu]

    def swapped(param: torch.Tensor, grad: torch.Tensor, mu: torch.Tensor) -> list[torch.Tensor]:
        new_param, new_mu, _, _ = OPS.lion(param, grad, mu, None, None, *args[5:])
        param.copy_(new_mu)
        mu.copy_(new_param)
        return []

    for fn in (read_later, one_kept, swapped):
        own, given = ([tensor.clone() for tensor in args[:3]] for _ in range(2))
        expected = fn(*own)
        module, found = traced(fn, args[:3])
        assert found == [OPS.lion.default], fn
        for got, value in zip([*module(*given), *given], [*expected, *own], strict=True):
            torch.testing.assert_close(got, value, rtol=0, atol=0)


def test_bad_arguments_are_named() -> None:
    x, coefs = torch.zeros(4), coefficients("adamw")
    with pytest.raises(ValueError, match=r"grad: shape \(3,\), expected the parameter's \(4,\)"):
        adamw.adamw(x, torch.zeros(3), x, x, coefs)
    with pytest.raises(ValueError, match="copy: shape"):
        adamw.adamw(x, x, x, x, coefs, copy=torch.zeros(5))
    with pytest.raises(TypeError, match=r"copy: torch\.float32"):
        adamw.adamw(x, x, x, x, coefs, copy=torch.zeros(4))
    with pytest.raises(TypeError, match="key: given to round by chance"):
        adamw.adamw(x, x, x, x, coefs, key=random.key(0))


def check(name: str, device: str, size: int, dtype: torch.dtype, copy: torch.dtype | None, keep: bool | None) -> None:
    """The Triton kernel against the rule in float64, pure and in place, and that it writes its outputs and no more."""
    from functional_booster.kernels import elementwise_update_triton

    args = arguments(name, size, dtype, copy, keep, device=device)
    expected = getattr(OPS, name)(*widened(arguments(name, size, dtype, copy, keep)))
    buffers = [args[0], args[2], args[3], args[4]]
    guarded: list[Any] = [None if b is None else b.new_full((size + 8,), 7.0) for b in buffers]
    outputs = tuple(None if whole is None else whole[:size] for whole in guarded)
    elementwise_update_triton.update(name, outputs, *args)
    again: Any = tuple(None if b is None else b.clone() for b in buffers)
    written: list[Any] = [again[0], args[1], again[1], again[2], again[3], *args[5:]]
    elementwise_update_triton.update(name, again, *written)
    for got, whole, in_place_, value in zip(outputs, guarded, again, expected, strict=True):
        if got is None:
            continue
        rounding = max(torch.finfo(got.dtype).eps, 1e-5)
        torch.testing.assert_close(got.cpu().double(), value, rtol=rounding, atol=1e-6)
        assert torch.equal(got, in_place_) and bool((whole[size:] == 7).all())


def check_chance(name: str, device: str, size: int) -> None:
    """What is rounded by chance has the same bits wherever the number to be rounded has."""
    from functional_booster.kernels import elementwise_update_triton

    for dtype, copy in ((torch.float32, torch.bfloat16), (torch.bfloat16, None)):
        args = arguments(name, size, dtype, copy, key=5, device=device)
        plain: list[Any] = [*args[:4], None, *args[5:7], None, True]
        plain[0] = args[0].float()
        outputs: list[Any] = [None if b is None else torch.empty_like(b) for b in (args[0], args[2], args[3], args[4])]
        elementwise_update_triton.update(name, tuple(outputs), *args)
        unrounded: list[Any] = [None if b is None else torch.empty_like(b) for b in (plain[0], args[2], args[3], None)]
        elementwise_update_triton.update(name, tuple(unrounded), *plain)
        words = random.bits(random.key(5), (size,))
        exact = unrounded[0]
        got = outputs[0] if copy is None else outputs[3]
        assert exact is not None and got is not None
        assert torch.equal(got.cpu(), elementwise_update.stochastic_round(exact.cpu(), words))


INTERPRETED = """
import contextlib
import torch
from functional_booster.kernels import elementwise_update_triton
from tests.test_adamw_kernel import RULES, check, check_chance
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
elementwise_update_triton._BLOCK = 64
single, half = torch.float32, torch.float16
for name in RULES:
    for size, dtype, copy, keep in (
        (1, single, None, None), (64, single, half, True), (70, single, half, False), (130, half, None, True)
    ):
        check(name, "cpu", size, dtype, copy, keep)
check_chance("adamw", "cpu", 130)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernels_interpreted_on_cpu() -> None:
    command = [sys.executable, "-W", "error", "-c", INTERPRETED]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("size", [1, 1023, 4096, 1_000_003])
@pytest.mark.parametrize("keep", [None, True, False])
def test_the_gpu_gives_the_numbers_of_float64(name: str, size: int, keep: bool | None) -> None:
    for dtype, copy in (
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, None),
    ):
        check(name, "cuda", size, dtype, copy, keep)
    if keep is None:
        check_chance(name, "cuda", size)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_the_fused_form_on_the_gpu_is_the_chain_to_rounding(form: str) -> None:
    tx, fused = FORMS[form]
    plain = {"w": torch.randn(33, 7, device="cuda"), "b": torch.randn(5, device="cuda")}
    params = flat.ravel(plain, flat.plan(plain, tx.groups(plain))) if tx.groups else plain
    state = tx.init(params)
    mine, mine_state = params, state
    for _ in range(4):
        grads = tree.map(torch.randn_like, params)
        updates, state = tx.update(tree.map(lambda g: g * 0.5, grads), state, params)
        params = fb.optim.apply_updates(params, updates)
        mine, mine_state = fused(grads, mine_state, mine, factor=torch.tensor(0.5, device="cuda"))
    assert tree.structure((mine, mine_state)) == tree.structure((params, state))
    for got, expected in zip(tree.leaves((mine, mine_state)), tree.leaves((params, state)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's own warnings are not ours to judge
def test_the_compiled_update_allocates_no_second_state() -> None:
    size = 1 << 22
    param, grad, mu, nu, _, coefs, keep, *_ = arguments("adamw", size, keep=True, device="cuda")

    def step(
        param: torch.Tensor,
        grad: torch.Tensor,
        mu: torch.Tensor,
        nu: torch.Tensor,
        coefs: torch.Tensor,
        keep: torch.Tensor,
    ) -> list[torch.Tensor]:
        new_param, new_mu, new_nu, _ = OPS.adamw(param, grad * 2.0, mu, nu, None, coefs, keep, None, True)
        for donor, value in ((param, new_param), (mu, new_mu), (nu, new_nu)):
            donor.copy_(value)
        return [coefs * 2.0]

    expected = OPS.adamw(param, grad * 2.0, mu, nu, None, coefs, keep, None, True)
    tensors = [param, grad, mu, nu, coefs, keep]
    module, found = traced(step, tensors)
    assert found == [OPS.adamw_.default]
    run = graph.compile(module, graph.examples_of(module))
    run(*(tensor.clone() for tensor in tensors))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*tensors)
    assert torch.cuda.max_memory_allocated() - before < 2 * 4 * size  # the doubled gradient, no more
    for got, value in zip((param, mu, nu), expected, strict=False):
        torch.testing.assert_close(got, value, rtol=0, atol=0)
