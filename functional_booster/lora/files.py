"""Adapters in peft's own files, ``adapter_config.json`` and ``adapter_model.safetensors``, both ways."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraConfig
from torch import nn

from functional_booster import hf_entries, hf_reading, hf_writing, publishing
from functional_booster.checkpoint import leaves
from functional_booster.checkpoint.folders import folder
from functional_booster.models.model import Model
from functional_booster.sharding.mesh import Mesh
from functional_booster.state import TrainState

from .model import DEFAULT, LoraModel, adapt, with_tensors

PREFIX = "base_model.model."
STEM = "adapter_model"
_UNLIMITED = 2**63  # bytes: peft reads no index


def save(path: str | os.PathLike[str], model: LoraModel, state: TrainState, name: str | None = None) -> None:
    """Write an adapter, by default the active one, to the directory ``path``: ``PeftModel.from_pretrained`` opens it.

    The directory's adapter is replaced in one moment, or stays whole. On processes, each must call this; nothing but
    the adapter travels. Raises ValueError for a name that is no adapter, OSError where it cannot be written.
    """
    name = _name(model, name)
    mesh = state.plan.mesh
    found = leaves.of_flat(state.storage, mesh)
    found |= {} if state.frozen is None else leaves.of_flat(state.frozen, mesh)
    own = {PREFIX + tensor: found[f"adapters.{name}.{tensor}"] for tensor in model.abstract["adapters"][name]}
    write(path, model.plans[name].config, own, mesh, state.step.device)


def load(
    path: str | os.PathLike[str], model: Model | nn.Module, name: str = DEFAULT, *, quantize: bool | str = False
) -> LoraModel:
    """``adapt(model, ...)`` with an adapter of peft's form, with which ``init`` of the model starts.

    Raises FileNotFoundError where there is none, ValueError for an adapter that is no LoRA, that has other tensors than
    its config says, and for what ``adapt`` refuses. Pickles are not read.
    """
    adapted = adapt(model, read_config(path), name, quantize=quantize)
    tensors = read(path)
    # Of embeddings and heads that have adapters, peft keeps the frozen weights, too.
    frozen = {tensor for tensor in tensors if tensor.endswith(".base_layer.weight")}
    return with_tensors(adapted, name, {tensor: tensors[tensor] for tensor in tensors.keys() - frozen})


def read_config(path: str | os.PathLike[str]) -> LoraConfig:
    """The LoraConfig of a directory. Raises FileNotFoundError without one, ValueError for another kind of adapter and
    for fields that this peft does not know."""
    place = folder(path)
    if "adapter_config.json" not in place.names():
        raise FileNotFoundError(f"{place} has no adapter_config.json: it is no adapter of peft's")
    with place.open("adapter_config.json") as stream:
        content = json.load(stream)
    if content.get("peft_type") != "LORA":
        raise ValueError(f"{place} holds an adapter of the kind {content.get('peft_type')!r}, expected 'LORA'")
    known = {field.name for field in dataclasses.fields(LoraConfig) if field.init}
    if unknown := sorted(name for name, value in content.items() if value and name not in known | {"peft_type"}):
        raise ValueError(f"{place}: adapter_config.json has {', '.join(unknown)}, which this version of peft has not")
    return LoraConfig(**{name: value for name, value in content.items() if name in known})


def read(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """{name without prefix: tensor} of a directory's adapter. Pickles are refused."""
    with hf_reading.open_weights(path, STEM) as weights:
        return {name.removeprefix(PREFIX): weights.read(name, ()) for name in weights.tensors}


def fill(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a directory's adapter into peft's module. Raises ValueError with the list of tensors that do not fit."""
    tensors = read(path)
    result = peft.set_peft_model_state_dict(module, {PREFIX + name: value for name, value in tensors.items()})
    missing = [name for name in result.missing_keys if ".lora_" in name or ".modules_to_save." in name]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"{os.fspath(path)} does not fit the module: missing {missing}, unexpected {result.unexpected_keys}"
        )


def write(
    path: str | os.PathLike[str],
    config: LoraConfig,
    tensors: Mapping[str, leaves.Leaf],
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Write {name in the file: leaf} and the config. On processes, each must call this."""
    texts = {"adapter_config.json": _text(config)}
    target = publishing.Target(folder(path), STEM, _UNLIMITED, texts)
    hf_writing.write(target, hf_entries.of_leaves(tensors), mesh, device, "save_lora")


def _text(config: LoraConfig) -> str:
    content: dict[str, Any] = {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()
    }
    return json.dumps(content | {"inference_mode": True}, indent=2, sort_keys=True) + "\n"


def _name(model: LoraModel, name: str | None) -> str:
    if name is None and len(model.active) == 1:
        return model.active[0]
    if name not in model.plans:
        raise ValueError(f"name: {name!r}, expected one of the model's adapters, {sorted(model.plans)}")
    return name
