"""Hypothesis strategies: meshes, specs, trees, batches, splits, and small models with whatever makes layouts go wrong.

Numbers come from a drawn seed, by counter-based keys: hypothesis shrinks shapes and structure, where the faults are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from functional_booster import optim
from functional_booster.kernels import random, tree
from functional_booster.models.model import Model
from functional_booster.plugins import Plugin
from functional_booster.sharding import initializers
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.mesh import Mesh, virtual_mesh
from functional_booster.sharding.spec import PartitionSpec

from .problem import Problem, labelled, loss_of, residual, small

Tree = tree.Tree
Shape = tuple[int, ...]
_SEEDS = st.integers(0, 2**16)
_NAMES = ("dp", "fsdp", "tp")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@st.composite
def meshes(draw: st.DrawFn, plugin: Plugin | None = None, max_ranks: int = 8) -> Mesh:
    """A virtual mesh of up to ``max_ranks`` ranks: over the plugin's axes, or, without one, over one to three axes.

    Half of a plugin's meshes are as the plugin lays a number of ranks out; the others spread its data axes at will.
    """
    if plugin is None:
        names = draw(st.permutations(_NAMES))[: draw(st.integers(1, len(_NAMES)))]
        return virtual_mesh(**dict(zip(names, draw(_factors(len(names), max_ranks)), strict=True)))
    axes = own = draw(st.sampled_from(_layouts(plugin, max_ranks)))
    if draw(st.booleans()):
        rest = math.prod(axes[name] for name in plugin.data_axes)
        for name in draw(st.permutations(plugin.data_axes)):
            axes = {**axes, name: draw(st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0]))}
            rest //= axes[name]
        axes = {**axes, name: axes[name] * rest}
    return virtual_mesh(**(axes if _accepts(plugin, axes) else own))


def _accepts(plugin: Plugin, axes: dict[str, int]) -> bool:
    """Whether the plugin's own arguments leave room for these sizes."""
    try:
        abstract = small(1).model.abstract
        plugin.layout(abstract, tree.map(lambda _: (), abstract), virtual_mesh(**axes))
    except ValueError:
        return False
    return True


def _layouts(plugin: Plugin, max_ranks: int) -> list[dict[str, int]]:
    """How the plugin lays out each number of ranks that it can."""
    found = []
    for ranks in range(1, max_ranks + 1):
        try:
            found.append(dict(plugin.axes(ranks)))
        except ValueError:
            continue
    if not found:
        raise ValueError(f"{plugin} lays out no number of ranks up to {max_ranks}: raise max_ranks")
    return found


@st.composite
def _factors(draw: st.DrawFn, number: int, most: int) -> tuple[int, ...]:
    """So many whole numbers whose product is at most ``most``."""
    factors: list[int] = []
    for _ in range(number):
        factors.append(draw(st.integers(1, max(1, most // math.prod(factors)))))
    return tuple(draw(st.permutations(factors)))


@st.composite
def shapes(draw: st.DrawFn, max_dims: int = 3, max_size: int = 9) -> Shape:
    """Scalars, one-element leaves, empty ones, and sizes that no number of ranks divides."""
    return tuple(draw(st.lists(st.integers(0, max_size), max_size=max_dims)))


@st.composite
def specs(draw: st.DrawFn, shape: Shape, mesh: Mesh) -> PartitionSpec:
    """A legal spec of a leaf of this shape: each axis splits at most one dim, several may split one."""
    entries: list[list[str]] = [[] for _ in shape]
    for name in draw(st.permutations(mesh.names)):
        place = draw(st.integers(-1, len(shape) - 1))
        if place >= 0:
            entries[place].append(name)
    written = [None if not entry else entry[0] if len(entry) == 1 else tuple(entry) for entry in entries]
    while written and written[-1] is None and draw(st.booleans()):
        written.pop()
    return PartitionSpec(*written)


def trees(leaves: st.SearchStrategy[Any], max_leaves: int = 6) -> st.SearchStrategy[Tree]:
    """Dicts, lists and tuples of ``leaves``, nested; the tree may be one leaf."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from(["w", "b", "h", "0", "A", "a"]), inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=max_leaves,
    )


@st.composite
def arrays(draw: st.DrawFn, shape: Shape | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor: any shape of ``shapes()``, any of several dtypes, NaN and infinities now and then."""
    shape = draw(shapes()) if shape is None else shape
    dtype = draw(st.sampled_from(_DTYPES)) if dtype is None else dtype
    values = random.normal(random.key(draw(_SEEDS)), shape, dtype=torch.float64) * 10
    if dtype.is_floating_point and draw(st.booleans()):
        values = values.masked_fill(values > 10, math.inf).masked_fill(values < -10, math.nan)
    return values > 0 if dtype == torch.bool else values.to(dtype)


@st.composite
def infos(draw: st.DrawFn, mesh: Mesh | None = None) -> ArrayInfo:
    """An ArrayInfo with an initializer, and with a spec over ``mesh``, if given."""
    shape = draw(shapes())
    spec = PartitionSpec() if mesh is None else draw(specs(shape, mesh))
    return ArrayInfo(shape, torch.float64, spec, initializers.normal(1.0), draw(st.booleans()))


def abstract_trees(mesh: Mesh | None = None, max_leaves: int = 6) -> st.SearchStrategy[Tree]:
    """Trees of ``infos``."""
    return trees(infos(mesh), max_leaves)


@st.composite
def splits(draw: st.DrawFn, ranks: int, max_accumulate: int = 3, max_rows: int = 3) -> tuple[int, int]:
    """(rows of the global batch, accumulate): rows that so many data ranks times accumulate divide."""
    accumulate = draw(st.integers(1, max_accumulate))
    return ranks * accumulate * draw(st.integers(1, max_rows)), accumulate


@st.composite
def batches(draw: st.DrawFn, rows: int, features: int, classes: int) -> dict[str, torch.Tensor]:
    """x (rows, features) float64 and labels y (rows,) int64, some ignored (-100): ranks differ in what counts."""
    return labelled(random.key(draw(_SEEDS)), rows, features, classes, draw(st.sampled_from([0.3, 0.0, 0.9])))


@st.composite
def models(draw: st.DrawFn, features: int, classes: int) -> Model:
    """A ``residual`` of odd widths, with or without leaves that are frozen, unused, used twice, or tied to the head."""
    names = ["frozen", "unused", "twice"] + (["tied"] if features == classes else [])
    flags = {name: draw(st.booleans()) for name in names}
    return residual(features, classes, draw(st.integers(1, 7)), draw(st.integers(1, 3)), **flags)


def optimizers() -> st.SearchStrategy[Any]:
    """AdamW, SGD with momentum, clipping inside of the optimizer, two groups, and a bare (init, update) on trees.

    ``eps`` is such that Adam does not blow rounding errors up.
    """
    return st.sampled_from([_adamw, _nesterov, _clipped, _groups, _bare]).map(lambda make: make())


def _adamw() -> Any:
    return optim.adamw(1e-2, eps=1e-5, weight_decay=0.1)


def _nesterov() -> Any:
    return optim.sgd(0.1, momentum=0.9, nesterov=True)


def _clipped() -> Any:
    return optim.chain(optim.clip_by_global_norm(0.3), _adamw())


def _groups() -> Any:
    def labels(params: Tree) -> Tree:
        return tree.map(lambda leaf: "matrix" if len(leaf.shape) > 1 else "vector", params)

    return optim.partition({"matrix": _adamw(), "vector": optim.sgd(0.1)}, labels)


def _bare() -> Any:
    momentum = optim.sgd(0.1, momentum=0.9)
    return (momentum.init, momentum.update)


@st.composite
def problems(draw: st.DrawFn, rows: int, tx: Any = None, clip: bool = True) -> Problem:
    """A model, its loss, an optimizer (or ``tx``), a batch of so many rows, and, with ``clip``, perhaps a max_norm."""
    features, classes = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    assume(rows > 0)
    model = draw(models(features, classes))
    return Problem(
        model=model,
        loss_fn=loss_of(model),
        tx=draw(optimizers()) if tx is None else tx,
        batch=draw(batches(rows, features, classes)),
        max_norm=draw(st.sampled_from([None, 0.1])) if clip else None,
        key=random.key(draw(_SEEDS)),
    )
