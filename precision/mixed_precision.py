"""MixedPrecision: a policy and what goes with it, and those that Colossal-AI has names for."""

from __future__ import annotations

import types
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from functional_booster.kernels import tree

from . import fp8, patterns
from .loss_scaling import FLOAT32, ConstantScaling, DynamicScaling, Scaling
from .numbers import check_number
from .policy import Policy

Tree = tree.Tree


@dataclass(frozen=True)
class Fp8:
    """Which weights are multiplied in fp8, and with how many scales: the arguments of ``precision.fp8.mark``."""

    scaling: fp8.Scaling = "tensor"
    exclude: Collection[str] = fp8.EXCLUDED

    def __post_init__(self) -> None:
        fp8.require_scaling(self.scaling)
        object.__setattr__(self, "exclude", patterns.checked("exclude", self.exclude))

    def mark(self, params: Tree, kept: Collection[str] = ()) -> Tree:
        """The tree with these weights as Fp8Weight, but for those with a name in ``kept``."""
        marked = fp8.mark(params, self.exclude, self.scaling)
        if not kept:
            return marked
        return tree.map_with_name(
            lambda name, leaf: fp8.plain(leaf) if name in kept else leaf, marked, is_leaf=fp8.is_weight
        )


@dataclass(frozen=True)
class MixedPrecision:
    """How a training step computes.

    ``policy``: the dtypes; ``scaling``: the loss's (None: none); ``fp8``: which weights are multiplied in fp8 (None:
    none); ``autocast``: each op in the dtype that ``torch.autocast`` chooses for it, between this one and float32;
    ``keep``: patterns of names of leaves (``precision.patterns``) that are stored and computed with as they are;
    ``keep_batch_norm``: so are batch norms' parameters; ``stochastic_rounding``: parameters stored in bfloat16 are
    rounded up or down by chance, so that small updates count on average (Gupta et al. 2015); ``cast_inputs``:
    floating-point inputs of functionalized modules come in the compute dtype. Raises TypeError or ValueError for what
    does not fit.
    """

    policy: Policy = field(default_factory=Policy)
    scaling: Scaling | None = None
    fp8: Fp8 | None = None
    autocast: torch.dtype | None = None
    keep: tuple[str, ...] = ()
    keep_batch_norm: bool = False
    stochastic_rounding: bool = False
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        kinds = {"policy": Policy, "scaling": Scaling | None, "fp8": Fp8 | None, "autocast": torch.dtype | None}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                wanted = str(kind).replace("functional_booster.precision.", "")
                raise TypeError(f"MixedPrecision: {name} is {getattr(self, name)!r}, expected {wanted}")
        object.__setattr__(self, "keep", patterns.checked("keep", self.keep))
        if self.autocast not in (None, torch.float16, torch.bfloat16):
            raise ValueError(f"autocast: {self.autocast}, expected torch.float16, torch.bfloat16 or None")
        if self.autocast is not None and self.policy.compute not in (None, torch.float32):
            raise ValueError(
                f"autocast: {self.autocast}, but the policy computes in {self.policy.compute}: with autocast it is None"
            )
        if self.stochastic_rounding and self.policy.param != torch.bfloat16:
            raise ValueError(
                f"MixedPrecision: stochastic_rounding is for parameters stored in bfloat16, here {self.policy.param}: "
                "master_weights=False"
            )
        for name in ("keep_batch_norm", "stochastic_rounding", "cast_inputs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"MixedPrecision: {name} is {getattr(self, name)!r}, expected True or False")


_WIDE = Policy(torch.float32, None, torch.float32, torch.float32, torch.float32)


def FP16TorchMixedPrecision(
    init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000
) -> MixedPrecision:
    """ "fp16": computed in float16 from float32 parameters, gradients summed in float32, the loss scaled as torch's
    ``GradScaler`` does it. Norms, softmax and losses have float32 inside."""
    check_number("init_scale", init_scale, *FLOAT32)
    least, most = min(2.0**-24, init_scale), max(2.0**64, init_scale)
    scaling = DynamicScaling(init_scale, growth_factor, backoff_factor, growth_interval, least, most, hysteresis=1)
    return MixedPrecision(replace(_WIDE, compute=torch.float16), scaling)


def FP16NaiveMixedPrecision(
    initial_scale: float = 2.0**32,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    min_scale: float = 1.0,
    max_scale: float = 2.0**32,
    hysteresis: int = 2,
) -> MixedPrecision:
    """ "fp16_naive": the whole model in float16, outputs and gradients in collectives too, from float32 masters."""
    policy = Policy(torch.float32, torch.float16, None, torch.float16, torch.float32)
    scaling = DynamicScaling(
        initial_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
    )
    return MixedPrecision(policy, scaling)


def FP16ApexMixedPrecision(
    opt_level: str = "O1",
    keep_batchnorm_fp32: bool | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> MixedPrecision:
    """ "fp16_apex": NVIDIA Apex's levels, without Apex. None: as the level has it.

    "O0": float32. "O1": float32 parameters, each op in float16 or float32 as autocast's lists say. "O2": a float16
    model but for batch norms, float32 masters. "O3": float16 throughout, no masters, no scaling. ``loss_scale``:
    "dynamic", or a number that stays. Raises ValueError for another level, and for what a level does not have.
    """
    levels = {
        "O0": MixedPrecision(replace(_WIDE, output=None)),
        "O1": MixedPrecision(replace(_WIDE, output=None), autocast=torch.float16),
        "O2": MixedPrecision(replace(_WIDE, compute=torch.float16), keep_batch_norm=True),
        "O3": MixedPrecision(Policy(torch.float16, torch.float16)),
    }
    if not isinstance(opt_level, str) or opt_level not in levels:
        raise ValueError(f"opt_level: {opt_level!r}, expected one of {', '.join(map(repr, levels))}")
    require_flags(keep_batchnorm_fp32=keep_batchnorm_fp32, master_weights=master_weights)
    if opt_level in ("O0", "O1") and (keep_batchnorm_fp32, master_weights) != (None, None):
        raise ValueError(
            f"keep_batchnorm_fp32={keep_batchnorm_fp32}, master_weights={master_weights}: {opt_level} has a float32 "
            "model: leave them out"
        )
    chosen = levels[opt_level]
    policy = chosen.policy if cast_model_outputs is None else replace(chosen.policy, output=cast_model_outputs)
    if master_weights is not None:
        policy = replace(policy, param=torch.float32 if master_weights else torch.float16)
    kept = chosen.keep_batch_norm if keep_batchnorm_fp32 is None else keep_batchnorm_fp32
    scale = ("dynamic" if opt_level in ("O1", "O2") else 1.0) if loss_scale is None else loss_scale
    scaling: Scaling | None
    if scale == "dynamic":
        check_number("max_loss_scale", max_loss_scale, *FLOAT32)
        least = min(2.0**-24, max_loss_scale) if min_loss_scale is None else min_loss_scale
        check_number("min_loss_scale", least, FLOAT32[0], max_loss_scale)
        first = min(max(2.0**16, least), max_loss_scale)
        scaling = DynamicScaling(first, 2.0, 0.5, 2000, least, max_loss_scale, hysteresis=1)
    elif isinstance(scale, str):
        raise ValueError(f"loss_scale: {scale!r}, expected 'dynamic' or a number")
    elif min_loss_scale is not None:
        raise ValueError(f"min_loss_scale: {min_loss_scale}, which a loss_scale of {scale!r} does not have")
    else:
        check_number("loss_scale", scale, *FLOAT32)
        scaling = None if opt_level == "O0" and scale == 1.0 else ConstantScaling(scale)
    return replace(chosen, policy=policy, keep_batch_norm=kept, scaling=scaling)


def BF16MixedPrecision(master_weights: bool = True, stochastic_rounding: bool = False) -> MixedPrecision:
    """ "bf16": computed in bfloat16, gradients summed in float32, from float32 masters.

    ``master_weights=False`` stores the parameters in bfloat16, 2 bytes each; ``stochastic_rounding`` is for these.
    """
    require_flags(master_weights=master_weights, stochastic_rounding=stochastic_rounding)
    policy = replace(_WIDE, param=torch.float32 if master_weights else torch.bfloat16, compute=torch.bfloat16)
    return MixedPrecision(policy, stochastic_rounding=stochastic_rounding)


def FP8MixedPrecision(
    scaling: fp8.Scaling = "tensor", exclude: Collection[str] = fp8.EXCLUDED, communication: bool = False
) -> MixedPrecision:
    """ "fp8": as "bf16", but that linear layers multiply in float8, e4m3 forward and e5m2 for gradients.

    ``scaling``: a scale for each tensor, or each row. ``exclude``: patterns of the names of weights that stay in
    bfloat16, as for ``precision.fp8.mark``. ``communication``: parameters and gradients travel in float8, too.
    """
    require_flags(communication=communication)
    bf16 = BF16MixedPrecision()
    policy = compressed(bf16.policy) if communication else bf16.policy
    return replace(bf16, policy=policy, fp8=Fp8(scaling, exclude))


def require_flags(**flags: object) -> None:
    """Require bools, or None; raises TypeError, naming the argument."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | None):
            raise TypeError(f"{name}: {flag!r}, expected True or False")


def compressed(policy: Policy) -> Policy:
    """The policy with parameters that travel in e4m3, and gradients in e5m2."""
    return replace(policy, wire=torch.float8_e4m3fn, reduce_wire=torch.float8_e5m2)


_NAMED = {
    "fp32": MixedPrecision,
    "bf16": BF16MixedPrecision,
    "fp16": FP16TorchMixedPrecision,
    "fp16_apex": FP16ApexMixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
    "fp8": FP8MixedPrecision,
}
NAMES = tuple(_NAMED)


def precision_of(precision: str | Policy | MixedPrecision | None, argument: str = "mixed_precision") -> MixedPrecision:
    """The precision by name; None and "fp32" leave every dtype as it is; a Policy alone casts, and does nothing else.

    Raises ValueError for an unknown name, TypeError for another type, both of which name the argument.
    """
    if precision is None:
        return MixedPrecision()
    if isinstance(precision, MixedPrecision):
        return precision
    if isinstance(precision, Policy):
        return MixedPrecision(precision)
    if not isinstance(precision, str):
        hint = f": call it, {precision.__name__}()" if isinstance(precision, types.FunctionType) else ""
        given = type(precision).__name__
        raise TypeError(f"{argument}: {given}, expected a name, a MixedPrecision, a Policy or None{hint}")
    if precision not in _NAMED:
        raise ValueError(
            f"{argument}: {precision!r} is not known, expected one of {', '.join(map(repr, _NAMED))} or None"
        )
    return _NAMED[precision]()
