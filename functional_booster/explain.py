"""explain: what every rank holds, and what one step moves between ranks, before anything is computed."""

from __future__ import annotations

import dataclasses
import functools
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_booster import explain_tables, optim, step
from functional_booster.kernels import flat, transforms, tree
from functional_booster.precision import Policy
from functional_booster.sharding.mesh import Mesh, spmd
from functional_booster.sharding.rows import microbatches

from .booster import Booster
from .jit import Jitted, jit
from .loss_call import LossFn
from .lowered import Lowered, readable_bytes
from .models.model import Model
from .plugins import Plan
from .rank_memory import Held, Leaf, Work, held_by, leaves_of, work_of
from .state import TrainState, on_ranks
from .train_step import TrainStep
from .transfers import Transfer, transfers

if TYPE_CHECKING:
    from rich.console import Group

Tree = tree.Tree
_WIDTH = 120  # columns of the table as text


@dataclass(frozen=True, repr=False)
class Explanation:
    """How a state is laid out, and what a step of it moves: ``print`` it; all numbers are those of one rank.

    ``lowered`` is the graph of one rank's step, with its collectives by axis name; of a microbatch where ``accumulate``
    is more than 1, and ``collectives`` are those of all microbatches, and of what is done once. ``loss`` says whether
    that is the step of a loss that was given, or of one that stands for any.
    """

    plan: Plan
    policy: Policy
    leaves: tuple[Leaf, ...]
    held: Held
    work: Work
    collectives: tuple[Transfer, ...]
    accumulate: int
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

        return Group(
            explain_tables.head(self.plan, self.policy, self.accumulate),
            explain_tables.parameters(self.leaves),
            explain_tables.sizes(self.held, self.work, self._traced()),
            explain_tables.collectives(self.collectives) if self.collectives else "No collectives.",
        )

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
    loss_fn: LossFn | None = None,
    batch: Tree = None,
    accumulate: int = 1,
) -> Explanation:
    """What each rank holds of a state, or of the one that ``init`` would make of a Model and ``tx``, and what it moves.

    Nothing is computed, and no process is asked: one rank's step is traced on fake tensors, under any mesh. With
    ``loss_fn``, ``tx`` and ``batch``, one rank's part of it (tensors or ArrayInfo), this is the graph of the jitted
    step; without, that of a loss which uses each parameter once, in order, and again in its backward: where buckets are
    gathered for each, the given loss may need fewer. The step is one of ``accumulate`` microbatches. Raises ValueError
    for arguments that are missing or out of range, TypeError for a state that is none.
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
    train_step = booster.train_step(
        _energy if loss_fn is None else loss_fn, _unchanged(state) if tx is None else tx, accumulate=accumulate
    )
    if not isinstance(train_step, TrainStep):
        raise ValueError(
            f"booster: {booster.plan.plugin}, expected a plugin without a pipeline, whose step is no graph"
        )
    with FakeTensorMode(allow_non_fake_inputs=True):
        local = _of_one_rank(state, booster.device)
        rows = torch.empty(accumulate, device=booster.device) if batch is None else batch
        rows = tree.map(lambda leaf: _fake(leaf, 0, booster.device), rows)
        work = work_of(local, booster.policy, accumulate)
        graphs = _graphs(train_step, local, rows)
    return Explanation(
        state.plan,
        booster.policy,
        tuple(leaves_of(local)),
        held_by(local, booster.device),
        work,
        transfers(graphs, local.plan.mesh),
        accumulate,
        loss_fn is not None,
        graphs[0][1],
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


def _graphs(train_step: TrainStep, state: TrainState, batch: Tree) -> list[tuple[int, Lowered]]:
    """The graphs of one rank's step, and how often each is called; first that in which the loss is."""
    recipe = train_step.recipe
    whole, further, finish = (part if isinstance(part, Jitted) else jit(part) for part in train_step.parts)
    if recipe.accumulate == 1:
        return [(1, whole.lower(state, batch))]
    first = microbatches(batch, recipe.accumulate)[0]
    prepared = train_step.prepare(state)
    sums = spmd(functools.partial(step.gradients, recipe), state.plan.mesh)(on_ranks(state), prepared, first)
    index = torch.zeros((), dtype=torch.int32, device=state.step.device)
    return [
        (recipe.accumulate, further.lower(sums, state, prepared, first, index)),
        (1, jit(train_step.prepare).lower(state)),
        (1, finish.lower(state, sums)),
    ]


def _unchanged(state: TrainState) -> optim.GradientTransformation:
    """An optimizer whose updates are the gradients."""
    return optim.GradientTransformation(
        lambda params: state.opt_state, lambda updates, opt_state, params: (updates, opt_state), optim.base.elementwise
    )


def _energy(params: Tree, batch: Tree) -> tuple[torch.Tensor, float]:
    """The sum of squares, leaf by leaf in order; its backward needs every parameter again."""
    leaves = tree.leaves(params)
    used = (leaf.abs().square() if transforms.is_differentiable(leaf) else leaf.ne(0) for leaf in leaves)
    return torch.stack([leaf.sum().to(torch.float32) for leaf in used]).sum(), 1.0
