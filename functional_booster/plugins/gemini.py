"""GeminiPlugin: parameters, gradients and optimizer state in chunks that are split, and placed one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.optim.validate import check_integer
from functional_booster.precision import MixedPrecision, Policy
from functional_booster.sharding import chunks, shards, units
from functional_booster.sharding.mesh import Mesh

from . import arguments, dataloaders, tensor_parallel

Tree = tree.Tree
_WIDTH = 1024  # what hidden_dim is where it is not given


@dataclass(frozen=True, repr=False)
class GeminiPlugin:
    """ZeRO stage 3 over chunks (Fang et al. 2021, "PatrickStar"; Colossal-AI's Gemini), on the axes of LowLevelZero.

    Chunks hold whole blocks. Their size is that from ``min_chunk_size_m`` to ``search_range_m`` more (million (2^20)
    elements of 4 bytes), in steps of ``hidden_dim`` (None: 1024) elements, that fills them best.

    ``placement_policy`` "static": the first chunks, ``shard_param_frac`` of the elements, are gathered where the loss
    uses them, as TorchFSDP does, the others once a step, as LowLevelZero does; parameters (the master copy) and
    optimizer state are split in any case. Of the first ``offload_optim_frac`` both live, and are updated, in the host's
    memory; ``offload_param_frac`` above 0 asks for 1 in both others, and is then fulfilled by that. "auto": all chunks
    are gathered where they are used, and begin in the host's memory; the first step on a GPU measures how much of it
    everything else takes, and from the second step on as many of the last chunks as ``steady_cuda_cap_ratio`` of the
    GPU's memory leaves room for stay there; an imperative loop refuses it. On the CPU "auto" is "static".

    ``precision`` ("fp16" where neither it nor the Booster's is given), ``max_norm``, ``master_weights``, ``use_fp8``,
    ``fp8_communication`` and the arguments of loss scaling: as LowLevelZero's. Arguments that change no result are
    ignored with a warning. ``tp_size``: ranks that share the leaves of own models, as HybridParallel's; chunks are then
    of what one of them has. Raises ValueError for what is not supported.
    """

    DEFAULT_PRECISION: ClassVar[str] = "fp16"

    chunk_config_dict: Any = None
    chunk_init_device: Any = None
    placement_policy: str = "static"
    enable_gradient_accumulation: bool = False
    max_prefetch: int = 0
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    precision: str | Policy | MixedPrecision | None = None
    master_weights: bool = True
    pin_memory: bool = False
    force_outputs_fp32: bool = False
    strict_ddp_mode: bool = False
    search_range_m: float = 32
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    memstats: Any = None
    gpu_margin_mem_ratio: float = 0.0
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    tp_size: int = 1
    extra_dp_size: int = 1
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_sequence_parallelism: bool = False
    enable_jit_fused: bool = False
    enable_async_reduce: bool = True
    use_fp8: bool = False
    verbose: bool = False
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        arguments.check_precision(self)
        arguments.check_size(self, "search_range_m", "min_chunk_size_m")
        arguments.check_fraction(self, "shard_param_frac", "offload_optim_frac", "offload_param_frac")
        arguments.check_fraction(self, "warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio")
        arguments.check_flag(self, "master_weights", "force_outputs_fp32", "use_fp8", "fp8_communication")
        check_integer("extra_dp_size", self.extra_dp_size, minimum=1)
        check_integer("tp_size", self.tp_size, minimum=1)
        if self.tp_size > 1 and self.placement_policy == "auto":
            raise ValueError(f"tp_size: {self.tp_size} with placement_policy='auto', expected 'static'")
        if self.hidden_dim is not None:
            check_integer("hidden_dim", self.hidden_dim, minimum=1)
        if self.placement_policy not in ("static", "auto"):
            raise ValueError(f"placement_policy: {self.placement_policy!r}, expected 'static' or 'auto'")
        if self.placement_policy == "auto":
            arguments.refuse(
                self, **dict.fromkeys(("shard_param_frac", "offload_optim_frac"), "'auto' decides what is where")
            )
        if self.offload_param_frac and (self.shard_param_frac, self.offload_optim_frac) != (1, 1):
            raise ValueError(
                f"offload_param_frac: {self.offload_param_frac}, which asks for shard_param_frac=1 and "
                f"offload_optim_frac=1, but these are {self.shard_param_frac} and {self.offload_optim_frac}"
            )
        arguments.refuse(
            self,
            chunk_config_dict="chunks are found by search",
        )
        arguments.ignore(
            self,
            *("chunk_init_device", "enable_gradient_accumulation", "max_prefetch", "warmup_non_model_data_ratio"),
            *("pin_memory", "strict_ddp_mode", "memstats", "gpu_margin_mem_ratio"),
            *(("steady_cuda_cap_ratio",) if self.placement_policy == "static" else ()),
            *("enable_all_optimization", "enable_fused_normalization", "enable_flash_attention"),
            *("enable_sequence_parallelism", "enable_jit_fused", "enable_async_reduce", "verbose"),
        )

    __repr__ = arguments.shown
    prepare_dataloader = dataloaders.prepare_dataloader

    @property
    def data_axes(self) -> tuple[str, ...]:
        """("extra_dp", "dp")"""
        return ("extra_dp", "dp")

    def axes(self, ranks: int) -> dict[str, int]:
        """``extra_dp_size`` replicas of equal groups, each of groups of ``tp_size`` ranks that share leaves."""
        if ranks % self.tp_size:
            raise ValueError(f"tp_size: {self.tp_size} does not divide {ranks} ranks")
        groups = ranks // self.tp_size
        if groups % self.extra_dp_size:
            raise ValueError(f"extra_dp_size: {self.extra_dp_size} does not divide {groups} ranks")
        data = {"extra_dp": self.extra_dp_size, "dp": groups // self.extra_dp_size}
        return data | {"tp": self.tp_size} if self.tp_size > 1 else data

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """The chunks of what one rank along "tp" has, each split over "dp"."""
        arguments.check_replicas(self.extra_dp_size, mesh)
        if self.tp_size == 1:
            return self._chunked(abstract, labels, mesh)
        arguments.check_axis(self, "tp", mesh)
        return tensor_parallel.layout(self._chunked, abstract, labels, mesh, "tp")

    def _chunked(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        planned = units.layout(abstract, labels, self._packed, mesh, ("dp",))
        if self.placement_policy == "auto":
            return replace(units.on_host(planned, planned.axes), provisional=True)
        return units.on_host(planned, chunks.leading(planned, self.offload_optim_frac))

    def place(self, layout: Layout, held: Mapping[str, int], peak: int, capacity: int) -> Layout:
        """A provisional layout with as few of the first chunks on the host as must be.

        ``held``: bytes of each chunk; ``peak``: those that a step takes beside them; ``capacity``: of the device.
        """
        room = self.steady_cuda_cap_ratio * capacity - peak
        return replace(layout, host=chunks.overflowing(layout, held, room), provisional=False)

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """The chunks that are gathered once a step are whole, in the compute dtype; the others stay."""

        def once(storage: Flat, policy: Policy) -> Flat:
            split = chunks.leading(storage.layout, self.shard_param_frac)
            return shards.join(storage, policy.compute, buckets=storage.buffers.keys() - split, wire=policy.wire)

        return tensor_parallel.inside(once, storage, policy)

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """The other chunks, gathered in the compute dtype, and again for the backward. Transposed: psum_scatter."""

        def used(prepared: Flat, policy: Policy) -> Flat:
            split = chunks.leading(prepared.layout, self.shard_param_frac)
            wires = {"wire": policy.wire, "cotangent_wire": policy.reduce_wire}
            return shards.join(shards.transient(prepared), policy.compute, policy.reduce, split, **wires)

        return tensor_parallel.inside(used, prepared, policy)

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """This rank's part of the sum."""

        def mine(grads: Flat, policy: Policy) -> Flat:
            return shards.scatter(grads, policy.reduce, policy.reduce_wire)

        return tensor_parallel.inside(mine, grads, policy)

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """The sum over the replicas."""

        def summed(grads: Flat, policy: Policy) -> Flat:
            return shards.total(grads, self.data_axes, policy.reduce, policy.reduce_wire)

        return tensor_parallel.inside(summed, grads, policy)

    def settle(self, storage: Flat, step: torch.Tensor) -> Flat:
        """What was updated."""
        return storage

    def _packed(self, names: Sequence[str], sizes: Sequence[int]) -> list[str]:
        """Each leaf's chunk, from its unit and its bytes."""
        together = tuple(units.weights(names, sizes).values())
        least, span = (round(millions * 2**20) * 4 for millions in (self.min_chunk_size_m, self.search_range_m))
        return units.packed(names, sizes, chunks.search(together, least, span, 4 * (self.hidden_dim or _WIDTH)))
