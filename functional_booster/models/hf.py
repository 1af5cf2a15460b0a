"""Weights between our trees and Hugging Face's state dicts, name by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from functional_booster.kernels import tree

from .gpt2 import gpt2
from .llama import llama
from .model import Model, Tree


@dataclass(frozen=True)
class Source:
    """Where a leaf lies in a state dict: ``name``, there transposed or not, and there part ``part`` of ``parts``.

    Parts lie side by side along the leaf's dim 0 (GPT-2's q, k, v).
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """The leaf, a view of the stored tensor."""
        whole = stored.mT if self.transposed else stored
        return whole.chunk(self.parts)[self.part]

    def shape(self, leaf: tuple[int, ...]) -> tuple[int, ...]:
        """The stored tensor's shape, given the leaf's."""
        whole = (leaf[0] * self.parts, *leaf[1:])
        return whole[::-1] if self.transposed else whole


@dataclass(frozen=True)
class Family:
    """What is particular to a family: factory, prefix, embedding, and stored tensors that are no weights."""

    factory: Callable[..., Model]
    prefix: str
    embedding: str
    constants: str


HEAD = "lm_head.weight"
FAMILIES = {
    "gpt2": Family(gpt2, "transformer.", "wte.weight", r"h\.\d+\.attn\.(masked_)?bias"),
    "llama": Family(llama, "model.", "embed_tokens.weight", r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
}


def from_hf(module_or_state_dict: Any, config: Any = None) -> tuple[Model, Tree]:
    """The Model and parameters of a Hugging Face causal language model, or of its state dict and config.

    ``config`` (their object or dict, or ours) may be left out for a module. Parameters keep their dtype and device, in
    fresh storage. Names may lack the ``transformer.`` or ``model.`` prefix. Raises ValueError for a family that is not
    ours (``functionalize`` takes any module), and one ValueError that lists all missing, unexpected and misshapen
    tensors.
    """
    given = module_or_state_dict
    state = given if isinstance(given, Mapping) else given.state_dict()
    config = getattr(given, "config", None) if config is None else config
    if config is None:
        raise ValueError("config: missing; a state dict does not say what model it is of")
    family = _family(config)
    model = family.factory(config)
    state = {name.removeprefix(family.prefix): tensor for name, tensor in state.items()}
    state = {name: tensor for name, tensor in state.items() if not re.fullmatch(family.constants, name)}
    places = sources(model)
    _require_fit(model, places, state, family)
    leaves = [
        place.read(state[place.name]).detach().clone(memory_format=torch.contiguous_format) for place in places.values()
    ]
    return model, tree.unflatten(tree.structure(model.abstract), leaves)


def to_hf(model: Model, params: Tree) -> dict[str, torch.Tensor]:
    """The state dict of the Hugging Face module, as ``module.load_state_dict`` takes it.

    A tied head stands there twice, as the same tensor. Raises ValueError for a model of another family, or parameters
    that are not the model's.
    """
    family = _family(model.config)
    if tree.structure(params) != tree.structure(model.abstract):
        given, expected = set(tree.names(params)), set(tree.names(model.abstract))
        raise ValueError(f"params: missing {sorted(expected - given)}, unexpected {sorted(given - expected)}")
    pieces: dict[str, list[tuple[Source, torch.Tensor]]] = {}
    for place, leaf in zip(sources(model).values(), tree.leaves(params), strict=True):
        pieces.setdefault(place.name, []).append((place, leaf))
    state = {}
    for name, parts in pieces.items():
        ordered = [leaf for _, leaf in sorted(parts, key=lambda piece: piece[0].part)]
        whole = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
        state[name if name == HEAD else family.prefix + name] = (
            whole.mT.contiguous() if parts[0][0].transposed else whole
        )
    if model.config.tie_word_embeddings:
        state[HEAD] = state[family.prefix + family.embedding]
    return state


def sources(model: Model) -> dict[str, Source]:
    """{leaf name: where it lies in a state dict without the prefix}, in the order of the leaves."""
    conv1d = model.config.model_type == "gpt2"
    return {name: _gpt2_source(name) if conv1d else Source(name) for name in tree.names(model.abstract)}


def _gpt2_source(name: str) -> Source:
    """GPT-2's linear layers are Conv1D, (in, out), and q, k, v one of them."""
    transposed = name.startswith("h.") and name.endswith("weight") and ".ln_" not in name
    found = re.fullmatch(r"(h\.\d+\.attn\.)([qkv])(\.\w+)", name)
    if found:
        return Source(f"{found[1]}c_attn{found[3]}", transposed, "qkv".index(found[2]), 3)
    return Source(name, transposed)


def _family(config: Any) -> Family:
    model_type = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise ValueError(
            f"config: model_type is {model_type!r}, expected one of {sorted(FAMILIES)}; functionalize takes any module"
        )
    return FAMILIES[model_type]


def _require_fit(model: Model, places: dict[str, Source], state: dict[str, torch.Tensor], family: Family) -> None:
    """Raise one ValueError that lists every tensor that is missing, unexpected, or of the wrong shape or kind."""
    wrong = [f"missing {name}" for name in dict.fromkeys(place.name for place in places.values()) if name not in state]
    for name in sorted(state.keys() - {place.name for place in places.values()}):
        if name != HEAD or not model.config.tie_word_embeddings:
            wrong.append(f"unexpected {name}")
        elif family.embedding in state and not torch.equal(state[HEAD], state[family.embedding]):
            wrong.append(f"{HEAD} differs from {family.embedding}, but the config says tie_word_embeddings")
    for (leaf, place), info in zip(places.items(), tree.leaves(model.abstract), strict=True):
        stored = state.get(place.name)
        if stored is None:
            continue
        shape = place.shape(info.shape)
        if tuple(stored.shape) != shape:
            wrong.append(f"{place.name} (for {leaf}) has shape {tuple(stored.shape)}, expected {shape}")
        elif not stored.is_floating_point():
            wrong.append(f"{place.name} (for {leaf}) is {stored.dtype}, expected a floating-point dtype")
    if wrong:
        raise ValueError(f"the weights do not fit a {model.name} of this config:\n  " + "\n  ".join(wrong))
