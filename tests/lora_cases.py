"""Tiny Hugging Face models and peft's own adapters in them, for the tests of LoRA."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import peft
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import functional_booster as fb
from functional_booster import lora
from functional_booster.models import hf

VOCABULARY = 31
PREFIX = "base_model.model."


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int = 2) -> Any:
    """A Hugging Face model, by default of two layers, without dropout, in evaluation mode."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        if family == "gpt2":
            drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            model = GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=8, n_layer=layers, n_head=2, **drops, **sizes))
        else:
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
            widths = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": layers}
            model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=16, **widths, **heads, **sizes))
    return nn.Module.to(model, dtype).eval()


def tokens(rows: int, seed: int = 0) -> torch.Tensor:
    """(rows, 9) token ids."""
    return torch.randint(0, VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(seed))


def config(**fields: Any) -> peft.LoraConfig:
    """A LoraConfig of rank 3."""
    usual: dict[str, Any] = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**(usual | fields))


def peft_model(module: Any, chosen: peft.LoraConfig, seed: int = 0) -> Any:
    """peft's model of a copy of the module, its adapter with numbers that matter, as it would be after training."""
    with torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fan_in_fan_out.*")
        warnings.filterwarnings("ignore", ".*tie_word_embeddings.*")
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")  # between peft and transformers
        torch.manual_seed(seed)
        model = peft.get_peft_model(copy.deepcopy(module), copy.deepcopy(chosen), autocast_adapter_dtype=False)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(next(module.parameters()).dtype)
                    parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def fresh(module: Any, **fields: Any) -> dict[str, torch.Tensor]:
    """The adapter that peft starts with."""
    with torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")
        return tensors(peft.get_peft_model(module, peft.LoraConfig(**fields)))


def tensors(model: Any, adapter: str = "default") -> dict[str, torch.Tensor]:
    """An adapter of a peft model, by the names that its files have."""
    state = peft.get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return {name.removeprefix(PREFIX): value.detach().clone() for name, value in state.items()}


def adapted(module: Any, chosen: peft.LoraConfig, own: bool, **options: Any) -> tuple[lora.LoraModel, Any]:
    """(model, base parameters): of an own model with the module's weights, or of the module itself."""
    if own:
        base, params = hf.from_hf(module)
        return lora.adapt(base, chosen, **options), params
    model = lora.adapt(module, chosen, **options)
    return model, model.base.init(fb.random.key(0))


def logits(outputs: Any) -> torch.Tensor:
    """Of an own model, or of a module."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits
