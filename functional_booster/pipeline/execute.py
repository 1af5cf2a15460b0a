"""A state's batch through a pipeline: the loss and the gradients, in the layout of the state.

On a virtual mesh one process takes the actions of all ranks; on a real mesh each process takes its own, and what is
used at several stages travels between them: a tied leaf before the first action, the terms of its gradient after the
last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from functional_booster import loss_call, step
from functional_booster.kernels import flat, random, tree
from functional_booster.precision import MixedPrecision, autocasting
from functional_booster.sharding import environment
from functional_booster.sharding.collectives import axis_size, psum
from functional_booster.sharding.mesh import Replicated, spmd
from functional_booster.sharding.rows import Microbatch, StandIn, rows_of, share_out
from functional_booster.state import TrainState, assemble

from .interpreter import Outcome, Program, run, run_rank
from .layout import AXIS
from .objective import Objective, Traced
from .simulation import Timeline
from .transport import Mailboxes, Processes, Transport, connected

Tree = tree.Tree
Scalars = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]  # loss, weight, aux


@dataclasses.dataclass(frozen=True)
class Executed:
    """What a batch gave: sums as the update takes them (without gradients after an evaluation), what the loss function
    gave beside them for each microbatch, where the last stage is, and the measured times of each pipeline."""

    sums: step.Sums
    outputs: list[Tree]
    timelines: list[Timeline]


def objective(
    loss_fn: loss_call.LossFn,
    precision: MixedPrecision,
    state: TrainState,
    trains: bool,
    compiled: bool,
    outputs: Callable[[], Tree] = tuple,
) -> Objective:
    """The loss function of a train step, cut into the stages of the state's plugin.

    ``outputs()``, asked once the loss function has returned, are tensors to be handed out beside the loss.
    """
    plugin: Any = state.plan.plugin
    device, axes = state.step.device.type, plugin.data_axes
    compute = precision.policy.compute if precision.cast_inputs else None
    layouts = [layout for layout in state.layouts if layout is not None]
    kept = frozenset().union(*(layout.kept_names for layout in layouts))

    def fn(params: Tree, microbatch: Tree) -> tuple[torch.Tensor, Tree]:
        params = params if precision.fp8 is None else precision.fp8.mark(params, kept)
        batch, key, buffers, counts = (microbatch[name] for name in ("batch", "key", "buffers", "counts"))
        with (
            environment.bind(compute=compute, data_axes=axes, evaluating=not trains),
            autocasting(precision.autocast, device),
        ):
            loss, weight, aux, new = loss_call.evaluate(loss_fn, params, batch, key, buffers, counts)
        if new is not buffers:
            raise ValueError("loss_fn returned aux['buffers']: a pipeline cannot write buffers (batch statistics)")
        means = {name: value * weight for name, value in aux.items()}
        return loss, {"weight": weight, "aux": means, "outputs": outputs()}

    trained = frozenset(slot.name for slot in state.storage.layout.slots)
    split = plugin.split(state.abstract.tree)
    return Objective(fn, split, trained if trains else False, compiled, split.remat(plugin.remat))


def execute(
    objective: Objective,
    state: TrainState,
    prepared: step.Prepared,
    batch: Tree,
    precision: MixedPrecision,
    trains: bool,
    measure: bool,
) -> Executed:
    """The batch's losses and, if it ``trains``, their gradients: prepared leaves in, gradients of the same layout out.

    On processes, each must call it.
    """
    plan, plugin = state.plan, cast(Any, state.plan.plugin)
    virtual, data_ranks = plan.mesh.virtual, plan.mesh.extent(plugin.data_axes)
    rows = rows_of(batch.batch if isinstance(batch, StandIn) else batch)
    number = plugin.microbatches(-(-rows // data_ranks) if virtual else rows)
    shared = share_out(batch, plan.mesh, plugin.data_axes, number)
    call = _Call(objective, state, prepared, shared, number, precision, trains, measure)
    with torch.no_grad():
        return call.all_ranks(_elements(batch)) if virtual else spmd(call.this_rank, plan.mesh)(_elements(batch))


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """One batch of a state."""

    objective: Objective
    state: TrainState
    prepared: step.Prepared
    shared: Sequence[Microbatch]
    number: int
    precision: MixedPrecision
    trains: bool
    measure: bool

    @functools.cached_property
    def names(self) -> list[str]:
        return tree.names(self.state.abstract.tree)

    def all_ranks(self, elements: float) -> Executed:
        """Every pipeline of a virtual mesh, one after the other."""
        mesh = self.state.plan.mesh
        data_ranks = mesh.extent(self.state.plan.plugin.data_axes)
        share = self._share(elements / data_ranks)
        outcomes = [
            run(self._schedule, self._program(self._whole(rank), self._microbatches(rank), share), self.measure)
            for rank in range(data_ranks)
        ]
        sums = [_summed(outcome) for outcome in outcomes]

        def stacked(*values: torch.Tensor) -> torch.Tensor:
            return torch.stack(values).view(-1, 1).expand(mesh.shape)

        loss, weight, aux = tree.map(stacked, *sums)
        grads = [self._laid_out(outcome) for outcome in outcomes] if self.trains else None
        one = torch.ones((), dtype=torch.float64, device=self.state.step.device)
        return Executed(
            step.Sums(
                None if grads is None else tree.map(lambda *parts: torch.stack(parts), *grads),
                loss,
                weight,
                aux,
                tree.map(lambda leaf: leaf.expand(*mesh.shape, *leaf.shape), self.state.buffers),
                one.expand(mesh.shape),
                None if share is None else share.expand(mesh.shape),
            ),
            [more["outputs"] for outcome in outcomes for _, (_, more) in sorted(outcome.results.items())],
            [outcome.timeline for outcome in outcomes if outcome.timeline is not None],
        )

    def this_rank(self, elements: float) -> Executed:
        """This process's actions, inside ``spmd``."""
        mesh = self.state.plan.mesh
        places = dict(zip(mesh.names, mesh.place, strict=True))
        rank, ranks = places[AXIS], mesh.extent(AXIS)
        share = self._share(elements)
        if share is not None:
            share = psum(share, self.state.plan.plugin.data_axes) / axis_size(self.state.plan.plugin.data_axes)
        microbatches = self._microbatches(places["dp"])
        homes, held = self._held(rank, ranks)
        traces = [self.objective.traced(self._tree(held), microbatch) for microbatch in microbatches]
        transport: Transport = Mailboxes(rank, {})
        if ranks > 1:
            group = connected(dict(zip(mesh.names, mesh.groups, strict=True))[AXIS] or "", self._device)
            transport = Processes(group, self._device)
        users, makers = self._users(traces)
        for name, home in homes.items():
            others = sorted(users.get(name, set()) - {home})
            for other in others if rank == home else []:
                transport.send(other, [held[name]])
            if rank in others:
                held[name] = transport.receive(home, [torch.empty_like(held[name], device=self._device)])()[0]
        transport.finish()
        program = self._program(self._tree(held), microbatches, share)
        outcome = run_rank(self._schedule, program, rank, transport, self.measure)
        found = _added(outcome)
        for name, home in homes.items():
            others = sorted(makers.get(name, set()) - {home})
            if rank in others:
                transport.send(home, [found.pop(name)])
            for other in others if rank == home else []:
                dtype = self.precision.policy.accumulate or held[name].dtype
                term = transport.receive(other, [torch.empty_like(held[name], dtype=dtype)])()[0]
                found[name] = found[name] + term if name in found else term
        transport.finish()
        loss, weight, aux = self._everywhere(outcome, traces[-1])
        return Executed(
            step.Sums(
                self._part(found, rank, ranks) if self.trains else None,
                loss,
                weight,
                aux,
                self.state.buffers,
                torch.ones((), dtype=torch.float64, device=self._device),
                share,
            ),
            [more["outputs"] for _, (_, more) in sorted(outcome.results.items())],
            [] if outcome.timeline is None else [outcome.timeline],
        )

    def _users(self, traces: Sequence[Traced]) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
        """{leaf: the ranks that compute with it}, and {leaf: those that make a term of its gradient}."""
        users, makers = dict[str, set[int]](), dict[str, set[int]]()
        for trace in traces:
            for stage, graphs in enumerate(trace.stages):
                rank = self._schedule.placement[stage]
                for at in graphs.parameters:
                    users.setdefault(self.names[at], set()).add(rank)
                for at in graphs.gradients:
                    makers.setdefault(self.names[at], set()).add(rank)
        return users, makers

    def _everywhere(self, outcome: Outcome, trace: Traced) -> Scalars:
        """Loss, weight and aux of the rank with the last stage, on all of them: one psum over "pp"."""
        if outcome.results:
            mine = _summed(outcome)
        else:
            described = trace.stages[-1].sent
            zeros = [torch.zeros(one.shape, dtype=one.dtype, device=self._device) for one in described]
            loss, more = tree.unflatten(trace.structure, zeros)
            mine = loss, more["weight"], more["aux"]
        scalars, structure = tree.flatten(mine)
        total = psum(torch.stack([scalar.to(torch.float64) for scalar in scalars]), (AXIS,)).unbind()
        return tree.unflatten(structure, [a.to(b.dtype) for a, b in zip(total, scalars, strict=True)])

    @property
    def _device(self) -> torch.device:
        return self.state.step.device

    @functools.cached_property
    def _schedule(self) -> Any:
        schedule = self.state.plan.plugin.schedule(len(self.shared))  # type: ignore[attr-defined]
        return schedule if self.trains else schedule.forwards()

    def _program(self, params: Tree, microbatches: list[Tree], share: torch.Tensor | None) -> Program:
        scaled = None if share is None else (self.state.loss_scale.factor / share).to(torch.float32)
        return Program(self.objective, params, microbatches, scaled, self.precision.policy.accumulate)

    def _share(self, elements: float) -> torch.Tensor | None:
        """What the gradients are a mean over where the loss is scaled: elements of a microbatch, the same for all.

        (The weight itself is known at the last stage, and to no other in time.)
        """
        if self.precision.scaling is None or not self.trains:
            return None
        return torch.tensor(max(elements / self.number, 1.0), dtype=torch.float64, device=self._device)

    def _microbatches(self, data_rank: int) -> list[Tree]:
        """What the stages are given of the microbatches of a data rank: keys are those of one device."""
        virtual, base = self.state.plan.mesh.virtual, random.fold_in(self.state.key, self.state.position)

        def mine(leaf: Any) -> Any:
            if isinstance(leaf, Replicated):
                return leaf.value
            return leaf[data_rank, 0] if virtual and isinstance(leaf, torch.Tensor) else leaf

        return [
            {
                "batch": tree.map(mine, one.batch, is_leaf=lambda node: isinstance(node, Replicated)),
                "key": random.fold_in(base, data_rank * self.number + one.index) if self.trains else None,
                "buffers": self.state.buffers,
                "counts": mine(one.counts),
            }
            for one in self.shared
        ]

    def _flats(self) -> Iterator[flat.Flat]:
        yield from (part for part in (self.prepared.trained, self.prepared.frozen) if part is not None)

    def _whole(self, data_rank: int) -> Tree:
        """The parameters of all stages, as one data rank of a virtual mesh has them."""

        def whole(values: flat.Flat | None) -> flat.Flat | None:
            if values is None:
                return None
            axes = values.layout.axes
            parts = {name: buffer[data_rank] for name, buffer in values.buffers.items()}
            return flat.Flat(
                {name: part.reshape(-1) if axes[name] else part[0] for name, part in parts.items()}, values.layout
            )

        trained = whole(self.prepared.trained)
        assert trained is not None
        return assemble(trained, whole(self.prepared.frozen))

    def _laid_out(self, outcome: Outcome) -> flat.Flat:
        """The gradients of one pipeline of a virtual mesh: the parts of its ranks along "pp", stacked."""
        layout, ranks = self.state.storage.layout, self.state.plan.mesh.extent(AXIS)
        found = _added(outcome)
        everywhere = {slot.name for slot in layout.slots if _home(layout, slot, ranks) is None}
        once = {name: term for name, term in found.items() if name not in everywhere}
        parts = [self._part(once if rank else found, rank, ranks) for rank in range(ranks)]
        return tree.map(lambda *each: torch.stack(each), *parts)

    def _part(self, found: Mapping[str, torch.Tensor], rank: int, ranks: int) -> flat.Flat:
        """The gradients of the leaves of one rank, where they lie in its part."""
        layout, buffers = self.state.storage.layout, {}
        for bucket, slots in layout.buckets.items():
            dtype = self.precision.policy.accumulate or self.prepared.trained.buffers[bucket].dtype
            split = bool(layout.axes[bucket])
            length = layout.size(bucket) // ranks if split else layout.size(bucket)
            shape = slots[0].shape if slots[0].offset is None else (length,)
            buffers[bucket] = torch.zeros(shape, dtype=dtype, device=self._device)
            for slot in slots:
                if slot.name not in found or _home(layout, slot, ranks) not in (None, rank):
                    continue
                if slot.offset is None:
                    buffers[bucket] = found[slot.name].to(dtype)
                else:
                    start = slot.offset - rank * length if split else slot.offset
                    buffers[bucket][start : start + slot.size] = found[slot.name].reshape(-1)
        return flat.Flat(buffers, layout)

    def _held(self, rank: int, ranks: int) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
        """{leaf: the rank along "pp" that stores it}, without those that all store; and the leaves, those of other
        ranks on the meta device."""
        homes, held = {}, {}
        for values in self._flats():
            for slot in values.layout.slots:
                home, buffer = _home(values.layout, slot, ranks), values.buffers[slot.bucket]
                if home is not None:
                    homes[slot.name] = home
                if slot.offset is None:
                    held[slot.name] = buffer
                elif home is None:
                    held[slot.name] = buffer[slot.offset : slot.offset + slot.size].view(slot.shape)
                elif home == rank:
                    start = slot.offset - rank * buffer.shape[0]
                    held[slot.name] = buffer[start : start + slot.size].view(slot.shape)
                else:
                    held[slot.name] = torch.empty(slot.shape, dtype=buffer.dtype, device="meta")
        return {name: homes[name] for name in self.names if name in homes}, held

    def _tree(self, held: Mapping[str, torch.Tensor]) -> Tree:
        return tree.unflatten(self.state.abstract.structure, [held[name] for name in self.names])


def _home(layout: flat.Layout, slot: flat.Slot, ranks: int) -> int | None:
    """The rank along "pp" that stores a leaf; None for one that all store."""
    if slot.offset is None or not layout.axes[slot.bucket]:
        return None
    return slot.offset // (layout.size(slot.bucket) // ranks)


def _added(outcome: Outcome) -> dict[str, torch.Tensor]:
    """The gradients by leaf: the terms of different stages, added."""
    found: dict[str, torch.Tensor] = {}
    for terms in outcome.gradients.values():
        for name, term in terms.items():
            found[name] = found[name] + term if name in found else term
    return found


def _summed(outcome: Outcome) -> Scalars:
    """Loss, weight and aux of all microbatches."""
    results = [outcome.results[index] for index in sorted(outcome.results)]
    parts = [(loss, more["weight"], more["aux"]) for loss, more in results]
    return tree.map(lambda *values: torch.stack(values).sum(0), *parts)


def _elements(batch: Tree) -> float:
    """How many tokens, or labels, there are: the elements of the largest leaf of integers, else the rows."""
    batch = batch.batch if isinstance(batch, StandIn) else batch
    integers = [leaf.numel() for leaf in tree.leaves(batch) if not leaf.is_floating_point()]
    return float(max(integers, default=rows_of(batch)))
