"""Colossal-AI's optimizers by their names, with its arguments and defaults, as torch optimizers.

For ``booster.boost(model, HybridAdam(model.parameters(), lr=1e-3))``: a booster turns each into a pure transform, which
updates state that lies however the plugin lays it out; ``PureOptimizer`` says what they are without one. The functional
API has them in ``fb.optim``: ``adamw``, ``sgd``, ``lamb``, ``lars``, ``came``, ``adafactor``, ``lion``.

Each parameter counts its own updates. Where parameters and state live, in the host's memory too, is the plugin's to say
(``cpu_offload``, ``offload_optim_frac``), also for CPUAdam, which is HybridAdam by another name; none of the ``Fused``
ones needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import optim
from .optimizer_families import Family, Values, keys, with_momentum
from .pure_optimizer import PureOptimizer

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
Betas = tuple[float, float]


def _adam(values: Values) -> optim.GradientTransformation:
    """Adam with or without bias correction, decay decoupled or in the gradient."""
    decay = optim.add_decayed_weights(values["weight_decay"])
    step = optim.scale_by_adam(values["b1"], values["b2"], values["eps"], debias=values["bias_correction"])
    links = (step, decay) if values["decoupled"] else (decay, step)
    return optim.chain(*links, optim.scale_by_learning_rate(values["lr"]))


class _Adam(PureOptimizer):
    family = Family(keys("bias_correction", "decoupled", "eps"), ("lr", "betas", "weight_decay"), _adam)


class HybridAdam(_Adam):
    """AdamW, or Adam with ``adamw_mode=False``. State in files (``nvme_offload_fraction`` above 0) is refused."""

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        if nvme_offload_fraction:
            raise ValueError(
                f"nvme_offload_fraction: got {nvme_offload_fraction}, expected 0: state lives on the device, or, where "
                "the plugin says so (offload_optim_frac, cpu_offload), in the host's memory"
            )
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, {**values, "bias_correction": bias_correction, "decoupled": adamw_mode})


class CPUAdam(HybridAdam):
    """HybridAdam by another name."""


class FusedAdam(_Adam):
    """AdamW, or Adam with ``adamw_mode=False``; ``amsgrad`` is refused, as by Colossal-AI."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**values, "bias_correction": bias_correction, "decoupled": adamw_mode})
        self.set_grad_none = set_grad_none


def _sgd(values: Values) -> optim.GradientTransformation:
    momentum, decay = values["momentum"], optim.add_decayed_weights(values["weight_decay"])
    momenta = optim.trace(momentum, values["nesterov"], dampening=values["dampening"])
    links = (momenta,) if values["has_momentum"] else ()
    links = (*links, decay) if values["wd_after_momentum"] else (decay, *links)
    return optim.chain(*links, optim.scale_by_learning_rate(values["lr"]))


class FusedSGD(PureOptimizer):
    """SGD with momentum; ``wd_after_momentum``: weights decay by the learning rate alone."""

    family = Family(
        with_momentum("dampening", "nesterov", "wd_after_momentum"), ("lr", "momentum", "weight_decay"), _sgd
    )

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        optim.sgd(lr, momentum, nesterov, dampening=dampening, weight_decay=weight_decay)  # raises for bad values
        values = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**values, "nesterov": nesterov, "wd_after_momentum": wd_after_momentum})


def _lamb(values: Values) -> optim.GradientTransformation:
    decay = (optim.add_decayed_weights(values["weight_decay"]),)
    before, after = ((), decay) if values["decoupled"] else (decay, ())
    averaging = () if values["grad_averaging"] else (optim.scale(1 / (1 - values["b1"])),)
    step = optim.scale_by_adam(values["b1"], values["b2"], values["eps"], debias=values["bias_correction"])
    ratio = (optim.scale_by_trust_ratio(),) if values["has_ratio"] else ()
    return optim.chain(*before, step, *averaging, *after, *ratio, optim.scale_by_learning_rate(values["lr"]))


class Lamb(PureOptimizer):
    """LAMB (You et al. 2020); ``adam=True``: no trust ratios. ``bias_correction``: the moments', as published."""

    family = Family(
        lambda group: {
            **keys("bias_correction", "eps")(group),
            "decoupled": True,
            "grad_averaging": True,
            "has_ratio": not group["adam"],
        },
        ("lr", "betas", "weight_decay"),
        _lamb,
        leafwise=True,
    )

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = False,
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**values, "adam": adam, "bias_correction": bias_correction})


class FusedLAMB(PureOptimizer):
    """LAMB after clipping all gradients together to ``max_grad_norm`` (0: none). (apex.optimizers.FusedLAMB.)

    Groups without weight decay have trust ratios only with ``use_nvlamb``. ``amsgrad`` is refused.
    """

    family = Family(
        lambda group: {
            **keys("bias_correction", "decoupled", "eps", "grad_averaging")(group),
            "has_ratio": group["use_nvlamb"] or group["weight_decay"] != 0,
        },
        ("lr", "betas", "weight_decay"),
        _lamb,
        leafwise=True,
        across=lambda optimizer: _clipping(optimizer.defaults["max_grad_norm"]),
    )

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "use_nvlamb": use_nvlamb}
        values |= {"bias_correction": bias_correction, "decoupled": adam_w_mode, "grad_averaging": grad_averaging}
        super().__init__(params, {**values, "max_grad_norm": max_grad_norm})
        self.set_grad_none = set_grad_none


def _clipping(max_grad_norm: float) -> optim.GradientTransformation | None:
    return optim.clip_by_global_norm(max_grad_norm) if max_grad_norm else None


def _lars(values: Values) -> optim.GradientTransformation:
    return optim.lars(
        values["lr"],
        values["weight_decay"],
        trust_coefficient=values["eeta"],
        eps=values["epsilon"],
        momentum=values["momentum"] if values["has_momentum"] else 0.0,
    )


class Lars(PureOptimizer):
    """LARS (You et al. 2017), as published: the learning rate is in the momentum, and nothing is clamped."""

    family = Family(with_momentum("eeta", "epsilon"), ("lr", "momentum", "weight_decay"), _lars, leafwise=True)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        values = {"lr": lr, "momentum": momentum, "eeta": eeta, "weight_decay": weight_decay, "epsilon": epsilon}
        super().__init__(params, values)


def _came(values: Values) -> optim.GradientTransformation:
    betas = (values["b1"], values["b2"], values["b3"])
    clip = values["clip_threshold"]
    return optim.came(values["lr"], *betas, values["eps"], clipping_threshold=clip, weight_decay=values["weight_decay"])


class CAME(PureOptimizer):
    """CAME (Luo et al. 2023); ``lr`` must be given. ``eps``: of squares, and of instability."""

    family = Family(keys("clip_threshold", "eps"), ("lr", "betas", "weight_decay"), _came, leafwise=True)

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        if lr is None:
            raise ValueError("lr: got None, expected a number: CAME has no step size of its own")
        values = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, values)


def _adafactor(values: Values) -> optim.GradientTransformation:
    rate = optim.relative_step(values["warmup_init"]) if values["relative"] else values["lr"]
    return optim.adafactor(
        rate,
        1,
        -values["decay_rate"],
        multiply_by_parameter_scale=values["scale_parameter"],
        clipping_threshold=values["clip_threshold"],
        momentum=values["beta1"],
        eps=values["eps"][0],
        min_scale=values["eps"][1],
        weight_decay=values["weight_decay"],
    )


class Adafactor(PureOptimizer):
    """Adafactor (Shazeer and Stern 2018). A given ``lr`` is the step size, whatever ``relative_step``.

    ``lr=None`` asks for ``relative_step``, which ``warmup_init`` starts small. Raises ValueError for neither.
    """

    family = Family(
        lambda group: {
            **keys("beta1", "clip_threshold", "decay_rate", "eps", "scale_parameter", "warmup_init")(group),
            "relative": group["lr"] is None,
        },
        ("lr", "weight_decay"),
        _adafactor,
        leafwise=True,
    )

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if lr is None and not relative_step:
            raise ValueError("lr: got None with relative_step=False, expected a number")
        if warmup_init and lr is not None:
            raise ValueError(f"warmup_init: got True with lr={lr}, expected lr=None: it warms the relative step up")
        values = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1}
        values |= {"weight_decay": weight_decay, "scale_parameter": scale_parameter, "warmup_init": warmup_init}
        super().__init__(params, values)


class Lion(PureOptimizer):
    """Lion (Chen et al. 2023)."""

    family = Family(
        keys(),
        ("lr", "betas", "weight_decay"),
        lambda values: optim.lion(values["lr"], values["b1"], values["b2"], weight_decay=values["weight_decay"]),
    )

    def __init__(self, params: Params, lr: float = 1e-4, betas: Betas = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


def _refuse_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        raise ValueError("amsgrad: got True, expected False: torch.optim.AdamW(amsgrad=True) has it")
