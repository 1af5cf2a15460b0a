"""Booster: composes a model, an optimizer, a precision and a plugin into a train step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_booster import booster_io, checkpoint, hf_checkpoint, imperative, initial, step
from functional_booster.kernels import flat, random, tree
from functional_booster.precision import MixedPrecision, Policy, resumed
from functional_booster.sharding import shards
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.mesh import Replicated, spmd

from .arguments import check_model, device_of, transformation_of
from .eval_step import build as build_eval_step
from .hf_reading import Report
from .loss_call import LossFn
from .models.model import Model
from .pipeline import PipelineParallel
from .pipeline import train_step as pipelined
from .pipeline.execute_pipeline import execute_pipeline
from .plugins import Plan, Plugin, max_norm_under, plan, precision_under
from .plugins.dataloaders import check_tail
from .state import TrainState, assemble, check_params, check_state
from .train_step import TrainStep, build, guarded, off_the_tape

Tree = tree.Tree


@dataclass(frozen=True)
class Booster:
    """``Booster(device=None, mixed_precision=None, plugin=None)``, Colossal-AI's entry point; it keeps no state.

    ``device``: where states live (None: the GPU if there is one, else the CPU). ``mixed_precision``: None or "fp32" (as
    the model is), "bf16", "fp16", "fp16_apex", "fp16_naive", "fp8", a MixedPrecision or a Policy. ``plugin``: None, one
    device, or how to lay a run out over many ranks: over ``mesh`` (a ``fb.virtual_mesh`` or a torch DeviceMesh), or,
    without one, over the processes of torch.distributed. Raises ValueError for an unknown name or device and for ranks
    that the plugin cannot lay out, TypeError for other types. ``precision`` is the mixed precision with what the plugin
    says of it, ``plan`` the plugin and its mesh.
    """

    device: Any = None
    mixed_precision: str | Policy | MixedPrecision | None = None
    plugin: Plugin | None = None
    mesh: Any = None
    plan: Plan = field(init=False, repr=False)
    precision: MixedPrecision = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_of(self.device))
        object.__setattr__(self, "plan", plan(self.plugin, self.mesh, self.device.type))
        object.__setattr__(self, "mesh", self.plan.mesh if self.plugin is not None else None)
        object.__setattr__(self, "precision", precision_under(self.plan.plugin, self.mixed_precision))

    @property
    def policy(self) -> Policy:
        """The dtypes that a step stores, computes and sums in."""
        return self.precision.policy

    def init(self, model: Model, tx: Any, *, key: torch.Tensor, params: Tree = None) -> TrainState:
        """A new TrainState, in fresh storage on the Booster's device.

        ``key`` (2,) int32 makes the parameters (``model.init(key)``) and every draw of the training that follows;
        ``params`` starts from given weights instead. On processes, each must call it, and the first one's values hold.
        Raises ValueError with the whole list of names where ``params`` does not fit the model.
        """
        check_model(model)
        transformation, stream = transformation_of(tx), random.fold_in(key, 1)
        if params is None:
            values = model.leaves(key.to(self.device))  # born where they will live
        else:
            check_params(params, model.abstract)
            values = iter(tree.named_leaves(params).items())
        return initial.state(model, transformation, values, stream, self.precision, self.plan, self.device)

    def abstract(self, model: Model, tx: Any) -> TrainState:
        """The TrainState that ``init`` would make, with ArrayInfo leaves: nothing is computed, no memory is used."""
        check_model(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            key = torch.empty(2, dtype=torch.int32)
            state = initial.state(model, transformation_of(tx), None, key, self.precision, self.plan, self.device)
        return tree.map(ArrayInfo.of, state)

    def train_step(
        self,
        loss_fn: LossFn,
        tx: Any,
        *,
        accumulate: int = 1,
        max_norm: float | None = None,
        skip_nonfinite: bool = True,
        jit: bool = True,
        donate: bool = True,
    ) -> TrainStep | pipelined.PipelineStep:
        """The function ``(state, batch) -> (state, metrics)``: forward, backward, clipping and update, as one graph.

        ``loss_fn(params, batch, key)`` returns ``(sum, weight)``, ``(sum, weight, aux)`` or a mean over rows; ``key``
        may be left out, ``buffers`` asked for by name. The batch, of any number of rows, is cut along dim 0 over the
        data ranks, and a rank's rows into ``accumulate`` microbatches (two graphs then); gradients are summed, divided
        once by the summed weight, and clipped to ``max_norm``. With ``skip_nonfinite`` a step whose gradient norm is
        not finite leaves parameters, optimizer and schedule as they are; where the precision scales the loss it does
        so in any case. With ``donate`` the new state takes over the old one's storage, and the old one is refused
        afterwards. The step raises ValueError, naming what differs, for a state of another plugin, mesh or precision.

        ``metrics``: 0-d tensors, not yet computed when the step returns: loss, grad_norm, lr, tokens (the weight),
        skipped, loss_scale, and aux.
        """
        max_norm = max_norm_under(self.plan.plugin, max_norm)
        recipe = step.Recipe(loss_fn, transformation_of(tx), self.precision, accumulate, max_norm, skip_nonfinite)
        if not isinstance(self.plan.plugin, PipelineParallel):
            return build(recipe, self.plan, jit, donate)
        if accumulate != 1:
            raise ValueError(f"accumulate: {accumulate} with a pipeline, expected 1: num_microbatches is the plugin's")
        return pipelined.build(recipe, self.plan, jit, donate)

    def eval_step(self, loss_fn: LossFn, *, jit: bool = True) -> Callable[[TrainState, Tree], step.Metrics]:
        """The function ``(state, batch) -> metrics`` (loss, tokens, aux): no key, no dropout, no gradients, no change.

        The ``loss_fn`` of the training will do: own and functionalized models drop nothing here, ``train=True`` or not.
        Raises ValueError for a state of another plugin, mesh or precision, as the train step does.
        """
        if isinstance(self.plan.plugin, PipelineParallel):
            return pipelined.PipelineEval(loss_fn, self.precision, self.plan, jit)
        return build_eval_step(loss_fn, self.precision, self.plan, jit)

    def full_params(self, state: TrainState) -> Tree:
        """The whole parameter tree in fresh storage, in the dtype it is stored in; on processes, each must call it."""
        check_state("state", state)
        mesh = state.plan.mesh

        def local(storage: flat.Flat, frozen: flat.Flat | None) -> Replicated:
            def whole(parts: flat.Flat) -> flat.Flat:
                return shards.join(shards.on_device(parts, state.step.device))

            return Replicated(assemble(whole(storage), None if frozen is None else whole(frozen)))

        with off_the_tape(), guarded("full_params", state):
            return tree.map(torch.clone, spmd(local, mesh)(state.storage, state.frozen))

    def shard(self, params: Tree, like: TrainState) -> TrainState:
        """``like`` with these parameters, laid out as its own: the inverse of ``full_params``. Raises as ``init``."""
        check_state("like", like)
        check_params(params, like.abstract.tree)
        placed = tree.map(lambda leaf, info: leaf.to(self.device, info.dtype), params, like.abstract.tree)
        storage, frozen = initial.laid_out(placed, like.layouts, like.plan)
        return like.replace(storage=storage, frozen=frozen)

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        *,
        key: torch.Tensor | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """(model, optimizer, criterion, dataloader, lr_scheduler) for the imperative loop, in this order, None kept.

        The module's weights are copied to the Booster's device; the torch optimizer becomes the equal pure transform,
        param groups and earlier state kept. ``key`` draws dropout (by default key 0). Raises TypeError for an optimizer
        that is not known, ValueError for one that holds other parameters, and for a dataloader of
        ``prepare_dataloader`` that leaves some rank without rows at an epoch's end.
        """
        check_tail(dataloader, self.plan)
        stream = random.key(0) if key is None else key
        boosted, handle, schedule = imperative.boost(
            model, optimizer, lr_scheduler, self.precision, self.plan, lambda pure, tx: self.init(pure, tx, key=stream)
        )
        return boosted, handle, criterion, dataloader, schedule

    def backward(self, loss: torch.Tensor, optimizer: imperative.BoostedOptimizer) -> None:
        """Add the gradients of ``loss`` (0-d) to those of the boosted model: on processes, their mean over ranks."""
        if not isinstance(optimizer, imperative.BoostedOptimizer):
            raise TypeError(f"optimizer: {type(optimizer).__name__}, expected the one that boost returned")
        optimizer.backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: imperative.BoostedModel,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: imperative.BoostedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """{"loss", "outputs"} of the next batch, forward and backward through a pipeline: ``execute_pipeline``."""
        return execute_pipeline(data_iter, model, criterion, optimizer, return_loss, return_outputs)

    def no_sync(self, model: Any = None, optimizer: Any = None) -> contextlib.AbstractContextManager[None]:
        """A context in which ``backward`` adds gradients up on each rank; the next one outside synchronizes them.

        Raises TypeError where neither handle that boost returned is given.
        """
        return imperative.no_sync(model, optimizer)

    def enable_lora(
        self,
        model: nn.Module | Model,
        pretrained_dir: str | os.PathLike[str] | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool | str = False,
    ) -> Any:
        """The module with peft's adapters, new by ``lora_config`` (a peft.LoraConfig) or from ``pretrained_dir``.

        Call it before ``boost``, and give the optimizer the parameters of what it returns; of a fb.Model it makes a
        ``lora.LoraModel``. ``quantize``: frozen linear layers are stored in NF4 (True or "nf4") or "int8", by
        torch alone. Raises as ``lora.enable``, ImportError without peft, ValueError for a ``bnb_quantization_config``.
        """
        from . import lora  # peft is an extra, and takes seconds to import

        if bnb_quantization_config is not None:
            raise ValueError("bnb_quantization_config: there is no bitsandbytes here, expected quantize=True (NF4)")
        return lora.enable(model, pretrained_dir, lora_config, quantize)

    lora = enable_lora

    def save_lora_as_pretrained(
        self, model: imperative.BoostedModel, checkpoint: str | os.PathLike[str], use_safetensors: bool = False
    ) -> None:
        """Write a boosted model's active adapter to a directory, as ``PeftModel.from_pretrained`` opens it.

        The tensors are safetensors, whatever ``use_safetensors``. On processes, each must call it. Raises as
        ``lora.save_module``.
        """
        from . import lora

        lora.save_module(model, checkpoint)

    def save(
        self,
        path: str | os.PathLike[str],
        state: TrainState,
        *,
        use_async: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> checkpoint.Saving | None:
        """Write the state to the directory ``path``; what was there is replaced in one moment, or stays whole.

        ``use_async``: return once the state is copied to the host, with a handle on the writing (``result()``,
        ``done()``). ``metrics`` are kept beside the state. On processes, each must call it. Raises as
        ``checkpoint.save``.
        """
        if use_async:
            return checkpoint.save_async(path, state, metrics=metrics)
        checkpoint.save(path, state, metrics=metrics)
        return None

    def load(self, path: str | os.PathLike[str], *, like: TrainState) -> TrainState:
        """Read a state of the shape of ``like`` (``booster.abstract(model, tx)``, or a state) onto the device.

        The loss scale goes on where this precision has a dynamic one and the state's run had; else it is a new one.

        Raises FileNotFoundError for a path that is no checkpoint, ValueError with the whole list of leaves that differ.
        """
        check_state("like", like)
        state = checkpoint.load(path, like, self.device)
        return state.replace(loss_scale=resumed(self.precision.scaling, state.loss_scale))

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        state: TrainState,
        model: Model,
        *,
        size_per_shard: float = 1024,
        dtype: torch.dtype | None = None,
        config: Any = None,
        generation_config: Any = None,
    ) -> None:
        """Write the weights to the directory ``path`` in Hugging Face's form: ``hf_checkpoint.save``."""
        hf_checkpoint.save(
            path,
            state,
            model,
            size_per_shard=size_per_shard,
            dtype=dtype,
            config=config,
            generation_config=generation_config,
        )

    def load_pretrained(
        self,
        path: str | os.PathLike[str],
        *,
        like: TrainState,
        model: Model,
        strict: bool = True,
        weights_only: bool = False,
    ) -> tuple[TrainState, Report]:
        """``like`` with weights in Hugging Face's form, and what did not fit: ``hf_checkpoint.load``."""
        return hf_checkpoint.load(path, like, model, strict=strict, weights_only=weights_only)

    def save_model(
        self,
        model: imperative.BoostedModel,
        checkpoint: str | os.PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> checkpoint.Saving | None:
        """Write a boosted model's weights: to one file, or, with ``shard``, to a directory of Hugging Face's form.

        ``size_per_shard`` in MB (2**20 bytes); ``prefix`` stands in the names of a directory's files. Files are
        safetensors, whatever ``use_safetensors``, and complete when this returns, or, with ``use_async``, when the
        ``checkpoint.Saving`` that it returns is ``done()``. On processes, each must call it. Raises as
        ``booster_io.save_model``.
        """
        return booster_io.save_model(model, checkpoint, shard, gather_dtensor, prefix, size_per_shard, use_async)

    def load_model(
        self,
        model: imperative.BoostedModel,
        checkpoint: str | os.PathLike[str],
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
        *,
        weights_only: bool = False,
    ) -> Report:
        """Load weights, of ``save_model`` or Hugging Face's, into a boosted model, in place; returns what did not fit.

        Each rank reads what it stores, slice by slice, whatever ``low_cpu_mem_mode`` and ``num_threads``. Pickles are
        refused, unless ``weights_only`` asks for torch's unpickler of that name. Raises as ``booster_io.load_model``.
        """
        return booster_io.load_model(model, checkpoint, strict, weights_only)

    def save_optimizer(
        self,
        optimizer: imperative.BoostedOptimizer,
        checkpoint: str | os.PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_async: bool = False,
    ) -> checkpoint.Saving | None:
        """Write a boosted optimizer's state and param groups: files as for ``save_model``, leaves by name."""
        return booster_io.save_optimizer(
            optimizer, checkpoint, shard, gather_dtensor, prefix, size_per_shard, use_async
        )

    def load_optimizer(
        self,
        optimizer: imperative.BoostedOptimizer,
        checkpoint: str | os.PathLike[str],
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load what ``save_optimizer`` wrote, under whatever plugin, in place. Raises as ``load_model``."""
        booster_io.load_optimizer(optimizer, checkpoint)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
        """Write a scheduler's ``state_dict()`` as JSON. Raises TypeError for values that JSON cannot hold."""
        booster_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
        """Load what ``save_lr_scheduler`` wrote. Raises ValueError for another scheduler's state."""
        booster_io.load_lr_scheduler(lr_scheduler, checkpoint)
