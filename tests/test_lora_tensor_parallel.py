"""Adapters of own models over tensor-parallel ranks are those of one device, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_cases import config, tokens

import functional_booster as fb
from functional_booster import lora
from functional_booster.kernels import tree

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 31, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3, "attn_pdrop": 0.0},
    "llama": {
        "vocab_size": 31,
        "hidden_size": 12,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
    },
}


def trained(booster: fb.Booster, family: str, fields: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """(all parameters, losses and norms) after two steps."""
    base = {"gpt2": fb.models.gpt2, "llama": fb.models.llama}[family](**SIZES[family])
    base = replace(base, abstract=tree.map(lambda info: replace(info, dtype=torch.float64), base.abstract))
    model = lora.adapt(base, config(**fields))
    weights = tree.map(lambda leaf: leaf.double() * 5, base.init(fb.random.key(1)))
    params, tx = lora.init(model, weights, fb.random.key(2)), fb.optim.adamw(1e-2, eps=1e-5)
    state = booster.init(model, tx, key=fb.random.key(0), params=params)
    step, measured = booster.train_step(model.loss, tx, max_norm=0.1, jit=False), []
    for number in range(2):
        state, metrics = step(state, {"input_ids": tokens(2, number)[:, :8]})
        measured += [metrics["loss"], metrics["grad_norm"]]
    return booster.full_params(state), measured


def fields_of(family: str, draw: Any) -> dict[str, Any]:
    targets: Any = (
        "all-linear" if family == "gpt2" else ["q_proj", "k_proj", "o_proj", "down_proj", "embed_tokens", "lm_head"]
    )
    return {
        "target_modules": targets,
        "init_lora_weights": False,
        "use_dora": draw(st.booleans()),
        "bias": draw(st.sampled_from(["none", "all"])),
        "lora_dropout": draw(st.sampled_from([0.0, 0.4])),
    }


@settings(max_examples=8, deadline=None)
@given(
    data=st.data(),
    family=st.sampled_from(["gpt2", "llama"]),
    tp=st.sampled_from([2, 3]),
    stage=st.sampled_from([0, 1]),
)
def test_tensor_parallel_ranks_are_one_device(data: Any, family: str, tp: int, stage: int) -> None:
    """Heads and neurons that the ranks do not divide, a vocabulary that is split, keys and values that are not."""
    fields = fields_of(family, data.draw)
    plugin = fb.HybridParallelPlugin(tp_size=tp, zero_stage=stage)
    params, measured = trained(fb.Booster("cpu", "fp32", plugin=plugin, mesh=fb.virtual_mesh(tp)), family, fields)
    expected, alone = trained(fb.Booster("cpu"), family, fields)
    torch.testing.assert_close(torch.stack(measured), torch.stack(alone), rtol=1e-8, atol=1e-10)
    named = tree.named_leaves(params)
    for name, leaf in tree.named_leaves(expected).items():
        torch.testing.assert_close(named[name], leaf, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_split_weights_that_are_quantized_are_refused_by_name(codec: str) -> None:
    model = lora.adapt(fb.models.llama(**SIZES["llama"]), config(), quantize=codec)
    booster = fb.Booster(
        "cpu", plugin=fb.HybridParallelPlugin(tp_size=3, zero_stage=0, precision="fp32"), mesh=fb.virtual_mesh(3)
    )
    tx = fb.optim.sgd(0.1)
    state = booster.init(model, tx, key=fb.random.key(0))
    with pytest.raises(ValueError, match=r"quantize: .*q_proj.weight is split over 'tp'"):
        booster.train_step(model.loss, tx, jit=False)(state, {"input_ids": tokens(2)})


def test_sequence_parallelism_is_refused_by_name() -> None:
    plugin = fb.HybridParallelPlugin(
        tp_size=2, zero_stage=0, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"
    )
    with pytest.raises(ValueError, match="adapters do not work with sequence parallelism, here over tp"):
        trained(fb.Booster("cpu", "fp32", plugin=plugin, mesh=fb.virtual_mesh(2)), "llama", {})
