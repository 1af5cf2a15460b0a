"""The train step: pure functions from (state, batch) to (state, metrics), in three parts.

``gradients`` of one microbatch, ``add`` over microbatches, ``update`` of the state. One batch is one graph; with
accumulation there are two, the microbatch (added to the sums so far) and the update.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_booster import optim
from functional_booster.kernels import flat, graph, random, transforms, tree
from functional_booster.precision import LossScale, MixedPrecision, Policy, autocasting, cast, stochastic_round
from functional_booster.sharding import environment, shards, tensor
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.collectives import axis_index, axis_size, pmax, psum
from functional_booster.sharding.mesh import own, spmd

from .loss_call import LossFn, evaluate
from .plugins import Plugin
from .state import TrainState, assemble, on_ranks

Tree = tree.Tree
Metrics = dict[str, torch.Tensor]
_ROUNDING = 1 << 61  # folded into a step's key for rounding: no place in the batch is so large


@dataclass(frozen=True)
class Sums:
    """What microbatches add up to: gradients, loss sum, weight, aux times weight, and the newest buffers.

    ``counted``: how many of this rank's microbatches counted (0-d float64).
    Where the loss is scaled, the gradients are those of its mean, over ``share`` (the weight a data rank has on
    average), so that their range is the mean's, too; else ``share`` is None, and they are those of the sum.
    """

    grads: Tree
    loss: torch.Tensor
    weight: torch.Tensor
    aux: dict[str, torch.Tensor]
    buffers: Tree
    counted: torch.Tensor | float = 1.0
    share: torch.Tensor | None = None


tree.register(Sums, ("grads", "loss", "weight", "aux", "buffers", "counted", "share"))


@dataclass(frozen=True)
class Prepared:
    """The parameters as a plugin prepares them for the microbatches of one step."""

    trained: flat.Flat
    frozen: flat.Flat | None


tree.register(Prepared, ("trained", "frozen"))


@dataclass(frozen=True)
class Recipe:
    """What a step is made of; static."""

    loss_fn: LossFn
    tx: optim.GradientTransformation
    precision: MixedPrecision
    accumulate: int = 1
    max_norm: float | None = None
    skip_nonfinite: bool = True

    @property
    def policy(self) -> Policy:
        """The precision's dtypes."""
        return self.precision.policy

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise TypeError(
                f"loss_fn: {type(self.loss_fn).__name__}, expected a function (params, batch, key) -> (sum, weight)"
            )
        if not isinstance(self.accumulate, int) or isinstance(self.accumulate, bool) or self.accumulate < 1:
            raise ValueError(f"accumulate: {self.accumulate!r}, expected a whole number of microbatches, at least 1")
        is_number = isinstance(self.max_norm, int | float) and not isinstance(self.max_norm, bool)
        if self.max_norm is not None and not (is_number and self.max_norm > 0):
            raise ValueError(f"max_norm: {self.max_norm!r}, expected a positive number, or None for no clipping")


def gradients(
    recipe: Recipe,
    state: TrainState,
    prepared: Prepared,
    batch: Tree,
    microbatch: int | torch.Tensor = 0,
    counts: torch.Tensor | None = None,
) -> Sums:
    """Gradients of the loss sum with respect to what was prepared, reduced as the plugin does, and the sums beside it.

    Rows of one place in the global batch have one key, however many ranks and microbatches it is split into. All is 0
    of a rank on which ``counts`` (0-d bool) is False; its collectives are those of the others.
    """
    plugin, axes = state.plan.plugin, state.plan.plugin.data_axes
    place = axis_index(axes) * recipe.accumulate + microbatch if axes else microbatch
    key = random.fold_in(random.fold_in(state.key, state.position), place)

    def objective(trained: flat.Flat) -> tuple[torch.Tensor, Any]:
        params = gathered(recipe.precision, plugin, Prepared(trained, prepared.frozen))
        with computing(recipe.precision, state):
            loss, weight, aux, buffers = evaluate(recipe.loss_fn, params, batch, key, state.buffers, counts)
        if recipe.precision.scaling is None:
            return loss, (loss, weight, aux, buffers, None)
        scaled, share = _scaled_loss(loss, weight, state.loss_scale, axes)
        return scaled, (loss, weight, aux, buffers, share)

    grads, (_, (loss, weight, aux, buffers, share)) = transforms.grad_and_value(objective, has_aux=True)(
        prepared.trained
    )
    grads = plugin.reduce(grads, recipe.policy)
    grads = cast(grads, recipe.policy.accumulate) if recipe.accumulate > 1 else grads
    counted = torch.ones_like(weight) if counts is None else counts.to(weight.dtype)
    return Sums(grads, loss, weight, {name: value * weight for name, value in aux.items()}, buffers, counted, share)


@contextlib.contextmanager
def computing(precision: MixedPrecision, state: TrainState) -> Generator[None]:
    """Around a loss function or a module: inputs come, and ops run, in the precision's dtypes."""
    compute = precision.policy.compute if precision.cast_inputs else None
    plugin = state.plan.plugin
    bound = {"data_axes": plugin.data_axes, "token_axes": getattr(plugin, "token_axes", ())}
    with environment.bind(compute=compute, **bound), autocasting(precision.autocast, state.step.device.type):
        yield


def _scaled_loss(
    loss: torch.Tensor, weight: torch.Tensor, scale: LossScale, axes: tuple[str, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss times the scale, and the weight that it is a mean over: of a data rank, on average."""
    weight = weight.detach()  # a scale, whatever it depends on
    share = psum(weight, axes) / axis_size(axes) if axes else weight
    share = torch.where(share > 0, share, 1.0)
    return loss * (scale.factor / share).to(loss.dtype), share


def prepare(policy: Policy, state: TrainState) -> Prepared:
    """What the microbatches of one step have in common: the parameters as the plugin prepares them."""

    def prepared(storage: flat.Flat) -> flat.Flat:
        return state.plan.plugin.prepare(shards.on_device(storage, state.step.device), policy)

    return Prepared(prepared(state.storage), None if state.frozen is None else prepared(state.frozen))


def gathered(precision: MixedPrecision, plugin: Plugin, prepared: Prepared) -> Tree:
    """The parameter tree that the loss sees."""
    policy = precision.policy
    frozen = None if prepared.frozen is None else plugin.gather(prepared.frozen, policy)
    params = assemble(plugin.gather(prepared.trained, policy), frozen)
    layouts = [part.layout for part in (prepared.trained, prepared.frozen) if part is not None]
    params = tensor.own_parts(params, layouts)
    if precision.fp8 is None:
        return params
    return precision.fp8.mark(params, frozenset().union(*(layout.kept_names for layout in layouts)))


def describe(recipe: Recipe, state: TrainState, prepared: Prepared, batch: Tree) -> Sums:
    """The sums of a microbatch as ArrayInfo; nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = tree.map(
            lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, (state, prepared, batch)
        )
        sums = spmd(functools.partial(gradients, recipe), state.plan.mesh)(on_ranks(fakes[0]), *fakes[1:])
    return tree.map(ArrayInfo.of, replace(sums, buffers=None))


def zeros(described: Sums, state: TrainState) -> Sums:
    """The sums over no microbatch, in fresh storage."""
    buffers = spmd(lambda state: state.buffers, state.plan.mesh)(on_ranks(state))
    fresh = tree.map(lambda info: torch.zeros(info.shape, dtype=info.dtype, device=state.step.device), described)
    return replace(fresh, buffers=own(buffers))


def add(sums: Sums, more: Sums) -> Sums:
    """The sums of both; buffers are the later ones."""
    loss, weight, aux, counted = tree.map(torch.add, *((s.loss, s.weight, s.aux, s.counted) for s in (sums, more)))
    if sums.share is None or more.share is None:
        return Sums(tree.map(torch.add, sums.grads, more.grads), loss, weight, aux, more.buffers, counted)
    share = sums.share + more.share
    grads = tree.map(lambda a, b: a * (sums.share / share) + b * (more.share / share), sums.grads, more.grads)
    return Sums(grads, loss, weight, aux, more.buffers, counted, share)


def totals(sums: Sums, axes: tuple[str, ...]) -> Sums:
    """The scalars summed over the data ranks, in one psum; gradients and buffers as they are."""
    if not axes:
        return sums
    scalars, structure = tree.flatten((sums.loss, sums.weight, sums.aux))
    added = psum(torch.stack([scalar.to(torch.float64) for scalar in scalars]), axes).unbind()
    loss, weight, aux = tree.unflatten(structure, [x.to(y.dtype) for x, y in zip(added, scalars, strict=True)])
    return replace(sums, loss=loss, weight=weight, aux=aux)


def agreed(new: Tree, old: Tree, axes: tuple[str, ...], counted: torch.Tensor | float = 1.0) -> Tree:
    """Buffers that all data ranks have: ``old`` plus the mean of what each changed, in one psum; the most counted.

    The mean is over the ranks of which microbatches ``counted``. What no rank changed stays to the bit.
    """
    leaves, structure = tree.flatten(new)
    before = tree.leaves(old)
    if not axes or not leaves:
        return new
    is_complex = [leaf.is_complex() for leaf in leaves]
    leaves, before = (
        [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in each] for each in (leaves, before)
    )
    floats = [place for place, leaf in enumerate(leaves) if leaf.is_floating_point()]
    if floats:
        pairs = [(leaves[place].to(torch.float64), before[place].to(torch.float64)) for place in floats]
        changes = [torch.where(leaf == was, 0, leaf - was).reshape(-1) for leaf, was in pairs]
        has_rows = (torch.as_tensor(counted, dtype=torch.float64, device=changes[0].device) > 0).to(torch.float64)
        *sums, ranks = psum(torch.cat([*changes, has_rows.reshape(1)]), axes).split([*map(torch.numel, changes), 1])
        means = [total / ranks for total in sums]
        for place, mean, (leaf, was) in zip(floats, means, pairs, strict=True):
            leaves[place] = (was + mean.view(leaf.shape)).to(leaves[place].dtype)
    leaves = [leaf if leaf.is_floating_point() else pmax(leaf, axes) for leaf in leaves]
    leaves = [torch.view_as_complex(leaf) if pair else leaf for leaf, pair in zip(leaves, is_complex, strict=True)]
    return tree.unflatten(structure, leaves)


def update(recipe: Recipe, state: TrainState, sums: Sums) -> tuple[TrainState, Metrics]:
    """Divide by the weight once, clip, apply the optimizer; a step whose gradients are not finite changes nothing but
    the loss scale."""
    plugin, scaling = state.plan.plugin, recipe.precision.scaling
    sums = replace(totals(sums, plugin.data_axes), grads=plugin.sync(sums.grads, recipe.policy))
    inverse = _inverse(sums.weight)
    unscaled = inverse if sums.share is None else inverse * (sums.share / state.loss_scale.factor)
    norm = optim.global_norm(sums.grads).to(torch.float64) * unscaled
    factor = 1.0 if recipe.max_norm is None else (recipe.max_norm / (norm + 1e-6)).clamp_max(1.0)
    finite = norm.isfinite() & sums.weight.isfinite() & (sums.weight >= 0)
    skips = recipe.skip_nonfinite or scaling is not None
    try:
        updated, opt_state = _applied(recipe, state, sums.grads, factor * unscaled, finite if skips else None)
    except Exception as error:
        _check_opt_state(recipe, state, error)
        raise
    storage = plugin.settle(updated, state.step + 1)
    buffers = agreed(sums.buffers, state.buffers, plugin.data_axes, sums.counted)
    if skips:
        storage = storage if storage is updated else select(finite, storage, updated)
        buffers = select(finite, buffers, state.buffers)
    done = finite.to(state.step.dtype) if skips else torch.ones_like(state.step)
    new = state.replace(
        step=state.step + done,
        position=state.position + 1,
        storage=storage,
        opt_state=opt_state,
        buffers=buffers,
        loss_scale=state.loss_scale if scaling is None else scaling.update(state.loss_scale, finite),
    )
    metrics = {
        "loss": (sums.loss * inverse).to(sums.loss.dtype),
        "grad_norm": norm.to(sums.loss.dtype),
        "tokens": sums.weight,
        "skipped": 1.0 - done.to(torch.float32),
        "loss_scale": state.loss_scale.factor,
        **{name: (value * inverse).to(sums.loss.dtype) for name, value in sums.aux.items()},
    }
    learning_rate = optim.learning_rate(opt_state)
    return new, metrics if learning_rate is None else {**metrics, "lr": learning_rate}


def _applied(
    recipe: Recipe, state: TrainState, grads: Tree, factor: torch.Tensor, finite: torch.Tensor | None
) -> tuple[flat.Flat, Tree]:
    """The storage and the optimizer's state after the update; those before it where ``finite`` (0-d bool) is False.

    What is stored in bfloat16 is rounded by chance, if the precision says so.
    """
    keys = _rounding_keys(state) if recipe.precision.stochastic_rounding else None
    if recipe.tx.fused is not None:
        here = shards.at_home(grads)  # each buffer is updated where it is stored
        return recipe.tx.fused(here, state.opt_state, state.storage, factor=factor, keep=finite, keys=keys)
    scaled = tree.map(lambda grad, leaf: _scaled(grad, factor, leaf.dtype), grads, state.storage)
    updates, opt_state = recipe.tx.update(shards.at_home(scaled), state.opt_state, state.storage)
    storage = optim.apply_updates(state.storage, updates) if keys is None else _rounded(state.storage, updates, keys)
    new, old = (storage, opt_state), (state.storage, state.opt_state)
    return new if finite is None else select(finite, new, old)


def _rounding_keys(state: TrainState) -> flat.Flat:
    """A key for each buffer of the storage that is in bfloat16; ranks that hold the same round alike, others apart."""
    key, layout = random.fold_in(random.fold_in(state.key, state.position), _ROUNDING), state.storage.layout

    def of(place: int, name: str, stored: torch.Tensor | None) -> torch.Tensor | None:
        if stored is None or stored.dtype != torch.bfloat16:
            return None
        axes = layout.axes[name]
        part = random.fold_in(random.fold_in(key, place), axis_index(axes) if axes else 0)
        return part.to(stored.device)

    buffers = enumerate(state.storage.buffers.items())
    return flat.Flat({name: of(place, name, stored) for place, (name, stored) in buffers}, layout)


def _rounded(storage: flat.Flat, updates: flat.Flat, keys: flat.Flat) -> flat.Flat:
    """The storage with the updates added, rounded by the keys that there are."""

    def added(stored: torch.Tensor, update: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        if key is None:
            return (stored + update).to(stored.dtype)
        return stochastic_round(stored.float() + update.float(), random.bits(key, tuple(stored.shape)))

    buffers = {
        name: stored
        if stored is None or updates.buffers[name] is None
        else added(stored, updates.buffers[name], keys.buffers[name])
        for name, stored in storage.buffers.items()
    }
    return flat.Flat(buffers, storage.layout)


def select(condition: torch.Tensor, new: Tree, old: Tree) -> Tree:
    """``new`` where the 0-d condition holds, else ``old``: decided on the device, by Python on the CPU."""
    if condition.device.type == "cpu" and not graph.transforms() and not graph.is_tracing():
        return new if bool(condition) else old
    return tree.map(
        lambda a, b: torch.where(condition.to(a.device), a, b) if isinstance(a, torch.Tensor) else a,
        new,
        old,
    )


def mean(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``total / weight``, 0 for no weight."""
    return (total * _inverse(weight)).to(total.dtype)


def _check_opt_state(recipe: Recipe, state: TrainState, error: Exception) -> None:
    """Raise ValueError if the state's optimizer state is not one of this optimizer."""
    expected, given = tree.structure(recipe.tx.init(state.storage)), tree.structure(state.opt_state)
    if expected != given:
        raise ValueError(
            f"state.opt_state is not one of the optimizer that the step was built with: it has the structure {given}, "
            f"expected {expected}"
        ) from error


def _inverse(weight: torch.Tensor) -> torch.Tensor:
    """1 / weight, float64, 0 where the weight is 0."""
    return torch.where(weight != 0, 1 / torch.where(weight != 0, weight, 1), 0).to(torch.float64)


def _scaled(grad: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product in float32 at least, so that a factor beyond the range of half precision is none."""
    wide = torch.promote_types(dtype, torch.float32)
    return (grad.to(wide) * factor.to(wide)).to(dtype)
