"""HybridParallelPlugin: tensor and sequence parallelism inside, data parallelism with ZeRO 0 to 3 around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat, Layout
from functional_booster.optim.validate import check_integer
from functional_booster.precision import MixedPrecision, Policy
from functional_booster.sharding.mesh import Mesh

from . import arguments, dataloaders, tensor_parallel
from .zero import Zero

Tree = tree.Tree
_MODES = (None, "split_gather", "all_to_all")
_LATER = {"ring": "its result is split_gather's", "ring_attn": "attention over a ring of ranks is not implemented yet"}
_DDPS_OWN = (
    "broadcast_buffers",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
)
_NO_MEANING = (
    *("enable_all_optimization", "enable_fused_normalization", "enable_flash_attention", "enable_jit_fused"),
    *("parallel_output", "make_vocab_size_divisible_by", "overlap_communication", "overlap_allgather"),
    *_DDPS_OWN,
)
_OF_PIPELINES = (
    *("num_microbatches", "microbatch_size", "pp_style", "num_model_chunks", "scheduler_nodes"),
    *("num_layers_per_stage", "enable_metadata_cache", "overlap_p2p"),
)


@dataclass(frozen=True, repr=False)
class HybridParallelPlugin:
    """Tensor parallelism over "tp" and sequence parallelism, with data parallelism over the other ranks.

    ``tp_size``: ranks that share the weights of own models' layers (Shoeybi et al. 2019, "Megatron-LM"), whether or not
    it divides heads, widths and vocabulary; what a model's specs leave whole, each rank has. ``sequence_parallelism_
    mode``, where ``enable_sequence_parallelism``: "split_gather", over "tp" (Korthikanti et al. 2022), or "all_to_all",
    over ``sp_size`` ranks of "sp" (Jacobs et al. 2023, "DeepSpeed Ulysses"). ``zero_stage`` over the rest, "dp": 0 is
    TorchDDP's, 1 and 2 LowLevelZero's, 3 TorchFSDP's layout of each rank's part. ``dp_outside``: "dp" is the slowest
    axis; else it varies faster than "tp", and ranks of one replica lie apart.

    ``precision`` ("fp16" where neither it nor the Booster's is given), ``max_norm``, the arguments of loss scaling,
    ``cpu_offload``, ``communication_dtype``, ``use_fp8`` and ``fp8_communication`` (over "dp"): as LowLevelZero's.
    ``zero_bucket_size_in_m`` is its ``reduce_bucket_size_in_m``, ``ddp_bucket_cap_mb`` TorchDDP's ``bucket_cap_mb``.
    ``model.apply`` returns whole logits and ``model.loss`` never holds them, whatever ``parallel_output``; that and
    other arguments change no result and are ignored with a warning.

    Raises ValueError for what is not supported: ``pp_size`` above 1, the modes "ring" and "ring_attn", a
    ``custom_policy`` and a ``gradient_checkpoint_config`` (``fb.remat`` is for that).
    """

    DEFAULT_PRECISION: ClassVar[str] = "fp16"

    tp_size: int = 1
    pp_size: int = 1
    sp_size: int | None = None
    precision: str | Policy | MixedPrecision | None = None
    zero_stage: int = 0
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    parallel_output: bool = True
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    broadcast_buffers: bool = True
    ddp_bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    zero_bucket_size_in_m: float = 12
    cpu_offload: bool = False
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    custom_policy: Any = None
    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    scheduler_nodes: Any = None
    num_layers_per_stage: Any = None
    gradient_checkpoint_config: Any = None
    enable_metadata_cache: bool = True
    make_vocab_size_divisible_by: int = 64
    dp_outside: bool = True
    overlap_p2p: bool = True
    overlap_allgather: bool = False
    fp8_communication: bool = False
    use_fp8: bool = False
    inner_ring_size: int | None = None

    def __post_init__(self) -> None:
        check_integer("tp_size", self.tp_size, minimum=1)
        check_integer("pp_size", self.pp_size, minimum=1)
        if self.sp_size is not None:
            check_integer("sp_size", self.sp_size, minimum=1)
        if isinstance(self.zero_stage, bool) or self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage: {self.zero_stage!r}, expected 0, 1, 2 or 3")
        arguments.check_precision(self)
        arguments.check_size(self, "zero_bucket_size_in_m", "ddp_bucket_cap_mb")
        arguments.check_dtype("communication_dtype", self.communication_dtype)
        arguments.check_flag(self, "enable_sequence_parallelism", "cpu_offload", "dp_outside")
        arguments.check_flag(self, "use_fp8", "fp8_communication")
        self._check_sequence()
        if self.cpu_offload and self.zero_stage == 0:
            raise ValueError(
                "cpu_offload: True with zero_stage=0, expected zero_stage 1, 2 or 3: it moves what they split"
            )
        without = "pipelines are not laid out by this plugin yet, so that it has no meaning"
        arguments.refuse(self, pp_size="fb.pipeline.PipelineParallel lays pipelines out, this plugin does not yet")
        arguments.refuse(self, **dict.fromkeys(_OF_PIPELINES, without))
        arguments.refuse(
            self,
            custom_policy="specs in the model's abstract tree say what is split",
            gradient_checkpoint_config="fb.remat around a block, in the loss function, is for that",
            inner_ring_size="attention over a ring of ranks is not implemented yet",
        )
        arguments.ignore(self, *_NO_MEANING)

    def _check_sequence(self) -> None:
        mode, size = self.sequence_parallelism_mode, self.sp_size
        if mode in _LATER:
            raise ValueError(
                f"sequence_parallelism_mode: {mode!r}, expected 'split_gather' or 'all_to_all': {_LATER[mode]}"
            )
        if mode not in _MODES:
            raise ValueError(f"sequence_parallelism_mode: {mode!r}, expected None, 'split_gather' or 'all_to_all'")
        if self.enable_sequence_parallelism != (mode is not None):
            raise ValueError(
                f"sequence_parallelism_mode: {mode!r} with enable_sequence_parallelism="
                f"{self.enable_sequence_parallelism}, expected both or neither"
            )
        if size not in (None, 1) and mode != "all_to_all":
            raise ValueError(
                f"sp_size: {size} with sequence_parallelism_mode={mode!r}, expected 'all_to_all', the mode that has "
                "ranks of its own (split_gather shares those of tp_size)"
            )

    __repr__ = arguments.shown
    prepare_dataloader = dataloaders.prepare_dataloader

    @property
    def data_axes(self) -> tuple[str, ...]:
        """("dp",)"""
        return ("dp",)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes over which own models split the tokens of a row."""
        return {None: (), "split_gather": ("tp",), "all_to_all": ("sp",)}[self.sequence_parallelism_mode]

    def axes(self, ranks: int) -> dict[str, int]:
        """``tp_size`` x ``sp_size`` ranks share a model, and the rest lie along "dp"."""
        inner = self.tp_size * (self.sp_size or 1)
        if ranks % inner:
            raise ValueError(f"tp_size x sp_size: {self.tp_size} x {self.sp_size or 1} does not divide {ranks} ranks")
        model = {"sp": self.sp_size or 1, "tp": self.tp_size}
        return {"dp": ranks // inner, **model} if self.dp_outside else {**model, "dp": ranks // inner}

    def layout(self, abstract: Tree, labels: Tree, mesh: Mesh) -> Layout:
        """The data-parallel layout of each rank's parts of leaves."""
        for axis in ("tp", "sp"):
            arguments.check_axis(self, axis, mesh)
        if "sp" not in self.token_axes and mesh.extent("sp") > 1:
            raise ValueError(f"mesh: {mesh} has ranks along 'sp', expected sequence_parallelism_mode='all_to_all'")
        return tensor_parallel.layout(self._data.layout, abstract, labels, mesh, "tp")

    def prepare(self, storage: Flat, policy: Policy) -> Flat:
        """As the data-parallel plugin does with this rank's parts."""
        return tensor_parallel.inside(self._data.prepare, storage, policy)

    def gather(self, prepared: Flat, policy: Policy) -> Flat:
        """As the data-parallel plugin does with this rank's parts."""
        return tensor_parallel.inside(self._data.gather, prepared, policy)

    def reduce(self, grads: Flat, policy: Policy) -> Flat:
        """As the data-parallel plugin does with this rank's parts."""
        return tensor_parallel.inside(self._data.reduce, grads, policy)

    def sync(self, grads: Flat, policy: Policy) -> Flat:
        """As the data-parallel plugin does with this rank's parts: along "tp" and "sp" gradients are whole already."""
        return tensor_parallel.inside(self._data.sync, grads, policy)

    def settle(self, storage: Flat, step: torch.Tensor) -> Flat:
        """What was updated."""
        return storage

    @property
    def _data(self) -> Zero:
        """The layout over "dp" of what one rank along "tp" has."""
        size = self.ddp_bucket_cap_mb if self.zero_stage == 0 else self.zero_bucket_size_in_m * 4
        return Zero("dp", self.zero_stage, int(size * 2**20), self.cpu_offload)
