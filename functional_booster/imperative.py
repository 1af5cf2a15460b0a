"""The imperative loop of Colossal-AI's users, as a thin shell over the pure pieces: one TrainState behind three handles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import nn

from functional_booster import optim, step
from functional_booster.kernels import flat, random, tree
from functional_booster.precision import Policy, cast

from .functionalize import functionalize
from .models.model import Model
from .state import TrainState, assemble
from .torch_optim import FromTorch, from_torch

Tree = tree.Tree
Init = Callable[[Model, optim.GradientTransformation], TrainState]


@dataclass
class Run:
    """What the handles of one ``boost`` share: the state, and the Parameters that stand for its storage."""

    module: nn.Module
    model: Model
    state: TrainState
    parameters: dict[str, nn.Parameter]
    policy: Policy

    def storage(self) -> flat.Flat:
        """The storage, with autograd's leaves as buffers."""
        return flat.Flat(dict(self.parameters), self.state.storage.layout)

    def params(self) -> Tree:
        """{name: tensor}: the parameters, as views of the storage."""
        return tree.map(torch.Tensor.detach, assemble(self.storage(), self.state.frozen))

    def write(self, state: TrainState) -> None:
        """Take over a successor of the state; the Parameters stay the same objects."""
        with torch.no_grad():
            for bucket, parameter in self.parameters.items():
                parameter.copy_(state.storage.buffers[bucket])
        self.state = state.replace(
            storage=flat.Flat({b: p.detach() for b, p in self.parameters.items()}, state.storage.layout)
        )


class BoostedModel(nn.Module):
    """A module whose forward is the pure model over the run's storage; ``parameters()`` are the flat buffers.

    ``state_dict`` and ``load_state_dict`` speak the module's own names; ``unwrap()`` gives the module with the present
    weights. Gradients are ordinary autograd's, in the ``.grad`` of ``parameters()``.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self.storage = nn.ParameterDict(run.parameters)
        self.train(run.module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        args, kwargs = _inputs(args, run), _inputs(kwargs, run)
        params = assemble(cast(run.storage(), run.policy.compute), cast(run.state.frozen, run.policy.compute))
        key = random.fold_in(run.state.key, run.state.position) if self.training else None
        outputs, buffers = run.model.apply(
            params, *args, key=key, train=self.training, buffers=run.state.buffers, mutable=True, **kwargs
        )
        if self.training:
            run.state = run.state.replace(
                buffers=tree.map(torch.Tensor.detach, buffers), position=run.state.position + 1
            )
        return _cast_outputs(outputs, run.policy.output)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The module's own state dict, with the present weights."""
        return self.unwrap().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load weights by the module's own names. Raises RuntimeError, with the whole list, where they do not fit."""
        result = self.unwrap().load_state_dict(state_dict, strict=strict)
        self._run.write(_with_weights(self._run.state, self._run.module))
        return result

    def unwrap(self) -> nn.Module:
        """The module that was handed to ``boost``, with the present weights and buffers written into it."""
        run = self._run
        with torch.no_grad():
            for tensors, values in (
                (dict(run.module.named_parameters()), run.params()),
                (dict(run.module.named_buffers()), run.state.buffers),
            ):
                for name, tensor in tensors.items():
                    tensor.copy_(values[name])
        return run.module


class BoostedOptimizer:
    """A torch optimizer's handle on the pure transform: ``param_groups`` are its own, so that schedulers work on them."""

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, converted: FromTorch) -> None:
        self._run = run
        self._converted = converted
        self._norm: torch.Tensor | None = None
        self.optimizer = optimizer
        self.skipped: torch.Tensor | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the torch optimizer; what is written there holds from the next step on."""
        return self.optimizer.param_groups

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Add the gradients of ``loss`` (0-d) to those of ``parameters()``."""
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            given = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TypeError(f"loss: {given}, expected a 0-d tensor")
        loss.backward(inputs=inputs, retain_graph=retain_graph)

    def step(self) -> None:
        """Apply the gradients; where they are not finite nothing changes and ``skipped`` says so."""
        run = self._run
        gradients = {b: _gradient(p) for b, p in run.parameters.items()}
        one = torch.ones((), device=run.state.step.device)
        sums = step.Sums(flat.Flat(gradients, run.state.storage.layout), one, one, {}, run.state.buffers)
        recipe = step.Recipe(_no_loss, self._converted.tx, run.policy)
        with torch.no_grad():
            state = run.state.replace(opt_state=self._converted.refresh(run.state.opt_state))
            new, metrics = step.update(recipe, state, sums)
        run.write(new.replace(position=run.state.position))
        self.skipped = metrics["skipped"]
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look whether a step was made

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self._run.parameters.values():
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
        norm = self.get_grad_norm()
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the gradients' norm is {norm.item()}")
        factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
        for parameter in self._run.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
        self._norm = norm
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp each gradient element to [-clip_value, clip_value]."""
        nn.utils.clip_grad_value_(self._run.parameters.values(), clip_value)

    def get_grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The global 2-norm of the gradients (0-d), before clipping if they were clipped."""
        if norm_type != 2.0:
            raise ValueError(f"norm_type: {norm_type}, expected 2.0")
        if self._norm is not None:
            return self._norm
        return optim.global_norm({b: _gradient(p) for b, p in self._run.parameters.items()})

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state: tensors by name, and the hyperparameters of each param group."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"state": tree.named_leaves(_by_leaf(self._run.state.opt_state)), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave. Raises ValueError, with the whole list, where names or shapes do not fit."""
        now = tree.named_leaves(_by_leaf(self._run.state.opt_state))
        given = state_dict["state"]
        problems = [f"{name}: missing" for name in now if name not in given]
        problems += [f"{name}: unexpected" for name in given if name not in now]
        problems += [
            f"{name}: shape {tuple(given[name].shape)}, expected {tuple(now[name].shape)}"
            for name in now.keys() & given.keys()
            if given[name].shape != now[name].shape
        ]
        if len(state_dict["param_groups"]) != len(self.param_groups):
            problems.append(f"param_groups: {len(state_dict['param_groups'])}, expected {len(self.param_groups)}")
        if problems:
            raise ValueError("the optimizer's state does not fit:\n  " + "\n  ".join(sorted(problems)))
        for name, place in now.items():  # views of the state's own storage
            place.copy_(given[name])
        for group, values in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(values)

    def unwrap(self) -> torch.optim.Optimizer:
        """The torch optimizer that was handed to ``boost``; its own state is that of before."""
        return self.optimizer


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
    if lr_scheduler is not None and (optimizer is None or getattr(lr_scheduler, "optimizer", None) is not optimizer):
        raise ValueError("lr_scheduler: it belongs to another optimizer than the one given")
    model = functionalize(module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    converted = None if optimizer is None else from_torch(optimizer, names)
    state = init(model, optim.identity() if converted is None else converted.tx)
    if converted is not None:
        state = state.replace(opt_state=converted.carry_over(state.opt_state))
    parameters = {bucket: nn.Parameter(buffer) for bucket, buffer in state.storage.buffers.items()}
    run = Run(module, model, state, parameters, policy)
    handle = None if converted is None else BoostedOptimizer(run, optimizer, converted)
    return (
        BoostedModel(run),
        handle,
        None if handle is None or lr_scheduler is None else BoostedScheduler(lr_scheduler, handle),
    )


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _no_loss(params: Tree, batch: Tree) -> torch.Tensor:
    raise AssertionError("the loss of an imperative step is the user's")


def _inputs(values: Any, run: Run) -> Any:
    """The inputs on the state's device, floating-point ones in the compute dtype."""
    device, dtype = run.state.step.device, run.policy.compute

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    return torch_pytree.tree_map(place, values)


def _cast_outputs(outputs: Any, dtype: torch.dtype | None) -> Any:
    """Outputs in the policy's dtype. torch's pytrees know Hugging Face's output classes."""
    return outputs if dtype is None else torch_pytree.tree_map(lambda leaf: cast(leaf, dtype), outputs)


def _by_leaf(opt_state: Tree) -> Tree:
    """The optimizer state with Flats spread out into the leaves that they stand for (views)."""

    def is_flat(node: Any) -> bool:
        return isinstance(node, flat.Flat)

    return tree.map(lambda node: flat.unravel(node) if is_flat(node) else node, opt_state, is_leaf=is_flat)


def _with_weights(state: TrainState, module: nn.Module) -> TrainState:
    params = {name: parameter.detach().to(state.step.device) for name, parameter in module.named_parameters()}
    kept = {name: params[name].to(info.dtype) for name, info in state.abstract.tree.items()}
    buffers = {name: buffer.detach().to(state.step.device, copy=True) for name, buffer in module.named_buffers()}
    return state.replace(params=kept, buffers=buffers)
