"""torch.optim optimizers as pure transformations: param groups kept, each parameter with a state of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from functional_booster.kernels import flat, tree

from . import optim
from .optim.base import Tree, device_of
from .optim.inject import hyperparameter


class FromTorchState(NamedTuple):
    """The hyperparameters of the next update, one dict a param group, and each parameter's own state."""

    hyperparams: tuple[dict[str, torch.Tensor], ...]  # each () float64
    inner: dict[str, Tree]  # {name: state}; as in torch, each parameter counts its own steps


class FromTorch(NamedTuple):
    """What ``from_torch`` returns."""

    tx: optim.GradientTransformation
    refresh: Callable[[FromTorchState], FromTorchState]  # the state with the hyperparameters that param_groups hold now
    carry_over: Callable[[FromTorchState], FromTorchState]  # the state with the moments of the optimizer's own state


def from_torch(optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]) -> FromTorch:
    """The transformation over the {name: tensor} tree that updates as ``optimizer`` does, parameter by parameter.

    Before a step, ``refresh(state)`` brings in what schedulers wrote into ``optimizer.param_groups`` (learning rate,
    momentum or betas, weight decay); after ``tx.init``, ``carry_over(state)`` goes on from steps already taken.
    Parameters that are in no group stay as they are; so do, with their state, those whose gradient is None. SGD, Adam
    and AdamW are known, exactly and no subclass; raises TypeError at another one, ValueError for a parameter without a
    name.
    """
    if type(optimizer) not in _KNOWN:
        known = ", ".join(f"torch.optim.{cls.__name__}" for cls in _KNOWN)
        raise TypeError(
            f"optimizer: got {type(optimizer).__module__}.{type(optimizer).__qualname__}, expected one of {known}"
        )
    family = _KNOWN[type(optimizer)]
    groups, parameters = _groups(optimizer, names)
    options = [family.options(group) for group in optimizer.param_groups]

    def build(hyperparams: tuple[dict[str, Any], ...]) -> list[optim.GradientTransformation]:
        return [family.build(values, option) for values, option in zip(hyperparams, options, strict=True)]

    def read(device: torch.device) -> tuple[dict[str, torch.Tensor], ...]:
        now = [family.options(group) for group in optimizer.param_groups]
        if now != options:
            raise ValueError(
                f"the optimizer's param groups have the options {now}, expected those it was converted with, {options}"
            )
        numbers = (family.hyperparams(group) for group in optimizer.param_groups)
        return tuple({key: hyperparameter(value, device) for key, value in group.items()} for group in numbers)

    def init(params: Tree) -> FromTorchState:
        hyperparams = read(device_of(params))
        txs = build(hyperparams)
        trained = {name: leaf for name, leaf in _named(params).items() if name in groups}
        return FromTorchState(hyperparams, {name: txs[groups[name]].init(leaf) for name, leaf in trained.items()})

    def update(updates: Tree, state: FromTorchState, params: Tree | None = None) -> tuple[Tree, FromTorchState]:
        txs = build(state.hyperparams)
        values = {} if params is None else _named(params)
        new, inner = {}, dict(state.inner)
        for name, gradient in _named(updates).items():
            if name in groups:
                new[name], inner[name] = txs[groups[name]].update(gradient, inner[name], values.get(name))
            else:
                new[name] = torch.zeros_like(gradient)
        return _like(updates, new), FromTorchState(state.hyperparams, inner)

    def refresh(state: FromTorchState) -> FromTorchState:
        return state._replace(hyperparams=read(device_of(state.hyperparams)))

    def carry_over(state: FromTorchState) -> FromTorchState:
        past = {name: optimizer.state.get(parameters[name], {}) for name in state.inner}
        return state._replace(inner={name: _carry_over(name, own, past[name]) for name, own in state.inner.items()})

    return FromTorch(optim.GradientTransformation(init, update), refresh, carry_over)


class _Family(NamedTuple):
    options: Callable[[dict[str, Any]], dict[str, Any]]  # what is fixed for good, from a param group
    hyperparams: Callable[[dict[str, Any]], dict[str, Any]]  # what a scheduler may change, from a param group
    build: Callable[[dict[str, Any], dict[str, Any]], optim.GradientTransformation]


def _sgd_options(group: dict[str, Any]) -> dict[str, Any]:
    return {"has_momentum": group["momentum"] != 0, **_pick(group, "dampening", "maximize", "nesterov")}


def _sgd_hyperparams(group: dict[str, Any]) -> dict[str, Any]:
    return _pick(group, "lr", "momentum", "weight_decay")


def _sgd(values: dict[str, Any], options: dict[str, Any]) -> optim.GradientTransformation:
    return optim.sgd(
        values["lr"],
        values["momentum"] if options["has_momentum"] else 0.0,
        options["nesterov"],
        dampening=options["dampening"],
        weight_decay=values["weight_decay"],
        maximize=options["maximize"],
    )


def _adam_options(group: dict[str, Any]) -> dict[str, Any]:
    return _pick(group, "amsgrad", "decoupled_weight_decay", "eps", "maximize")


def _adam_hyperparams(group: dict[str, Any]) -> dict[str, Any]:
    return {"b1": group["betas"][0], "b2": group["betas"][1], **_pick(group, "lr", "weight_decay")}


def _adam(values: dict[str, Any], options: dict[str, Any]) -> optim.GradientTransformation:
    alias = optim.adamw if options["decoupled_weight_decay"] else optim.adam
    return alias(
        values["lr"],
        values["b1"],
        values["b2"],
        options["eps"],
        weight_decay=values["weight_decay"],
        amsgrad=options["amsgrad"],
        maximize=options["maximize"],
    )


_ADAM = _Family(_adam_options, _adam_hyperparams, _adam)
_KNOWN: dict[type, _Family] = {
    torch.optim.SGD: _Family(_sgd_options, _sgd_hyperparams, _sgd),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
}


def _pick(group: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: group[key] for key in keys}


def _groups(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]
) -> tuple[dict[str, int], dict[str, torch.nn.Parameter]]:
    """{name: number of its param group} and {name: parameter}."""
    groups, parameters = {}, {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ValueError(
                    f"param_groups[{index}]['params'][{position}], of shape {tuple(parameter.shape)}, is no parameter "
                    "of the model: build the optimizer from the model's parameters"
                )
            groups[names[parameter]], parameters[names[parameter]] = index, parameter
    return groups, parameters


def _named(values: Tree) -> dict[str, torch.Tensor]:
    """{name: leaf} of a plain tree or of a Flat, without those that are None."""
    return tree.named_leaves(flat.unravel(values) if isinstance(values, flat.Flat) else values)


def _like(values: Tree, named: dict[str, torch.Tensor]) -> Tree:
    """The inverse of ``_named``: a tree of the structure of ``values``."""
    if not isinstance(values, flat.Flat):
        return tree.map_with_name(lambda name, _: named[name], values)
    leaves = [named.get(slot.name) for slot in values.layout.slots]
    return flat.ravel(tree.unflatten(values.layout.structure, leaves), values.layout)


def _carry_over(name: str, state: Tree, past: Mapping[str, Any]) -> Tree:
    """A parameter's state with the moments and the count of torch's state of it, ``past``."""

    def filled(like: torch.Tensor, key: str) -> torch.Tensor:
        value = past[key]
        if value.shape != like.shape:
            raise ValueError(
                f"{name}: the optimizer's {key} has shape {tuple(value.shape)}, expected {tuple(like.shape)}"
            )
        return value.detach().to(like.device, like.dtype, copy=True)

    def carry(node: Any) -> Any:
        if isinstance(node, optim.ScaleByAdamState) and "step" in past:
            count = torch.full_like(node.count, int(past["step"]))
            nu_max = None if node.nu_max is None else filled(node.nu_max, "max_exp_avg_sq")
            return node._replace(
                count=count, mu=filled(node.mu, "exp_avg"), nu=filled(node.nu, "exp_avg_sq"), nu_max=nu_max
            )
        if isinstance(node, optim.TraceState) and past.get("momentum_buffer") is not None:
            return node._replace(count=torch.ones_like(node.count), trace=filled(node.trace, "momentum_buffer"))
        return node

    return tree.map(carry, state, is_leaf=lambda node: isinstance(node, (optim.ScaleByAdamState, optim.TraceState)))
