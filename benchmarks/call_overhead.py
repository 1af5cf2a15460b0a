"""Python's share of a jitted step, outside the compiled graph, for a model of 150 leaves: ``python -m
benchmarks.call_overhead``.

Bar: at most 200 microseconds a call.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import tyro

import functional_booster as fb
from functional_booster.kernels import graph

from . import report


def main(leaves: int = 150, rounds: int = 300) -> None:
    """The time of a call, and of the same call with a compiled function that returns at once."""
    abstract = {f"w{i:03}": fb.ArrayInfo((8,), initializer=fb.initializers.normal(1.0)) for i in range(leaves)}
    model = fb.Model(lambda key: fb.initialize(abstract, key), lambda params, x: x, abstract)
    tx = fb.optim.adamw(1e-3)
    booster = fb.Booster(device="cpu")

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return sum(leaf.square().sum() for leaf in fb.tree.leaves(params)) * batch["x"].mean()

    batch = {"x": torch.ones(4)}

    def caller() -> Any:
        step, held = booster.train_step(loss, tx, max_norm=1.0), [booster.init(model, tx, key=fb.random.key(0))]

        def call() -> None:
            held[0], _ = step(held[0], batch)

        call()
        return call

    def at_once(traced: Any, *_: Any) -> Any:
        results = [torch.zeros(result.shape, dtype=result.dtype) for result in graph.results_of(traced)]
        return lambda *_: results

    with mock.patch.object(graph, "compile", at_once):
        outside = caller()
    alone = report.medians(report.interleaved({"outside": outside}, rounds))["outside"]
    seconds = report.medians(report.interleaved({"step": caller(), "outside": outside}, rounds))
    rows = [
        {"what": "step", "us": 1e6 * seconds["step"]},
        {"what": "step outside the compiled graph", "us": 1e6 * alone},
        {
            "what": "the same right after a step, caches cold and the thread pool spinning",
            "us": 1e6 * seconds["outside"],
        },
    ]
    report.publish(
        "call_overhead", rows, leaves=leaves, tensors_in_the_state=len(fb.tree.leaves(booster.abstract(model, tx)))
    )


if __name__ == "__main__":
    tyro.cli(main)
