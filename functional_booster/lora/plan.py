"""Plans: what a peft LoraConfig means for a model, module by module. peft itself reads the config.

The model's modules are laid out on the meta device, without memory, and peft puts its layers into them: which modules a
config targets, at which rank, scaling and dropout, which are trained whole and which biases, is what peft made of it.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraConfig, LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from functional_booster.models import hf
from functional_booster.models.hf import Source
from functional_booster.models.model import Model

Places = tuple[tuple[str, Source], ...]  # the leaves of the base that a tensor of a state dict is made of

INITS = (True, False, "gaussian", "orthogonal", "pissa", "pissa_niter_N", "olora", "mica", "loftq")
BITS = {4: "nf4", 8: "int8"}  # of LoftQ: how the weights are quantized

# Every other field of a LoraConfig must have its default.
_SUPPORTED = frozenset(
    "r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save "
    "init_lora_weights loftq_config layers_to_transform layers_pattern rank_pattern alpha_pattern use_dora "
    # what says nothing of the computation
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode runtime_config "
    "megatron_core qalora_group_size".split()
)


@dataclass(frozen=True)
class Site:
    """A module that an adapter changes: its name, as peft has it, and the numbers of its ``B @ A * scaling``.

    ``size``: (out, into) of a linear layer, (D, V) of a table; ``places``: the leaves of the base that hold its weight,
    side by side along its outputs; ``is_transposed``: these leaves are (into, out).
    """

    module: str
    size: tuple[int, int]
    rank: int
    scaling: float
    dropout: float
    is_embedding: bool
    is_dora: bool
    is_transposed: bool
    places: Places

    @property
    def names(self) -> dict[str, str]:
        """{"A", "B" and with DoRA "magnitude": the name of the tensor, as peft's files have it}."""
        ends = ("embedding_A", "embedding_B") if self.is_embedding else ("A.weight", "B.weight")
        names = {role: f"{self.module}.lora_{end}" for role, end in zip("AB", ends, strict=True)}
        return names | ({"magnitude": f"{self.module}.lora_magnitude_vector"} if self.is_dora else {})

    @property
    def rows(self) -> dict[str, slice]:
        """{leaf of the base: the rows of B that are its own}, in order."""
        each = self.size[0] // len(self.places)
        ordered = sorted(self.places, key=lambda place: place[1].part)
        return {leaf: slice(source.part * each, (source.part + 1) * each) for leaf, source in ordered}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the tensors in ``names``."""
        out, into = self.size
        shapes = {"A": (self.rank, into), "B": (out, self.rank), "magnitude": (out,)}
        return {role: shapes[role] for role in self.names}


@dataclass(frozen=True)
class Plan:
    """An adapter: the sites that it changes, and {name: places} of the tensors of the base that it has its own of.

    These are the ``modules_to_save`` and the biases that are trained. ``config`` is the LoraConfig with what peft
    filled in.
    """

    config: LoraConfig
    sites: tuple[Site, ...]
    replaced: Mapping[str, Places]


def plan(model: Model, module: nn.Module | None, config: LoraConfig) -> Plan:
    """What ``config`` means for a model of ours, or for ``module`` and its functionalized Model.

    Raises TypeError for another config, ValueError for a field, a value, a kind of module or a tied weight that is not
    supported, naming it, and where nothing is targeted.
    """
    require_supported(config)
    config = copy.deepcopy(config)
    skeleton = _of_config(model) if module is None else _on_meta(module)
    stored = _stored(model, module)
    adapted, config = _injected(skeleton, config)
    sites, replaced = [], {}
    for name, part in adapted.named_modules():
        if isinstance(part, LoraLayer):
            sites.append(_site(name, part, stored))
        elif isinstance(part, AuxiliaryTrainingWrapper):
            own = part.modules_to_save["default"]
            if any(True for _ in own.buffers()):
                raise ValueError(f"modules_to_save: {name} has buffers, of which there is one for all adapters")
            for local, _ in own.named_parameters():
                replaced[f"{name}.{local}"] = _untied(f"{name}.{local}", "modules_to_save", stored)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and not any(mark in name for mark in ("lora_", "modules_to_save.")):
            replaced[name] = _untied(name.replace(".base_layer.", "."), "bias", stored)
    for site in sites:
        _require_possible(site, config.init_lora_weights)
    return Plan(config, tuple(sites), replaced)


def linear_layers(model: Model, module: nn.Module | None) -> dict[str, bool]:
    """{leaf of the base: whether it is (into, out)} of the linear layers' weights, but for the head and tied ones."""
    skeleton, stored = _of_config(model) if module is None else _on_meta(module), _stored(model, module)
    head, found = head_of(skeleton), {}
    for name, part in skeleton.named_modules():
        if isinstance(part, (nn.Linear, Conv1D)) and part is not head:
            places = stored[f"{name}.weight"]
            if sum(its == places for its in stored.values()) == 1:
                found |= {leaf: isinstance(part, Conv1D) and module is not None for leaf, _ in places}
    return found


def head_of(module: Any) -> nn.Module | None:
    """The output embedding of a Hugging Face model, None of other modules."""
    return module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None


def require_supported(config: Any) -> None:
    """Raise TypeError for what is no LoraConfig, ValueError, naming it, for a field or value that is not supported."""
    if not isinstance(config, LoraConfig):
        raise TypeError(f"lora_config: {type(config).__name__}, expected a peft.LoraConfig")
    plain = LoraConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _SUPPORTED and value and value != getattr(plain, field.name):
            raise ValueError(f"lora_config: {field.name}={value!r} is not supported")
    how, bits = config.init_lora_weights, loftq_of(config)["loftq_bits"]
    name = re.sub(r"^pissa_niter_[0-9]+$", "pissa_niter_N", how) if isinstance(how, str) else how
    if name not in INITS:
        supported = ", ".join(map(repr, INITS))
        raise ValueError(f"lora_config: init_lora_weights={how!r}, supported are {supported}")
    if how == "loftq" and bits not in BITS:
        raise ValueError(f"lora_config: loftq_bits={bits!r}, expected one of {', '.join(map(str, BITS))}")


def loftq_of(config: Any) -> dict[str, Any]:
    """LoftQ's options: "loftq_bits" a value, and "loftq_iter" rounds."""
    return {"loftq_bits": 4, "loftq_iter": 1} | dict(config.loftq_config or {})


def _require_possible(site: Site, how: bool | str) -> None:
    """Raise ValueError where a site cannot begin so, as peft does."""
    if how == "orthogonal" and site.rank % 2 and not site.is_embedding:
        raise ValueError(f"lora_config: {site.module} has r={site.rank}, expected an even number for 'orthogonal'")
    if how == "mica" and (site.is_embedding or site.is_dora or site.rank > min(site.size)):
        raise ValueError(
            f"lora_config: {site.module} cannot begin by 'mica', which is for linear layers without DoRA and ranks up "
            f"to their size {site.size}, got r={site.rank}"
        )


def _of_config(model: Model) -> nn.Module:
    """The Hugging Face module that an own model is, without values."""
    content = dict(model.config.to_hf_config())
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(content.pop("model_type"), **content))


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy without values."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        meta = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _stored(model: Model, module: nn.Module | None) -> dict[str, Places]:
    """{name in the module's state dict: places}; of tied ones, each name."""
    if module is None:
        stored = hf.stored_tensors(model)  # each under a name with the prefix and one without; a tied head is a third
        return {name: tensor.parts for tensor in stored for name in (tensor.names[0], *tensor.names[2:])}
    return {name: ((leaf, Source(leaf)),) for name, leaf in hf.state_names(module).items()}


def _injected(skeleton: nn.Module, config: LoraConfig) -> tuple[nn.Module, LoraConfig]:
    """The skeleton with peft's layers, and the config with what peft filled in."""
    init, config.init_lora_weights = config.init_lora_weights, True  # values come later
    config.inference_mode = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fan_in_fan_out.*")  # is read off the layers
        warnings.filterwarnings("ignore", ".*tie_word_embeddings.*")  # tied weights are refused
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")  # between peft and transformers
        adapted: Any = peft.get_peft_model(skeleton, config, low_cpu_mem_usage=True)
    config = adapted.peft_config["default"]
    config.init_lora_weights = init
    return adapted.base_model.model, config


def _site(name: str, layer: LoraLayer, stored: Mapping[str, Places]) -> Site:
    base: Any = layer.get_base_layer()
    kind = next((kind for kind in (nn.Linear, nn.Embedding, Conv1D) if isinstance(base, kind)), None)
    if kind is None:
        raise ValueError(
            f"target_modules: {name} is a {type(base).__name__}, supported are Linear, Conv1D and Embedding"
        )
    is_embedding, is_dora = kind is nn.Embedding, "default" in (layer.lora_magnitude_vector or {})
    rows, columns = base.weight.shape
    places = _untied(f"{name}.weight", "target_modules", stored)
    dropout: Any = getattr(layer.lora_dropout["default"], "p", 0.0)
    is_own = places[0][1].transposed  # own models have (out, into) leaves
    return Site(
        module=name,
        size=(rows, columns) if kind is nn.Linear else (columns, rows),
        rank=layer.r["default"],
        scaling=float(layer.scaling["default"]),
        dropout=0.0 if is_embedding else dropout,
        is_embedding=is_embedding,
        is_dora=is_dora,
        is_transposed=kind is Conv1D and not is_own,
        places=places,
    )


def _untied(name: str, argument: str, stored: Mapping[str, Places]) -> Places:
    places = stored[name]
    if others := [other for other, its in stored.items() if its == places and other != name]:
        raise ValueError(f"{argument}: {name} is tied to {others[0]}, which is not supported")
    return places
