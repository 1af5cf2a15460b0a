"""Adapters beside a base that is made or read leaf by leaf: the same values, and a rank's share of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from live_memory import Live
from lora_cases import config, tiny
from torch import nn
from transformers import LlamaForCausalLM

import functional_booster as fb
from functional_booster import lora

WIDTH, LAYERS = 64, 16
ONE = 4 * WIDTH * WIDTH  # bytes of a weight
BOTH = pytest.mark.parametrize("own", [True, False], ids=["own", "module"])


def own_model(width: int = 8, layers: int = 2) -> fb.Model:
    sizes = {"vocab_size": width, "hidden_size": width, "intermediate_size": width}
    return fb.models.llama(num_hidden_layers=layers, num_attention_heads=2, **sizes)


def equal(one: Any, other: Any) -> None:
    assert fb.tree.structure(one) == fb.tree.structure(other)
    for name, leaf in fb.tree.named_leaves(one).items():
        assert torch.equal(leaf, fb.tree.named_leaves(other)[name]), name


@pytest.mark.parametrize("quantize", [False, "nf4", "int8"])
@pytest.mark.parametrize("fields", [{}, {"init_lora_weights": "pissa"}, {"use_dora": True, "bias": "all"}], ids=str)
@BOTH
def test_leaves_one_by_one_are_those_of_init(own: bool, fields: Any, quantize: bool | str) -> None:
    """GPT-2's q, k and v, of which an own model has three leaves, and the module one, have adapters in common."""
    base = fb.models.gpt2(vocab_size=8, n_positions=4, n_embd=8, n_layer=2, n_head=2) if own else tiny("gpt2")
    model = lora.adapt(base, config(target_modules="all-linear", **fields), quantize=quantize)
    model = lora.adapt(model, config(target_modules=["c_fc"], **fields), "other")
    leaves = list(model.leaves(fb.random.key(0)))
    expected = fb.tree.named_leaves(model.init(fb.random.key(0)))
    assert len(leaves) == len(expected)
    assert all(torch.equal(value, expected[name]) for name, value in leaves)


@pytest.mark.parametrize("quantize", [False, "nf4"])
@pytest.mark.parametrize("how", [True, "olora"])
def test_slices_of_a_checkpoint_make_the_state_of_the_module(how: bool | str, quantize: Any, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    with fb.LazyInitContext():
        lazy = LlamaForCausalLM.from_pretrained(tmp_path)
    chosen, key = config(target_modules="all-linear", init_lora_weights=how), fb.random.key(0)
    booster = fb.Booster("cpu", plugin=fb.TorchFSDPPlugin(), mesh=fb.virtual_mesh(2))
    states = [
        booster.init(lora.adapt(module, chosen, quantize=quantize), fb.optim.sgd(0.1), key=key)
        for module in (tiny("llama"), lazy)
    ]
    equal(states[1].storage, states[0].storage)
    equal(states[1].frozen, states[0].frozen)


@pytest.mark.parametrize("quantize", [False, "nf4", "int8"])
@pytest.mark.parametrize("kind", ["lazy", "own", "files"])
def test_memory_at_initialization(kind: str, quantize: bool | str, tmp_path: Path) -> None:
    """Of weights that lie in files each rank reads its slices; all else is one weight, and what is computed of it."""
    booster = fb.Booster("cpu", "fp32", plugin=fb.TorchFSDPPlugin(), mesh=fb.virtual_mesh(4))
    targets = list(map(str, range(LAYERS))) if kind == "lazy" else ["q_proj", "o_proj", "up_proj", "down_proj"]
    chosen = peft.LoraConfig(r=1, target_modules=targets)
    if kind == "own":
        base: Any = own_model(WIDTH, 4)
    else:
        with fb.LazyInitContext():
            base = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    if kind == "files":
        model = own_model(WIDTH, 4)
        state = booster.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))
        booster.save_pretrained(tmp_path, state, model)
        with fb.LazyInitContext():
            base = LlamaForCausalLM.from_pretrained(tmp_path)
    model = lora.adapt(base, chosen, quantize=quantize)
    with Live() as live:
        state = booster.init(model, fb.optim.adamw(0.1), key=fb.random.key(0))
    held = sum(leaf.nbytes for leaf in fb.tree.leaves(state))
    dense = sum(info.nbytes for info in fb.tree.leaves(model.base.abstract))
    assert held < (0.6 if quantize else 1.2) * dense + 16 * 1024
    assert live.peak - held <= {False: 2, "int8": 2.5, "nf4": 4.5}[quantize] * ONE


@pytest.mark.parametrize("quantize", [False, "nf4", "int8"])
def test_a_lazy_module_has_adapters_in_the_imperative_loop(quantize: bool | str) -> None:
    """peft's adapters are lazy, too: booster.boost makes all of them, leaf by leaf."""
    booster, modules = fb.Booster("cpu"), []
    for is_lazy in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        if is_lazy:
            torch.manual_seed(0)
            with fb.LazyInitContext():
                module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        torch.manual_seed(1)
        chosen = peft.LoraConfig(r=2, target_modules=["0", "2"])
        modules.append(booster.enable_lora(module, lora_config=chosen, quantize=quantize))
    assert all(parameter.is_meta for parameter in modules[1].parameters())
    losses = []
    for module in modules:
        model, *_ = booster.boost(module, torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1))
        losses.append(model(torch.ones(3, 8)).sum())
    assert torch.equal(*losses)
