"""Which stage each parameter belongs to, from nothing but their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from functional_booster.kernels import tree

from .actions import require_counts

Tree = tree.Tree


@tree.hash_once
@dataclasses.dataclass(frozen=True)
class Split:
    """The layers of a model over the stages of a pipeline.

    ``homes``: (leaf, the stage that stores it), of every leaf; ``layers``: the leaves that are in a layer, whose stage
    decides where the layer is computed. Everything else is computed where its inputs are, so that a tied leaf is used
    at several stages, and stored at one.
    """

    stages: int
    homes: tuple[tuple[str, int], ...]
    layers: frozenset[str]

    def remat(self, amount: float | Sequence[int]) -> frozenset[str]:
        """The leaves of the first layers of each stage: a part of them (0 to 1), or so many at each stage.

        Raises ValueError for a number of stages, or of layers, that there is not.
        """
        of_stage: dict[int, list[str]] = {stage: [] for stage in range(self.stages)}
        for name, stage in self.homes:
            if name in self.layers and (layer := layer_of(name)) is not None and layer not in of_stage[stage]:
                of_stage[stage].append(layer)
        ordered = [sorted(found, key=lambda layer: int(layer.rpartition(".")[2])) for found in of_stage.values()]
        numbers = [int(amount * len(found)) for found in ordered] if isinstance(amount, int | float) else list(amount)
        sizes = [len(found) for found in ordered]
        if len(numbers) != self.stages or not all(0 <= a <= b for a, b in zip(numbers, sizes, strict=True)):
            raise ValueError(f"remat: {amount}, expected a part from 0 to 1, or for each stage a number up to {sizes}")
        chosen = {layer for found, number in zip(ordered, numbers, strict=True) for layer in found[:number]}
        return frozenset(name for name in self.layers if layer_of(name) in chosen)

    def anchors(self) -> dict[str, int]:
        """{leaf of a layer: its stage}."""
        return {name: stage for name, stage in self.homes if name in self.layers}


def split(
    model: Any,
    stages: int,
    num_layers_per_stage: Sequence[int] | None = None,
    layers: str | Sequence[str] | None = None,
) -> Split:
    """The layers of a model (a Model, or a tree of its parameters), cut into ``stages`` runs that follow one another.

    A layer is an entry of a list in the tree: all leaves of ``h.3``. ``layers`` names the lists, in the order in which
    they are computed ("h"; by default all outermost ones, as they stand in the tree). Each stage gets as many layers as
    any other, or one more, the middle ones first: the ends have embedding and head; ``num_layers_per_stage`` says how
    many instead. What stands in the tree before the first layer is stored at the first stage, what comes after it at
    the last. Raises ValueError for fewer layers than stages, numbers that do not add up to the layers, and a list that
    there is not.
    """
    require_counts(stages=stages)
    names = list(_in_order(getattr(model, "abstract", model)))
    found = [layer for layer in dict.fromkeys(map(layer_of, names)) if layer is not None]
    lists = list(dict.fromkeys(_list_of(layer) for layer in found))
    if layers is not None:
        wanted = [layers] if isinstance(layers, str) else list(layers)
        if unknown := [name for name in wanted if name not in lists]:
            raise ValueError(f"layers: {unknown[0]!r} is no list of layers in the parameter tree, which has {lists}")
        lists = wanted
    ordered = [layer for name in lists for layer in _counted(found, name)]
    numbers = _numbers(len(ordered), stages, num_layers_per_stage)
    stage_of = dict(zip(ordered, (stage for stage, number in enumerate(numbers) for _ in range(number)), strict=True))
    first = min((place for place, name in enumerate(names) if layer_of(name) in stage_of), default=0)
    homes = tuple(
        (name, stage_of.get(layer_of(name) or "", 0 if place < first else stages - 1))
        for place, name in enumerate(names)
    )
    return Split(stages, homes, frozenset(name for name in names if layer_of(name) in stage_of))


def layer_of(name: str) -> str | None:
    """The layer that a leaf is in: its name up to the first number, None where there is none."""
    path = name.split(".")
    depth = next((depth for depth, entry in enumerate(path) if entry.isdigit()), None)
    return None if depth is None else ".".join(path[: depth + 1])


def _list_of(layer: str) -> str:
    return layer.rpartition(".")[0]


def _counted(found: list[str], name: str) -> list[str]:
    own = (layer for layer in found if _list_of(layer) == name)
    return sorted(own, key=lambda layer: int(layer.rpartition(".")[2]))


def _numbers(layers: int, stages: int, given: Sequence[int] | None) -> Sequence[int]:
    if given is not None:
        fits = len(given) == stages and sum(given) == layers and all(number > 0 for number in given)
        if not fits:
            raise ValueError(
                f"num_layers_per_stage: {list(given)}, expected {stages} numbers of at least 1 that add up to the "
                f"model's {layers} layers"
            )
        return given
    if layers < stages:
        raise ValueError(f"stages: {stages}, but the model has {layers} layers, and each stage needs one")
    numbers, more = [layers // stages] * stages, layers % stages
    start = stages // 2 - more // 2
    for stage in range(start, start + more):
        numbers[stage] += 1
    return numbers


def _in_order(node: Tree, path: str = "") -> Iterator[str]:
    """The names of a tree's leaves as they were written: a dict's in the order of its entries, which optree sorts."""
    if isinstance(node, Mapping):
        items: Any = node.items()
    elif isinstance(node, list | tuple):
        items = enumerate(node)
    else:
        inner = tree.names(node, lambda leaf: leaf is None)
        yield from (".".join(filter(None, (path, name))) for name in inner)
        return
    for entry, child in items:
        yield from _in_order(child, f"{path}.{entry}" if path else str(entry))
