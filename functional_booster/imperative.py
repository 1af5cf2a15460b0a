"""The imperative loop of Colossal-AI's users, a thin shell over the pure pieces: one TrainState, three handles."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import nn

from functional_booster import optim, step
from functional_booster.kernels import random, tree
from functional_booster.precision import Policy, cast, cast_arguments
from functional_booster.sharding import environment

from .functionalize import functionalize
from .models.model import Model
from .state import TrainState
from .torch_optim import FromTorch, FromTorchState, from_torch

Tree = tree.Tree
Init = Callable[[Model, optim.GradientTransformation], TrainState]


@dataclass
class Run:
    """What the handles of one ``boost`` share. The Parameters, by name, lie in the state's storage, leaf by leaf.

    Autograd's leaves are thus the module's own, and a parameter that it did not reach is told by its ``.grad``: None.
    """

    module: nn.Module
    model: Model
    state: TrainState
    parameters: dict[str, nn.Parameter]
    policy: Policy

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(the module's tensor, the run's tensor) of each parameter and buffer."""
        parameters, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        return [
            *((tensor, self.parameters[name].detach()) for name, tensor in parameters.items()),
            *((tensor, self.state.buffers[name]) for name, tensor in buffers.items()),
        ]


class BoostedModel(nn.Module):
    """A module whose forward is the pure model over the run's parameters and buffers, which keep their own names.

    ``module`` is the module that was handed to ``boost``: the forward runs in its submodules' modes (``train``,
    ``eval``); its weights play no part, and ``unwrap()`` writes the present ones into it. Gradients are ordinary
    autograd's, in the ``.grad`` of ``parameters()``.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self.module = run.module
        self.training = run.module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        args, kwargs = _moved((args, kwargs), run.state.step.device)
        modes = {name: part.training for name, part in run.module.named_modules()}
        with environment.bind(compute=run.policy.compute):
            outputs, buffers = run.model.apply(
                cast(dict(run.parameters), run.policy.compute),
                *args,
                key=random.fold_in(run.state.key, run.state.position),
                train=modes,
                buffers=run.state.buffers,
                mutable=True,
                **kwargs,
            )
        if any(modes.values()):
            run.state = run.state.replace(
                buffers=tree.map(torch.Tensor.detach, buffers), position=run.state.position + 1
            )
        return cast_arguments(outputs, run.policy.output)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are trained, and the frozen ones, by the module's own names."""
        for name, parameter in self._run.parameters.items():
            yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The present buffers by the module's own names."""
        for name, buffer in self._run.state.buffers.items():
            yield f"{prefix}.{name}" if prefix else name, buffer

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own state dict, with copies of the present weights in the dtypes that they are stored in."""
        kwargs["keep_vars"] = True  # the tensors themselves, to know them by
        own: dict[str, Any] = self.unwrap().state_dict(*args, **kwargs)
        values = {id(tensor): value for tensor, value in self._run.pairs()}
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor):
                own[name] = values.get(id(tensor), tensor).detach().clone()
        return own

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights by the module's own names. Raises RuntimeError, with the whole list, where they do not fit."""
        module = self.unwrap()
        result = module.load_state_dict(state_dict, strict=strict)
        values = {id(tensor): value for tensor, value in self._run.pairs()}
        with torch.no_grad():
            for name, tensor in module.state_dict(keep_vars=True).items():
                if id(tensor) in values:  # what was given may be wider than the module's own tensor
                    values[id(tensor)].copy_(state_dict.get(name, tensor))
        return result

    def unwrap(self) -> nn.Module:
        """The module that was handed to ``boost``, with the present weights and buffers written into it."""
        with torch.no_grad():
            for tensor, value in self._run.pairs():
                tensor.copy_(value)
        return self._run.module

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> BoostedModel:
        """What ``to``, ``cuda``, ``half``... do: refused, unless everything is there already."""
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            moved = fn(value.detach())
            if (moved.device, moved.dtype) != (value.device, value.dtype):
                raise RuntimeError(
                    f"{name}: {value.dtype} on {value.device} cannot become {moved.dtype} on {moved.device}: the "
                    "Booster's device and mixed_precision say where a boosted model lives; convert before boost"
                )
        return self


class BoostedOptimizer:
    """A torch optimizer's handle on the pure transform, for the parameters in its ``param_groups``."""

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, converted: FromTorch) -> None:
        self._run = run
        self._converted = converted
        self._norm: torch.Tensor | None = None
        names = {own: name for name, own in run.module.named_parameters()}
        members = [names[own] for group in optimizer.param_groups for own in group["params"]]
        self._parameters = {name: run.parameters[name] for name in members}  # as in torch, other ones are left alone
        self.optimizer = optimizer
        self.skipped: torch.Tensor | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the torch optimizer; what is written there holds from the next step on."""
        return self.optimizer.param_groups

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Add the gradients of ``loss`` (0-d) to those of ``parameters()``."""
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            given = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TypeError(f"loss: {given}, expected a 0-d tensor")
        self._norm = None
        loss.backward(inputs=inputs, retain_graph=retain_graph)

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Apply the gradients; where they are not finite nothing changes and ``skipped`` (0-d, 1 or 0) says so.

        Parameters without a gradient (None) stay as they are, as does their state. ``closure``, if given, computes loss
        and gradients first; its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        if gradients:
            self._update(gradients)
        else:
            self.skipped = torch.zeros(())
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look whether a step was made
        return loss

    def _update(self, gradients: dict[str, torch.Tensor]) -> None:
        """The pure update of the part of the state that has gradients."""
        run = self._run
        whole = self._state_for(gradients)
        part = run.state.replace(
            storage={name: self._parameters[name].detach() for name in gradients},
            opt_state=whole._replace(inner={name: whole.inner[name] for name in gradients}),
        )
        one = torch.ones((), device=run.state.step.device)
        sums = step.Sums(gradients, one, one, {}, run.state.buffers)
        with torch.no_grad():
            new, metrics = step.update(step.Recipe(_no_loss, self._converted.tx, run.policy), part, sums)
            values: Any = new.storage
            for name, value in values.items():
                self._parameters[name].copy_(value)
        opt_state = new.opt_state._replace(inner={**whole.inner, **new.opt_state.inner})
        run.state = new.replace(storage=run.state.storage, opt_state=opt_state, position=run.state.position)
        self.skipped = metrics["skipped"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self._parameters.values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()
        self._norm = None

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients down to a global norm of at most ``max_norm``; returns the norm before (0-d).

        Raises ValueError for another norm than the 2-norm, RuntimeError for a norm that is not finite, if asked to.
        """
        if norm_type != 2.0:
            raise ValueError(f"norm_type: {norm_type}, expected 2.0")
        if not max_norm > 0:
            raise ValueError(f"max_norm: {max_norm}, expected a positive number")
        norm = optim.global_norm(self._gradients())
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the gradients' norm is {norm.item()}")
        factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
        for gradient in self._gradients().values():
            gradient.mul_(factor.to(gradient.dtype))
        self._norm = norm
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp each gradient element to [-clip_value, clip_value]."""
        if not clip_value > 0:
            raise ValueError(f"clip_value: {clip_value}, expected a positive number")
        for gradient in self._gradients().values():
            gradient.clamp_(-clip_value, clip_value)

    def get_grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The global 2-norm of the gradients (0-d), that of before if ``clip_grad_by_norm`` clipped them."""
        if norm_type != 2.0:
            raise ValueError(f"norm_type: {norm_type}, expected 2.0")
        if self._norm is not None:
            return self._norm
        return optim.global_norm(self._gradients())

    def state_dict(self) -> dict[str, Any]:
        """Copies of the optimizer's state: tensors by name, and the hyperparameters of each param group."""
        groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in self.param_groups]
        state = tree.named_leaves(self._run.state.opt_state.inner)
        return {"state": {name: value.clone() for name, value in state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave, as copies. Raises ValueError, with the whole list, where it does not fit."""
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("state_dict: expected what state_dict() of a boosted optimizer gave: state, param_groups")
        state = self._state_for([name for name, leaf in self._parameters.items() if leaf.requires_grad])
        now, given = tree.named_leaves(state.inner), state_dict["state"]
        problems = [f"{name}: missing" for name in now if name not in given]
        problems += [f"{name}: unexpected" for name in given if name not in now]
        problems += [
            f"{name}: shape {tuple(given[name].shape)}, expected {tuple(now[name].shape)}"
            for name in now.keys() & given.keys()
            if given[name].shape != now[name].shape
        ]
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            problems.append(f"param_groups: {len(groups)}, expected {len(self.param_groups)}")
        if problems:
            raise ValueError("the optimizer's state does not fit:\n  " + "\n  ".join(sorted(problems)))
        before = [dict(group) for group in self.param_groups]
        for group, values in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy(values))
        try:
            state = self._converted.refresh(state)
        except (KeyError, ValueError):
            for group, values in zip(self.param_groups, before, strict=True):
                group.update(values)
            raise
        loaded = [given[name].to(place.device, place.dtype, copy=True) for name, place in now.items()]
        inner = tree.unflatten(tree.structure(state.inner), loaded)
        self._run.state = self._run.state.replace(opt_state=state._replace(inner=inner))

    def unwrap(self) -> torch.optim.Optimizer:
        """The torch optimizer that was handed to ``boost``; its own state is that of before."""
        return self.optimizer

    def _gradients(self) -> dict[str, torch.Tensor]:
        """{name: gradient} of the optimizer's parameters that have one."""
        return {name: leaf.grad for name, leaf in self._parameters.items() if leaf.grad is not None}

    def _state_for(self, names: Iterable[str]) -> FromTorchState:
        """The state before a step of these parameters: with a new one for each that was frozen until now."""
        state = self._converted.refresh(self._run.state.opt_state)
        thawed = {name: self._parameters[name].detach() for name in names if name not in state.inner}
        return state._replace(inner={**state.inner, **self._converted.tx.init(thawed).inner}) if thawed else state


class BoostedScheduler:
    """A torch scheduler that is held back when the optimizer skipped its step; everything else is the scheduler's."""

    def __init__(self, scheduler: Any, optimizer: BoostedOptimizer) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step of the schedule, unless the optimizer's last step was skipped."""
        skipped = self._optimizer.skipped
        if skipped is None or not bool(skipped):
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._scheduler, name)


def boost(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, lr_scheduler: Any, policy: Policy, init: Init
) -> tuple[BoostedModel, BoostedOptimizer | None, BoostedScheduler | None]:
    """The handles on a new run: model, optimizer and scheduler, None kept."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"model: {type(module).__name__}, expected an nn.Module")
    if isinstance(module, BoostedModel):
        raise ValueError("model: it is boosted already")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    if lr_scheduler is not None:
        if not hasattr(lr_scheduler, "step") or not hasattr(lr_scheduler, "optimizer"):
            raise TypeError(f"lr_scheduler: {type(lr_scheduler).__name__}, expected a torch scheduler")
        if optimizer is None:
            raise ValueError("lr_scheduler: it belongs to an optimizer, but no optimizer was given")
        if lr_scheduler.optimizer is not optimizer:
            raise ValueError("lr_scheduler: it belongs to another optimizer than the one given")
    model = functionalize(module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    converted = None if optimizer is None else from_torch(optimizer, names)
    tx = optim.identity()._replace(groups=None) if converted is None else converted.tx
    state = init(model, tx)
    if converted is not None:
        state = state.replace(opt_state=converted.carry_over(state.opt_state))
    values = state.params
    parameters = {
        name: nn.Parameter(values[name], requires_grad=own.requires_grad) for name, own in module.named_parameters()
    }
    run = Run(module, model, state, parameters, policy)
    handle = None if optimizer is None or converted is None else BoostedOptimizer(run, optimizer, converted)
    return (
        BoostedModel(run),
        handle,
        None if handle is None or lr_scheduler is None else BoostedScheduler(lr_scheduler, handle),
    )


def _no_loss(params: Tree, batch: Tree) -> torch.Tensor:
    raise AssertionError("the loss of an imperative step is the user's")


def _moved(values: Any, device: torch.device) -> Any:
    """The tensors of a call's arguments on the device."""
    return torch_pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, values)
