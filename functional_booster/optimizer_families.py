"""What each class of torch.optim does, as a pure transform built from the values of a param group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import optim
from .optim.base import at, number_of
from .optim.scaling import ascent

Group = dict[str, Any]  # a param group, or what was read from one
Values = dict[str, Any]


class Family(NamedTuple):
    """How the param groups of a class are read, and the transform that one is.

    ``fixed``: what stays as it is for good; ``scheduled``: the keys of numbers that a scheduler may change, ``betas``
    becoming b1, b2 and b3. ``build`` gets both. ``leafwise``: it is not elementwise, and must know how leaves lie.
    ``across``: what is done before to all gradients together.
    """

    fixed: Callable[[Group], Values]
    scheduled: tuple[str, ...]
    build: Callable[[Values], optim.GradientTransformation]
    leafwise: bool = False
    across: Callable[[torch.optim.Optimizer], optim.GradientTransformation | None] = lambda optimizer: None

    def numbers(self, group: Group) -> Values:
        """The numbers of a param group; one that is None is left out."""
        found: Values = {}
        for key in self.scheduled:
            if key == "betas":
                found |= {f"b{place}": value for place, value in enumerate(group[key], 1)}
            elif group[key] is not None:
                found[key] = group[key]
        return found


def keys(*names: str) -> Callable[[Group], Values]:
    """The function from a param group to these of its values."""
    return lambda group: {name: group[name] for name in names}


def with_momentum(*names: str) -> Callable[[Group], Values]:
    """``keys``, and whether there is momentum: one that a scheduler brings to 0 keeps its state."""
    return lambda group: {"has_momentum": group["momentum"] != 0, **keys(*names)(group)}


def _sgd(values: Values) -> optim.GradientTransformation:
    momentum = values["momentum"] if values["has_momentum"] else 0.0
    return optim.sgd(
        values["lr"],
        momentum,
        values["nesterov"],
        dampening=values["dampening"],
        weight_decay=values["weight_decay"],
        maximize=values["maximize"],
    )


def _adam(values: Values) -> optim.GradientTransformation:
    alias = optim.adamw if values["decoupled_weight_decay"] else optim.adam
    return alias(
        values["lr"],
        values["b1"],
        values["b2"],
        values["eps"],
        weight_decay=values["weight_decay"],
        amsgrad=values["amsgrad"],
        maximize=values["maximize"],
    )


def _rmsprop(values: Values) -> optim.GradientTransformation:
    return optim.rmsprop(
        values["lr"],
        values["alpha"],
        values["eps"],
        centered=values["centered"],
        momentum=values["momentum"] if values["has_momentum"] else 0.0,
        weight_decay=values["weight_decay"],
        maximize=values["maximize"],
    )


def _variant(alias: Callable[..., optim.GradientTransformation]) -> Callable[[Values], optim.GradientTransformation]:
    return lambda values: alias(values["lr"], **{key: value for key, value in values.items() if key != "lr"})


def _rprop(values: Values) -> optim.GradientTransformation:
    return optim.rprop(values["lr"], *values["etas"], *values["step_sizes"], maximize=values["maximize"])


def _adafactor(values: Values) -> optim.GradientTransformation:
    """torch's: no momentum, the relative step bounds the rate, and weights decay by the rate alone."""
    rate, (floor, min_scale) = values["lr"], values["eps"]

    def bounded(count: torch.Tensor) -> torch.Tensor:
        t = number_of(count)
        return (t.rsqrt() / at(rate, t)).clamp(max=1.0)

    descent = optim.chain(
        optim.scale_by_factored_rms(
            optim.adafactor_decay(-values["beta2_decay"]),
            0.0,
            1,
            floor=_machine_epsilon if floor is None else floor,
        ),
        optim.clip_by_block_rms(values["d"]),
        optim.scale_by_param_block_rms(min_scale),
        optim.scale_by_schedule(bounded),
        optim.add_decayed_weights(values["weight_decay"]),
        optim.scale_by_learning_rate(rate),
    )
    return ascent(values["maximize"], descent)


def _machine_epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _muon(values: Values) -> optim.GradientTransformation:
    return optim.chain(
        optim.scale_by_muon(
            values["ns_coefficients"],
            values["ns_steps"],
            values["momentum"],
            values["eps"],
            nesterov=values["nesterov"],
            adjust_lr_fn=values["adjust_lr_fn"],
        ),
        optim.add_decayed_weights(values["weight_decay"]),
        optim.scale_by_learning_rate(values["lr"]),
    )


_ADAM = Family(keys("amsgrad", "decoupled_weight_decay", "eps", "maximize"), ("lr", "betas", "weight_decay"), _adam)
_NUMBERS = ("lr", "weight_decay")
OF_TORCH: dict[type, Family] = {
    torch.optim.SGD: Family(
        with_momentum("dampening", "maximize", "nesterov"), ("lr", "momentum", "weight_decay"), _sgd
    ),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adagrad: Family(
        keys("eps", "initial_accumulator_value", "lr_decay", "maximize"), _NUMBERS, _variant(optim.adagrad)
    ),
    torch.optim.Adadelta: Family(keys("eps", "maximize"), (*_NUMBERS, "rho"), _variant(optim.adadelta)),
    torch.optim.RMSprop: Family(
        with_momentum("centered", "eps", "maximize"), (*_NUMBERS, "alpha", "momentum"), _rmsprop
    ),
    torch.optim.NAdam: Family(
        keys("decoupled_weight_decay", "eps", "maximize", "momentum_decay"),
        (*_NUMBERS, "betas"),
        _variant(optim.nadam),
    ),
    torch.optim.RAdam: Family(
        keys("decoupled_weight_decay", "eps", "maximize"), (*_NUMBERS, "betas"), _variant(optim.radam)
    ),
    torch.optim.Adamax: Family(keys("eps", "maximize"), (*_NUMBERS, "betas"), _variant(optim.adamax)),
    torch.optim.ASGD: Family(keys("alpha", "lambd", "maximize", "t0"), _NUMBERS, _variant(optim.asgd)),
    torch.optim.Rprop: Family(keys("etas", "maximize", "step_sizes"), ("lr",), _rprop),
    torch.optim.Adafactor: Family(keys("beta2_decay", "d", "eps", "maximize"), _NUMBERS, _adafactor, leafwise=True),
    torch.optim.Muon: Family(
        keys("adjust_lr_fn", "eps", "nesterov", "ns_coefficients", "ns_steps"),
        (*_NUMBERS, "momentum"),
        _muon,
        leafwise=True,
    ),
}
