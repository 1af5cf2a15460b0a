"""torch optimizers as pure transformations: param groups kept, each parameter with a state of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from functional_booster.kernels import flat, tree

from . import optim
from .optim.base import Tree, device_of, is_flat
from .optim.inject import hyperparameter
from .optimizer_families import OF_TORCH, Family
from .pure_optimizer import PureOptimizer


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

    The tree may be a Flat in which each leaf lies alone, as it is or in a buffer that ranks share: what a leaf's state
    has of one dim is then laid out like the leaf. Before a step, ``refresh(state)`` brings in what schedulers wrote
    into ``optimizer.param_groups`` (learning rate, momentum or betas, weight decay); after ``tx.init``,
    ``carry_over(state)`` goes on from steps already taken. Parameters that are in no group stay as they are; so do,
    with their state, those whose gradient is None. Known are the classes of torch.optim but for SparseAdam and LBFGS,
    exactly and no subclass, and those of ``fb.optimizers``; raises TypeError at another one, ValueError for a
    parameter without a name.
    """
    family = _family_of(optimizer)
    groups, parameters = _groups(optimizer, names)
    fixed = [family.fixed(group) for group in optimizer.param_groups]
    across = family.across(optimizer)

    def build(hyperparams: tuple[dict[str, Any], ...]) -> list[optim.GradientTransformation]:
        return [family.build({**values, **still}) for values, still in zip(hyperparams, fixed, strict=True)]

    def read(device: torch.device) -> tuple[dict[str, torch.Tensor], ...]:
        now = [family.fixed(group) for group in optimizer.param_groups]
        if now != fixed:
            raise ValueError(
                f"the optimizer's param groups have the options {now}, expected those it was converted with, {fixed}"
            )
        numbers = (family.numbers(group) for group in optimizer.param_groups)
        return tuple({key: hyperparameter(value, device) for key, value in group.items()} for group in numbers)

    def init(params: Tree) -> FromTorchState:
        hyperparams = read(device_of(params))
        txs = build(hyperparams)
        trained = {name: leaf for name, leaf in _named(params).items() if name in groups}
        if family.leafwise:
            _check_whole(trained, parameters)
        inner = {name: _stored(txs[groups[name]].init(leaf)) for name, leaf in trained.items()}
        return FromTorchState(hyperparams, inner)

    def update(updates: Tree, state: FromTorchState, params: Tree | None = None) -> tuple[Tree, FromTorchState]:
        txs = build(state.hyperparams)
        values = {} if params is None else _named(params)
        new, inner = {}, dict(state.inner)
        gradients = {name: leaf for name, leaf in _named(updates).items() if name in groups}
        if across is not None:
            gradients, _ = across.update(gradients, across.init(gradients))
        for name, gradient in gradients.items():
            past = _laid_out(inner[name], gradient)
            new[name], past = txs[groups[name]].update(gradient, past, values.get(name))
            inner[name] = _stored(past)
        return _like(updates, new), FromTorchState(state.hyperparams, inner)

    def refresh(state: FromTorchState) -> FromTorchState:
        return state._replace(hyperparams=read(device_of(state.hyperparams)))

    def carry_over(state: FromTorchState) -> FromTorchState:
        carry = _carry_over_own if isinstance(optimizer, PureOptimizer) else _carry_over
        past = {name: optimizer.state.get(parameters[name], {}) for name in state.inner}
        return state._replace(inner={name: carry(name, own, past[name]) for name, own in state.inner.items()})

    return FromTorch(optim.GradientTransformation(init, update, _alone), refresh, carry_over)


def _family_of(optimizer: torch.optim.Optimizer) -> Family:
    steps = (inspect.unwrap(cls.step) for cls in (type(optimizer), PureOptimizer))  # torch wraps them, class by class
    if isinstance(optimizer, PureOptimizer) and len(set(steps)) == 1:
        return optimizer.family
    if type(optimizer) not in OF_TORCH:
        known = ", ".join(f"torch.optim.{cls.__name__}" for cls in OF_TORCH)
        raise TypeError(
            f"optimizer: got {type(optimizer).__module__}.{type(optimizer).__qualname__}, expected one of {known}, or "
            "of fb.optimizers"
        )
    return OF_TORCH[type(optimizer)]


def _alone(abstract: Tree) -> Tree:
    """Labels by which each leaf keeps its own shape: each counts its own steps."""
    return tree.map(lambda _: None, abstract)


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


def _check_whole(leaves: Mapping[str, Any], parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise ValueError for a leaf that has another shape than the parameter: norms and matrices need to know how a part
    lies in the whole."""
    for name, leaf in leaves.items():
        shape = tuple(next(iter(leaf.layout.slots)).shape if is_flat(leaf) else leaf.shape)
        if shape != tuple(parameters[name].shape):
            raise ValueError(
                f"{name}: shape {shape}, expected the parameter's, {tuple(parameters[name].shape)}: this optimizer is "
                "not elementwise, and a part of a leaf must come in a Flat, which says how it lies"
            )


def _named(values: Tree) -> dict[str, Any]:
    """{name: leaf} of a plain tree or of a Flat, without what is None; what lies in a buffer as a Flat of its own."""
    if not is_flat(values):
        return tree.named_leaves(values)
    present = [slot for slot in values.layout.slots if values.buffers[slot.bucket] is not None]
    return {slot.name: _lone(values, slot) for slot in present}


def _lone(values: flat.Flat, slot: flat.Slot) -> Any:
    """A leaf that lies alone: as a tensor in its own shape, or as a Flat."""
    bucket, layout = slot.bucket, values.layout
    if slot.offset is None:
        return values.buffers[bucket]
    if len(layout.buckets[bucket]) > 1:
        raise ValueError(f"{slot.name}: it shares the bucket {bucket!r}, but each parameter has a state of its own")
    own = replace(
        layout,
        structure=tree.structure(0),
        slots=(replace(slot, name=""),),
        split=tuple(pair for pair in layout.split if pair[0] == bucket),
        host=tuple(name for name in layout.host if name == bucket),
        kept=tuple(name for name in layout.kept if name == bucket),
    )
    return flat.Flat({bucket: values.buffers[bucket]}, own)


def _like(values: Tree, named: dict[str, Any]) -> Tree:
    """The inverse of ``_named``: a tree of the structure of ``values``, zeros for what is not in ``named``."""
    if not is_flat(values):
        return tree.map_with_name(lambda name, leaf: named[name] if name in named else torch.zeros_like(leaf), values)

    def buffer(slot: flat.Slot) -> torch.Tensor | None:
        given = values.buffers[slot.bucket]
        if given is None or slot.name not in named:
            return None if given is None else torch.zeros_like(given)
        return _stored(named[slot.name])

    return flat.Flat({slot.bucket: buffer(slot) for slot in values.layout.slots}, values.layout)


def _stored(state: Tree) -> Tree:
    """A leaf's state as it is kept: bare tensors, whether the leaf has its shape or lies in a buffer."""
    return tree.map(lambda node: next(iter(node.buffers.values())) if is_flat(node) else node, state, is_leaf=is_flat)


def _laid_out(state: Tree, like: Any) -> Tree:
    """The inverse of ``_stored``: what a leaf in a buffer has of one dim lies like it; counts and factors do not."""
    if not is_flat(like):
        return state
    (bucket,) = like.buffers
    return tree.map(lambda leaf: flat.Flat({bucket: leaf}, like.layout) if leaf.dim() == 1 else leaf, state)


_PAST: dict[type, dict[str, str]] = {  # {state: {its field: the key in the state of a torch optimizer}}
    optim.AsgdState: {"eta": "eta", "mu": "mu", "ax": "ax"},
    optim.FactoredState: {"row": "row_var", "col": "col_var", "full": "variance"},
    optim.RpropState: {"step_sizes": "step_size", "prev": "prev"},
    optim.ScaleByAdadeltaState: {"e_g": "square_avg", "e_x": "acc_delta"},
    optim.ScaleByAdamState: {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"},
    optim.ScaleByLearningRateState: {},
    optim.ScaleByMuonState: {"mu": "momentum_buffer"},
    optim.ScaleByNadamState: {"mu": "exp_avg", "nu": "exp_avg_sq", "mu_product": "mu_product"},
    optim.ScaleByRmsState: {"nu": "square_avg", "mu": "grad_avg"},
    optim.ScaleByRssState: {"sum_of_squares": "sum"},
    optim.ScaleByScheduleState: {},
    optim.TraceState: {"trace": "momentum_buffer"},
}


def _carry_over(name: str, state: Tree, past: Mapping[str, Any]) -> Tree:
    """A parameter's state with the moments and the count of torch's state of it, ``past``."""

    def filled(like: Any, key: str) -> torch.Tensor | None:
        value = past.get("exp_inf" if key == "exp_avg_sq" and "exp_inf" in past else key)
        if like is None or value is None:
            return like
        if value.shape != like.shape:
            raise ValueError(
                f"{name}: the optimizer's {key} has shape {tuple(value.shape)}, expected {tuple(like.shape)}"
            )
        return value.detach().to(like.device, like.dtype, copy=True)

    def carry(node: Any) -> Any:
        if type(node) not in _PAST or not past:
            return node
        changes = {field: filled(getattr(node, field), key) for field, key in _PAST[type(node)].items()}
        if "count" in node._fields:
            has_buffer = past.get("momentum_buffer") is not None
            done = int(past["step"]) if "step" in past else int(has_buffer)  # SGD counts nothing: what has begun
            changes["count"] = torch.full_like(node.count, done)
        return node._replace(**changes)

    return tree.map(carry, state, is_leaf=lambda node: type(node) in _PAST)


def _carry_over_own(name: str, state: Tree, past: Mapping[str, Any]) -> Tree:
    """As ``_carry_over``, of the state of a PureOptimizer, which has the same leaves."""

    def filled(key: str, like: torch.Tensor) -> torch.Tensor:
        value = past[key]
        if value.shape != like.shape:
            raise ValueError(
                f"{name}: the optimizer's {key} has shape {tuple(value.shape)}, expected {tuple(like.shape)}"
            )
        return value.detach().to(like.device, like.dtype, copy=True)

    return tree.map_with_name(filled, state) if past else state
