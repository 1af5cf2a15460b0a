"""torch.optim optimizers, turned into transformations, take the steps that they would have taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from functional_booster import lr_scheduler, optim
from functional_booster.kernels import flat, tree
from functional_booster.torch_optim import FromTorch, from_torch

Tree = tree.Tree
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def make_module() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)).double()


def names_of(module: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def params_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def grad_of(name: str, value: torch.Tensor, step: int) -> torch.Tensor:
    phase = torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape) + len(name)
    return 0.3 * value.detach() + torch.sin(phase * (step + 1))


def torch_step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.grad = grad_of(name, parameter, step)
    optimizer.step()


def pure_step(converted: FromTorch, params: Tree, state: Any, step: int) -> tuple[Tree, Any]:
    grads = tree.map_with_name(lambda name, value: grad_of(name, value, step), params)
    updates, state = converted.tx.update(grads, converted.refresh(state), params)
    return optim.apply_updates(params, updates), state


def assert_same(params: dict[str, torch.Tensor], module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            params[name], parameter.detach(), **EXACT, msg=lambda text, name=name: f"{name}: {text}"
        )


def two_groups(
    module: torch.nn.Sequential, cls: Callable[..., Any], second: dict[str, Any], **options: Any
) -> torch.optim.Optimizer:
    return cls([{"params": module[0].parameters()}, {"params": module[1].parameters(), **second}], **options)


options_of_adam = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.1),
        "betas": st.tuples(st.floats(0.0, 0.95), st.floats(0.5, 0.999)),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)
options_of_sgd = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.1),
        "momentum": st.sampled_from([0.0, 0.9]),
        "dampening": st.sampled_from([0.0, 0.5]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "maximize": st.booleans(),
    }
)


def options_of(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """What most classes have, and these."""
    common = {"lr": st.floats(1e-3, 0.1), "maximize": st.booleans()}
    return st.fixed_dictionaries({**common, **options})


decays, betas = st.sampled_from([0.0, 0.1]), st.tuples(st.floats(0.0, 0.95), st.floats(0.5, 0.999))
decoupled = st.booleans()
FAMILIES: dict[Any, st.SearchStrategy[dict[str, Any]]] = {
    torch.optim.Adam: options_of_adam,
    torch.optim.AdamW: options_of_adam,
    torch.optim.SGD: options_of_sgd,
    torch.optim.Adagrad: options_of(
        lr_decay=st.sampled_from([0.0, 0.1]), weight_decay=decays, initial_accumulator_value=st.sampled_from([0.0, 0.5])
    ),
    torch.optim.Adadelta: options_of(rho=st.floats(0.1, 0.95), weight_decay=decays),
    torch.optim.RMSprop: options_of(
        alpha=st.floats(0.5, 0.99), momentum=st.sampled_from([0.0, 0.9]), centered=st.booleans(), weight_decay=decays
    ),
    torch.optim.NAdam: options_of(
        betas=betas, momentum_decay=st.floats(0.0, 0.1), weight_decay=decays, decoupled_weight_decay=decoupled
    ),
    torch.optim.RAdam: options_of(betas=betas, weight_decay=decays, decoupled_weight_decay=decoupled),
    torch.optim.Adamax: options_of(betas=betas, weight_decay=decays),
    torch.optim.ASGD: options_of(
        lambd=st.sampled_from([1e-4, 0.1]),
        alpha=st.floats(0.1, 1.0),
        t0=st.sampled_from([1e6, 2.0]),
        weight_decay=decays,
    ),
    torch.optim.Rprop: options_of(etas=st.tuples(st.floats(0.1, 0.9), st.floats(1.1, 1.5))),
    torch.optim.Adafactor: options_of(
        beta2_decay=st.floats(-1.0, -0.1), d=st.sampled_from([1.0, 2.0]), weight_decay=decays
    ),
}


@pytest.fixture
def double_counts() -> Any:
    """torch keeps some numbers of its state (products, rates) in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_counts")
@pytest.mark.parametrize("cls", FAMILIES, ids=lambda cls: cls.__name__)
@settings(deadline=None, max_examples=3)
@given(data=st.data(), before=st.sampled_from([0, 3]))
def test_param_groups_schedulers_and_earlier_steps(cls: Any, data: st.DataObject, before: int) -> None:
    """Two groups of different options, the third layer in none, a scheduler, steps taken before the conversion."""
    first, second = data.draw(FAMILIES[cls]), data.draw(FAMILIES[cls])
    module = make_module()
    optimizer = two_groups(module, cls, second, **first)
    for step in range(before):
        torch_step(module, optimizer, step)
    converted = from_torch(optimizer, names_of(module))
    params = params_of(module)
    state = converted.carry_over(converted.tx.init(params))
    scheduler = lr_scheduler.CosineAnnealingWarmupLR(optimizer, 8, warmup_steps=3)
    for step in range(before, before + 8):
        params, state = pure_step(converted, params, state, step)
        torch_step(module, optimizer, step)
        scheduler.step()
        assert_same(params, module)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_one_cycle_also_cycles_the_momentum(cls: type) -> None:
    module = make_module()
    options = {"momentum": 0.9, "nesterov": True} if cls is torch.optim.SGD else {}
    optimizer = two_groups(module, cls, {"lr": 0.02, "weight_decay": 0.2}, lr=0.05, **options)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 20)
    converted = from_torch(optimizer, names_of(module))
    params = params_of(module)
    state = converted.tx.init(params)
    for step in range(25):
        params, state = pure_step(converted, params, state, step)
        torch_step(module, optimizer, step)
        scheduler.step()
    assert_same(params, module)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_parameters_without_a_gradient_wait(cls: type) -> None:
    """Before and after the conversion, each parameter has the moments and the count of its own steps."""
    module = make_module()
    options = {"momentum": 0.9, "dampening": 0.5} if cls is torch.optim.SGD else {}
    optimizer = cls(module.parameters(), lr=0.05, weight_decay=0.1, **options)
    torch_step(module[:1], optimizer, 0)
    torch_step(module[:2], optimizer, 1)
    converted = from_torch(optimizer, names_of(module))
    params = params_of(module)
    state = converted.carry_over(converted.tx.init(params))
    for step in range(2, 10):
        optimizer.zero_grad()
        reached = {name: value for name, value in params.items() if name.startswith(str(step % 3))}
        grads = {name: grad_of(name, value, step) if name in reached else None for name, value in params.items()}
        updates, state = converted.tx.update(grads, converted.refresh(state), params)
        params = optim.apply_updates(params, updates)
        for name, parameter in module.named_parameters():
            if name in reached:
                parameter.grad = grad_of(name, parameter, step)
        optimizer.step()
        assert_same(params, module)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_flat_and_traced_with_hyperparameters_as_inputs(cls: type) -> None:
    """One graph over a state's storage serves every step, whatever the schedulers write."""
    module = make_module()
    optimizer = two_groups(module, cls, {"lr": 0.02}, lr=0.05, **({"momentum": 0.9} if cls is torch.optim.SGD else {}))
    for step in range(3):
        torch_step(module, optimizer, step)
    converted = from_torch(optimizer, names_of(module))
    plain = params_of(module)
    layout = flat.plan(plain, tree.unflatten(tree.structure(plain), optim.leaf_labels(converted.tx, plain)))
    assert all(len(slots) == 1 for slots in layout.buckets.values())  # each parameter counts its own steps
    params = flat.ravel(plain, layout)
    state = converted.carry_over(converted.tx.init(params))
    leaves, structure = tree.flatten((tree.map(torch.clone, params), state, params))

    def update(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return tree.leaves(converted.tx.update(*tree.unflatten(structure, tensors)))

    graph = make_fx(update, tracing_mode="fake")(*leaves)
    out = tree.structure((params, state))
    scheduler = lr_scheduler.StepLR(optimizer, 20, gamma=0.8)
    for step in range(3, 13):
        grads = flat.ravel({name: grad_of(name, value, step) for name, value in flat.unravel(params).items()}, layout)
        updates, state = tree.unflatten(out, graph(*tree.leaves((grads, converted.refresh(state), params))))
        params = optim.apply_updates(params, updates)
        torch_step(module, optimizer, step)
        scheduler.step()
    assert_same(flat.unravel(params), module)


def test_the_torch_optimizer_is_left_alone() -> None:
    module = make_module()
    optimizer = torch.optim.AdamW(module.parameters())
    torch_step(module, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict())
    converted = from_torch(optimizer, names_of(module))
    params = params_of(module)
    state = converted.carry_over(converted.tx.init(params))
    for step in range(3):
        params, state = pure_step(converted, params, state, step)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, values in before["state"].items():
        for key, value in values.items():
            assert torch.equal(after["state"][index][key], value)


def test_adam_with_decoupled_decay_is_adamw() -> None:
    module = make_module()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1, weight_decay=0.3, decoupled_weight_decay=True)
    converted = from_torch(optimizer, names_of(module))
    params = params_of(module)
    state = converted.tx.init(params)
    for step in range(5):
        params, state = pure_step(converted, params, state, step)
        torch_step(module, optimizer, step)
    assert_same(params, module)


def test_other_optimizers_are_refused_by_name() -> None:
    class Mine(torch.optim.Adam):
        pass

    module = make_module()
    with pytest.raises(
        TypeError,
        match=r"got .*Mine, expected one of torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, .*fb.optimizers",
    ):
        from_torch(Mine(module.parameters()), names_of(module))
    with pytest.raises(TypeError, match=r"got torch.optim.lbfgs.LBFGS"):
        from_torch(torch.optim.LBFGS(module.parameters()), names_of(module))
    with pytest.raises(TypeError, match=r"got torch.optim.sparse_adam.SparseAdam"):
        from_torch(torch.optim.SparseAdam(module.parameters()), names_of(module))


def test_what_cannot_be_converted_is_named() -> None:
    module, other = make_module(), make_module()
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['params'\]\[0\], of shape \(4, 3\), is no parameter"):
        from_torch(torch.optim.SGD(other.parameters(), lr=0.1), names_of(module))

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    converted = from_torch(optimizer, names_of(module))
    state = converted.tx.init(params_of(module))
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="expected those it was converted with"):
        converted.refresh(state)

    optimizer = torch.optim.Adam(module[:1].parameters())
    torch_step(module[:1], optimizer, 0)
    converted = from_torch(optimizer, names_of(module))
    shards = {name: value[:1] for name, value in params_of(module).items()}
    with pytest.raises(ValueError, match=r"0.bias: the optimizer's exp_avg has shape \(4,\), expected \(1,\)"):
        converted.carry_over(converted.tx.init(shards))
