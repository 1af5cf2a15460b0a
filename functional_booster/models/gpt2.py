"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm first, GELU. Field and leaf names are Hugging Face's."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from functional_booster.kernels import random
from functional_booster.sharding import sequence
from functional_booster.sharding.region import region

from . import config as configs
from . import layers
from .model import Model, Tree, language_model

ONLY = {"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False}


@dataclass(frozen=True)
class GPT2Config:
    """Hugging Face's GPT2Config, as far as the language model is concerned. Raises on values that do not fit."""

    model_type: ClassVar[str] = "gpt2"

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    reorder_and_upcast_attn: bool = False  # softmax is in float32 here, always
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        optional = () if self.n_inner is None else ("n_inner",)
        configs.require_positive(self, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", *optional)
        configs.require_multiple(self, "n_embd", "n_head")
        configs.require_probability(self, "resid_pdrop", "embd_pdrop", "attn_pdrop")
        configs.require_choice(self, "activation_function", layers.ACTIVATIONS)

    @property
    def max_position_embeddings(self) -> int:
        """The longest row, in tokens."""
        return self.n_positions

    def to_hf_config(self) -> dict[str, Any]:
        """The content of Hugging Face's ``config.json``."""
        return configs.to_hf(self, "GPT2LMHeadModel")


def gpt2(config: Any = None, **keywords: Any) -> Model:
    """A GPT-2 language model from Hugging Face's config fields, a config of theirs (object or dict), or a GPT2Config.

    ``apply(params, input_ids (B, T) int64, *, attention_mask=None (B, T), position_ids=None (B, T), key=None,
    train=False)`` -> logits (B, T, V). Dropout happens when ``train``, and then needs ``key``. Raises TypeError for an
    unknown field, ValueError for a value that is out of range or not implemented.
    """
    built = configs.build(GPT2Config, configs.fields_of(GPT2Config, config, ONLY) | keywords, ONLY)
    return language_model(built, _abstract(built), functools.partial(_hidden, built), _head)


def _abstract(config: GPT2Config) -> Tree:
    width, inner, std = config.n_embd, config.n_inner or 4 * config.n_embd, config.initializer_range
    head_dim = width // config.n_head
    residual_std = std / math.sqrt(2 * config.n_layer)  # GPT-2, section 2.3: two residual additions a layer

    def block() -> Tree:
        return {
            "ln_1": layers.norm(width, bias=True),
            "attn": {
                **{name: layers.column_parallel(width, width, std, bias=True, grain=head_dim) for name in "qkv"},
                "c_proj": layers.row_parallel(width, width, residual_std, bias=True, grain=head_dim),
            },
            "ln_2": layers.norm(width, bias=True),
            "mlp": {
                "c_fc": layers.column_parallel(inner, width, std, bias=True),
                "c_proj": layers.row_parallel(width, inner, residual_std, bias=True),
            },
        }

    abstract = {
        "wte": layers.vocabulary(config.vocab_size, width, std),
        "wpe": layers.embedding(config.n_positions, width, std),
        "h": [block() for _ in range(config.n_layer)],
        "ln_f": layers.norm(width, bias=True),
    }
    return abstract if config.tie_word_embeddings else abstract | {"lm_head": abstract["wte"]}


def _head(params: Tree) -> torch.Tensor:
    """The output embedding (V, D); over "tp" this rank's part of it."""
    return params.get("lm_head", params["wte"])["weight"]


def _hidden(
    config: GPT2Config,
    params: Tree,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    train: bool = False,
) -> torch.Tensor:
    """The hidden state (B, T, D) after the final norm, of this rank's tokens.

    A position beyond ``n_positions`` fails in the lookup.
    """
    layers.check_tokens(input_ids, ("n_positions", config.n_positions), attention_mask, position_ids)
    key = layers.dropout_key(key, train, config.embd_pdrop, config.attn_pdrop, config.resid_pdrop)
    embedding_key, blocks_key = (None, None) if key is None else random.split(key, 2).unbind()
    places = params["wpe"]["weight"]
    x = layers.embedded(params["wte"]["weight"], input_ids)
    if position_ids is None and not sequence.token_axes():
        x = x + layers.looked_up(places, slice(input_ids.shape[1]))
    else:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = x + layers.looked_up(places, sequence.own_tokens(position_ids))
    x = layers.dropout_of_tokens(x, config.embd_pdrop, embedding_key)
    mask = None if attention_mask is None else layers.padding_mask(attention_mask, x.dtype)
    block = region(functools.partial(_block, config))
    for index, layer in enumerate(params["h"]):
        x = block(layer, x, mask, None if blocks_key is None else random.fold_in(blocks_key, index))
    return layers.layer_norm(params["ln_f"], x, config.layer_norm_epsilon)


def _block(
    config: GPT2Config, params: Tree, x: torch.Tensor, mask: torch.Tensor | None, key: torch.Tensor | None
) -> torch.Tensor:
    """One layer: (B, t, D) -> (B, t, D), invariant over "tp"."""
    weights_key, attention_key, mlp_key = (None,) * 3 if key is None else random.split(key, 3).unbind()
    h = sequence.columns(layers.layer_norm(params["ln_1"], x, config.layer_norm_epsilon), "tp")
    h = _attention(config, params["attn"], h, mask, weights_key)
    x = x + layers.dropout_of_tokens(h, config.resid_pdrop, attention_key)
    h = sequence.columns(layers.layer_norm(params["ln_2"], x, config.layer_norm_epsilon), "tp")
    h = layers.ACTIVATIONS[config.activation_function](layers.linear(params["mlp"]["c_fc"], h))
    return x + layers.dropout_of_tokens(
        layers.linear_and_leave(params["mlp"]["c_proj"], h), config.resid_pdrop, mlp_key
    )


def _attention(
    config: GPT2Config, params: Tree, x: torch.Tensor, mask: torch.Tensor | None, key: torch.Tensor | None
) -> torch.Tensor:
    head_dim = config.n_embd // config.n_head
    q, k, v = layers.heads([params[name] for name in "qkv"], x, head_dim)
    scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
    out = layers.attention(q, k, v, mask, scale, config.attn_pdrop, key, config.n_head)
    return layers.linear_and_leave(params["c_proj"], out)
