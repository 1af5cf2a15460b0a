"""``booster.execute_pipeline``: a batch forward and backward through the pipeline of a boosted model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from functional_booster import step
from functional_booster.boosted_model import BoostedModel
from functional_booster.boosted_optimizer import BoostedOptimizer
from functional_booster.kernels import tree
from functional_booster.sharding.mesh import Replicated, own, spmd
from functional_booster.state import on_ranks

from .execute import Executed, execute, objective
from .objective import Objective
from .plugin import PipelineParallel

Tree = tree.Tree
_objectives: WeakKeyDictionary[BoostedModel, dict[Any, Objective]] = WeakKeyDictionary()  # traced once, then reused


def execute_pipeline(
    data_iter: Iterator[Any],
    model: BoostedModel,
    criterion: Callable[[Any, Any], torch.Tensor],
    optimizer: BoostedOptimizer | None = None,
    return_loss: bool = True,
    return_outputs: bool = False,
) -> dict[str, Any]:
    """{"loss", "outputs"} of the next batch of ``data_iter``; with an optimizer, gradients are added to the model's.

    A batch (a dict of the module's arguments by name, else its only argument) is cut into microbatches along dim 0;
    ``criterion(outputs, microbatch)`` is a mean over its rows. "loss" (0-d, on every rank the same) is the mean over
    the global batch; "outputs" are the module's, of all microbatches together, where the last stage is, None elsewhere;
    both are None where not asked for. As after ``booster.backward``, on processes gradients are means over data ranks.
    Without an optimizer nothing is dropped and nothing changes. Raises TypeError for what ``boost`` did not return,
    ValueError without a pipeline.
    """
    if not isinstance(model, BoostedModel):
        raise TypeError(f"model: {type(model).__name__}, expected the one that boost returned")
    if optimizer is not None and not isinstance(optimizer, BoostedOptimizer):
        raise TypeError(f"optimizer: {type(optimizer).__name__}, expected None or the one that boost returned")
    run, trains = model._run, optimizer is not None
    if not isinstance(run.plan.plugin, PipelineParallel):
        raise ValueError(f"plugin: {run.plan.plugin}, expected one with pipeline parallelism")
    batch, kept = next(data_iter), list[Tree]()
    modes = {name: part.training for name, part in run.module.named_modules()}

    def loss_fn(params: Tree, rows: Any, key: Any = None, buffers: Any = None) -> torch.Tensor:
        args, kwargs = ((), rows) if isinstance(rows, Mapping) else ((rows,), {})
        outputs = run.model.apply(params, *args, key=key, train=modes if trains else False, buffers=buffers, **kwargs)
        kept[:] = [_tensors(outputs) if return_outputs else ()]
        return criterion(outputs, rows)

    with run.guarded("pipeline"):
        values = {name: run.parameters[name].detach() for name in run.buckets}
        state = run.state.replace(storage=run.laid_out(values))
        known, key = _objectives.setdefault(model, {}), (criterion, trains, return_outputs, tuple(modes.values()))
        if key not in known:
            known[key] = objective(loss_fn, run.precision, state, trains, False, kept.pop)
        prepared = spmd(lambda state: step.prepare(run.precision.policy, state), run.plan.mesh)(on_ranks(state))
        done = execute(known[key], state, prepared, batch, run.precision, trains, measure=False)
        with torch.no_grad():
            loss = _add_gradients(model, done) if trains else _mean_loss(model, done)
    if trains:
        run.state = run.state.replace(position=run.state.position + 1)
        optimizer._norm = None  # type: ignore[union-attr]
    outputs = _joined(done.outputs) if return_outputs and done.outputs else None
    return {"loss": loss if return_loss else None, "outputs": outputs}


def _mean_loss(model: BoostedModel, done: Executed) -> torch.Tensor:
    plugin, mesh = model._run.plan.plugin, model._run.plan.mesh

    def local(sums: step.Sums) -> Replicated:
        total = step.totals(sums, plugin.data_axes)
        return Replicated(step.mean(total.loss, total.weight))

    return spmd(local, mesh)(done.sums)


def _add_gradients(model: BoostedModel, done: Executed) -> torch.Tensor:
    """Bring the gradients into the parameters' ``.grad``; returns the loss."""
    run = model._run
    plugin, mesh, policy = run.plan.plugin, run.plan.mesh, run.policy

    def local(sums: step.Sums, factor: Any) -> Tree:
        total = step.totals(sums, plugin.data_axes)
        # A global batch's gradient is over all its rows, a process's over its own.
        rows = total.weight if mesh.virtual else sums.weight
        unscaled = torch.where(rows > 0, 1 / rows, 0) * (1.0 if sums.share is None else sums.share / factor)
        mine = tree.map(lambda grad: grad * unscaled.to(grad.dtype), plugin.reduce(sums.grads, policy))
        return plugin.sync(mine, policy)

    reduced = spmd(local, mesh)(done.sums, Replicated(run.state.loss_scale.factor))
    reduced = own(reduced) if mesh.virtual else reduced
    for name, bucket in run.buckets.items():
        parameter = run.parameters[name]
        if not parameter.requires_grad:
            continue
        grad = reduced.buffers[bucket]
        grad = (grad if mesh.virtual else grad / mesh.extent(plugin.data_axes)).to(parameter.dtype)
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    return _mean_loss(model, done)


def _tensors(outputs: Any) -> Tree:
    """A module's outputs as a tree of tensors; Hugging Face's are a dict of them."""
    return (
        {name: value for name, value in outputs.items() if value is not None}
        if isinstance(outputs, Mapping)
        else outputs
    )


def _joined(outputs: list[Tree]) -> Tree:
    return tree.map(lambda *parts: torch.cat(parts) if parts[0].dim() else torch.stack(parts), *outputs)
