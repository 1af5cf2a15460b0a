"""explain: what every rank holds, and what one step moves between ranks, before anything is computed."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_booster import optim, step
from functional_booster.kernels import flat, graph, transforms, tree
from functional_booster.precision import Policy
from functional_booster.sharding.mesh import Mesh, Replicated, spmd

from .booster import Booster
from .jit import jit
from .lowered import Lowered, readable_bytes
from .models.model import Model
from .plugins import Plan
from .state import TrainState, on_ranks

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

Tree = tree.Tree
_WIDTH = 120  # columns of the table as text


@dataclass(frozen=True)
class Leaf:
    """A parameter: ``split`` names the mesh axes that split its ``bucket`` into ``parts``, one a rank along them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    bucket: str
    split: tuple[str, ...]
    parts: int

    @property
    def bytes(self) -> float:
        """Bytes a rank, on average: a part of a bucket may hold all of a leaf, or nothing of it."""
        return math.prod(self.shape) * self.dtype.itemsize / self.parts


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds between steps.

    ``parameters`` are the trained ones and ``frozen`` the others, ``padding`` (a rank, on average) included;
    ``counters``: step, position, key and loss scale. ``host`` of all these are in the host's memory.
    """

    parameters: int
    frozen: int
    optimizer: int
    buffers: int
    counters: int
    padding: int
    host: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.frozen + self.optimizer + self.buffers + self.counters


@dataclass(frozen=True)
class Work:
    """Bytes that a rank takes on top while a step runs, activations and the optimizer's temporaries left out.

    ``prepared``: parameters that are copied once a step; ``gathered``: those that are copied where the loss uses them,
    ``largest`` by the largest bucket; ``gradients`` as the backward leaves them, ``kept`` of them for each microbatch,
    and ``summed`` over ranks, as the update gets them.
    """

    prepared: int
    gathered: int
    largest: int
    gradients: int
    kept: int
    summed: int


@dataclass(frozen=True)
class Transfer:
    """A kind of collective in one step: ``count`` calls over the ``ranks`` of an axis, whose results have ``bytes``."""

    op: str
    axis: str
    ranks: int
    dtype: torch.dtype
    count: int
    bytes: int

    @property
    def wire(self) -> int:
        """Bytes that a rank sends if the ranks form a ring.

        Of a whole of W bytes over n ranks: all_gather, reduce_scatter and all_to_all W (n - 1) / n, all_reduce twice
        that, broadcast W.
        """
        if self.op.startswith("reduce_scatter"):
            return self.bytes * (self.ranks - 1)
        if self.op.startswith("broadcast"):
            return self.bytes
        return (1 + self.op.startswith("all_reduce")) * self.bytes * (self.ranks - 1) // self.ranks


@dataclass(frozen=True, repr=False)
class Explanation:
    """How a state is laid out, and what a step of it moves: ``print`` it; all numbers are those of one rank.

    ``lowered`` is the graph of one rank's step, with its collectives by axis name. ``loss`` says whether that is the
    step of a loss that was given, or of one that stands for any.
    """

    plan: Plan
    policy: Policy
    leaves: tuple[Leaf, ...]
    held: Held
    work: Work
    collectives: tuple[Transfer, ...]
    loss: bool
    lowered: Lowered = field(compare=False)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=_WIDTH, color_system=None, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).rstrip()

    __repr__ = __str__  # a prompt shows the table

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=_WIDTH, record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format='<pre style="line-height: 1.2">{code}</pre>')

    def __rich__(self) -> Group:
        from rich.console import Group

        transfers = _collectives(self.collectives) if self.collectives else "No collectives."
        return Group(self._head(), _parameters(self.leaves), _sizes(self.held, self.work, self._traced()), transfers)

    def _head(self) -> str:
        mesh = self.plan.mesh
        axes = ", ".join(f"{name}={size}" for name, size in mesh.axes)
        where = f"{mesh.size} ranks ({axes})" if mesh.axes else "one device"
        dtypes = {one.name: getattr(self.policy, one.name) for one in dataclasses.fields(self.policy)}
        given = ", ".join(f"{name} {_dtype(dtype)}" for name, dtype in dtypes.items() if dtype is not None)
        return f"{type(self.plan.plugin).__name__} over {where}\nDtypes: {given or 'as the model has them'}"

    def _traced(self) -> list[tuple[str, str]]:
        """What only the graph of a given loss tells."""
        if not self.loss:
            return []
        temporaries = readable_bytes(self.lowered.memory.temporary)
        return [("all of these and activations, at worst", temporaries), ("FLOPs", f"{self.lowered.flops:.3g}")]


def explain(
    state: TrainState | Model,
    booster: Booster,
    *,
    tx: Any = None,
    loss_fn: step.LossFn | None = None,
    batch: Tree = None,
) -> Explanation:
    """What each rank holds of a state, or of the one that ``init`` would make of a Model and ``tx``, and what it moves.

    Nothing is computed, and no process is asked: one rank's step is traced on fake tensors, under any mesh. With
    ``loss_fn``, ``tx`` and ``batch``, one rank's part of it (tensors or ArrayInfo), this is the graph of the jitted
    step; without, that of a loss which uses each bucket once, in order, and again in its backward: where buckets are
    gathered for each, the given loss may need fewer. Raises ValueError for arguments that are missing, TypeError for a
    state that is none.
    """
    if isinstance(state, Model):
        if tx is None:
            raise ValueError("tx: missing, the optimizer whose state is to be explained with the model's parameters")
        state = booster.abstract(state, tx)
    if not isinstance(state, TrainState):
        raise TypeError(f"state: {type(state).__name__}, expected a TrainState or a fb.Model")
    if (loss_fn is None) != (batch is None):
        raise ValueError(f"{'loss_fn' if loss_fn is None else 'batch'}: missing, give both or neither")
    if loss_fn is not None and tx is None:
        raise ValueError("tx: missing, the optimizer of the step whose loss_fn is given")
    plan, policy = state.plan, booster.policy
    with FakeTensorMode(allow_non_fake_inputs=True):
        local = _of_one_rank(state, booster.device)
        rows = None if batch is None else tree.map(lambda leaf: _fake(leaf, 0, booster.device), batch)
        work = _work(local, policy)
    lowered = _lower(local, policy, tx) if loss_fn is None else booster.train_step(loss_fn, tx).lower(local, rows)
    return Explanation(
        plan,
        policy,
        tuple(_leaves(local)),
        _held(local, booster.device),
        work,
        tuple(_transfers(lowered, plan.mesh)),
        loss_fn is not None,
        lowered,
    )


def _of_one_rank(state: TrainState, device: torch.device) -> TrainState:
    """The state of the first rank, on fake tensors; the groups of its mesh bear the names of the axes."""
    mesh = state.plan.mesh
    lead = len(mesh.axes) if mesh.virtual else 0
    groups = tuple(name if size > 1 else None for name, size in mesh.axes)
    alone = Plan(state.plan.plugin, Mesh(mesh.axes, groups, (0,) * len(groups)))

    def local(node: Any) -> Any:
        if not isinstance(node, flat.Flat):
            return _fake(node, lead, device)
        homes = {bucket: torch.device("cpu") if bucket in node.layout.host else device for bucket in node.buffers}
        return flat.Flat({name: _fake(value, lead, homes[name]) for name, value in node.buffers.items()}, node.layout)

    def is_flat(node: Any) -> bool:
        return isinstance(node, flat.Flat)

    alike = tree.map(lambda leaf: _fake(leaf, 0, device), state)
    split = {
        name: tree.map(local, getattr(state, name), is_leaf=is_flat) for name in ("storage", "frozen", "opt_state")
    }
    return dataclasses.replace(alike, **split, plan=alone)


def _fake(leaf: Any, lead: int, device: torch.device) -> Any:
    """An empty tensor like ``leaf`` without its first dims, of the fake mode in scope; what has no shape stays."""
    if not hasattr(leaf, "shape"):
        return leaf
    return torch.empty(tuple(leaf.shape)[lead:], dtype=leaf.dtype, device=device)


def _lower(state: TrainState, policy: Policy, tx: Any) -> Lowered:
    """The graph of a step of ``_energy``; gradients are the updates where there is no ``tx``."""
    plugin = state.plan.plugin
    unchanged = optim.GradientTransformation(
        lambda params: state.opt_state, lambda updates, opt_state, params: (updates, opt_state), optim.base.elementwise
    )
    recipe = step.Recipe(_energy, unchanged if tx is None else optim.as_transformation(tx), policy)

    def local(state: TrainState) -> tuple[TrainState, Replicated]:
        prepared = step.prepare(policy, state)

        def energy(trained: flat.Flat) -> torch.Tensor:
            frozen = [] if prepared.frozen is None else [plugin.gather(prepared.frozen, policy)]
            return _energy(plugin.gather(trained, policy), *frozen)

        grads, loss = transforms.grad_and_value(energy)(prepared.trained)
        weight = torch.ones((), dtype=torch.float64, device=loss.device)
        sums = step.Sums(plugin.reduce(grads, policy), loss, weight, {}, state.buffers)
        new, metrics = step.update(recipe, state, sums)
        return on_ranks(new), Replicated(metrics)

    def train_step(state: TrainState) -> tuple[TrainState, step.Metrics]:
        return spmd(local, state.plan.mesh)(on_ranks(state))

    return jit(train_step, donate=True).lower(state)


def _energy(*flats: flat.Flat) -> torch.Tensor:
    """The sum of squares, bucket by bucket in the order of the leaves; its backward needs every parameter again."""
    names = [(part, bucket) for part in flats for bucket in dict.fromkeys(slot.bucket for slot in part.layout.slots)]
    buffers = (part.buffers[bucket] for part, bucket in names)
    used = (buffer.abs().square() if transforms.is_differentiable(buffer) else buffer.ne(0) for buffer in buffers)
    return torch.stack([part.sum().to(torch.float32) for part in used]).sum()


def _work(state: TrainState, policy: Policy) -> Work:
    plugin = state.plan.plugin

    def local(state: TrainState) -> tuple[Tree, ...]:
        prepared = step.prepare(policy, state)
        held = [part for part in (prepared.trained, prepared.frozen) if part is not None]
        kept = plugin.reduce(prepared.trained, policy)  # a gradient is laid out as what it is taken of
        return held, [plugin.gather(part, policy) for part in held], prepared.trained, kept, plugin.sync(kept, policy)

    with torch.no_grad():
        prepared, gathered, *gradients = spmd(local, state.plan.mesh)(on_ranks(state))
    copies = _fresh(gathered, prepared)
    return Work(
        sum(_fresh(prepared, (state.storage, state.frozen))),
        sum(copies),
        max(copies, default=0),
        *map(_nbytes, gradients),
    )


def _fresh(values: Tree, old: Tree) -> list[int]:
    """The bytes of each tensor that is not one of the ``old`` ones, or a view of it."""
    olds = tree.leaves(old)
    return [leaf.nbytes for leaf in tree.leaves(values) if not any(graph.shares_storage(leaf, other) for other in olds)]


def _leaves(state: TrainState) -> Iterable[Leaf]:
    """In the order of the model's tree."""
    layouts = [(layout, layout is state.storage.layout) for layout in state.layouts if layout is not None]
    found = {}
    for layout, trained in layouts:
        for slot in layout.slots:
            split = layout.axes[slot.bucket]
            parts = state.plan.mesh.extent(split)
            found[slot.name] = Leaf(slot.name, slot.shape, slot.dtype, trained, slot.bucket, split, parts)
    return (found[name] for name in tree.names(state.abstract.tree))


def _held(state: TrainState, device: torch.device) -> Held:
    flats = [part for part in (state.storage, state.frozen) if part is not None]
    everything = [leaf for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)]
    return Held(
        parameters=_nbytes(state.storage),
        frozen=_nbytes(state.frozen),
        optimizer=_nbytes(state.opt_state),
        buffers=_nbytes(state.buffers),
        counters=_nbytes((state.step, state.position, state.key, state.loss_scale)),
        padding=round(sum(_padding(part.layout, state.plan.mesh) for part in flats)),
        host=sum(leaf.nbytes for leaf in everything if leaf.device != device),
    )


def _padding(layout: flat.Layout, mesh: Mesh) -> float:
    """Bytes a rank, on average."""
    return sum(
        (layout.size(bucket) - sum(slot.size for slot in slots))
        * slots[0].dtype.itemsize
        / mesh.extent(layout.axes[bucket])
        for bucket, slots in layout.buckets.items()
    )


def _transfers(lowered: Lowered, mesh: Mesh) -> Iterable[Transfer]:
    """Those that take longest first."""
    found = (
        Transfer(one.op, one.axis, mesh.extent(one.axis), one.dtype, one.count, one.bytes)
        for one in lowered.collectives
    )
    return sorted(found, key=lambda one: (-one.wire, one.op, one.axis, str(one.dtype)))


def _nbytes(values: Tree) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(values) if isinstance(leaf, torch.Tensor))


def _parameters(leaves: tuple[Leaf, ...]) -> Table:
    """One row for leaves that differ in numbers of their names, and in buckets, alone."""
    from rich.text import Text

    table = _table("parameter", "", "shape", "dtype", "split over", "bucket", "bytes a rank")
    alike: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", leaf.name)
        alike.setdefault((pattern, leaf.shape, leaf.dtype, leaf.split, leaf.trained), []).append(leaf)
    for (pattern, shape, dtype, split, trained), rows in alike.items():
        buckets = sorted({leaf.bucket for leaf in rows})
        table.add_row(
            Text((pattern if len(rows) > 1 else rows[0].name) + ("" if trained else " (frozen)")),
            f"x {len(rows)}" if len(rows) > 1 else "",
            str(list(shape)),
            _dtype(dtype),
            ", ".join(split) or "whole",
            Text(buckets[0] if len(buckets) == 1 else f"{len(buckets)} buckets"),
            readable_bytes(sum(leaf.bytes for leaf in rows)),
        )
    return table


def _sizes(held: Held, work: Work, more: list[tuple[str, str]]) -> Table:
    table = _table("after init", "bytes a rank")
    frozen = [("frozen parameters", held.frozen)] if held.frozen else []
    rows = [("trained parameters", held.parameters), *frozen, ("optimizer state", held.optimizer)]
    rows += [("buffers", held.buffers)] if held.buffers else []
    for name, size in (*rows, ("counters and key", held.counters)):
        table.add_row(name, readable_bytes(size))
    table.add_row("together", readable_bytes(held.total), style="bold")
    for name, size in (("padding", held.padding), ("in the host's memory", held.host)):
        if size:
            table.add_row(f"  of that {name}", readable_bytes(size))
    table.add_section()
    table.add_row("[bold]while a step runs, on top[/bold]", "")
    added = [("parameters, prepared once a step", work.prepared), ("parameters, gathered where used", work.gathered)]
    for name, size in added:
        if size:
            table.add_row(name, readable_bytes(size))
    if work.gathered:
        table.add_row("  the largest bucket of them", readable_bytes(work.largest))
    table.add_row("gradients of a batch", readable_bytes(work.gradients))
    if work.kept != work.gradients:
        table.add_row("  kept of them", readable_bytes(work.kept))
    if work.summed != work.kept:
        table.add_row("gradients, summed over ranks", readable_bytes(work.summed))
    for name, value in more:
        table.add_row(name, value)
    return table


def _collectives(collectives: tuple[Transfer, ...]) -> Table:
    table = _table("collectives of a step", "axis", "dtype", "calls", "bytes of results", "bytes sent (ring)")
    for one in collectives:
        axis = f"{one.axis} ({one.ranks})"
        table.add_row(
            one.op, axis, _dtype(one.dtype), str(one.count), readable_bytes(one.bytes), readable_bytes(one.wire)
        )
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if "bytes" in name or name == "calls" else "left")
    return table


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
