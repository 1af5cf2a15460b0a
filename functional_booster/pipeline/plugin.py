"""PipelineParallel: the layers of a model over ranks, one after the other, times data parallelism."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.optim.validate import check_integer
from functional_booster.plugins import arguments, dataloaders
from functional_booster.precision import Policy
from functional_booster.sharding.collectives import all_gather, psum, psum_scatter
from functional_booster.sharding.mesh import Mesh

from .actions import Schedule
from .gpipe import gpipe
from .interleaved import interleaved
from .layout import AXIS, layout
from .one_f_one_b import one_f_one_b
from .splitting import Split, split
from .zero_bubble_v import zero_bubble_v

Tree = tree.Tree
STYLES = ("gpipe", "1f1b", "interleaved", "zbv")


@dataclasses.dataclass(frozen=True, repr=False)
class PipelineParallel:
    """Pipeline parallelism over the axis "pp" of ``pp_size`` ranks, times data parallelism over "dp".

    ``pp_style``: "gpipe", "1f1b", "interleaved" (``num_model_chunks`` stages a rank) or "zbv" (two a rank). A rank's
    rows are cut into ``num_microbatches``, or into as few as have ``microbatch_size`` rows at most; neither: one for
    each stage. ``num_layers_per_stage``: how many layers each stage has, evenly by default. ``zero_stage`` 1: the
    parameters and the optimizer's state of a stage are split over its data ranks. ``remat``: the part of each stage's
    layers (0 to 1), or for each stage the number of layers, first ones first, that the backward computes again. Raises
    TypeError or ValueError, naming the argument.
    """

    pp_size: int = 1
    pp_style: str = "1f1b"
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    num_model_chunks: int = 1
    num_layers_per_stage: tuple[int, ...] | None = None
    zero_stage: int = 0
    remat: float | tuple[int, ...] = 0.0

    def __post_init__(self) -> None:
        check_integer("pp_size", self.pp_size, minimum=1)
        check_integer("num_model_chunks", self.num_model_chunks, minimum=1)
        check_integer("zero_stage", self.zero_stage, minimum=0, maximum=1)
        for name in ("num_microbatches", "microbatch_size"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)
        if self.num_microbatches is not None and self.microbatch_size is not None:
            raise ValueError("num_microbatches and microbatch_size: both are given, expected one of them")
        if self.pp_style not in STYLES:
            raise ValueError(f"pp_style: {self.pp_style!r}, expected one of {', '.join(map(repr, STYLES))}")
        if self.num_model_chunks != 1 and self.pp_style != "interleaved":
            raise ValueError(
                f"num_model_chunks: {self.num_model_chunks} with pp_style={self.pp_style!r}, expected 1: it is for "
                "'interleaved'"
            )
        if self.num_layers_per_stage is not None:
            object.__setattr__(self, "num_layers_per_stage", tuple(self.num_layers_per_stage))

    __repr__ = arguments.shown
    prepare_dataloader = dataloaders.prepare_dataloader

    @property
    def data_axes(self) -> tuple[str, ...]:
        """("dp",)"""
        return ("dp",)

    def axes(self, ranks: int) -> dict[str, int]:
        """Pipelines of ``pp_size`` ranks that follow one another, side by side."""
        if ranks % self.pp_size:
            raise ValueError(f"pp_size: {self.pp_size} does not divide {ranks} ranks")
        return {"dp": ranks // self.pp_size, AXIS: self.pp_size}

    def schedule(self, microbatches: int) -> Schedule:
        """The schedule of a step of so many microbatches."""
        match self.pp_style:
            case "gpipe":
                return gpipe(self.pp_size, microbatches)
            case "interleaved":
                return interleaved(self.pp_size, microbatches, self.num_model_chunks)
            case "zbv":
                return zero_bubble_v(self.pp_size, microbatches)
            case _:
                return one_f_one_b(self.pp_size, microbatches)

    def microbatches(self, rows: int) -> int:
        """How many microbatches a rank's ``rows`` are cut into."""
        if self.microbatch_size is not None:
            return max(1, -(-rows // self.microbatch_size))
        return self.num_microbatches or self.schedule(1).stages

    def split(self, abstract: Tree) -> Split:
        """Which leaf is stored at which stage."""
        return split(abstract, self.schedule(1).stages, self.num_layers_per_stage)

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """Buckets that "pp" splits between ranks' leaves, and "dp" further, if ``zero_stage`` says so."""
        if mesh.extent(AXIS) != self.pp_size:
            raise ValueError(f"pp_size: {self.pp_size}, but the axis {AXIS!r} has another size: {mesh}")
        placement = self.schedule(1).placement
        ranks_of = {name: placement[stage] for name, stage in self.split(abstract).homes}
        inner = ("dp",) if self.zero_stage else ()
        return layout(abstract, labels, ranks_of, self.pp_size, inner, mesh.extent(inner))

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """This rank's leaves, in the compute dtype, gathered over the data ranks."""

        def prepared(bucket: str, buffer: torch.Tensor) -> torch.Tensor:
            kept = bucket in storage.layout.kept or not buffer.is_floating_point()
            value = buffer if kept else buffer.to(policy.compute or buffer.dtype)
            wire = None if kept else policy.wire
            return all_gather(value, ("dp",), wire=wire) if "dp" in storage.layout.axes[bucket] else value

        return _each(storage, prepared)

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """The whole buffers, of all stages: for what is not done as a pipeline."""

        def whole(bucket: str, buffer: torch.Tensor) -> torch.Tensor:
            return all_gather(buffer, (AXIS,)) if prepared.layout.axes[bucket] else buffer

        return _each(prepared, whole)

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """The gradients of this rank's leaves."""
        return grads

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """Their sums over the data ranks; of what all ranks store, over the stages as well."""

        def summed(bucket: str, buffer: torch.Tensor) -> torch.Tensor:
            kept = bucket in grads.layout.kept
            value, wire = (buffer, None) if kept else (buffer.to(policy.reduce or buffer.dtype), policy.reduce_wire)
            axes = grads.layout.axes[bucket]
            if not axes:
                return psum(value, ("dp", AXIS), wire=wire)
            return (psum_scatter if "dp" in axes else psum)(value, ("dp",), wire=wire)

        return _each(grads, summed)

    def settle(self, storage: Flat, step: torch.Tensor) -> Flat:
        """What was updated."""
        return storage


def _each(values: Flat, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Flat:
    buffers = {name: None if buffer is None else change(name, buffer) for name, buffer in values.buffers.items()}
    return Flat(buffers, values.layout)
