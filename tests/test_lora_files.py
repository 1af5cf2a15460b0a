"""Adapters in peft's files, both ways, under any plugin; and the imperative loop with adapters."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lora_cases import adapted, config, logits, peft_model, tensors, tiny, tokens

import functional_booster as fb
from functional_booster import lora
from functional_booster.kernels import tree
from functional_booster.models import hf

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*")  # between peft and transformers
BOTH = pytest.mark.parametrize("own", [True, False], ids=["own", "module"])
LAYOUTS: dict[str, Any] = {
    "one device": {},
    "fsdp": {"plugin": fb.TorchFSDPPlugin(), "mesh": fb.virtual_mesh(4)},
    "zero": {"plugin": fb.LowLevelZeroPlugin(stage=2, precision="fp32"), "mesh": fb.virtual_mesh(2)},
}
FIELDS = {
    "plain": {},
    "dora": {"use_dora": True, "use_rslora": True, "target_modules": "all-linear"},
    "whole": {"modules_to_save": ["lm_head"], "bias": "all", "target_modules": ["embed_tokens", "q_proj"]},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@BOTH
def test_peft_opens_what_we_save_and_we_open_it(own: bool, fields: Any, layout: Any, tmp_path: Path) -> None:
    module = tiny("llama")
    model, base = adapted(module, config(**fields), own)
    theirs = peft_model(module, config(**fields))
    params = lora.init(model, base, fb.random.key(0), {"default": tensors(theirs)})
    booster = fb.Booster(device="cpu", **layout)
    state = booster.init(model, fb.optim.sgd(0.1), key=fb.random.key(0), params=params)
    lora.save(tmp_path / "adapter", model, state)
    opened = peft.PeftModel.from_pretrained(copy.deepcopy(module), tmp_path / "adapter").eval()
    expected = logits(model.apply(params, tokens(2)))
    torch.testing.assert_close(opened(input_ids=tokens(2)).logits, expected, rtol=1e-5, atol=1e-6)
    again = lora.load(tmp_path / "adapter", hf.from_hf(module)[0] if own else module)
    restored = lora.init(again, base, fb.random.key(5))
    for one, other in zip(tree.leaves(restored), tree.leaves(params), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_we_open_what_peft_saves(fields: Any, tmp_path: Path) -> None:
    module = tiny("llama")
    theirs = peft_model(module, config(**fields)).eval()
    theirs.save_pretrained(tmp_path, save_embedding_layers="embed_tokens" in str(fields))
    for own in (True, False):
        base = hf.from_hf(module) if own else (module, None)
        model = lora.load(tmp_path, base[0])
        params = lora.init(model, base[1] if own else model.base.init(), fb.random.key(0))
        expected = theirs(input_ids=tokens(2)).logits
        torch.testing.assert_close(logits(model.apply(params, tokens(2))), expected, rtol=1e-5, atol=1e-6)


def test_a_fresh_process_opens_it_with_equal_logits(tmp_path: Path) -> None:
    module = tiny("gpt2")
    module.save_pretrained(tmp_path / "base")
    model, base = adapted(module, config(init_lora_weights=False), False)
    params = lora.init(model, base, fb.random.key(0))
    state = fb.Booster(device="cpu").init(model, fb.optim.sgd(0.1), key=fb.random.key(0), params=params)
    lora.save(tmp_path / "adapter", model, state)
    torch.save(tokens(2), tmp_path / "ids.pt")
    script = (
        "import sys, torch, peft, transformers as t; where = sys.argv[1]; "
        "m = t.AutoModelForCausalLM.from_pretrained(where + '/base'); "
        "m = peft.PeftModel.from_pretrained(m, where + '/adapter').eval(); "
        "torch.save(m(input_ids=torch.load(where + '/ids.pt')).logits.detach(), where + '/logits.pt')"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=environment, capture_output=True)
    expected = logits(model.apply(params, tokens(2)))
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-5, atol=1e-6)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    module = tiny("llama")
    with pytest.raises(FileNotFoundError, match=r"no adapter_config\.json"):
        lora.load(tmp_path, module)
    theirs = peft_model(module, config())
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    content = json.loads(file.read_text())
    for changes, named in (
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"not_yet_known": 3}, "not_yet_known"),
        ({"r": 2}, "shape .* expected"),
        ({"target_modules": ["q_proj"]}, "unexpected"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "missing"),
    ):
        file.write_text(json.dumps(content | changes))
        with pytest.raises(ValueError, match=named):
            lora.load(tmp_path, module)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("quantize", [False, "nf4", "int8"])
def test_the_imperative_loop_trains_adapters_alone(layout: Any, quantize: bool | str, tmp_path: Path) -> None:
    module = tiny("llama")
    booster = fb.Booster(device="cpu", **layout)
    chosen = config(target_modules="all-linear", init_lora_weights=False)
    model = booster.lora(copy.deepcopy(module), lora_config=chosen, quantize=quantize)
    theirs = copy.deepcopy(model)
    rivals = [p for p in theirs.parameters() if p.requires_grad]
    reference = torch.optim.AdamW(rivals, lr=1e-2, eps=1e-4)
    frozen = {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for number in range(3):
        ids = tokens(4, number)
        for one, step in ((model, optimizer), (theirs, reference)):
            loss = one(input_ids=ids, labels=ids).loss
            booster.backward(loss, optimizer) if one is model else loss.backward()
            step.step()
            step.zero_grad()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-5)
    booster.save_lora_as_pretrained(model, tmp_path / "adapter")
    again = booster.enable_lora(copy.deepcopy(module), pretrained_dir=tmp_path / "adapter", quantize=quantize).eval()
    expected = model.unwrap().eval()(input_ids=tokens(2)).logits
    assert torch.equal(again(input_ids=tokens(2)).logits, expected)
    if not quantize:
        opened = peft.PeftModel.from_pretrained(copy.deepcopy(module), tmp_path / "adapter").eval()
        assert torch.equal(opened(input_ids=tokens(2)).logits, expected)


def test_enable_lora_names_what_is_wrong() -> None:
    booster, module = fb.Booster(device="cpu"), tiny("llama")
    with pytest.raises(ValueError, match="lora_config: missing"):
        booster.enable_lora(module)
    with pytest.raises(TypeError, match=r"expected an nn\.Module or a fb\.Model"):
        booster.enable_lora(3, lora_config=config())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lora_bias"):
        booster.enable_lora(module, lora_config=config(lora_bias=True))
    with pytest.raises(ValueError, match="bnb_quantization_config"):
        booster.enable_lora(module, lora_config=config(), bnb_quantization_config=object())
    boosted, *_ = booster.boost(module)
    with pytest.raises(ValueError, match="before boost"):
        booster.enable_lora(boosted, lora_config=config())
    with pytest.raises(ValueError, match="has no adapters"):
        booster.save_lora_as_pretrained(boosted, "nowhere")
    model = booster.enable_lora(hf.from_hf(tiny("llama"))[0], lora_config=config())
    assert isinstance(model, lora.LoraModel)
