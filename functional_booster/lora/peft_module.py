"""Adapters in an imperative loop: a module that peft has put them into, which ``boost`` takes as any other."""

from __future__ import annotations

import os
import warnings
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraConfig
from torch import nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from functional_booster import hf_entries
from functional_booster.boosted_model import BoostedModel
from functional_booster.lazy import resumed
from functional_booster.models.model import Model

from . import files
from .model import LoraModel, adapt
from .plan import head_of, require_supported
from .quantized_weight import CODECS, QuantizedWeight, codec_of


def enable(
    model: nn.Module | Model,
    pretrained_dir: str | os.PathLike[str] | None = None,
    lora_config: LoraConfig | None = None,
    quantize: bool | str = False,
) -> nn.Module | LoraModel:
    """A module with adapters, peft's PeftModel, whose own weights are frozen; of a Model a LoraModel.

    The adapters are new ones by ``lora_config``, or those of ``pretrained_dir``, whose config holds. ``quantize``: the
    linear layers' weights, but for the head, are stored in NF4 (True, "nf4") or "int8", and dequantized where they are
    used. A module is changed in place. Raises ValueError where neither is given, and for what is not supported, naming
    it.
    """
    if pretrained_dir is None and lora_config is None:
        raise ValueError("lora_config: missing; expected a peft.LoraConfig, or pretrained_dir with an adapter")
    if pretrained_dir is not None and lora_config is not None:
        warnings.warn("lora_config: ignored, the adapter of pretrained_dir has its own", stacklevel=2)
    if isinstance(model, Model):
        if pretrained_dir is not None:
            return files.load(pretrained_dir, model, quantize=quantize)
        return adapt(model, lora_config, quantize=quantize)  # type: ignore[arg-type]
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__}, expected an nn.Module or a fb.Model")
    if isinstance(model, BoostedModel):
        raise ValueError("model: it is boosted already: enable LoRA before boost")
    config = files.read_config(pretrained_dir) if pretrained_dir is not None else lora_config
    require_supported(config)
    codec = codec_of(quantize)
    dense = [] if codec is None else _linear_layers(model)
    with resumed(model):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")  # between peft and transformers
            adapted = peft.get_peft_model(model, config)  # type: ignore[arg-type]
        for layer in dense:  # after peft, which initializes some adapters by the weights
            _quantize(layer, codec)  # type: ignore[arg-type]
    if pretrained_dir is not None:
        files.fill(adapted, pretrained_dir)
    return adapted


def save_module(model: BoostedModel, checkpoint: str | os.PathLike[str]) -> None:
    """Write the active adapter of a boosted PeftModel, as ``lora.save`` does. On processes, each must call this.

    Raises TypeError for what is no boosted model, ValueError for one without adapters.
    """
    if not isinstance(model, BoostedModel):
        raise TypeError(f"model: {type(model).__name__}, expected the one that boost returned")
    if not isinstance(model.module, peft.PeftModel):
        raise ValueError(f"model: {type(model.module).__name__} has no adapters: booster.enable_lora gives it some")
    module: Any = model.unwrap()
    tensors = peft.get_peft_model_state_dict(module, save_embedding_layers=False)
    run = model._run
    leaves = hf_entries.plain({name: value.contiguous() for name, value in tensors.items()}, run.plan.mesh)
    files.write(checkpoint, module.active_peft_config, leaves, run.plan.mesh, run.state.step.device)


class Quantized(nn.Module):
    """The parametrization of a weight that is stored in few bits, which takes and gives it dense."""

    def __init__(self, weight: torch.Tensor, codec: str) -> None:
        super().__init__()
        self.shape, self.dtype, self.codec = tuple(weight.shape), weight.dtype, codec

    def weight(self, *parts: torch.Tensor) -> QuantizedWeight:
        """The weight that these parts store."""
        return QuantizedWeight.from_parts(parts, self.codec, self.shape, self.dtype)

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        """The dense weight."""
        return self.weight(*parts).dense()

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of a dense weight."""
        return CODECS[self.codec].quantize(weight)


def _linear_layers(module: nn.Module) -> list[Any]:
    """The layers whose weights are to be quantized: linear ones, but for the head and tied ones."""
    head = head_of(module)
    uses = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    layers = [part for part in module.modules() if isinstance(part, (nn.Linear, Conv1D)) and part is not head]
    return [layer for layer in layers if uses.count(id(layer.weight)) == 1]


def _quantize(layer: Any, codec: str) -> None:
    """Store a linear layer's weight in few bits."""
    layer.weight.requires_grad_(False)
    parametrize.register_parametrization(layer, "weight", Quantized(layer.weight, codec), unsafe=True)
    type(layer).forward = _forward  # a class of its own, which the parametrization has given it


def _forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """A linear layer's, that keeps no dense weight for backward."""
    stored = layer.parametrizations.weight
    parts = [getattr(stored, f"original{number}") for number in range(stored.ntensors)]
    weight = stored[0].weight(*parts)
    out = (weight.t() if isinstance(layer, Conv1D) else weight).linear(input)
    return out if layer.bias is None else out + layer.bias
