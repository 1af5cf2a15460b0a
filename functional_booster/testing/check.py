"""check_plugin: one call holds a plugin to all laws."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from functional_booster.plugins import Plugin
from functional_booster.sharding.mesh import Mesh

from .laws import LAWS
from .problem import Problem
from .strategies import meshes, problems, splits


def check_plugin(
    plugin: Plugin,
    *,
    laws: Sequence[Callable[..., None]] = LAWS,
    max_ranks: int = 8,
    max_examples: int = 10,
    tx: Any = None,
    clip: bool = True,
    apart: Collection[str] = (),
) -> None:
    """Hold ``plugin`` to each law, on so many drawn examples: virtual meshes, small models, splits of a batch.

    For a plugin that is meant for one optimizer, or cannot clip: ``tx``, ``clip=False``; ``apart`` names metrics that
    it defines in its own way (see ``Problem``). Raises AssertionError, for the smallest example found, that names law,
    plugin, mesh, leaf and difference. ``virtual_equals_real`` is not among the laws: it takes processes.
    """

    @st.composite
    def cases(draw: st.DrawFn) -> tuple[Mesh, Problem, int]:
        mesh = draw(meshes(plugin, max_ranks))
        rows, accumulate = draw(splits(mesh.extent(plugin.data_axes)))
        return mesh, replace(draw(problems(rows, tx, clip)), apart=frozenset(apart)), accumulate

    for law in laws:
        _hold(law, plugin, cases(), max_examples)


def _hold(law: Callable[..., None], plugin: Plugin, cases: st.SearchStrategy[Any], max_examples: int) -> None:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]  # a step takes longer than what hypothesis is made for

    @settings(max_examples=max_examples, deadline=None, suppress_health_check=slow, report_multiple_bugs=False)
    @given(cases)
    def holds(case: tuple[Mesh, Problem, int]) -> None:
        mesh, problem, accumulate = case
        law(plugin, mesh, problem, accumulate=accumulate)

    holds()
