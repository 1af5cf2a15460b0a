"""TrainStep: one batch, one new state; of one graph, or of three parts where gradients are accumulated."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from functional_booster import placement, step, watchdog
from functional_booster.kernels import graph, tree
from functional_booster.precision import MixedPrecision
from functional_booster.sharding.mesh import Replicated, spmd
from functional_booster.sharding.rows import Microbatch, share_out

from .donation import consume, consumed_by, refuse_consumed
from .jit import Jitted, jit
from .loss_call import check_batch
from .lowered import Lowered
from .plugins import Plan
from .state import TrainState, check_state, on_ranks

Tree = tree.Tree


@dataclass(frozen=True)
class TrainStep:
    """A training step: ``(state, batch) -> (state, metrics)``. ``lower`` shows its graph, ``compiles`` counts them.

    The batch may have any number of rows, whatever ranks and microbatches divide: an epoch's last one, too. The step is
    that of one device on these rows, where the loss is a sum over rows, each by itself (a bare mean counts as one).
    """

    recipe: step.Recipe
    plan: Plan
    donate: bool
    prepare: Callable[..., Any]
    parts: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
    _described: dict[Any, step.Sums] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, step.Metrics]:
        with guarded("train step", state, 1):
            if isinstance(state, TrainState) and placement.is_provisional(state):
                once = build(self.recipe, self.plan, False, self.donate)  # the layout changes: not worth compiling for
                return placement.measured(lambda state: once._run(state, batch), state)
            return self._run(state, batch)

    def _run(self, state: TrainState, batch: Tree) -> tuple[TrainState, step.Metrics]:
        whole, further, finish = self.parts
        shared = self._microbatches(state, batch)
        if len(shared) == 1:
            return whole(state, shared[0].batch, shared[0].counts)
        prepared = self.prepare(state)
        sums = self._zeros(state, prepared, shared[0].batch)
        indices = torch.arange(self.recipe.accumulate, dtype=torch.int32, device=state.step.device).unbind()
        for one in shared:
            sums = further(sums, state, prepared, one.batch, indices[one.index], one.counts)
        del prepared  # the update is the other peak of memory
        return finish(state, sums)

    def lower(self, state: TrainState, batch: Tree) -> Lowered:
        """The graph of this call, untouched by it; of the microbatch when there is accumulation.

        On a virtual mesh the ranks are batched together and the graph has no collectives:
        ``fb.explain(state, booster, tx=tx, loss_fn=loss_fn, batch=batch)`` shows one rank's graph, with them.
        """
        whole, further, _ = (part if isinstance(part, Jitted) else jit(part) for part in self.parts)
        first, *others = self._microbatches(state, batch)
        if not others:
            lowered = whole.lower(state, first.batch, first.counts)
        else:
            prepared = self.prepare(state)
            index = torch.zeros((), dtype=torch.int32, device=state.step.device)
            sums = self._zeros(state, prepared, first.batch)
            lowered = further.lower(sums, state, prepared, first.batch, index, first.counts)
        return replace(lowered, mesh=state.plan.mesh if state.plan.mesh.across else None)

    def _zeros(self, state: TrainState, prepared: step.Prepared, microbatch: Tree) -> step.Sums:
        """The sums to begin with; what they look like is found out once for each shape of the arguments."""
        leaves, structure = tree.flatten((state, prepared, microbatch))
        key = (structure, *((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves))
        if key not in self._described:
            self._described[key] = step.describe(self.recipe, state, prepared, microbatch)
        return step.zeros(self._described[key], state)

    def _microbatches(self, state: TrainState, batch: Tree) -> list[Microbatch]:
        """The batch as the mesh's ranks take it, cut into microbatches."""
        check(state, batch)
        require_own(state, self.plan, self.recipe.precision)
        return share_out(batch, state.plan.mesh, state.plan.plugin.data_axes, self.recipe.accumulate)

    @property
    def compiles(self) -> int:
        """How many graphs were compiled so far."""
        return sum(part.compiles for part in self.parts if isinstance(part, Jitted))


def build(recipe: step.Recipe, plan: Plan, compiled: bool, donate: bool) -> TrainStep:
    def prepare(state: TrainState) -> step.Prepared:
        return spmd(functools.partial(step.prepare, recipe.policy), state.plan.mesh)(on_ranks(state))

    def train_step(
        state: TrainState, batch: Tree, counts: torch.Tensor | None = None
    ) -> tuple[TrainState, step.Metrics]:
        def local(state: TrainState, batch: Tree, counts: torch.Tensor | None) -> tuple[TrainState, Replicated]:
            sums = step.gradients(recipe, state, step.prepare(recipe.policy, state), batch, counts=counts)
            new, metrics = step.update(recipe, state, sums)
            return on_ranks(new), Replicated(metrics)

        return spmd(local, state.plan.mesh)(on_ranks(state), batch, counts)

    def microbatch(
        sums: step.Sums,
        state: TrainState,
        prepared: step.Prepared,
        batch: Tree,
        index: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> step.Sums:
        def local(sums: step.Sums, state: TrainState, *rest: Any) -> step.Sums:
            return step.add(sums, step.gradients(recipe, state.replace(buffers=sums.buffers), *rest))

        return spmd(local, state.plan.mesh)(sums, on_ranks(state), prepared, batch, Replicated(index), counts)

    def finish(state: TrainState, sums: step.Sums) -> tuple[TrainState, step.Metrics]:
        def local(state: TrainState, sums: step.Sums) -> tuple[TrainState, Replicated]:
            new, metrics = step.update(recipe, state, sums)
            return on_ranks(new), Replicated(metrics)

        return spmd(local, state.plan.mesh)(on_ranks(state), sums)

    finish.__name__ = train_step.__name__
    if compiled:
        given = (0,) if donate else ()
        parts = jit(train_step, donate=given), jit(microbatch, donate=0), jit(finish, donate=given)
    else:
        parts = _eager(train_step, donate), without_tape(microbatch), _eager(finish, donate)
    # A cast or a gather for each buffer, once a step: nothing to compile there.
    return TrainStep(recipe, plan, donate, without_tape(prepare), parts)


def _eager(fn: Callable[..., Any], donate: bool) -> Callable[..., Any]:
    """``fn`` as it runs without jit; its first argument is consumed all the same, so that a mistake shows."""
    run = without_tape(fn)

    @functools.wraps(fn)
    def wrapped(state: TrainState, *rest: Any) -> Any:
        result = run(state, *rest)
        if not donate or graph.transforms() or graph.is_tracing():
            return result
        own = tree.map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result)
        consume(state, [leaf for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)], fn.__name__)
        return own

    return wrapped


def without_tape(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, off autograd's tape, which a loop must not drag along: gradients through it are fb.grad's."""

    @functools.wraps(fn)
    def wrapped(*args: Any) -> Any:
        leaves = tree.leaves(args)
        if any(map(consumed_by, leaves)):
            refuse_consumed(tree.names(args), leaves)
        with off_the_tape():
            return fn(*args)

    return wrapped


def off_the_tape() -> contextlib.AbstractContextManager[Any]:
    """Off autograd's tape, unless a transform looks on: what fb.grad differentiates is on its own."""
    return contextlib.nullcontext() if graph.transforms() or graph.is_tracing() else torch.no_grad()


def guarded(what: str, state: Any, ahead: int = 0) -> contextlib.AbstractContextManager[None]:
    """Around work that processes do together: where it fails on one, all raise. The step is ``ahead`` of the state's.

    On a GPU the step is not told: the host does not wait for it.
    """
    mesh = state.plan.mesh if isinstance(state, TrainState) else None
    if mesh is None or not mesh.across or graph.transforms() or graph.is_tracing():
        return contextlib.nullcontext()
    known = isinstance(state.position, torch.Tensor) and state.position.device.type == "cpu"
    return watchdog.guard(what, int(state.position) + ahead if known else None)


def require_own(state: TrainState, plan: Plan, precision: MixedPrecision) -> None:
    """Raise ValueError for a state that a Booster of another plugin, mesh or precision made, saying what differs."""
    if state.plan is plan and state.precision is precision:
        return
    pairs = {"plugin": (state.plan.plugin, plan.plugin), "mesh": (state.plan.mesh, plan.mesh)} | {
        f"mixed_precision.{each.name}": (getattr(state.precision, each.name), getattr(precision, each.name))
        for each in fields(precision)
    }
    differing = [f"  {name}: {has}, expected {own}" for name, (has, own) in pairs.items() if has != own]
    if differing:
        raise ValueError(
            "state: not one of the step's Booster (what another one saves, this one loads):\n" + "\n".join(differing)
        )


def check(state: TrainState, batch: Tree) -> None:
    check_state("state", state)
    check_batch(batch, state.step.device)
