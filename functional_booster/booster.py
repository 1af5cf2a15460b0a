"""Booster: composes a model, an optimizer, a precision and a plugin into a train step."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_booster import checkpoint, imperative, optim, step, watchdog
from functional_booster.kernels import flat, graph, random, transforms, tree
from functional_booster.precision import Policy, cast
from functional_booster.sharding import environment, shards
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.mesh import Replicated, own, spmd
from functional_booster.sharding.rows import microbatches, split_rows

from .donation import consume, consumed_by, refuse_consumed
from .jit import Jitted, jit
from .lowered import Lowered
from .models.model import Model
from .plugins import Plan, Plugin, max_norm_under, plan, policy_under
from .state import Abstract, TrainState, assemble, check_params, disassemble, on_ranks

Tree = tree.Tree


@dataclass(frozen=True)
class Booster:
    """``Booster(device=None, mixed_precision=None, plugin=None)``, Colossal-AI's entry point; it keeps no state.

    ``device``: where states live (None: the GPU if there is one, else the CPU). ``mixed_precision``: None, "fp32",
    "bf16" or a Policy. ``plugin``: None, one device, or how to lay a run out over many ranks: over ``mesh`` (a
    ``fb.virtual_mesh`` or a torch DeviceMesh), or, without one, over the processes of torch.distributed. Raises
    ValueError for an unknown name or device and for ranks that the plugin cannot lay out, TypeError for other types.
    """

    device: Any = None
    mixed_precision: str | Policy | None = None
    plugin: Plugin | None = None
    mesh: Any = None
    plan: Plan = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", _device(self.device))
        object.__setattr__(self, "plan", plan(self.plugin, self.mesh, self.device.type))
        object.__setattr__(self, "mesh", self.plan.mesh if self.plugin is not None else None)
        policy_under(self.plan.plugin, self.mixed_precision)

    @property
    def policy(self) -> Policy:
        """The dtypes that a step stores, computes and sums in."""
        return policy_under(self.plan.plugin, self.mixed_precision)

    def init(self, model: Model, tx: Any, *, key: torch.Tensor, params: Tree = None) -> TrainState:
        """A new TrainState, in fresh storage on the Booster's device.

        ``key`` (2,) int32 makes the parameters (``model.init(key)``) and every draw of the training that follows;
        ``params`` starts from given weights instead. On processes, each must call it, and the first one's values hold.
        Raises ValueError with the whole list of names where ``params`` does not fit the model.
        """
        if not isinstance(model, Model):
            raise TypeError(
                f"model: {type(model).__name__}, expected a fb.Model; for an nn.Module: fb.functionalize(module)"
            )
        stream = random.fold_in(key, 1)
        if params is None:
            params = model.init(key.to(self.device))  # born where they will live
        else:
            check_params(params, model.abstract)
        return self._state(model, optim.as_transformation(tx), params, stream)

    def abstract(self, model: Model, tx: Any) -> TrainState:
        """The TrainState that ``init`` would make, with ArrayInfo leaves: nothing is computed, no memory is used."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            empty = tree.map(lambda info: torch.empty(info.shape, dtype=info.dtype), model.abstract)
            state = self._state(model, optim.as_transformation(tx), empty, torch.empty(2, dtype=torch.int32))
        return tree.map(ArrayInfo.of, state)

    def train_step(
        self,
        loss_fn: step.LossFn,
        tx: Any,
        *,
        accumulate: int = 1,
        max_norm: float | None = None,
        skip_nonfinite: bool = True,
        jit: bool = True,
        donate: bool = True,
    ) -> TrainStep:
        """The function ``(state, batch) -> (state, metrics)``: forward, backward, clipping and update, as one graph.

        ``loss_fn(params, batch, key)`` returns ``(sum, weight)``, ``(sum, weight, aux)`` or a mean over rows; ``key``
        may be left out, ``buffers`` asked for by name. The batch is cut along dim 0 into ``accumulate`` microbatches
        (two graphs then); gradients are summed, divided once by the summed weight, and clipped to ``max_norm``. With
        ``skip_nonfinite`` a step whose gradient norm is not finite leaves parameters, optimizer and schedule as they
        are. With ``donate`` the new state takes over the old one's storage, and the old one is refused afterwards.

        ``metrics``: 0-d tensors, not yet computed when the step returns: loss, grad_norm, lr, tokens (the weight),
        skipped, loss_scale, and aux.
        """
        max_norm = max_norm_under(self.plan.plugin, max_norm)
        recipe = step.Recipe(loss_fn, optim.as_transformation(tx), self.policy, accumulate, max_norm, skip_nonfinite)
        return _train_step(recipe, jit, donate)

    def eval_step(self, loss_fn: step.LossFn, *, jit: bool = True) -> Callable[[TrainState, Tree], step.Metrics]:
        """The function ``(state, batch) -> metrics`` (loss, tokens, aux): no key, no dropout, no gradients, no change.

        The ``loss_fn`` of the training will do: own and functionalized models drop nothing here, ``train=True`` or not.
        """
        policy = self.policy

        def local(state: TrainState, batch: Tree) -> Replicated:
            params = step.gathered(policy, state.plan.plugin, step.prepare(policy, state))
            with environment.bind(evaluating=True, compute=policy.compute):
                loss, weight, aux, _ = step.evaluate(loss_fn, params, batch, None, state.buffers)
            weighted = {name: value * weight for name, value in aux.items()}
            sums = step.totals(step.Sums(None, loss, weight, weighted, None), state.plan.plugin.data_axes)
            means = {name: step.mean(value, sums.weight) for name, value in sums.aux.items()}
            return Replicated({"loss": step.mean(sums.loss, sums.weight), "tokens": sums.weight, **means})

        def evaluate(state: TrainState, batch: Tree) -> step.Metrics:
            return spmd(local, state.plan.mesh)(on_ranks(state), batch)

        run = _jit(evaluate) if jit else _without_tape(evaluate)

        def eval_step(state: TrainState, batch: Tree) -> step.Metrics:
            with _guarded("eval step", state):
                _check(state, batch)
                return run(state, split_rows(batch, state.plan.mesh, state.plan.plugin.data_axes))

        return eval_step

    def full_params(self, state: TrainState) -> Tree:
        """The whole parameter tree in fresh storage, in the dtype it is stored in; on processes, each must call it."""
        mesh = state.plan.mesh

        def local(storage: flat.Flat, frozen: flat.Flat | None) -> Replicated:
            def whole(parts: flat.Flat) -> flat.Flat:
                return shards.join(shards.on_device(parts, state.step.device))

            return Replicated(assemble(whole(storage), None if frozen is None else whole(frozen)))

        with _off_the_tape(), _guarded("full_params", state):
            return tree.map(torch.clone, spmd(local, mesh)(state.storage, state.frozen))

    def shard(self, params: Tree, like: TrainState) -> TrainState:
        """``like`` with these parameters, laid out as its own: the inverse of ``full_params``. Raises as ``init``."""
        check_params(params, like.abstract.tree)
        placed = tree.map(lambda leaf, info: leaf.to(self.device, info.dtype), params, like.abstract.tree)
        storage, frozen = _laid_out(placed, like.layouts, like.plan)
        return like.replace(storage=storage, frozen=frozen)

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        *,
        key: torch.Tensor | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """(model, optimizer, criterion, dataloader, lr_scheduler) for the imperative loop, in this order, None kept.

        The module's weights are copied to the Booster's device; the torch optimizer becomes the equal pure transform,
        param groups and earlier state kept. ``key`` draws dropout (by default key 0). Raises TypeError for an optimizer
        that is not known, ValueError for one that holds other parameters.
        """
        stream = random.key(0) if key is None else key
        boosted, handle, schedule = imperative.boost(
            model, optimizer, lr_scheduler, self.policy, self.plan, lambda pure, tx: self.init(pure, tx, key=stream)
        )
        return boosted, handle, criterion, dataloader, schedule

    def backward(self, loss: torch.Tensor, optimizer: imperative.BoostedOptimizer) -> None:
        """Add the gradients of ``loss`` (0-d) to those of the boosted model: on processes, their mean over ranks."""
        if not isinstance(optimizer, imperative.BoostedOptimizer):
            raise TypeError(f"optimizer: {type(optimizer).__name__}, expected the one that boost returned")
        optimizer.backward(loss)

    def no_sync(self, model: Any = None, optimizer: Any = None) -> contextlib.AbstractContextManager[None]:
        """A context in which ``backward`` adds gradients up on each rank; the next one outside synchronizes them.

        Raises TypeError where neither handle that boost returned is given.
        """
        return imperative.no_sync(model, optimizer)

    def save(self, path: str | os.PathLike[str], state: TrainState) -> None:
        """Write the state to the directory ``path``; what was there is replaced in one moment, or stays whole."""
        checkpoint.save(path, state)

    def load(self, path: str | os.PathLike[str], *, like: TrainState) -> TrainState:
        """Read a state of the shape of ``like`` (``booster.abstract(model, tx)``, or a state) onto the device.

        Raises FileNotFoundError for a path that is no checkpoint, ValueError with the whole list of leaves that differ.
        """
        return checkpoint.load(path, like, self.device)

    @torch.inference_mode(mode=False)  # its tensors must be trainable wherever it is made
    def _state(self, model: Model, tx: optim.GradientTransformation, params: Tree, key: torch.Tensor) -> TrainState:
        device, mesh, buffers = self.device, self.plan.mesh, model.buffers()
        if not graph.is_tracing():  # processes may have built the module, or drawn the key, each for itself
            here = tree.map(lambda leaf: leaf.to(device), (params, buffers, key))
            with watchdog.guard("init") if mesh.across else contextlib.nullcontext():
                params, buffers, key = shards.of_the_first(here, mesh)
        typed = tree.map(lambda leaf, info: leaf.detach().to(info.dtype), params, model.abstract)
        placed = tree.map(lambda leaf: leaf.to(device, copy=True), cast(typed, self.policy.param))
        described = tree.map(
            lambda leaf, info: ArrayInfo(
                info.shape, leaf.dtype, info.spec, None, info.trainable and transforms.is_differentiable(leaf)
            ),
            placed,
            model.abstract,
        )
        trained, frozen = tree.partition(described, tree.map(lambda info: info.trainable, described))
        labels = tree.unflatten(tree.structure(trained), optim.leaf_labels(tx, trained))
        plugin = self.plan.plugin
        layout = plugin.layout(trained, labels, mesh)
        alike = tree.map(lambda _: (), frozen)  # no optimizer tells frozen leaves apart
        frozen_layout = plugin.layout(frozen, alike, mesh) if tree.leaves(frozen) else None
        storage, still = _laid_out(placed, (layout, frozen_layout), self.plan)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return TrainState(
            step=zero,
            position=zero.clone(),
            storage=storage,
            frozen=still,
            opt_state=own(spmd(tx.init, mesh)(storage)),
            buffers=tree.map(lambda leaf: leaf.detach().to(device, copy=True), buffers),
            key=key.to(device, copy=True),
            loss_scale=torch.ones((), dtype=torch.float32, device=device),
            abstract=Abstract.of(described),
            plan=self.plan,
        )


def _laid_out(
    params: Tree, layouts: tuple[flat.Layout, flat.Layout | None], plan: Plan
) -> tuple[flat.Flat, flat.Flat | None]:
    """The storage of these parameters, trained and frozen, in fresh memory. No communication."""

    def local(whole: Tree) -> tuple[flat.Flat | None, ...]:
        return tuple(None if flats is None else shards.part(flats) for flats in disassemble(whole, *layouts))

    with _off_the_tape():
        storage, frozen = own(spmd(local, plan.mesh)(Replicated(params)))
        return shards.at_home(storage, pin=True), None if frozen is None else shards.at_home(frozen, pin=True)


_jit = jit  # the methods have an argument of this name


@dataclass(frozen=True)
class TrainStep:
    """A training step: ``(state, batch) -> (state, metrics)``. ``lower`` shows its graph, ``compiles`` counts them."""

    recipe: step.Recipe
    donate: bool
    prepare: Callable[..., Any]
    parts: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
    _described: dict[Any, step.Sums] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, step.Metrics]:
        with _guarded("train step", state, 1):
            return self._run(state, batch)

    def _run(self, state: TrainState, batch: Tree) -> tuple[TrainState, step.Metrics]:
        whole, further, finish = self.parts
        batches = self._microbatches(state, batch)
        if len(batches) == 1:
            return whole(state, batches[0])
        prepared = self.prepare(state)
        sums = self._zeros(state, prepared, batches[0])
        for index, microbatch in enumerate(torch.arange(len(batches), dtype=torch.int32, device=state.step.device)):
            sums = further(sums, state, prepared, batches[index], microbatch)
        del prepared  # the update is the other peak of memory
        return finish(state, sums)

    def lower(self, state: TrainState, batch: Tree) -> Lowered:
        """The graph of this call, untouched by it; of the microbatch when there is accumulation.

        On a virtual mesh the ranks are batched together and the graph has no collectives:
        ``fb.explain(state, booster, tx=tx, loss_fn=loss_fn, batch=batch)`` shows one rank's graph, with them.
        """
        whole, further, _ = (part if isinstance(part, Jitted) else _jit(part) for part in self.parts)
        batches = self._microbatches(state, batch)
        if len(batches) == 1:
            return whole.lower(state, batches[0])
        prepared = self.prepare(state)
        first = torch.zeros((), dtype=torch.int32, device=state.step.device)
        return further.lower(self._zeros(state, prepared, batches[0]), state, prepared, batches[0], first)

    def _zeros(self, state: TrainState, prepared: step.Prepared, microbatch: Tree) -> step.Sums:
        """The sums to begin with; what they look like is found out once for each shape of the arguments."""
        leaves, structure = tree.flatten((state, prepared, microbatch))
        key = (structure, *((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves))
        if key not in self._described:
            self._described[key] = step.describe(self.recipe, state, prepared, microbatch)
        return step.zeros(self._described[key], state)

    def _microbatches(self, state: TrainState, batch: Tree) -> list[Tree]:
        """The batch as the mesh's ranks take it, cut into microbatches."""
        _check(state, batch)
        mesh = state.plan.mesh
        stacked = split_rows(batch, mesh, state.plan.plugin.data_axes)
        return microbatches(stacked, self.recipe.accumulate, len(mesh.axes) if mesh.virtual else 0)

    @property
    def compiles(self) -> int:
        """How many graphs were compiled so far."""
        return sum(part.compiles for part in self.parts if isinstance(part, Jitted))


def _train_step(recipe: step.Recipe, compiled: bool, donate: bool) -> TrainStep:
    def prepare(state: TrainState) -> step.Prepared:
        return spmd(functools.partial(step.prepare, recipe.policy), state.plan.mesh)(on_ranks(state))

    def train_step(state: TrainState, batch: Tree) -> tuple[TrainState, step.Metrics]:
        def local(state: TrainState, batch: Tree) -> tuple[TrainState, Replicated]:
            sums = step.gradients(recipe, state, step.prepare(recipe.policy, state), batch)
            new, metrics = step.update(recipe, state, sums)
            return on_ranks(new), Replicated(metrics)

        return spmd(local, state.plan.mesh)(on_ranks(state), batch)

    def microbatch(
        sums: step.Sums, state: TrainState, prepared: step.Prepared, batch: Tree, index: torch.Tensor
    ) -> step.Sums:
        def local(sums: step.Sums, state: TrainState, *rest: Any) -> step.Sums:
            return step.add(sums, step.gradients(recipe, state.replace(buffers=sums.buffers), *rest))

        return spmd(local, state.plan.mesh)(sums, on_ranks(state), prepared, batch, Replicated(index))

    def finish(state: TrainState, sums: step.Sums) -> tuple[TrainState, step.Metrics]:
        def local(state: TrainState, sums: step.Sums) -> tuple[TrainState, Replicated]:
            new, metrics = step.update(recipe, state, sums)
            return on_ranks(new), Replicated(metrics)

        return spmd(local, state.plan.mesh)(on_ranks(state), sums)

    finish.__name__ = train_step.__name__
    if compiled:
        given = (0,) if donate else ()
        parts = _jit(train_step, donate=given), _jit(microbatch, donate=0), _jit(finish, donate=given)
    else:
        parts = _eager(train_step, donate), _without_tape(microbatch), _eager(finish, donate)
    # A cast or a gather for each buffer, once a step: nothing to compile there.
    return TrainStep(recipe, donate, _without_tape(prepare), parts)


def _eager(fn: Callable[..., Any], donate: bool) -> Callable[..., Any]:
    """``fn`` as it runs without jit; its first argument is consumed all the same, so that a mistake shows."""
    run = _without_tape(fn)

    @functools.wraps(fn)
    def wrapped(state: TrainState, *rest: Any) -> Any:
        result = run(state, *rest)
        if not donate or graph.transforms() or graph.is_tracing():
            return result
        own = tree.map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result)
        consume(state, [leaf for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)], fn.__name__)
        return own

    return wrapped


def _without_tape(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, off autograd's tape, which a loop must not drag along: gradients through it are fb.grad's."""

    @functools.wraps(fn)
    def wrapped(*args: Any) -> Any:
        leaves = tree.leaves(args)
        if any(map(consumed_by, leaves)):
            refuse_consumed(tree.names(args), leaves)
        with _off_the_tape():
            return fn(*args)

    return wrapped


def _off_the_tape() -> contextlib.AbstractContextManager[Any]:
    """Off autograd's tape, unless a transform looks on: what fb.grad differentiates is on its own."""
    return contextlib.nullcontext() if graph.transforms() or graph.is_tracing() else torch.no_grad()


def _guarded(what: str, state: Any, ahead: int = 0) -> contextlib.AbstractContextManager[None]:
    """Around work that processes do together: where it fails on one, all raise. The step is ``ahead`` of the state's.

    On a GPU the step is not told: the host does not wait for it.
    """
    mesh = state.plan.mesh if isinstance(state, TrainState) else None
    if mesh is None or not mesh.across or graph.transforms() or graph.is_tracing():
        return contextlib.nullcontext()
    known = isinstance(state.position, torch.Tensor) and state.position.device.type == "cpu"
    return watchdog.guard(what, int(state.position) + ahead if known else None)


def _check(state: TrainState, batch: Tree) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(f"state: {type(state).__name__}, expected a TrainState (booster.init makes one)")
    step.check_batch(batch, state.step.device)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'device: {device!r}, expected "cpu", "cuda" or "cuda:N"') from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type != "cuda":
        raise ValueError(f'device: {str(chosen)!r}, expected "cpu", "cuda" or "cuda:N"')
    index = (
        chosen.index if chosen.index is not None else torch.cuda.current_device() if torch.cuda.is_available() else 0
    )
    if index >= torch.cuda.device_count():
        raise ValueError(f"device: {str(chosen)!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)
