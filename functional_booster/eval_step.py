"""The eval step: what training measures, of one batch, without training."""

from __future__ import annotations

from collections.abc import Callable

import torch

from functional_booster import loss_call, step
from functional_booster.kernels import tree
from functional_booster.precision import MixedPrecision
from functional_booster.sharding import environment
from functional_booster.sharding.mesh import Replicated, spmd
from functional_booster.sharding.rows import Microbatch, share_out

from .hooks import mean_metrics
from .jit import jit
from .loss_call import LossFn
from .plugins import Plan
from .state import TrainState, on_ranks
from .train_step import check, guarded, require_own, without_tape

Tree = tree.Tree


def build(
    loss_fn: LossFn, precision: MixedPrecision, plan: Plan, compiled: bool
) -> Callable[[TrainState, Tree], dict[str, torch.Tensor]]:
    """The function ``(state, batch) -> metrics``: loss, tokens and aux of a batch of any number of rows."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: {type(loss_fn).__name__}, expected a function (params, batch, key) -> (sum, weight)")

    def evaluate(state: TrainState, batch: Tree, counts: torch.Tensor | None = None) -> step.Metrics:
        def local(state: TrainState, batch: Tree, counts: torch.Tensor | None) -> Replicated:
            params = step.gathered(precision, state.plan.plugin, step.prepare(precision.policy, state))
            with environment.bind(evaluating=True), step.computing(precision, state):
                loss, weight, aux, _ = loss_call.evaluate(loss_fn, params, batch, None, state.buffers, counts)
            weighted = {name: value * weight for name, value in aux.items()}
            sums = step.totals(step.Sums(None, loss, weight, weighted, None), state.plan.plugin.data_axes)
            means = {name: step.mean(value, sums.weight) for name, value in sums.aux.items()}
            return Replicated({"loss": step.mean(sums.loss, sums.weight), "tokens": sums.weight, **means})

        return spmd(local, state.plan.mesh)(on_ranks(state), batch, counts)

    run = jit(evaluate) if compiled else without_tape(evaluate)

    def one(state: TrainState, rows: Microbatch) -> step.Metrics:
        return run(state, rows.batch, rows.counts)

    def eval_step(state: TrainState, batch: Tree) -> step.Metrics:
        with guarded("eval step", state):
            check(state, batch)
            require_own(state, plan, precision)
            shared = share_out(batch, state.plan.mesh, state.plan.plugin.data_axes)
            return one(state, shared[0]) if len(shared) == 1 else mean_metrics(one, state, shared)

    return eval_step
