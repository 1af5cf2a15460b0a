"""functionalize: any nn.Module as a Model, a pair of pure functions over {name: tensor}."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy as is_uninitialized

from functional_booster.kernels import graph
from functional_booster.precision import cast_arguments, fp8
from functional_booster.sharding import environment
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.collectives import enter

from . import hf_attention, lazy, losses, module_regions
from .lazy import is_lazy
from .models.hf import state_names
from .models.model import Model
from .module_mode import ModuleMode
from .skeleton import Skeleton, Values

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def functionalize(module: nn.Module) -> Model:
    """A Model of ``module``; the module itself stays as it is, in every respect.

    Parameters and buffers are flat dicts by dotted name. A parameter that the module holds under several names is one
    leaf, under the first of them in ``module.named_parameters()``. Parameters with ``requires_grad=False`` and those
    that are no floating-point numbers are leaves whose ArrayInfo says ``trainable=False``.

    - ``init(key=None)`` copies the module's weights as they are then; the key is not used. Of a module that was made in
      a LazyInitContext it makes them.
    - ``apply(params, *args, key=None, train=False, buffers=None, mutable=False, kwargs=None, **named)`` is the module's
      forward, in training or evaluation mode; with ``mutable=True`` it returns ``(outputs, new buffers)``.
      ``buffers=None`` takes the module's own, as they were when it was functionalized. In training, a module that
      writes buffers without ``mutable=True`` raises ValueError; in evaluation what it writes is dropped. What draws
      random numbers draws from ``key`` and raises ValueError without one. ``kwargs`` is a dict of arguments by name,
      like those named in the call: an argument of the module's own that is called key, train, buffers, mutable or
      kwargs is given in it (``kwargs={"key": k}``).
    - ``train=True`` is ``module.train()``; but of a module in training, submodules in evaluation mode (frozen batch
      statistics) stay so: modes are those that the module had when it was functionalized. A dict {submodule name:
      bool}, as of ``named_modules``, sets each mode.
      Inside a step, floating-point arguments are cast to the dtype that its precision computes in.
      Under ``jit``, blocks that repeat (in a ModuleList or Sequential) are regions: traced and compiled once.
      A parameter that is a ``precision.fp8.Fp8Weight`` is multiplied in fp8 by linear layers and ``x @ weight``.
    - ``buffers()`` copies every buffer, those outside the state dict too.
    - ``loss(params, batch, key=None, buffers=None)``, for Hugging Face causal language models, is the next-token loss
      of ``batch["input_ids"]`` (B, T) as (sum, weight); ``labels`` default to ``losses.labels_from`` of the tokens and
      ``attention_mask``. With a key it trains: dropout is on.

    Raises TypeError for what is no nn.Module or wraps one for data parallelism or compilation, and ValueError for
    modules with uninitialized parameters. Weights on the meta device are described, but ``init`` refuses, by name,
    those that no LazyInitContext recorded.
    """
    _check_module(module)
    forward = _Forward(module)
    own_buffers = {n: buffer if is_lazy(buffer) else buffer.detach().clone() for n, buffer in module.named_buffers()}

    def model_buffers() -> dict[str, torch.Tensor]:
        found = {
            name: lazy.tensor_of(value) for name, value in lazy.values(own_buffers, f"{forward.name}: its buffers")
        }
        own_buffers.update({name: value for name, value in found.items() if own_buffers[name].is_meta})
        return {name: found[name].clone() if found[name] is own_buffers[name] else found[name] for name in own_buffers}

    def apply(
        params: Values,
        *args: Any,
        key: torch.Tensor | None = None,
        train: bool | Mapping[str, bool] = False,
        buffers: Values | None = None,
        mutable: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> Any:
        _check_options(key, kwargs, named)
        forward.check("params", params, forward.abstract)
        if buffers is None:
            device = next((value.device for value in params.values()), None)
            buffers = {name: buffer.to(device) for name, buffer in model_buffers().items()}
        forward.check("buffers", buffers, forward.abstract_buffers)
        scope = environment.current()
        modes = forward.modes_of(False if scope.evaluating else train)
        args, named = cast_arguments((args, {**named, **(kwargs or {})}), scope.compute)
        return forward(params, buffers, args, named, key=key, modes=modes, mutable=mutable)

    return Model(
        init=_Weights(module),
        apply=apply,
        abstract=dict(forward.abstract),
        buffers=model_buffers,
        loss=_next_token_loss(apply) if hf_attention.is_causal_lm(module) else None,
        config=hf_attention.config_of(module),
        name=forward.name,
        batch_norms=_batch_norms(module),
        state_names=state_names(module),
    )


def _batch_norms(module: nn.Module) -> frozenset[str]:
    """The names of the parameters of batch norms."""
    norms = {name: part for name, part in module.named_modules() if isinstance(part, _BATCH_NORMS)}
    return frozenset(
        f"{name}.{own}" if name else own for name, part in norms.items() for own, _ in part.named_parameters()
    )


@dataclass(frozen=True, eq=False)
class _Weights:
    """``init(key=None)``: the weights that a module has, or that a LazyInitContext recorded, in fresh storage."""

    module: nn.Module

    def __call__(self, key: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        made = {name: lazy.tensor_of(value) for name, value in self.leaves(key)}
        return {name: made[name] for name, _ in self.module.named_parameters()}

    def leaves(self, key: torch.Tensor | None = None) -> Iterator[tuple[str, Any]]:
        """(name, value), one at a time, in any order."""
        return lazy.values(dict(self.module.named_parameters()), f"{type(self.module).__name__}: its weights")


class _Forward:
    """A module's forward on given values: a skeleton on the meta device lends its structure to each call."""

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__
        self.abstract = {name: _info(parameter) for name, parameter in module.named_parameters()}
        self.abstract_buffers = {name: ArrayInfo.of(buffer) for name, buffer in module.named_buffers()}
        self.tied = _tied_names(module)
        self.modes = {name: part.training for name, part in module.named_modules()}
        template = _on_meta(module)
        hf_attention.prepare(template)
        self.template = _Template(template)

    def check(self, what: str, given: Any, expected: Mapping[str, ArrayInfo]) -> None:
        """Raise one error that lists everything that keeps ``given`` from being this module's values."""
        if not isinstance(given, Mapping):
            raise TypeError(f"{what}: expected a dict of tensors by name, as init gives it, got {type(given).__name__}")
        faults = [f"{name!r} is missing" for name in expected if name not in given]
        for name, value in given.items():
            if name in self.tied:
                faults.append(f"{name!r} is unexpected: it is tied to {self.tied[name]!r}")
            elif name not in expected:
                faults.append(f"{name!r} is unexpected")
            elif not isinstance(fp8.plain(value), torch.Tensor):
                faults.append(f"{name!r} is {type(value).__name__}, expected a tensor")
            elif tuple(value.shape) != expected[name].shape:
                faults.append(f"{name!r} has shape {tuple(value.shape)}, expected {expected[name].shape}")
        if faults:
            raise ValueError(f"{what} do not fit {self.name}: " + "; ".join(faults))

    def modes_of(self, train: bool | Mapping[str, bool]) -> Mapping[str, bool]:
        """The mode of each submodule, in the order of ``named_modules``."""
        if isinstance(train, Mapping):
            if train.keys() != self.modes.keys():
                differing = ", ".join(map(repr, sorted(train.keys() ^ self.modes.keys())))
                raise ValueError(
                    f"train: expected a mode for each submodule of {self.name}; missing or unknown: {differing}"
                )
            return {name: train[name] for name in self.modes}
        return self.modes if train and self.modes[""] else dict.fromkeys(self.modes, train)

    def __call__(
        self,
        params: Values,
        buffers: Values,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        key: torch.Tensor | None,
        modes: Mapping[str, bool],
        mutable: bool,
    ) -> Any:
        axes = tuple(axis.name for axis in environment.current().axes)
        owned = {  # on each rank its own, but for counters, which count the same on all
            name: (enter(buffer, axes) if buffer.is_floating_point() else buffer).clone()
            for name, buffer in buffers.items()
        }
        weights = {name: fp8.plain(value) for name, value in params.items()}
        versions = {name: _version(value) for name, value in [*weights.items(), *owned.items()]}
        skeleton = self.template.skeleton
        with skeleton.holding({**weights, **owned}) as module, ModuleMode(module, key, params) as mode:
            for part, training in zip(skeleton.owners, modes.values(), strict=True):
                part.training = training
            module_regions.install(self.template.repeated, mode)
            outputs = module(*args, **kwargs)
            after = skeleton.read()

        def written(before: Values) -> list[str]:
            return [
                name
                for name, value in before.items()
                if after[name] is not value or _version(value) != versions[name] or id(value) in mode.written
            ]

        if changed := written(weights):
            raise ValueError(f"the forward of {self.name} changes parameters in place: {', '.join(changed)}")
        if mutable:
            changed = written(owned)
            return outputs, {name: after[name].detach() if name in changed else buffers[name] for name in owned}
        if any(modes.values()) and (changed := written(owned)):
            raise ValueError(
                f"{self.name} writes buffers in training: {', '.join(changed)}; call apply with mutable=True, which "
                "returns (outputs, new buffers)"
            )
        return outputs


class _Template(threading.local):
    """A module without values. Each thread has its own copy, since a call puts its values into it."""

    def __init__(self, module: nn.Module) -> None:
        with graph.without_modes():  # a thread's first call may come from a trace
            self.skeleton = Skeleton(copy.deepcopy(module))
        self.repeated = module_regions.repeated(self.skeleton.module)


def _on_meta(module: nn.Module) -> nn.Module:
    """A deep copy whose parameters and buffers are on the meta device: no memory, and no tie to the module."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        meta = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta", requires_grad=False)
    for owner in module.modules():
        for value in vars(owner).values():
            # What was computed from parameters (hook-based weight norm keeps its weight so) is computed again.
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = torch.empty_like(value, device="meta", requires_grad=False)
            elif isinstance(value, torch.Tensor) and id(value) not in memo and is_lazy(value):
                memo[id(value)] = lazy.value_of(value)
    try:
        skeleton = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"module: {type(module).__name__} cannot be copied by copy.deepcopy: {error}") from error
    for owner in skeleton.modules():
        if isinstance(owner, nn.RNNBase):
            owner.flatten_parameters = _keep_parameters  # cuDNN's flattening would move the caller's weights in memory
    return skeleton


def _keep_parameters() -> None:
    pass


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        given = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(f"module: expected an instance of torch.nn.Module, got {given}")
    for cls in type(module).__mro__:
        if cls.__name__ in _WRAPPERS:
            raise TypeError(f"module: a {cls.__name__} wraps the module: hand in its .{_WRAPPERS[cls.__name__]}")
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if unknown := [name for name, value in tensors if is_uninitialized(value)]:
        raise ValueError(
            f"module: uninitialized parameters: {', '.join(unknown)}; run a forward first, it gives them shapes"
        )


def _check_options(key: Any, kwargs: Any, named: Mapping[str, Any]) -> None:
    """Raise where an argument of the module's own was taken for one of ``apply``'s, or is given twice."""
    if key is not None and not (isinstance(key, torch.Tensor) and key.dtype == torch.int32 and key.shape == (2,)):
        given = f"{key.dtype} of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else type(key).__name__
        raise TypeError(
            f"key: {given}, expected int32 of shape (2,), as fb.random.key makes it; an argument of the module's own "
            'that is called key is given as kwargs={"key": ...}'
        )
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"kwargs: {type(kwargs).__name__}, expected a dict of the module's arguments by name")
    if twice := named.keys() & (kwargs or {}).keys():
        raise TypeError(f"given by name and in kwargs: {', '.join(sorted(twice))}")


def _info(parameter: nn.Parameter) -> ArrayInfo:
    differentiable = parameter.is_floating_point() or parameter.is_complex()
    return ArrayInfo(tuple(parameter.shape), parameter.dtype, trainable=parameter.requires_grad and differentiable)


def _tied_names(module: nn.Module) -> dict[str, str]:
    """{further name: first name} of the parameters and buffers that the module holds under several names."""
    tied: dict[str, str] = {}
    for every, unique in (
        (module.named_parameters(remove_duplicate=False), module.named_parameters()),
        (module.named_buffers(remove_duplicate=False), module.named_buffers()),
    ):
        first = {id(value): name for name, value in unique}
        tied.update({name: first[id(value)] for name, value in every if first[id(value)] != name})
    return tied


def _version(value: torch.Tensor) -> int:
    while torch._C._functorch.is_batchedtensor(value):  # what is written is the tensor inside
        value = torch._C._functorch.get_unwrapped(value)
    return 0 if value.is_inference() else value._version


def _next_token_loss(apply: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: Values, batch: Values, key: torch.Tensor | None = None, buffers: Values | None = None) -> Any:
        if "input_ids" not in batch:
            raise KeyError(f"batch: 'input_ids' is missing, it has {sorted(batch)}")
        tokens, labels = batch["input_ids"], batch.get("labels")
        if labels is None:
            labels = losses.labels_from(tokens, batch.get("attention_mask"))
        inputs = {name: batch[name] for name in ("attention_mask", "position_ids", "token_type_ids") if name in batch}
        outputs = apply(params, tokens, **inputs, key=key, train=key is not None, buffers=buffers)
        return losses.next_token(outputs.logits, labels)

    return loss
