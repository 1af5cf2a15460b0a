"""Weights between our trees and Hugging Face's state dicts, name by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from functional_booster.kernels import tree

from .gpt2 import GPT2Config, gpt2
from .llama import LlamaConfig, llama
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
        return whole.chunk(self.parts)[self.part] if self.parts > 1 else whole

    def rows(self, shape: tuple[int, ...], start: int, stop: int) -> tuple[slice, ...]:
        """Which part of the stored tensor holds rows ``start`` to ``stop`` of the leaf of ``shape``."""
        first = self.part * shape[0]
        rows = slice(first + start, first + stop)
        return (slice(None), rows) if self.transposed else (rows,)

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


@dataclass(frozen=True)
class Stored:
    """A tensor of a state dict: its ``names`` (that which we give it, then others it may have), and its leaves."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Source], ...]


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


def is_own(model: Model) -> bool:
    """Whether this is a ``gpt2`` or a ``llama`` of ours, whose leaves bear other names than Hugging Face's tensors."""
    return isinstance(model.config, (GPT2Config, LlamaConfig))


def stored_tensors(model: Model) -> list[Stored]:
    """The tensors of a state dict of an own model, in the order of its leaves; a tied head is its embedding."""
    family = _family(model.config)
    pieces: dict[str, list[tuple[str, Source]]] = {}
    for leaf, place in sources(model).items():
        pieces.setdefault(place.name, []).append((leaf, place))
    infos, stored = tree.named_leaves(model.abstract), []
    for name, parts in pieces.items():
        names = (name,) if name == HEAD else (family.prefix + name, name)
        if name == family.embedding and model.config.tie_word_embeddings:
            names += (HEAD,)
        leaf, place = parts[0]
        ordered = sorted(parts, key=lambda part: part[1].part)
        stored.append(Stored(names, place.shape(infos[leaf].shape), tuple(ordered)))
    return stored


def is_constant(model: Model, name: str) -> bool:
    """Whether a tensor of a state dict is no weight: masks and frequencies that older versions stored."""
    family = _family(model.config)
    return re.fullmatch(family.constants, name.removeprefix(family.prefix)) is not None


def state_names(module: nn.Module) -> dict[str, str]:
    """{name in the module's state dict: first name of this parameter or buffer in the module}, tied ones several times.

    Buffers outside of the state dict are left out.
    """
    first: dict[int, str] = {}
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        first.setdefault(id(value), name)
    kept = module.state_dict(keep_vars=True)
    return {name: first[id(value)] for name, value in kept.items() if id(value) in first}


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
