"""torch.optim optimizers as pure transformations, param groups kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from functional_booster.kernels import flat, tree

from . import optim
from .optim.base import Tree, device_of
from .optim.inject import hyperparameter

FROZEN = "frozen"


class FromTorchState(NamedTuple):
    """The hyperparameters of the next update, one dict a param group, and the state of the groups' transformations."""

    hyperparams: tuple[dict[str, torch.Tensor], ...]  # each () float64
    inner: optim.PartitionState


class FromTorch(NamedTuple):
    """What ``from_torch`` returns."""

    tx: optim.GradientTransformation
    refresh: Callable[[FromTorchState], FromTorchState]  # the state with the hyperparameters that param_groups hold now
    carry_over: Callable[[FromTorchState], FromTorchState]  # the state with the moments of the optimizer's own state


def from_torch(optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]) -> FromTorch:
    """The transformation over the {name: tensor} tree that updates as ``optimizer`` does, group by group.

    Before a step, ``refresh(state)`` brings in what schedulers wrote into ``optimizer.param_groups`` (learning rate,
    momentum or betas, weight decay); after ``tx.init``, ``carry_over(state)`` goes on from steps already taken.
    Parameters that are in no group or do not require a gradient stay as they are. SGD, Adam and AdamW are known,
    exactly and no subclass; raises TypeError at another one, ValueError for a parameter without a name.
    """
    if type(optimizer) not in _KNOWN:
        known = ", ".join(f"torch.optim.{cls.__name__}" for cls in _KNOWN)
        raise TypeError(
            f"optimizer: got {type(optimizer).__module__}.{type(optimizer).__qualname__}, expected one of {known}"
        )
    family = _KNOWN[type(optimizer)]
    labels, parameters = _labels(optimizer, names)
    options = [family.options(group) for group in optimizer.param_groups]

    def label_tree(params: Tree) -> Tree:
        return tree.map_with_name(lambda name, _: labels.get(name, FROZEN), params)

    def build(hyperparams: tuple[dict[str, Any], ...]) -> optim.GradientTransformation:
        groups = {
            str(index): family.build(values, option)
            for index, (values, option) in enumerate(zip(hyperparams, options, strict=True))
        }
        return optim.partition({**groups, FROZEN: optim.set_to_zero()}, label_tree)

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
        return FromTorchState(hyperparams, build(hyperparams).init(params))

    def update(updates: Tree, state: FromTorchState, params: Tree | None = None) -> tuple[Tree, FromTorchState]:
        updates, inner = build(state.hyperparams).update(updates, state.inner, params)
        return updates, FromTorchState(state.hyperparams, inner)

    def refresh(state: FromTorchState) -> FromTorchState:
        return state._replace(hyperparams=read(device_of(state.hyperparams)))

    def carry_over(state: FromTorchState) -> FromTorchState:
        states = dict(state.inner.inner_states)
        for index in map(str, range(len(options))):
            past = {name: optimizer.state.get(parameters[name], {}) for name, label in labels.items() if label == index}
            states[index] = _carry_over(states[index], past)
        return state._replace(inner=optim.PartitionState(states))

    plain = tuple(family.hyperparams(group) for group in optimizer.param_groups)
    return FromTorch(optim.GradientTransformation(init, update, build(plain).groups), refresh, carry_over)


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


def _labels(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]
) -> tuple[dict[str, str], dict[str, torch.nn.Parameter]]:
    """{name: number of its param group} and {name: parameter} of the parameters that are trained."""
    labels, parameters = {}, {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            if parameter not in names:
                raise ValueError(
                    f"param_groups[{index}]['params'][{position}], of shape {tuple(parameter.shape)}, is no parameter "
                    "of the model: build the optimizer from the model's parameters"
                )
            labels[names[parameter]], parameters[names[parameter]] = str(index), parameter
    return labels, parameters


def _carry_over(state: Tree, past: dict[str, dict[str, Any]]) -> Tree:
    """A group's state with the moments that torch's state ``past``, {name: its state}, holds."""

    def carry(node: Any) -> Any:
        if isinstance(node, optim.ScaleByAdamState):
            moments = {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"}
            steps = {name: int(values.get("step", 0)) for name, values in past.items()}
        elif isinstance(node, optim.TraceState):
            moments = {"trace": "momentum_buffer"}
            steps = {name: int(values.get("momentum_buffer") is not None) for name, values in past.items()}
        else:
            return node
        if not any(steps.values()):
            return node
        first, count = next(iter(steps.items()))
        for name, step in steps.items():
            if step != count:
                raise ValueError(
                    f"the optimizer's state counts {count} steps for {first!r} and {step} for {name!r}, expected one "
                    "count a param group: put parameters that began at different times into different groups"
                )
        filled = {
            field: _filled(getattr(node, field), past, key)
            for field, key in moments.items()
            if getattr(node, field) is not None
        }
        return node._replace(count=torch.full_like(node.count, count), **filled)

    return tree.map(carry, state, is_leaf=lambda node: isinstance(node, (optim.ScaleByAdamState, optim.TraceState)))


def _filled(like: Tree, past: dict[str, dict[str, Any]], key: str) -> Tree:
    """A tree like ``like``, plain or with Flats, holding ``past[name][key]`` at each name."""

    def copied(name: str, place: torch.Tensor) -> torch.Tensor:
        value = past[name][key]
        if value.shape != place.shape:
            raise ValueError(
                f"{name}: the optimizer's {key} has shape {tuple(value.shape)}, expected {tuple(place.shape)}"
            )
        return place.copy_(value.detach())

    def fill(name: str, node: Any) -> Any:
        if not isinstance(node, flat.Flat):
            return copied(name, node.clone())
        buffers = {bucket: None if buffer is None else buffer.clone() for bucket, buffer in node.buffers.items()}
        for slot in node.layout.slots:
            buffer = buffers[slot.bucket]
            if buffer is not None:
                place = buffer if slot.offset is None else buffer.narrow(0, slot.offset, slot.size).view(slot.shape)
                copied(f"{name}.{slot.name}" if name else slot.name, place)
        return flat.Flat(buffers, node.layout)

    return tree.map_with_name(fill, like, is_leaf=lambda node: isinstance(node, flat.Flat))
