"""LoRA against peft: the same outputs, losses and merged weights, under every plugin; adapters alone are trained."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_cases import adapted, config, fresh, logits, peft_model, tensors, tiny, tokens
from torch import nn

import functional_booster as fb
from functional_booster import lora
from functional_booster.kernels import tree
from functional_booster.precision import fp8
from functional_booster.sharding import region
from functional_booster.testing.laws import traced

PLUGINS = {
    "ddp": fb.TorchDDPPlugin(),
    "fsdp": fb.TorchFSDPPlugin(),
    "zero1": fb.LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero2": fb.LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": fb.GeminiPlugin(precision="fp32"),
}
BOTH = pytest.mark.parametrize("own", [True, False], ids=["own", "module"])


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A family and the fields of a LoraConfig for it."""
    family = draw(st.sampled_from(["gpt2", "llama"]))
    layers = {"gpt2": ["c_attn", "c_proj", "c_fc"], "llama": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
    names = draw(st.lists(st.sampled_from(layers[family]), min_size=1, max_size=3, unique=True))
    targets = draw(st.sampled_from([names, None, "all-linear", rf".*\.1\..*({'|'.join(names)})"]))
    fields: dict[str, Any] = {
        "target_modules": targets,
        "r": draw(st.integers(1, 5)),
        "lora_alpha": draw(st.integers(1, 9)),
        "use_rslora": draw(st.booleans()),
        "use_dora": draw(st.booleans()),
        "bias": draw(st.sampled_from(["none", "all", "lora_only"])),
        "init_lora_weights": draw(st.sampled_from([True, False, "gaussian"])),
    }
    if isinstance(targets, list):
        fields["layers_to_transform"] = draw(st.sampled_from([None, 0, [1], [0, 1]]))
        fields["rank_pattern"] = draw(st.sampled_from([{}, {names[0]: 2}]))
        fields["alpha_pattern"] = draw(st.sampled_from([{}, {names[0]: 7}]))
    if targets == "all-linear":
        fields["exclude_modules"] = draw(st.sampled_from([None, [layers[family][1]]]))
    if family == "llama":
        fields["modules_to_save"] = draw(st.sampled_from([None, ["lm_head"], ["norm"]]))
    return {"family": family, "fields": fields}


@settings(max_examples=25, deadline=None)
@given(case=configs(), own=st.booleans())
def test_outputs_and_merged_weights_are_pefts(case: dict[str, Any], own: bool) -> None:
    module = tiny(case["family"], torch.float64)
    chosen = config(**case["fields"])
    theirs = peft_model(module, chosen).eval()
    model, base = adapted(module, chosen, own)
    params = lora.init(model, base, fb.random.key(0), {"default": tensors(theirs)})
    expected = theirs(input_ids=tokens(2)).logits
    exact = {"rtol": 0, "atol": 1e-6 if own else 1e-13}  # Hugging Face's norms are in float32
    torch.testing.assert_close(logits(model.apply(params, tokens(2))), expected, **exact)
    merged = lora.merge(model, params)
    torch.testing.assert_close(logits(model.base.apply(merged, tokens(2))), expected, **exact)
    if not own:
        whole = theirs.merge_and_unload().state_dict()
        for name, leaf in merged.items():
            torch.testing.assert_close(leaf, whole[name], rtol=0, atol=1e-14)


@BOTH
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_twenty_losses_are_pefts_and_the_base_stays(family: str, own: bool) -> None:
    module = tiny(family)
    chosen = config(target_modules="all-linear", modules_to_save=["lm_head"] if family == "llama" else None)
    theirs = peft_model(module, chosen).train()
    model, base = adapted(module, chosen, own)
    params = lora.init(model, base, fb.random.key(0), {"default": tensors(theirs)})
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    tx = fb.optim.adamw(1e-2, weight_decay=0.1)
    booster = fb.Booster(device="cpu")
    state = booster.init(model, tx, key=fb.random.key(0), params=params)
    step = booster.train_step(model.loss, tx, jit=False)
    for number in range(20):
        batch = tokens(4, number)
        expected = theirs(input_ids=batch, labels=batch).loss
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        state, metrics = step(state, {"input_ids": batch})
        torch.testing.assert_close(metrics["loss"], expected.detach(), rtol=1e-5, atol=1e-6)
    trained = booster.full_params(state)
    for before, after in zip(tree.leaves(params["base"]), tree.leaves(trained["base"]), strict=True):
        assert torch.equal(before, after)
    for name, tensor in tensors(theirs).items():
        torch.testing.assert_close(trained["adapters"]["default"][name], tensor, rtol=1e-4, atol=1e-4)


@BOTH
def test_only_adapters_have_optimizer_state(own: bool) -> None:
    model, base = adapted(tiny("llama"), config(), own)
    tx = fb.optim.adamw(1e-2)
    state = fb.Booster(device="cpu").init(
        model, tx, key=fb.random.key(0), params=lora.init(model, base, fb.random.key(1))
    )
    stored = sum(buffer.numel() for buffer in state.storage.buffers.values() if buffer is not None)
    assert sum(leaf.numel() for leaf in tree.leaves(state.opt_state) if leaf.dim()) == 2 * stored
    born = tree.leaves(model.init(fb.random.key(0))["adapters"])
    assert sum(slot.size for slot in state.storage.layout.slots) == sum(leaf.numel() for leaf in born)
    assert {slot.name.split(".")[0] for slot in state.storage.layout.slots} == {"adapters"}
    assert state.frozen is not None and {slot.name.split(".")[0] for slot in state.frozen.layout.slots} == {"base"}


@pytest.mark.parametrize("quantize", [False, "nf4", "int8"])
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
@BOTH
def test_a_plugins_steps_are_those_of_one_device(plugin: Any, own: bool, quantize: bool | str) -> None:
    module = tiny("llama", torch.float32 if quantize else torch.float64)
    model, base = adapted(module, config(init_lora_weights=False, use_dora=True), own, quantize=quantize)
    params = lora.init(model, base, fb.random.key(0))
    tx = fb.optim.adamw(1e-2, eps=1e-4)
    trained = []
    for booster in (fb.Booster(device="cpu"), fb.Booster(device="cpu", plugin=plugin, mesh=fb.virtual_mesh(4))):
        state = booster.init(model, tx, key=fb.random.key(0), params=params)
        step = booster.train_step(model.loss, tx, jit=False, max_norm=0.1)
        for number in range(2):
            state, _ = step(state, {"input_ids": tokens(4, number)})
        trained.append(booster.full_params(state))
    tolerance = 1e-4 if quantize else 1e-6 if own else 1e-5  # Hugging Face's norms are in float32
    for one, other in zip(tree.leaves(trained[0]), tree.leaves(trained[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance if one.is_floating_point() else 0)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@BOTH
def test_a_traced_step_is_the_eager_one(own: bool, quantize: str) -> None:
    model, base = adapted(tiny("gpt2"), config(lora_dropout=0.3, init_lora_weights=False), own, quantize=quantize)
    params, tx, results = lora.init(model, base, fb.random.key(0)), fb.optim.sgd(0.1), []
    for jit in (False, True):
        booster = fb.Booster(device="cpu")
        state = booster.init(model, tx, key=fb.random.key(0), params=params)
        with traced():
            state, _ = booster.train_step(model.loss, tx, jit=jit)(state, {"input_ids": tokens(2)})
        results.append(booster.full_params(state))
    for eager, graph in zip(tree.leaves(results[0]), tree.leaves(results[1]), strict=True):
        torch.testing.assert_close(eager, graph, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("quantize", "dropout"), [(False, 0.0), (True, 0.3)])
def test_blocks_of_a_module_with_adapters_are_regions(quantize: bool, dropout: float) -> None:
    """The first block, whose input is frozen, is a kind of its own: it needs no gradient of it."""
    chosen = config(target_modules="all-linear", lora_dropout=dropout)
    model, base = adapted(tiny("llama", layers=4), chosen, False, quantize=quantize)
    params, tx, booster = lora.init(model, base, fb.random.key(0)), fb.optim.sgd(0.1), fb.Booster(device="cpu")
    state = booster.init(model, tx, key=fb.random.key(0), params=params)
    low = booster.train_step(model.loss, tx).lower(state, {"input_ids": tokens(2)})
    calls = [node for node in low.graph.nodes if node.target is region.call_op]
    assert (len(low.regions), len(calls)) == (4, 2 * 4)  # a forward and a backward of either kind


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@BOTH
def test_precisions_change_the_loss_by_their_rounding_alone(precision: str, own: bool) -> None:
    model, base = adapted(tiny("llama"), config(init_lora_weights=False), own)
    params, tx, losses = lora.init(model, base, fb.random.key(0)), fb.optim.sgd(0.1), []
    for name in (None, precision):
        booster = fb.Booster(device="cpu", mixed_precision=name)
        state = booster.init(model, tx, key=fb.random.key(0), params=params)
        before = tree.leaves(booster.full_params(state)["base"])
        step = booster.train_step(model.loss, tx, jit=False)
        for number in range(3):
            state, metrics = step(state, {"input_ids": tokens(4, number)})
        losses.append(metrics["loss"].float())
        assert all(map(torch.equal, before, tree.leaves(booster.full_params(state)["base"])))
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-2, atol=0)


def test_dropout_is_on_the_adapters_input_by_key() -> None:
    linear = nn.Linear(6, 5)
    module = nn.Sequential(linear, nn.Tanh())
    model = lora.adapt(module, peft.LoraConfig(r=2, target_modules=["0"], lora_dropout=0.5, init_lora_weights=False))
    params, key, x = model.init(fb.random.key(0)), fb.random.key(3), torch.randn(7, 6)
    weight = lora.attached(model, params, key)["0.weight"]
    (adapter,) = weight.adapters
    dropped = fb.random.dropout(x, 0.5, adapter.key)
    hidden = F.linear(x, linear.weight, linear.bias) + adapter.scaling * dropped @ adapter.A.T @ adapter.B.T
    torch.testing.assert_close(model.apply(params, x, key=key, train=True), hidden.tanh())
    assert not torch.equal(model.apply(params, x, key=key, train=True), model.apply(params, x))
    with pytest.raises(ValueError, match="key: missing"):
        model.apply(params, x, train=True)


@pytest.mark.parametrize("use_dora", [False, True])
def test_embeddings_and_heads_have_adapters_in_lookups_and_products(use_dora: bool) -> None:
    module = tiny("llama", torch.float64)
    chosen = config(target_modules=["embed_tokens", "lm_head"], use_dora=use_dora)
    theirs = peft_model(module, chosen).eval()
    for own in (True, False):
        model, base = adapted(module, chosen, own)
        params = lora.init(model, base, fb.random.key(0), {"default": tensors(theirs)})
        expected = theirs(input_ids=tokens(2), labels=tokens(2))
        torch.testing.assert_close(logits(model.apply(params, tokens(2))), expected.logits, rtol=0, atol=1e-6)
        loss, weight = model.loss(params, {"input_ids": tokens(2)})
        torch.testing.assert_close((loss / weight).float(), expected.loss.float(), rtol=1e-5, atol=0)
        merged = model.base.apply(lora.merge(model, params), tokens(2))
        torch.testing.assert_close(logits(merged), expected.logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_300", "olora"])
@BOTH
def test_principal_adapters_leave_the_model_as_it_was(how: str, own: bool) -> None:
    # peft's olora takes the weight of GPT-2's Conv1D for that of a linear layer
    family = "llama" if how == "olora" else "gpt2"
    module = tiny(family)
    fields: dict[str, Any] = {"init_lora_weights": how, "target_modules": "all-linear"}
    model, base = adapted(module, config(**fields), own)
    params = lora.init(model, base, fb.random.key(0))
    torch.testing.assert_close(logits(model.apply(params, tokens(2))), module(tokens(2)).logits, rtol=1e-4, atol=1e-5)
    mine = params["adapters"]["default"]
    fields |= {"task_type": "CAUSAL_LM", "fan_in_fan_out": family == "gpt2"}
    theirs = fresh(tiny(family), r=3, lora_alpha=5, **fields)
    for site in model.plans["default"].sites:  # factors have a sign of their own, products have not
        a, b = site.names["A"], site.names["B"]
        torch.testing.assert_close(mine[b] @ mine[a], theirs[b] @ theirs[a], rtol=1e-3, atol=1e-5)


def test_new_adapters_are_drawn_as_peft_draws_them_and_change_nothing_at_first() -> None:
    module = nn.Sequential(nn.Linear(400, 300), nn.Tanh())
    x = torch.randn(3, 400)
    for how, bound in ((True, 1 / 20), ("gaussian", None), (False, 1 / 20)):
        fields: dict[str, Any] = {"r": 64, "target_modules": ["0"], "init_lora_weights": how}
        model = lora.adapt(module, peft.LoraConfig(**fields))
        params = model.init(fb.random.key(0))
        a, b = (params["adapters"]["default"][f"0.lora_{role}.weight"] for role in "AB")
        theirs = fresh(nn.Sequential(nn.Linear(400, 300)), **fields)
        for mine, other in zip((a, b), theirs.values(), strict=True):
            torch.testing.assert_close(mine.std(), other.std(), rtol=0.02, atol=1e-9)
            assert abs(float(mine.mean())) <= 0.02 * float(mine.std())
        assert bound is None or float(a.abs().max()) <= bound
        assert torch.equal(model.apply(params, x), module(x)) == (how is not False)
        again = model.init(fb.random.key(0))["adapters"]["default"]
        assert torch.equal(again["0.lora_A.weight"], a)


def test_orthogonal_adapters_have_factors_in_spaces_of_their_own() -> None:
    fields: dict[str, Any] = {"r": 64, "lora_alpha": 3, "target_modules": ["0"], "init_lora_weights": "orthogonal"}
    module = nn.Sequential(nn.Linear(400, 300), nn.Tanh())
    mine = lora.adapt(module, peft.LoraConfig(**fields)).init(fb.random.key(0))["adapters"]["default"]
    theirs = fresh(nn.Sequential(nn.Linear(400, 300)), **fields)
    for name, other in theirs.items():
        tensor = mine[name.removeprefix("base_model.model.")]
        assert tensor.shape == other.shape
        torch.testing.assert_close(tensor.std(), other.std(), rtol=0.05, atol=0)
    for factors in (mine, theirs):  # B @ A is zero, whatever both are
        a, b = (next(value for name, value in factors.items() if f"lora_{role}" in name) for role in "AB")
        torch.testing.assert_close(b @ a, torch.zeros(300, 400), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="0 has r=3, expected an even number"):
        lora.adapt(module, peft.LoraConfig(**(fields | {"r": 3})))


@BOTH
def test_minor_components_are_frozen_and_pefts(own: bool) -> None:
    """MiCA (arXiv 2604.01694): B has the last left singular vectors, up to their signs, and A is trained."""
    module, chosen = tiny("llama"), config(init_lora_weights="mica", target_modules="all-linear")
    model, base = adapted(module, chosen, own)
    params = lora.init(model, base, fb.random.key(0))
    torch.testing.assert_close(logits(model.apply(params, tokens(2))), module(tokens(2)).logits, rtol=1e-4, atol=1e-5)
    mine, infos = params["adapters"]["default"], model.abstract["adapters"]["default"]
    theirs = fresh(
        tiny("llama"), r=3, lora_alpha=5, task_type="CAUSAL_LM", init_lora_weights="mica", target_modules="all-linear"
    )
    for site in model.plans["default"].sites:
        a, b = site.names["A"], site.names["B"]
        torch.testing.assert_close(mine[b] @ mine[b].T, theirs[b] @ theirs[b].T, rtol=1e-3, atol=1e-4)
        assert not mine[a].any()
        assert (infos[a].trainable, infos[b].trainable) == (True, False)


@pytest.mark.parametrize("quantize", [False, "nf4", "int8"])
def test_loftq_makes_up_for_what_quantizing_loses(quantize: bool | str) -> None:
    module, bits = tiny("llama"), 8 if quantize == "int8" else 4
    errors = {}
    for rounds in (0, 1, 5):
        chosen = config(target_modules="all-linear")
        if rounds:  # peft's config asks for scipy, which its own quantization needs
            chosen.init_lora_weights, chosen.loftq_config = "loftq", {"loftq_bits": bits, "loftq_iter": rounds}
        model, base = adapted(module, chosen, True, quantize=quantize)
        merged = lora.merge(model, lora.init(model, base, fb.random.key(0)))
        gaps = tree.map(lambda one, other: (one - other).square().sum(), merged, base)
        errors[rounds] = float(sum(tree.leaves(gaps)))
    assert errors[5] < errors[1] < (errors[0] or 1.0)
    other = config()
    other.init_lora_weights, other.loftq_config = "loftq", {"loftq_bits": 12 - bits}
    if quantize:
        with pytest.raises(ValueError, match="but the base is stored in"):
            adapted(module, other, True, quantize=quantize)


KINDS: dict[str, dict[str, Any]] = {
    "svd": {},
    "svd of a rank, clamped": {"svd_rank": 2, "svd_clamp": 0.9},
    "linear": {},
    "ties": {"density": 0.5},
    "ties_svd": {"density": 0.5, "majority_sign_method": "frequency"},
    "magnitude_prune": {"density": 0.4},
    "magnitude_prune_svd": {"density": 0.4},
    "dare_linear": {"density": 1.0},
    "dare_ties_svd": {"density": 1.0},
}


@pytest.mark.filterwarnings("ignore:The density")
@pytest.mark.parametrize("kind", KINDS)
def test_combined_adapters_are_pefts(kind: str) -> None:
    module, fields = tiny("llama", torch.float64), {"target_modules": ["q_proj", "down_proj"]}
    theirs = peft_model(module, config(**fields))
    first = tensors(theirs)
    theirs.add_adapter("other", config(**fields, use_rslora=True))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".other." in name:
                parameter.data = 0.3 * torch.randn_like(parameter, dtype=torch.float64)
    model, base = adapted(module, config(**fields), True)
    model = lora.adapt(model, config(**fields, use_rslora=True), "other")
    given = {"default": first, "other": tensors(theirs, "other")}
    params = lora.init(model, base, fb.random.key(0), given)
    weights, chosen = {"default": 0.7, "other": -1.3}, kind.split(" ")[0]
    theirs.add_weighted_adapter(list(weights), list(weights.values()), "sum", chosen, **KINDS[kind])
    _, more = lora.combine(model, params, weights, "sum", chosen, **KINDS[kind], key=fb.random.key(1))
    expected = tensors(theirs, "sum")
    for site in model.plans["default"].sites:  # factors have a sign of their own, products have not
        a, b = site.names["A"], site.names["B"]
        mine = more["adapters"]["sum"]
        torch.testing.assert_close(mine[b] @ mine[a], (expected[b] @ expected[a]).double(), rtol=1e-5, atol=1e-7)


def test_dropped_elements_are_drawn_by_key_and_scaled_up() -> None:
    module = nn.Sequential(nn.Linear(64, 48), nn.Tanh())
    model = lora.adapt(module, peft.LoraConfig(r=16, lora_alpha=16, target_modules=["0"], init_lora_weights=False))
    params = model.init(fb.random.key(0))
    before = params["adapters"]["default"]
    for seed in (1, 1, 2):
        _, more = lora.combine(
            model, params, {"default": 1.0}, "sum", "dare_linear", density=0.25, key=fb.random.key(seed)
        )
        after = more["adapters"]["sum"]["0.lora_A.weight"]
        kept = after != 0
        torch.testing.assert_close(after[kept], 4 * before["0.lora_A.weight"][kept])
        assert float(kept.float().mean()) == pytest.approx(0.25, abs=0.05)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"combination_type": "mean"}, "combination_type: 'mean'"),
        ({"combination_type": "ties"}, "density: None"),
        ({"combination_type": "dare_ties", "density": 0.5}, "key: missing"),
    )
    for bad, named in wrong:
        with pytest.raises(ValueError, match=named):
            lora.combine(model, params, {"default": 1.0}, "sum", **bad)


def test_several_adapters_add_up_are_activated_combined_and_unmerged() -> None:
    module = tiny("llama", torch.float64)
    model, base = adapted(module, config(init_lora_weights=False), True)
    model = lora.adapt(model, config(init_lora_weights=False, r=2), "other")
    params = lora.init(model, base, fb.random.key(0))
    both, first = lora.activate(model, ["default", "other"]), lora.activate(model, "default")
    deltas = [
        tree.map(torch.sub, lora.merge(one, params), params["base"])
        for one in (first, lora.activate(model, "other"), both)
    ]
    for a, b, c in zip(*map(tree.leaves, deltas), strict=True):
        torch.testing.assert_close(a + b, c, rtol=0, atol=1e-14)
    frozen = tree.named_leaves(first.abstract)
    assert {name.split(".")[1] for name, info in frozen.items() if info.trainable} == {"default"}
    for kind in ("cat", "linear"):
        weights = {"default": 0.5, "other": 2.0} if kind == "cat" else {"default": 0.25}
        combined, more = lora.combine(model, params, weights, "sum", kind)
        pairs = zip(*map(tree.leaves, deltas[:2]), strict=True)
        wanted = [0.5 * a + 2.0 * b if kind == "cat" else 0.25 * a for a, b in pairs]
        found = tree.leaves(tree.map(torch.sub, lora.merge(combined, more), params["base"]))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    restored = lora.unmerge(both, lora.merge(both, params), params)
    for one, other in zip(tree.leaves(restored), tree.leaves(base), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="'x' is no adapter"):
        lora.activate(model, "x")
    with pytest.raises(ValueError, match="other ranks"):
        lora.combine(model, params, {"default": 1.0, "other": 1.0}, "sum", "linear")


@pytest.mark.filterwarnings("ignore:.*Using default CorDA config")
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_replication": [(0, 2)]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_parameters": ["x.weight"]}, "target_parameters"),
        ({"init_lora_weights": "corda"}, "corda"),
        ({"init_lora_weights": "pissa_niter_many"}, "init_lora_weights='pissa_niter_many'"),
        ({"target_modules": ["wte"]}, "wte.weight is tied to lm_head.weight"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight is tied"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    for own in (True, False):
        with pytest.raises(ValueError, match=named):
            adapted(tiny("gpt2"), config(**fields), own)


def test_bad_arguments_are_named() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2))
    chosen = peft.LoraConfig(r=2, target_modules=["0"])
    with pytest.raises(ValueError, match=r"0 is a Conv2d"):
        lora.adapt(module, chosen)
    with pytest.raises(TypeError, match=r"hand in the nn\.Module itself"):
        lora.adapt(fb.functionalize(module), chosen)
    with pytest.raises(TypeError, match=r"expected a fb\.Model or an nn\.Module"):
        lora.adapt(3, chosen)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a peft\.LoraConfig"):
        lora.adapt(module, {"r": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without dots"):
        lora.adapt(module, chosen, "a.b")
    model, base = adapted(tiny("llama"), config(), True)
    with pytest.raises(ValueError, match="there is an adapter 'default' already"):
        lora.adapt(model, config())
    with pytest.raises(ValueError, match=r"lora_A.weight: missing(.|\n)*more: unexpected"):
        lora.init(model, base, fb.random.key(0), {"default": {"more": torch.zeros(1)}})


def test_weights_with_adapters_in_other_torch_calls_are_merged_ones() -> None:
    base, adapter = torch.randn(4, 6), lora.Adapter(torch.randn(2, 6), torch.randn(4, 2), scaling=0.5)
    weight: Any = lora.LoraWeight(base, (adapter,))
    dense = base + 0.5 * adapter.B @ adapter.A
    x = torch.randn(3, 6)
    torch.testing.assert_close(weight.merged(), dense)
    torch.testing.assert_close(x @ weight.t(), x @ dense.t())
    torch.testing.assert_close(torch.addmm(torch.ones(4), x, weight.T), torch.addmm(torch.ones(4), x, dense.T))
    torch.testing.assert_close(torch.einsum("bi,oi->bo", x, weight), x @ dense.t())
    torch.testing.assert_close(weight[1:3] * 2, dense[1:3] * 2)
    ones = torch.ones(2, 6)
    torch.testing.assert_close(F.linear(x, torch.cat([ones, weight])), F.linear(x, torch.cat([ones, dense])))
    assert (weight.shape, weight.dtype, len(weight)) == (base.shape, base.dtype, 4)


def test_an_ensemble_of_adapters_is_a_vmap() -> None:
    model, base = adapted(tiny("llama"), config(init_lora_weights=False), True)
    several = [lora.init(model, base, fb.random.key(seed))["adapters"] for seed in range(2)]
    stacked = tree.map(lambda *leaves: torch.stack(leaves), *several)
    ids = tokens(2)

    def outputs_of(adapters: Any) -> torch.Tensor:
        return model.apply({"base": base, "adapters": adapters}, ids)

    outputs = torch.vmap(outputs_of)(stacked)
    for one, adapters in zip(outputs, several, strict=True):
        torch.testing.assert_close(one, outputs_of(adapters))


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@BOTH
def test_quantized_bases_multiply_as_their_dense_weights(family: str, own: bool, quantize: str) -> None:
    model, base = adapted(tiny(family), config(init_lora_weights=False), own, quantize=quantize)
    params = lora.init(model, base, fb.random.key(0))
    leaves = tree.leaves(params["base"], is_leaf=lambda leaf: isinstance(leaf, lora.QuantizedWeight))
    assert sum(isinstance(leaf, lora.QuantizedWeight) for leaf in leaves) == len(model.quantized) >= 8
    expected = logits(model.base.apply(lora.merge(model, params), tokens(2)))
    torch.testing.assert_close(logits(model.apply(params, tokens(2))), expected, rtol=1e-4, atol=1e-5)


def test_the_hugging_face_form_asks_for_merged_weights(tmp_path: Any) -> None:
    base = fb.models.llama(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    model = lora.adapt(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    booster, tx = fb.Booster("cpu"), fb.optim.sgd(0.1)
    state = booster.init(model, tx, key=fb.random.key(0))
    with pytest.raises(ValueError, match=r"model: it has adapters: save them by lora\.save, or .* after lora\.merge"):
        booster.save_pretrained(tmp_path / "hf", state, model)
    assert not (tmp_path / "hf").exists()


def test_adapters_are_left_out_of_fp8_by_their_names() -> None:
    """A PeftModel's, too, which an imperative loop has."""
    weights = {"q_proj": {"base_layer": torch.ones(4, 4), "lora_A": {"default": torch.ones(2, 4)}}}
    marked = fp8.mark(weights)["q_proj"]
    assert fp8.is_weight(marked["base_layer"])
    assert not fp8.is_weight(marked["lora_A"]["default"])
