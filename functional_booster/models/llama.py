"""Llama (Touvron et al. 2023): rotary positions, RMSNorm first, SwiGLU, grouped queries. Names are Hugging Face's."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from functional_booster.kernels import random, rotary
from functional_booster.sharding import sequence
from functional_booster.sharding.region import region

from . import config as configs
from . import layers
from .model import Model, Tree, language_model

ONLY = {"partial_rotary_factor": 1.0}


@dataclass(frozen=True)
class Rope:
    """Hugging Face's ``rope_parameters``: rope_type "default", "linear" (factor), or "llama3" (all fields)."""

    model_type: ClassVar[str] = "llama: rope_parameters"

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        needed = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }
        if self.rope_type not in needed:
            raise ValueError(
                f"llama: rope_type {self.rope_type!r} is not implemented, expected one of {sorted(needed)}"
            )
        for name in ("rope_theta", *needed[self.rope_type]):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(f"llama: rope_parameters: {name}={value!r}, expected a positive number")

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class LlamaConfig:
    """Hugging Face's LlamaConfig, as far as the language model is concerned. Raises on values that do not fit."""

    model_type: ClassVar[str] = "llama"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: Rope = Rope()
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        configs.require_positive(self, *sizes, "max_position_embeddings")
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            configs.require_multiple(self, "hidden_size", "num_attention_heads")
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        configs.require_positive(self, "num_key_value_heads", "head_dim")
        configs.require_multiple(self, "num_attention_heads", "num_key_value_heads")
        if self.head_dim % 2:  # type: ignore[operator]
            raise ValueError(f"llama: head_dim={self.head_dim} is odd, but rotary positions turn pairs of dims")
        configs.require_probability(self, "attention_dropout")
        configs.require_choice(self, "hidden_act", layers.ACTIVATIONS)

    def to_hf_config(self) -> dict[str, Any]:
        """The content of Hugging Face's ``config.json``."""
        return configs.to_hf(self, "LlamaForCausalLM") | {"rope_parameters": self.rope_parameters.to_dict()}


def llama(config: Any = None, **keywords: Any) -> Model:
    """A Llama language model from Hugging Face's config fields, a config of theirs (object or dict), or a LlamaConfig.

    Rotary positions are given as ``rope_parameters`` (a dict), or as ``rope_theta`` and ``rope_scaling``. ``apply`` is
    as for ``gpt2``. Raises TypeError for an unknown field, ValueError for a value out of range or not implemented.
    """
    given = configs.fields_of(LlamaConfig, config, {*ONLY, "rope_theta", "rope_scaling"}) | keywords
    built = configs.build(LlamaConfig, _with_rope(given), ONLY)
    return language_model(built, _abstract(built), functools.partial(_hidden, built), _head)


def _with_rope(given: dict[str, Any]) -> dict[str, Any]:
    """The fields with one ``Rope`` in place of the three ways that rotary positions are written."""
    fields = {name: value for name, value in given.items() if name not in ("rope_theta", "rope_scaling")}
    parameters = fields.get("rope_parameters") or {}
    rope = parameters.to_dict() if isinstance(parameters, Rope) else dict(parameters)
    rope |= given.get("rope_scaling") or {}
    if given.get("rope_theta") is not None:
        rope["rope_theta"] = given["rope_theta"]
    if "type" in rope:  # its name before transformers 4.43
        rope.setdefault("rope_type", rope.pop("type"))
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("llama: rope_parameters: partial_rotary_factor is not implemented, only 1.0 is")
    if rope.get("rope_type") == "llama3":
        longest = fields.get("max_position_embeddings", LlamaConfig.max_position_embeddings)
        rope.setdefault("original_max_position_embeddings", longest)
    return fields | {"rope_parameters": configs.build(Rope, rope, {})}


def _abstract(config: LlamaConfig) -> Tree:
    width, inner, std, head_dim = (
        config.hidden_size,
        config.intermediate_size,
        config.initializer_range,
        config.head_dim,
    )
    queries, values = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim  # type: ignore[operator]
    bias, mlp_bias, grain = config.attention_bias, config.mlp_bias, head_dim or 1
    grouped = "pad" if queries == values else "replicate"  # a group's keys and values are on each of its ranks

    def block() -> Tree:
        return {
            "input_layernorm": layers.norm(width, bias=False),
            "self_attn": {
                "q_proj": layers.column_parallel(queries, width, std, bias, grain),
                "k_proj": layers.column_parallel(values, width, std, bias, grain, grouped),
                "v_proj": layers.column_parallel(values, width, std, bias, grain, grouped),
                "o_proj": layers.row_parallel(width, queries, std, bias, grain),
            },
            "post_attention_layernorm": layers.norm(width, bias=False),
            "mlp": {
                "gate_proj": layers.column_parallel(inner, width, std, mlp_bias),
                "up_proj": layers.column_parallel(inner, width, std, mlp_bias),
                "down_proj": layers.row_parallel(width, inner, std, mlp_bias),
            },
        }

    abstract = {
        "embed_tokens": layers.vocabulary(config.vocab_size, width, std),
        "layers": [block() for _ in range(config.num_hidden_layers)],
        "norm": layers.norm(width, bias=False),
    }
    return abstract if config.tie_word_embeddings else abstract | {"lm_head": abstract["embed_tokens"]}


def _head(params: Tree) -> torch.Tensor:
    """The output embedding (V, D); over "tp" this rank's part of it."""
    return params.get("lm_head", params["embed_tokens"])["weight"]


def _hidden(
    config: LlamaConfig,
    params: Tree,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    train: bool = False,
) -> torch.Tensor:
    """The hidden state (B, T, D) after the final norm, of this rank's tokens."""
    limit = ("max_position_embeddings", config.max_position_embeddings)
    layers.check_tokens(input_ids, limit, attention_mask, position_ids)
    key = layers.dropout_key(key, train, config.attention_dropout)
    x = layers.embedded(params["embed_tokens"]["weight"], input_ids)
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    frequencies = _frequencies(config.rope_parameters, config.head_dim, input_ids.device)  # type: ignore[arg-type]
    tables = layers.rotary_tables(frequencies, _own_positions(position_ids))
    mask = None if attention_mask is None else layers.padding_mask(attention_mask, x.dtype)
    block = region(functools.partial(_block, config))
    for index, layer in enumerate(params["layers"]):
        x = block(layer, x, tables, mask, None if key is None else random.fold_in(key, index))
    return layers.rms_norm(params["norm"], x, config.rms_norm_eps)


def _block(
    config: LlamaConfig,
    params: Tree,
    x: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
) -> torch.Tensor:
    """One layer: (B, t, D) -> (B, t, D), invariant over "tp"."""
    h = sequence.columns(layers.rms_norm(params["input_layernorm"], x, config.rms_norm_eps), "tp")
    attended = _attention(config, params["self_attn"], h, tables, mask, key)
    h, x = layers.add_rms_norm(params["post_attention_layernorm"], attended, x, config.rms_norm_eps)
    return x + layers.gated_mlp(params["mlp"], sequence.columns(h, "tp"), config.hidden_act)


def _attention(
    config: LlamaConfig,
    params: Tree,
    x: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
) -> torch.Tensor:
    head_dim: int = config.head_dim  # type: ignore[assignment]
    heads, groups = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    keys_and_values = [params[name] for name in ("k_proj", "v_proj")]
    if groups < heads:
        keys_and_values = [layers.of_own_groups(layer, groups * head_dim) for layer in keys_and_values]
    q, k, v = layers.heads([params["q_proj"], *keys_and_values], x, head_dim)
    q, k = rotary.rotary(q, k, *tables)
    if groups < heads:
        k, v = (layers.own_groups(one, q.shape[1], heads, groups) for one in (k, v))
    out = layers.attention(q, k, v, mask, head_dim**-0.5, config.attention_dropout, key, heads)
    return layers.linear_and_leave(params["o_proj"], out)


def _own_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """The positions of the tokens that attention's projections see: all, but where "sp" splits them."""
    return position_ids if "tp" in sequence.token_axes() else sequence.own_tokens(position_ids)


def _frequencies(rope: Rope, head_dim: int, device: torch.device) -> torch.Tensor:
    """Radians a token of each pair of dims, (d/2,) float32. llama3 slows the low ones down (Llama 3.1)."""
    exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    frequencies = 1.0 / rope.rope_theta**exponents
    given = rope.to_dict()
    if rope.rope_type == "linear":
        return frequencies / given["factor"]
    if rope.rope_type == "default":
        return frequencies
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    turns = given["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow, divided by factor; 1: fast, kept
    return frequencies * (blend + (1 - blend) / factor)
