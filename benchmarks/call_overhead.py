"""Python's share of a jitted step, outside the compiled graph, for a model of 150 leaves: ``python -m benchmarks.call_overhead``.

Bar: at most 200 microseconds a call.
"""

from __future__ import annotations

from typing import Any

import torch
import tyro

import functional_booster as fb
from functional_booster.jit import Jitted

from . import report


def main(leaves: int = 150, rounds: int = 300) -> None:
    """The time of a call less the time of the compiled function inside it, both on a tiny model."""
    abstract = {f"w{i:03}": fb.ArrayInfo((8,), initializer=fb.initializers.normal(1.0)) for i in range(leaves)}
    model = fb.Model(lambda key: fb.initialize(abstract, key), lambda params, x: x, abstract)
    tx = fb.optim.adamw(1e-3)
    booster = fb.Booster(device="cpu")

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return sum(leaf.square().sum() for leaf in fb.tree.leaves(params)) * batch["x"].mean()

    step = booster.train_step(loss, tx, max_norm=1.0)
    state = booster.init(model, tx, key=fb.random.key(0))
    batch = {"x": torch.ones(4)}
    state, _ = step(state, batch)
    jitted: Jitted = step.compiled[0]  # type: ignore[attr-defined]
    run, tensors = jitted.artifact(state, batch)
    held = [state]

    def call() -> None:
        held[0], _ = step(held[0], batch)

    seconds = report.medians(report.interleaved({"graph": lambda: run(*tensors), "call": call}, rounds))
    rows = [
        {"what": "compiled graph", "us": 1e6 * seconds["graph"]},
        {"what": "step", "us": 1e6 * seconds["call"]},
        {"what": "step outside the compiled graph", "us": 1e6 * (seconds["call"] - seconds["graph"])},
    ]
    report.publish("call_overhead", rows, leaves=leaves, tensors_in_the_state=len(fb.tree.leaves(held[0])))


if __name__ == "__main__":
    tyro.cli(main)
