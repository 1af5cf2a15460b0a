"""Own models: each family passes the same suite; Hugging Face's modules are the reference."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from functional_booster.kernels import graph, random, transforms, tree
from functional_booster.losses import next_token
from functional_booster.models import GPT2Config, LlamaConfig, Model, from_hf, gpt2, layers, llama, to_hf
from functional_booster.models.gpt2 import _block as gpt2_block
from functional_booster.models.llama import _block as llama_block
from functional_booster.sharding.environment import bind
from functional_booster.sharding.region import call_op

GPT2 = {"vocab_size": 37, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
LLAMA = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False, "n_inner": 20, "activation_function": "relu"},
    "gpt2-unscaled": {**GPT2, "scale_attn_weights": False, "layer_norm_epsilon": 1e-3},
    "llama": LLAMA,
    "llama-gqa-tied": {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama-biases": {**LLAMA, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {**LLAMA, "head_dim": 6, "hidden_act": "gelu"},
    "llama-rope-llama3": {**LLAMA, "rope_parameters": LLAMA3_ROPE},
    "llama-rope-linear": {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.5}},
}
FAMILIES = ("gpt2", "llama-gqa-tied")


def reference(variant: str, dtype: torch.dtype = torch.float32) -> Any:
    """A Hugging Face module of this variant, with random weights in every parameter, biases and norms too."""
    fields: dict[str, Any] = {
        name: dict(value) if isinstance(value, dict) else value for name, value in VARIANTS[variant].items()
    }
    hf: Any = transformers
    if variant.startswith("gpt2"):
        module = hf.GPT2LMHeadModel(hf.GPT2Config(**fields))
    else:
        module = hf.LlamaForCausalLM(hf.LlamaConfig(**fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            center = 1.0 if parameter.dim() == 1 and parameter.mean() == 1 else 0.0
            parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
    module = module.to(dtype).eval()
    if dtype == torch.float64:  # transformers' own RMSNorm rounds to float32
        for name, norm in list(module.named_modules()):
            if isinstance(norm, LlamaRMSNorm):
                exact = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=dtype)
                exact.load_state_dict(norm.state_dict())
                module.set_submodule(name, exact)
    return module


def tokens(batch: int = 3, length: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randint(37, (batch, length), generator=torch.Generator().manual_seed(seed))


def build(variant: str, **changes: Any) -> Model:
    fields = {**VARIANTS[variant], **changes}
    return gpt2(**fields) if variant.startswith("gpt2") else llama(**fields)


def born(variant: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> tuple[Model, tree.Tree]:
    """A model and its parameters; the initial ones are scaled up, so that attention is far from uniform."""
    model = build(variant, **changes)
    return model, tree.map(lambda leaf: (4 * leaf).to(dtype), model.init(random.key(seed)))


def assert_close(actual: tree.Tree, expected: tree.Tree, **tolerances: Any) -> None:
    for name, leaf in tree.named_leaves(expected).items():
        torch.testing.assert_close(
            tree.named_leaves(actual)[name], leaf, msg=lambda text, n=name: f"{n}: {text}", **tolerances
        )


# --- against Hugging Face -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_hugging_face(variant: str) -> None:
    module = reference(variant)
    model, params = from_hf(module)
    with torch.no_grad():
        expected = module(tokens()).logits
    torch.testing.assert_close(model.apply(params, tokens()), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_hugging_face(variant: str) -> None:
    module = reference(variant, torch.float64)
    labels = tokens(seed=1)
    labels[0, 3:6] = -100
    logits = module(tokens()).logits[:, :-1]  # its own loss would round to float32
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    model, params = from_hf(module)
    grads, (total, weight) = transforms.grad_and_value(model.loss, has_aux=True)(
        params, {"input_ids": tokens(), "labels": labels}
    )
    torch.testing.assert_close(total / weight, loss.detach())
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    actual = to_hf(model, tree.map(lambda gradient: gradient / weight, grads))
    assert_close({name: actual[name] for name in expected}, expected)


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_that_of_hugging_face(variant: str, side: str) -> None:
    module = reference(variant, torch.float64)
    model, params = from_hf(module)
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[1, slice(0, 4) if side == "left" else slice(7, 11)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = module(tokens(), attention_mask=mask, position_ids=positions).logits
    actual = model.apply(params, tokens(), attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_config_go_back_and_forth(variant: str) -> None:
    module = reference(variant)
    model, params = from_hf(module)
    state = to_hf(model, params)
    assert state.keys() == module.state_dict().keys()
    config = json.loads(json.dumps(model.config.to_hf_config()))
    rebuilt = type(module)(transformers.AutoConfig.for_model(**config))
    rebuilt.load_state_dict(state)
    assert_close(rebuilt.state_dict(), module.state_dict(), atol=0, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(rebuilt.eval()(tokens()).logits, module(tokens()).logits, atol=0, rtol=0)
    assert (gpt2 if variant.startswith("gpt2") else llama)(config).config == model.config


def test_parameters_from_a_module_are_fresh() -> None:
    module = reference("llama")
    _, params = from_hf(module)
    tree.map(lambda leaf: leaf.zero_(), params)
    assert all(parameter.abs().sum() > 0 for parameter in module.parameters())


def test_a_state_dict_may_lack_the_prefix_and_the_tied_head() -> None:
    module = reference("gpt2")
    bare = module.transformer.state_dict() | {
        "h.0.attn.bias": torch.ones(1, 1, 16, 16),
        "h.0.attn.masked_bias": torch.ones(()),
    }
    _, params = from_hf(bare, module.config)
    assert_close(params, from_hf(module)[1], atol=0, rtol=0)


def test_weights_that_do_not_fit_are_all_named() -> None:
    module = reference("llama")
    state = module.state_dict()
    del state["model.norm.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 16)
    state["model.extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match="do not fit a llama") as caught:
        from_hf(state, module.config)
    for expected in ("missing norm.weight", "unexpected extra", r"(3, 16), expected (24, 16)"):
        assert expected in str(caught.value)


def test_a_tied_head_that_differs_is_refused() -> None:
    module = reference("gpt2")
    state = {**module.state_dict(), "lm_head.weight": torch.zeros(37, 16)}
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        from_hf(state, module.config)
    with pytest.raises(ValueError, match="config: missing"):
        from_hf(state)


# --- the functional laws --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", FAMILIES)
def test_an_ensemble_by_vmap_is_a_loop(variant: str) -> None:
    members = [born(variant, seed=seed)[1] for seed in range(3)]
    model = build(variant)
    batch = {"input_ids": tokens()}
    of_member = transforms.grad_and_value(lambda params: model.loss(params, batch)[0])
    stacked = tree.map(lambda *leaves: torch.stack(leaves), *members)
    grads, losses = transforms.vmap(of_member)(stacked)
    for index, member in enumerate(members):
        expected, loss = of_member(member)
        torch.testing.assert_close(losses[index], loss)
        assert_close(tree.map(lambda leaf, i=index: leaf[i], grads), expected)


@pytest.mark.parametrize("variant", FAMILIES)
def test_per_sample_gradients_sum_to_the_batch_gradient(variant: str) -> None:
    model, params = born(variant)

    def loss(params: tree.Tree, rows: torch.Tensor) -> torch.Tensor:
        return model.loss(params, {"input_ids": rows})[0]

    each = transforms.vmap(lambda row: transforms.grad(loss)(params, row[None]))(tokens())
    assert_close(tree.map(lambda leaf: leaf.sum(0), each), transforms.grad(loss)(params, tokens()))


@pytest.mark.parametrize("variant", FAMILIES)
def test_the_fused_loss_is_next_token_over_the_logits(variant: str) -> None:
    model, params = born(variant)
    batch = {"input_ids": tokens(), "labels": tokens(seed=1)}
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}
    fused = transforms.grad_and_value(lambda params: model.loss(params, batch, chunk_size=7, **options)[0])(params)
    plain = transforms.grad_and_value(
        lambda params: next_token(model.apply(params, batch["input_ids"]), batch["labels"], **options)[0]
    )(params)
    assert_close(fused, plain)


@pytest.mark.parametrize(("variant", "padded"), [("gpt2", True), ("llama-gqa-tied", False)])
def test_the_traced_graph_computes_the_same_and_calls_one_region(variant: str, padded: bool) -> None:
    """With padding and dropout, and with neither."""
    model, params = born(variant, **(DROPOUTS if padded else NO_DROPOUT)[variant])
    leaves, structure = tree.flatten(params)

    def flat(ids: torch.Tensor, mask: torch.Tensor, key: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
        batch = {"input_ids": ids} | ({"attention_mask": mask} if padded else {})
        gradient = transforms.grad(lambda params: model.loss(params, batch, key if padded else None)[0])
        return tree.leaves(gradient(tree.unflatten(structure, leaves)))

    mask = (torch.arange(11) < torch.tensor([[11], [8], [5]])).to(torch.int64)
    arguments = [tokens(), mask, random.key(1), *leaves]
    with bind(outline=True):
        traced = graph.trace(flat, arguments)
    calls = [node.args[0] for node in traced.graph.nodes if node.target is call_op]
    assert len(calls) == 2 * 2  # two layers, forward and backward
    assert len(set(calls)) == 2
    assert_close(traced(*arguments), flat(*arguments))


@pytest.mark.parametrize("variant", FAMILIES)
def test_hessian_vector_product_is_that_of_autograd(variant: str) -> None:
    """torch.func twice over the fused loss, against plain autograd twice over the logits."""
    model, params = born(variant)
    leaves, structure = tree.flatten(params)
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator) for leaf in leaves]

    def dot(gradient: Any) -> torch.Tensor:
        products = [(one * other).sum() for one, other in zip(tree.leaves(gradient), direction, strict=True)]
        return torch.stack(products).sum()

    gradient = transforms.grad(lambda params: model.loss(params, {"input_ids": tokens()})[0])
    actual = transforms.grad(lambda params: dot(gradient(params)))(params)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = [leaf.clone().requires_grad_() for leaf in leaves]
        loss, _ = next_token(model.apply(tree.unflatten(structure, wanted), tokens()), tokens())
        expected = torch.autograd.grad(dot(torch.autograd.grad(loss, wanted, create_graph=True)), wanted)
    assert_close(actual, tree.unflatten(structure, expected))


@pytest.mark.parametrize("variant", FAMILIES)
def test_bfloat16_stays_bfloat16_and_near(variant: str) -> None:
    model, exact = born(variant)
    params = tree.map(lambda leaf: leaf.bfloat16(), exact)
    batch = {"input_ids": tokens()}
    logits = model.apply(params, tokens())
    assert logits.dtype == torch.bfloat16
    rounded = tree.map(lambda leaf: leaf.double(), params)
    expected = model.apply(rounded, tokens())
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
    grads, (total, _) = transforms.grad_and_value(model.loss, has_aux=True)(params, batch)
    assert total.dtype == torch.float32
    assert all(leaf.dtype == torch.bfloat16 for leaf in tree.leaves(grads))
    exact_grads = transforms.grad(lambda params: model.loss(params, batch)[0])(rounded)
    error = tree.map(lambda leaf, expected: (leaf - expected).square().sum(), grads, exact_grads)
    size = tree.map(lambda leaf: leaf.square().sum(), exact_grads)
    assert sum(tree.leaves(error)) < 0.05**2 * sum(tree.leaves(size))


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_token_does_not_see_later_ones(variant: str) -> None:
    model, params = born(variant)
    changed = tokens()
    changed[:, 6:] = (changed[:, 6:] + 1) % 37
    before, after = model.apply(params, tokens()), model.apply(params, changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert ((before[:, 6:] - after[:, 6:]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("variant", FAMILIES)
def test_padding_changes_neither_other_tokens_nor_the_gradient(variant: str) -> None:
    model, params = born(variant)
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[:, :3] = 0
    other = tokens()
    other[:, :3] = (other[:, :3] + 5) % 37

    def run(ids: torch.Tensor) -> tuple[torch.Tensor, tree.Tree]:
        batch = {"input_ids": ids, "attention_mask": mask}
        logits = model.apply(params, ids, attention_mask=mask)
        return logits[:, 3:], transforms.grad_and_value(model.loss, has_aux=True)(params, batch)

    logits, (grads, value) = run(tokens())
    others = run(other)
    torch.testing.assert_close(logits, others[0])
    assert_close((grads, value), others[1])
    assert value[1] == 3 * 7  # the first real token would be predicted from padding


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_row_of_padding_alone_is_finite(variant: str) -> None:
    model, params = born(variant)
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[1] = 0
    grads, _ = transforms.grad_and_value(model.loss, has_aux=True)(
        params, {"input_ids": tokens(), "attention_mask": mask}
    )
    assert tree.all(lambda leaf: bool(leaf.isfinite().all()), grads)
    assert (layers.padding_mask(mask, torch.float32)[1, 0].diagonal() == 0).all()


# --- dropout --------------------------------------------------------------------------------------------------------

DROPOUTS: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3},
    "llama-gqa-tied": {"attention_dropout": 0.3},
}
NO_DROPOUT: dict[str, dict[str, Any]] = {variant: dict.fromkeys(rates, 0.0) for variant, rates in DROPOUTS.items()}


@pytest.mark.parametrize("variant", FAMILIES)
def test_dropout_is_a_function_of_the_key(variant: str) -> None:
    model, params = born(variant, **DROPOUTS[variant])
    first, again, other = (model.apply(params, tokens(), key=random.key(seed), train=True) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert torch.equal(model.apply(params, tokens(), key=random.key(1)), model.apply(params, tokens()))
    with pytest.raises(ValueError, match="key: missing"):
        model.apply(params, tokens(), train=True)


@pytest.mark.parametrize(("variant", "site"), [(v, site) for v, rates in DROPOUTS.items() for site in rates])
def test_each_rate_drops_something(variant: str, site: str) -> None:
    rates: dict[str, Any] = NO_DROPOUT[variant] | {site: 0.2}
    model, params = born(variant, **rates)
    dropped = model.apply(params, tokens(), key=random.key(1), train=True)
    assert not torch.allclose(dropped, model.apply(params, tokens()))


@pytest.mark.parametrize("variant", FAMILIES)
def test_dropout_keeps_the_expectation(variant: str) -> None:
    """Without its second half a block is linear in all that is dropped: its mean over keys is the block without."""
    model, params = born(variant, **DROPOUTS[variant])
    x = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if variant == "gpt2":
        layer, down = params["h"][0], "c_proj"
        block = functools.partial(gpt2_block, model.config)
    else:
        layer, down = params["layers"][0], "down_proj"
        tables = layers.rotary_tables(torch.tensor([1.0, 0.1]), torch.arange(7)[None])
        block = lambda p, x, mask, key: llama_block(model.config, p, x, tables, mask, key)  # noqa: E731
    layer = {**layer, "mlp": {**layer["mlp"], down: tree.map(torch.zeros_like, layer["mlp"][down])}}
    count = 1000
    draws = transforms.vmap(lambda key: block(layer, x, None, key))(random.split(random.key(3), count))
    spread = draws.std(0)
    moved = spread > 1e-9
    scores = (draws.mean(0) - block(layer, x, None, None))[moved] / (spread[moved] / count**0.5)
    assert moved.sum() > 100
    assert scores.abs().max() < 5
    assert scores.square().mean() < 1.6


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "fields", "error", "message"),
    [
        (gpt2, {"n_layers": 2}, TypeError, "unknown keyword 'n_layers'; did you mean 'n_layer'"),
        (gpt2, {"hidden": 2}, TypeError, "unknown keyword 'hidden'"),
        (gpt2, {"n_embd": 10, "n_head": 4}, ValueError, "n_embd=10 is not a multiple of n_head=4"),
        (gpt2, {"n_layer": 0}, ValueError, "n_layer=0, expected a positive number"),
        (gpt2, {"vocab_size": 3.5}, TypeError, "vocab_size=3.5, expected an int"),
        (gpt2, {"resid_pdrop": 1.0}, ValueError, "resid_pdrop=1.0"),
        (gpt2, {"activation_function": "mish"}, ValueError, "activation_function='mish' is not implemented"),
        (gpt2, {"add_cross_attention": True}, ValueError, "add_cross_attention=True is not implemented"),
        (gpt2, {"scale_attn_by_inverse_layer_idx": True}, ValueError, "scale_attn_by_inverse_layer_idx=True"),
        (gpt2, {"config": 3}, TypeError, "config: int"),
        (gpt2, {"config": {"model_type": "bert"}}, ValueError, "model_type is 'bert', expected 'gpt2'"),
        (llama, {"num_key_values_heads": 2}, TypeError, "did you mean 'num_key_value_heads'"),
        (
            llama,
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            ValueError,
            "not a multiple of num_key_value_heads=3",
        ),
        (llama, {"hidden_size": 12, "num_attention_heads": 4}, ValueError, "head_dim=3 is odd"),
        (llama, {"rope_parameters": {"rope_type": "yarn"}}, ValueError, "rope_type 'yarn' is not implemented"),
        (llama, {"rope_scaling": {"type": "linear"}}, ValueError, "factor=None, expected a positive number"),
        (llama, {"rope_parameters": {"partial_rotary_factor": 0.5}}, ValueError, "partial_rotary_factor"),
        (llama, {"rope_parameters": {"rope_teta": 5.0}}, TypeError, "did you mean 'rope_theta'"),
    ],
)
def test_a_bad_config_is_named(factory: Any, fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        factory(**fields)


def test_old_and_new_ways_to_write_rope_agree() -> None:
    old = llama(**LLAMA, rope_theta=100.0, rope_scaling={k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"})
    assert old.config == build("llama-rope-llama3").config
    assert llama(old.config, rope_theta=7.0).config.rope_parameters.rope_theta == 7.0


@pytest.mark.parametrize("variant", FAMILIES)
def test_keywords_win_over_a_config(variant: str) -> None:
    model = build(variant)
    changed = (gpt2 if variant == "gpt2" else llama)(model.config, vocab_size=41)
    assert changed.config == dataclasses.replace(model.config, vocab_size=41)
    assert isinstance(hash(changed.config), int)
    assert isinstance(model.config, GPT2Config if variant == "gpt2" else LlamaConfig)


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": torch.zeros(2, 3)}, TypeError, "input_ids: torch.float32, expected a tensor of torch.int64"),
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids: list"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, ValueError, r"input_ids: shape \(3,\), expected \(B, T\)"),
        ({"input_ids": torch.zeros(1, 33, dtype=torch.int64)}, ValueError, "input_ids: 33 tokens a row, but"),
        ({"input_ids": tokens(), "attention_mask": torch.ones(3, 4)}, ValueError, r"attention_mask: shape \(3, 4\)"),
        ({"input_ids": tokens(), "position_ids": tokens(2)}, ValueError, r"position_ids: shape \(2, 11\)"),
        ({"input_ids": tokens(), "position_ids": torch.ones(3, 11)}, TypeError, "position_ids: torch.float32"),
    ],
)
def test_bad_input_is_named(variant: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model, params = born(variant)
    with pytest.raises(error, match=message):
        model.apply(params, **arguments)
    with pytest.raises(KeyError, match="batch: 'input_ids' is missing"):
        model.loss(params, {"labels": tokens()})
