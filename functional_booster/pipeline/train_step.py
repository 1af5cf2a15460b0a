"""The train step and the eval step of a pipeline: ``(state, batch) -> (state, metrics)``, as on one device.

A step is the schedule's actions, which leave each rank the gradients of its leaves, and then the update that every
other layout has: each rank's part of the storage is its stages' leaves.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from functional_booster import loss_call, step, train_step
from functional_booster.kernels import tree
from functional_booster.plugins import Plan
from functional_booster.precision import MixedPrecision
from functional_booster.sharding.mesh import Replicated, spmd
from functional_booster.state import TrainState, on_ranks

from .execute import execute, objective
from .objective import Objective
from .simulation import Timeline

Tree = tree.Tree


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineStep:
    """A training step over a schedule. The batch may have any number of rows.

    The step is that of one device with ``accumulate`` = the number of microbatches, keys of dropout too.
    ``timelines``: if ``measure``, when which action of the last step ran; one for each pipeline in this process.
    """

    recipe: step.Recipe
    plan: Plan
    compiled: bool
    inner: train_step.TrainStep
    measure: bool = False
    timelines: list[Timeline] = dataclasses.field(default_factory=list)
    _objectives: dict[Any, Objective] = dataclasses.field(default_factory=dict, repr=False)

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, step.Metrics]:
        with train_step.guarded("train step", state, 1):
            train_step.check(state, batch)
            train_step.require_own(state, self.plan, self.recipe.precision)
            key = state.abstract, state.layouts
            if key not in self._objectives:
                recipe = self.recipe
                self._objectives[key] = objective(recipe.loss_fn, recipe.precision, state, True, self.compiled)
            prepared = self.inner.prepare(state)
            done = execute(
                self._objectives[key], state, prepared, batch, self.recipe.precision, trains=True, measure=self.measure
            )
            del prepared  # the update is the other peak of memory
            self.timelines[:] = done.timelines
            return self.inner.parts[2](state, done.sums)

    @property
    def compiles(self) -> int:
        """How many graphs of the update were compiled so far; those of the stages are not counted."""
        return self.inner.compiles

    def lower(self, state: TrainState, batch: Tree) -> NoReturn:
        """Raises TypeError: this step is a program of many graphs, see ``timelines`` and ``plugin.schedule``."""
        raise TypeError("lower: a pipeline's step is many graphs, one a stage and direction, expected another plugin")


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineEval:
    """``(state, batch) -> metrics`` over the forwards of a schedule: loss, tokens, aux; no key, no change."""

    loss_fn: loss_call.LossFn
    precision: MixedPrecision
    plan: Plan
    compiled: bool
    _objectives: dict[Any, Objective] = dataclasses.field(default_factory=dict, repr=False)

    def __call__(self, state: TrainState, batch: Tree) -> step.Metrics:
        with train_step.guarded("eval step", state):
            train_step.check(state, batch)
            train_step.require_own(state, self.plan, self.precision)
            key = state.abstract, state.layouts
            if key not in self._objectives:
                self._objectives[key] = objective(self.loss_fn, self.precision, state, False, self.compiled)
            prepared = spmd(lambda state: step.prepare(self.precision.policy, state), state.plan.mesh)
            done = execute(
                self._objectives[key],
                state,
                prepared(on_ranks(state)),
                batch,
                self.precision,
                trains=False,
                measure=False,
            )

            def means(sums: step.Sums) -> Replicated:
                total = step.totals(sums, state.plan.plugin.data_axes)
                aux = {name: step.mean(value, total.weight) for name, value in total.aux.items()}
                return Replicated({"loss": step.mean(total.loss, total.weight), "tokens": total.weight, **aux})

            return spmd(means, state.plan.mesh)(done.sums)


def build(recipe: step.Recipe, plan: Plan, compiled: bool, donate: bool, measure: bool = False) -> PipelineStep:
    """The train step of a plan whose plugin is a pipeline's; ``recipe.accumulate`` is the plugin's to say."""
    return PipelineStep(recipe, plan, compiled, train_step.build(recipe, plan, compiled, donate), measure)
