"""functional_booster: distributed training on PyTorch, done the functional way. ``import functional_booster as fb``."""

from __future__ import annotations

import importlib
from typing import Any

from functional_booster.kernels import random, tree
from functional_booster.kernels.transforms import grad, grad_and_value, vjp, vmap
from functional_booster.precision import (
    BF16MixedPrecision,
    ConstantScaling,
    DynamicScaling,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
    Policy,
)
from functional_booster.sharding import checkpoint_policies, collectives, initializers
from functional_booster.sharding.abstract import ArrayInfo, initialize
from functional_booster.sharding.mesh import Mesh, spmd, virtual_mesh
from functional_booster.sharding.region import region
from functional_booster.sharding.remat import checkpoint_name, remat
from functional_booster.sharding.spec import P, PartitionSpec

from . import (
    data,
    debug,
    hooks,
    losses,
    lr_scheduler,
    models,
    optim,
    optimizers,
    pipeline,
    profile,
    schedules,
    trackers,
    visualize,
)
from .booster import Booster
from .dataloader import StandIn, prepare_dataloader
from .donation import DonatedError
from .explain import explain
from .fit import fit
from .functionalize import functionalize
from .generate import generate
from .jit import Jitted, RecompileWarning, jit
from .launch import launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
from .lazy import LazyInitContext
from .models.model import Model
from .plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from .rank_failure import RankFailure
from .state import TrainState

__version__ = "0.1.0"

__all__ = [
    "ArrayInfo",
    "BF16MixedPrecision",
    "Booster",
    "ConstantScaling",
    "DonatedError",
    "DynamicScaling",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "GeminiPlugin",
    "HybridParallelPlugin",
    "Jitted",
    "LazyInitContext",
    "LowLevelZeroPlugin",
    "Mesh",
    "MixedPrecision",
    "Model",
    "P",
    "PartitionSpec",
    "Policy",
    "RankFailure",
    "RecompileWarning",
    "StandIn",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "TrainState",
    "checkpoint_name",
    "checkpoint_policies",
    "collectives",
    "data",
    "debug",
    "explain",
    "fit",
    "functionalize",
    "generate",
    "grad",
    "grad_and_value",
    "hooks",
    "initialize",
    "initializers",
    "jit",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "losses",
    "lr_scheduler",
    "models",
    "optim",
    "optimizers",
    "pipeline",
    "prepare_dataloader",
    "profile",
    "random",
    "region",
    "remat",
    "schedules",
    "spmd",
    "trackers",
    "tree",
    "virtual_mesh",
    "visualize",
    "vjp",
    "vmap",
]


def __getattr__(name: str) -> Any:
    if name == "lora":  # imported when it is asked for: it needs peft, an extra that takes seconds to import
        return importlib.import_module(".lora", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
