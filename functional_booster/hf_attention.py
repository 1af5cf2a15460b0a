"""Hugging Face models made traceable: attention and masks of our own, through transformers' interfaces.

transformers' mask helpers look at the values of their inputs (is anything padded? are sequences packed?), which no
trace and no vmap allows. The models' copies use an attention of our own instead, under two names that differ in their
mask function: without padding, ``is_causal`` is kept and the fused kernels stay; with padding, a mask is built always.
transformers is never imported here unless the module at hand comes from it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from functional_booster.kernels import attention

_NAME = "functional_booster"
_PADDED = "functional_booster_padded"


def pretrained_models(module: nn.Module) -> list[Any]:
    """The outermost transformers models in ``module``: itself, or what a module of the user's own wraps."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return []
    if isinstance(module, modeling.PreTrainedModel):
        return [module]
    return [model for child in module.children() for model in pretrained_models(child)]


def config_of(module: nn.Module) -> Any:
    """A copy of a transformers model's config; None for any other module."""
    return copy.deepcopy(module.config) if pretrained_models(module) == [module] else None


def is_causal_lm(module: nn.Module) -> bool:
    """Whether this is one of transformers' models that predict the next token, or a subclass of one."""
    if pretrained_models(module) != [module]:
        return False
    from transformers.models.auto import modeling_auto as auto

    known = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    # An encoder (BERT) looks ahead unless its config makes it a decoder.
    config: Any = module.config
    encoder = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    return not encoder and any(cls.__name__ in known for cls in type(module).__mro__)


def prepare(skeleton: nn.Module) -> None:
    """Give the transformers models in a copy our attention; no cache, no checkpointing of their own.

    Models that do not go through AttentionInterface keep the attention that they have.
    """
    for model in pretrained_models(skeleton):
        configs = list({id(part.config): part.config for part in model.modules() if _has_config(part)}.values())
        for config in configs:
            config.use_cache = False
        for part in model.modules():
            if getattr(part, "gradient_checkpointing", False):
                part.gradient_checkpointing = False
            for hook_id, hook in list(part._forward_hooks.items()):
                if _is_unwanted(hook):
                    del part._forward_hooks[hook_id]
            vars(part).pop("_output_capturing_hooks_installed", None)
        if all(_takes_attention(part) for part in model.modules() if pretrained_models(part) == [part]):
            _register()
        else:
            configs = []
        names = tuple(inspect.signature(model.forward).parameters)
        model.register_forward_pre_hook(functools.partial(_choose_masks, configs, names), with_kwargs=True)


def _is_unwanted(hook: Any) -> bool:
    """Whether a hook is checkpointing's, to make embeddings require gradients, which torch.func forbids.

    Or one that records outputs: it stays in a model after one use, and comes again where it is needed; no region may
    have hooks inside.
    """
    recording = getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
    return recording or getattr(hook, "__name__", "") == "make_inputs_require_grads"


def _has_config(part: nn.Module) -> bool:
    from transformers import PretrainedConfig

    return isinstance(getattr(part, "config", None), PretrainedConfig)


def _takes_attention(model: Any) -> bool:
    """Whether the model's attention goes through AttentionInterface, with nothing that only its own code does."""
    return (model._supports_attention_backend or model._supports_sdpa) and model._can_set_attn_implementation()


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, padded in ((_NAME, False), (_PADDED, True)):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, functools.partial(_mask, padded))


def _choose_masks(
    configs: list[Any], names: tuple[str, ...], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a forward: masks come from the mask handed in; with none handed in, nothing looks at values."""
    given = dict(zip(names, args, strict=False)) | kwargs
    padded = any(name.endswith("attention_mask") and value is not None for name, value in given.items())
    for config in configs:
        config._attn_implementation = _PADDED if padded else _NAME
    tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
    takes_mask = "attention_mask" in names and not model.config.is_encoder_decoder
    if padded or not takes_mask or tokens is None or given.get("position_ids") is not None:
        return None
    # With neither mask nor positions the helper would look for packed sequences in its own positions, by value. A mask
    # stops it; ours does not read this one.
    everything = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    return (), given | {"attention_mask": everything}


def _mask(
    padded: bool,
    *,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The bool mask (B, 1, Tq, Tk), True: attend; None where the attention's ``is_causal`` says all there is to say."""
    from transformers.masking_utils import sdpa_mask

    attention_mask = attention_mask if padded else None
    everywhere = attention_mask is None and (local_size is None or kv_length < local_size)
    if everywhere and (allow_is_bidirectional_skip or (allow_is_causal_skip and q_length == kv_length)):
        return None
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **kwargs,
    )


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """AttentionInterface's contract: query (B, H, Tq, D), key, value (B, Hkv, Tk, D) -> (B, Tq, H, D)."""
    for name in ("output_attentions", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(f"{type(module).__name__}: {name} is not supported by a functionalized model")
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is None and sinks is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs.get("position_bias")
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query.shape[2] > 1

    def dropped(weights: torch.Tensor) -> torch.Tensor:
        return F.dropout(weights, dropout)

    mixed = attention.explicit(query, key, value, attention_mask, causal, scaling, softcap, sinks, dropped)
    return mixed.transpose(1, 2).contiguous(), None
