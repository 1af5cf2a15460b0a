"""Laws: what must hold for every plugin, mesh and model. Each raises AssertionError, and says which faults it finds.

``mesh`` is a virtual mesh with the plugin's axes; ``problem.batch`` is the global batch, of any number of rows where a
law does not say more. The error names law, plugin, mesh, leaf and difference.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from functional_booster import checkpoint
from functional_booster.booster import Booster
from functional_booster.jit import RecompileWarning
from functional_booster.kernels import graph, tree
from functional_booster.kernels.flat import Flat
from functional_booster.plugins import Plugin, TorchFSDPPlugin
from functional_booster.plugins.dataloaders import share
from functional_booster.sharding.collectives import all_gather, psum
from functional_booster.sharding.mesh import Mesh, Replicated, spmd, virtual_mesh
from functional_booster.sharding.rows import StandIn, portion, rows_of
from functional_booster.state import TrainState

from .problem import Problem

Tree = tree.Tree
Values = dict[str, torch.Tensor]
TOLERANCE = 1e-9  # of float64, relative and absolute: sums in another order, a few steps of an optimizer on them
STEPS = 2


def unshard_inverts_shard(plugin: Plugin, mesh: Mesh, problem: Problem, *, accumulate: int = 1) -> None:
    """``full_params(init(params)) == params`` and ``shard(full_params(state)) == state``, bitwise; after steps as well.

    Finds: parts in the wrong order, padding that is kept or lost, leaves that come back in another place, storage whose
    padding does not stay zero (it would count in norms), ranks whose parts do not make one whole.
    """
    case = _Case("unshard inverts shard", plugin, mesh)
    booster = Booster(problem.device, "fp32", plugin=plugin, mesh=mesh)
    params = problem.model.init(problem.key)
    state = booster.init(problem.model, problem.tx, key=problem.key, params=params)
    case.require_equal(tree.named_leaves(booster.full_params(state)), tree.named_leaves(params), 0)
    state, _ = _train(booster, problem, accumulate, state=state)
    again = booster.shard(booster.full_params(state), like=state)
    stored = {"storage": state.storage, "frozen": state.frozen}
    case.require_equal(_named({"storage": again.storage, "frozen": again.frozen}), _named(stored), 0)


def step_equals_one_device(plugin: Plugin, mesh: Mesh, problem: Problem, *, accumulate: int = 1) -> None:
    """Steps under the plugin equal steps on one device that accumulates the same microbatches, to rounding.

    Loss, norm, weight, aux, parameters and the whole optimizer state, dropout included: a row has the key of its place
    in the global batch, whose rows ``accumulate`` times the number of data ranks must divide here. Finds: a sum over
    ranks that is missing, averaged, taken twice or over the wrong axes; a part that meets another rank's gradient; a
    norm that counts a leaf twice or misses ranks; ranks that drop alike.
    """
    case = _Case("step == one device", plugin, mesh)
    got = _train(Booster(problem.device, "fp32", plugin=plugin, mesh=mesh), problem, accumulate)
    alone = _train(Booster(problem.device), problem, accumulate * mesh.extent(plugin.data_axes))
    case.require_equal(_compared(problem, *got), _compared(problem, *alone), TOLERANCE)


def accumulation_equals_whole_batch(plugin: Plugin, mesh: Mesh, problem: Problem, *, accumulate: int = 1) -> None:
    """Without dropout, a batch split over ranks and microbatches gives the step of the whole batch, to rounding.

    Finds: gradients divided before they are summed, weights of microbatches or ranks that count alike though they
    differ, microbatches that are lost or counted twice, clipping that is done too early.
    """
    case = _Case("accumulate == whole batch", plugin, mesh)
    sure = replace(problem, loss_fn=lambda params, batch: problem.loss_fn(params, batch, None))
    got = _train(Booster(problem.device, "fp32", plugin=plugin, mesh=mesh), sure, accumulate)
    whole = _train(Booster(problem.device), sure, 1)
    case.require_equal(_compared(problem, *got), _compared(problem, *whole), TOLERANCE)


def uneven_batches_equal_one_device(plugin: Plugin, mesh: Mesh, problem: Problem, *, accumulate: int = 1) -> None:
    """Batches of one row, of a row less or more than ranks, and of all but one: one device's steps, to rounding.

    Without dropout; train and eval step. Finds: ranks without rows that count, or whose gradients do; rows that are
    left out, or taken twice to fill up; ranks and microbatches that weigh alike though one has a row more.
    """
    case = _Case("uneven batch == one device", plugin, mesh)
    sure = replace(problem, loss_fn=lambda params, batch: problem.loss_fn(params, batch, None))
    booster, alone = Booster(problem.device, "fp32", plugin=plugin, mesh=mesh), Booster(problem.device)
    rows, ranks = rows_of(problem.batch), mesh.extent(plugin.data_axes)
    for number in sorted({1, ranks - 1, ranks + 1, rows - 1} & {*range(1, rows)}):
        few = replace(sure, batch=_portion_of(problem.batch, range(number)))
        got, expected = (_trained_and_evaluated(*each, few) for each in ((booster, accumulate), (alone, 1)))
        case.require_equal(got, expected, TOLERANCE, f"{number} rows")


def jit_equals_eager(
    plugin: Plugin, mesh: Mesh, problem: Problem, *, accumulate: int = 1, compiled: bool = False
) -> None:
    """A jitted, donated step equals the same Python run eagerly, to rounding.

    Runs the traced graph; with ``compiled`` what Inductor makes of it, which takes a minute. Finds: Python that decides
    by values, numbers that became constants of the graph, results in storage that a donated input had, collectives that
    a graph drops or moves.
    """
    case = _Case("jit == eager", plugin, mesh)
    booster = Booster(problem.device, "fp32", plugin=plugin, mesh=mesh)
    with contextlib.nullcontext() if compiled else traced():
        got = _train(booster, problem, accumulate, jit=True)
    eager = _train(booster, problem, accumulate)
    case.require_equal(_compared(problem, *got), _compared(problem, *eager), TOLERANCE)


def load_inverts_save(plugin: Plugin, mesh: Mesh, problem: Problem, *, accumulate: int = 1) -> None:
    """What is saved is what is loaded, bitwise: on this layout, on one device, on other ranks, under another plugin.

    And back: a checkpoint of one device is loaded on this layout. Finds: leaves that are saved in a layout's own order,
    names that depend on the layout, padding in files, state (moments, counters, keys) that is not saved.
    """
    case = _Case("load inverts save", plugin, mesh)
    here = Booster(problem.device, "fp32", plugin=plugin, mesh=mesh)
    alone = Booster(problem.device)
    others = (here, alone, Booster(problem.device, "fp32", plugin=TorchFSDPPlugin(), mesh=virtual_mesh(3)))
    state, _ = _train(here, problem, accumulate)
    saved = checkpoint.named_tensors(state)
    with tempfile.TemporaryDirectory() as folder:
        for place, other in enumerate(others):
            here.save(f"{folder}/{place}", state)
            loaded = other.load(f"{folder}/{place}", like=other.abstract(problem.model, problem.tx))
            into = f"loaded on {other.plan.mesh if other.plugin is not None else 'one device'}"
            case.require_equal(checkpoint.named_tensors(loaded), saved, 0, into)
            other.save(f"{folder}/back", loaded)
            back = here.load(f"{folder}/back", like=state)
            case.require_equal(_named(back), _named(state), 0, f"{into} and back")


def resume_equals_never_stopped(plugin: Plugin, mesh: Mesh, problem: Problem, *, accumulate: int = 1) -> None:
    """Steps, save, load, and steps again are bitwise the run that never stopped: state and metrics.

    Finds: state that is kept outside of the TrainState, numbers that are saved in less than their precision, keys and
    counters that begin again.
    """
    case = _Case("resume == never stopped", plugin, mesh)
    booster = Booster(problem.device, "fp32", plugin=plugin, mesh=mesh)
    half, _ = _train(booster, problem, accumulate)
    with tempfile.TemporaryDirectory() as folder:
        booster.save(Path(folder) / "half", half)
        resumed = booster.load(Path(folder) / "half", like=booster.abstract(problem.model, problem.tx))
    state, metrics = _train(booster, problem, accumulate, state=resumed)
    whole, expected = _train(booster, problem, accumulate, steps=2 * STEPS)
    case.require_equal({**_named(state), **_named(metrics)}, {**_named(whole), **_named(expected[-STEPS:])}, 0)


def replicas_are_equal(plugin: Plugin, mesh: Mesh, problem: Problem, *, accumulate: int = 1) -> None:
    """Whatever mesh axes do not split is bitwise the same on every rank along them, after steps.

    Parameters, frozen leaves and optimizer state. Finds: ranks that drift apart, since each applied a gradient of its
    own, or one that was summed in another order.
    """
    case = _Case("replicas are equal", plugin, mesh)
    state, _ = _train(Booster(problem.device, "fp32", plugin=plugin, mesh=mesh), problem, accumulate)
    for name, differing in _apart(state).items():
        if int(differing):
            raise AssertionError(f"{case}: {name}: {int(differing)} elements differ from the first replica's")


def virtual_equals_real(
    plugin: Plugin, mesh: Mesh | None, problem: Problem, *, accumulate: int = 1, compiled: bool = False
) -> None:
    """Steps of processes equal those of as many virtual ranks, to rounding; jit and eager; replicas are equal.

    Every process of an initialized torch.distributed calls this with the same problem, the global batch in it; ``mesh``
    (a torch DeviceMesh) may be left out. Finds: collectives that differ between the two, ranks that enter different
    ones, code that reads its rank from elsewhere than its axes.
    """
    booster = Booster(problem.device, "fp32", plugin=plugin, mesh=mesh)
    real = booster.plan.mesh
    virtual = Mesh(real.axes)
    case = _Case("virtual == real", plugin, real)
    expected = _compared(
        problem, *_train(Booster(problem.device, "fp32", plugin=plugin, mesh=virtual), problem, accumulate)
    )
    which, ranks = share(real, plugin.data_axes)
    mine = portion(range(rows_of(problem.batch)), ranks, which)
    part = _portion_of(problem.batch, mine or range(1))
    local = replace(problem, batch=part if mine else StandIn(part))
    for jit in (False, True):
        with contextlib.nullcontext() if compiled else traced():
            state, metrics = _train(booster, local, accumulate, jit=jit)
        case.require_equal(_compared(problem, state, metrics), expected, TOLERANCE, "jit" if jit else "eager")
    differing = {name: int(number) for name, number in _apart(state).items()}
    for name, number in differing.items():
        if number:
            raise AssertionError(f"{case}: {name}: {number} elements differ between replicas")


LAWS = (
    unshard_inverts_shard,
    step_equals_one_device,
    accumulation_equals_whole_batch,
    uneven_batches_equal_one_device,
    replicas_are_equal,
    jit_equals_eager,
    load_inverts_save,
    resume_equals_never_stopped,
)


@contextlib.contextmanager
def traced() -> Generator[None]:
    """Within it, ``jit`` runs the graphs that it traces, and leaves Inductor out: the same numbers, in no time."""
    with mock.patch.object(graph, "compile", lambda traced, examples, options=None: traced):
        yield


@dataclass(frozen=True)
class _Case:
    """What a law is tried on, for its message."""

    law: str
    plugin: Any
    mesh: Mesh

    def __str__(self) -> str:
        return f"the law {self.law!r} does not hold for {self.plugin} on {self.mesh}"

    def require_equal(self, got: Values, expected: Values, tolerance: float, where: str = "") -> None:
        """Raise AssertionError for the first leaf that is missing, of another kind, or differs; 0 means bitwise."""
        place = f"{self}{', ' if where else ''}{where}"
        if got.keys() != expected.keys():
            raise AssertionError(f"{place}: leaves {sorted(got.keys() ^ expected.keys())} are not on both sides")
        for name, leaf in got.items():
            other = expected[name]
            if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
                kinds = (f"{one.dtype}{list(one.shape)}" for one in (leaf, other))
                raise AssertionError(f"{place}: {name} is {' where expected was '.join(kinds)}")
            if (problem := _difference(leaf, other, tolerance)) is not None:
                raise AssertionError(f"{place}: {name}: {problem}")


def _difference(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    if tolerance == 0 or not got.is_floating_point():
        wrong = _unequal(got, expected)
    else:
        wrong = ~torch.isclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not wrong.any():
        return None
    distance = torch.where(wrong, (got.double() - expected.double()).abs(), -1.0).nan_to_num(torch.inf)
    place = tuple(int(each) for each in torch.unravel_index(distance.argmax(), got.shape))
    at = f" at {place}" if place else ""
    return (
        f"{int(wrong.sum())} of {got.numel()} elements differ, most{at}: got {got[place].item()!r}, expected "
        f"{expected[place].item()!r} (difference {distance.max().item():.3g})"
    )


def _unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ; a NaN equals a NaN."""
    return (a != b) & ~((a != a) & (b != b))


def _train(
    booster: Booster,
    problem: Problem,
    accumulate: int,
    *,
    steps: int = STEPS,
    jit: bool = False,
    state: TrainState | None = None,
) -> tuple[TrainState, list[dict[str, torch.Tensor]]]:
    """So many steps on the problem's batch, and the metrics of each."""
    if state is None:
        state = booster.init(problem.model, problem.tx, key=problem.key, params=problem.model.init(problem.key))
    step = booster.train_step(
        problem.loss_fn, problem.tx, accumulate=accumulate, max_norm=problem.max_norm, jit=jit, donate=jit
    )
    history = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecompileWarning)  # an uneven batch has microbatches of two sizes
        for _ in range(steps):
            state, metrics = step(state, problem.batch)
            history.append(metrics)
    return state, history


def _trained_and_evaluated(booster: Booster, accumulate: int, problem: Problem) -> Values:
    state, history = _train(booster, problem, accumulate)
    metrics = booster.eval_step(problem.loss_fn, jit=False)(state, problem.batch)
    return _compared(problem, state, [*history, metrics])


def _compared(problem: Problem, state: TrainState, history: list[dict[str, torch.Tensor]]) -> Values:
    """Whole leaves of a state and the metrics, by name, whatever the layout."""
    kept = [{name: value for name, value in metrics.items() if name not in problem.apart} for metrics in history]
    return {**tree.named_leaves({"metrics": kept}), **checkpoint.named_tensors(state)}


def _named(values: Tree) -> Values:
    """The leaves as they are stored, by name."""
    return tree.named_leaves(values)


def _apart(state: TrainState) -> dict[str, torch.Tensor]:
    """For each leaf of a state, in how many elements ranks differ from the first one that should hold the same."""
    mesh = state.plan.mesh

    def count(leaf: torch.Tensor, split: tuple[str, ...]) -> torch.Tensor:
        along = tuple(axis for axis in mesh.names if axis not in split)
        first = all_gather(leaf, along, tiled=False)[0]
        return psum(_unequal(leaf, first).sum(), mesh.names)

    def local(values: Tree) -> Replicated:
        nodes, structure = tree.flatten(values, is_leaf=lambda node: isinstance(node, Flat))
        counts = [_counted(node, count) for node in nodes]
        return Replicated(tree.unflatten(structure, counts))

    values = {"storage": state.storage, "frozen": state.frozen, "opt_state": state.opt_state}
    with torch.no_grad():
        return tree.named_leaves(spmd(local, mesh)(values))


def _counted(node: Any, count: Any) -> Any:
    if not isinstance(node, Flat):
        return count(node, ())
    axes = node.layout.axes
    return {name: None if leaf is None else count(leaf, axes[name]) for name, leaf in node.buffers.items()}


def _portion_of(batch: Tree, rows: range) -> Tree:
    return tree.map(lambda leaf: leaf[rows.start : rows.stop] if leaf.dim() else leaf, batch)
