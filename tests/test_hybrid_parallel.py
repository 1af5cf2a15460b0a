"""HybridParallelPlugin: tensor, sequence and data parallelism together are one device, in float64; its arguments."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster import testing
from functional_booster.kernels import tree
from functional_booster.models.model import Model
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.spec import P

TOKENS, ROWS = 12, 2
LLAMA: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": TOKENS,
    "attention_dropout": 0.2,
}
GPT2: dict[str, Any] = {"vocab_size": 29, "n_embd": 24, "n_layer": 1, "n_head": 6, "n_positions": TOKENS}
TX = fb.optim.adamw(1e-2, eps=1e-5, weight_decay=0.1)


@functools.cache
def model(kind: str) -> Model:
    """A language model in float64, with a vocabulary, widths and heads that few numbers of ranks divide."""
    made = {
        "llama": lambda: fb.models.llama(**LLAMA),
        "llama-tied": lambda: fb.models.llama(**LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        "gpt2": lambda: fb.models.gpt2(**GPT2),
        "gpt2-even": lambda: fb.models.gpt2(**{**GPT2, "n_head": 4}),
    }[kind]()
    return dataclasses.replace(
        made, abstract=tree.map(lambda info: dataclasses.replace(info, dtype=torch.float64), made.abstract)
    )


def weights(kind: str) -> Any:
    """Weights large enough for attention to attend."""
    return tree.map(lambda leaf: leaf.double() * 5, model(kind).init(fb.random.key(1)))


def batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(LLAMA["vocab_size"], (ROWS, TOKENS), generator=draw)
    return {"input_ids": tokens, "labels": torch.where(torch.rand(tokens.shape, generator=draw) < 0.2, -100, tokens)}


def logits_loss(kind: str) -> Any:
    """The loss from whole logits, as a user writes it."""

    def loss_fn(params: Any, batch: Any, key: Any = None) -> Any:
        logits = model(kind).apply(params, batch["input_ids"], key=key, train=key is not None)
        return fb.losses.next_token(logits, batch["labels"])

    return loss_fn


def trained(booster: fb.Booster, kind: str, fused: bool, accumulate: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """The state after two steps, and what they measured."""
    state = booster.init(model(kind), TX, key=fb.random.key(0), params=weights(kind))
    loss_fn = model(kind).loss if fused else logits_loss(kind)
    step = booster.train_step(loss_fn, TX, accumulate=accumulate, max_norm=0.3, jit=False)
    measured = {}
    for number in range(2):
        state, metrics = step(state, batch())
        measured |= {f"{name} {number}": value for name, value in metrics.items()}
    evaluated = booster.eval_step(loss_fn, jit=False)(state, batch())
    return state, measured | {f"eval {name}": value for name, value in evaluated.items()}


@functools.cache
def on_one_device(kind: str, fused: bool, microbatches: int) -> tuple[Any, dict[str, torch.Tensor]]:
    return trained(fb.Booster("cpu"), kind, fused, microbatches)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[fb.HybridParallelPlugin, Any]:
    """A plugin and a virtual mesh of at most 16 ranks."""
    mode = draw(st.sampled_from([None, "split_gather", "all_to_all"]))
    tp = draw(st.sampled_from([1, 2, 3, 4, 6] if mode != "all_to_all" else [1, 2, 3]))
    sp = draw(st.sampled_from([1, 2] if tp != 2 else [1, 3])) if mode == "all_to_all" else 1
    dp = draw(st.sampled_from([1, 2]))
    plugin = hybrid(
        tp_size=tp, sp_size=sp, zero_stage=draw(st.integers(0, 3)), mode=mode, dp_outside=draw(st.booleans())
    )
    return plugin, fb.virtual_mesh(dp * tp * sp)


def hybrid(mode: str | None = None, **options: Any) -> fb.HybridParallelPlugin:
    return fb.HybridParallelPlugin(
        **options, enable_sequence_parallelism=mode is not None, sequence_parallelism_mode=mode
    )


@settings(max_examples=4, deadline=None)
@given(layouts(), st.sampled_from(["llama", "llama-tied", "gpt2"]), st.booleans())
@example((hybrid(tp_size=4, zero_stage=2), fb.virtual_mesh(8)), "llama", True)
@example((hybrid("split_gather", tp_size=4, zero_stage=3), fb.virtual_mesh(8)), "gpt2", True)
@example((hybrid("all_to_all", tp_size=3, sp_size=2, zero_stage=1), fb.virtual_mesh(12)), "llama-tied", False)
def test_every_layout_is_one_device(laid_out: Any, kind: str, fused: bool) -> None:
    """Loss, norm, clipping, dropout, parameters: two steps, and an evaluation."""
    plugin, mesh = laid_out
    booster = fb.Booster("cpu", "fp32", plugin=plugin, mesh=mesh)
    state, measured = trained(booster, kind, fused, 1)
    alone, expected = on_one_device(kind, fused, booster.mesh.extent("dp"))
    for name, value in expected.items():
        torch.testing.assert_close(measured[name], value, rtol=1e-9, atol=1e-11, msg=f"{name} under {plugin}")
    named = tree.named_leaves(booster.full_params(state))
    for name, leaf in tree.named_leaves(alone.params).items():
        torch.testing.assert_close(named[name], leaf, rtol=1e-8, atol=1e-10, msg=f"{name} under {plugin}")


@pytest.mark.parametrize("mode", [None, "split_gather", "all_to_all"])
def test_fp8_gradients_are_one_devices(mode: str | None) -> None:
    """To fp8's rounding, leaf by leaf: parts have scales of their own."""
    plugin = hybrid(mode, **({"sp_size": 2} if mode == "all_to_all" else {"tp_size": 2}))
    tx, grads = fb.optim.sgd(1.0), []
    for booster in (fb.Booster("cpu", "fp8"), fb.Booster("cpu", "fp8", plugin, mesh=fb.virtual_mesh(2))):
        state = booster.init(model("llama"), tx, key=fb.random.key(0))
        new, _ = booster.train_step(model("llama").loss, tx, jit=False, donate=False)(state, batch())
        grads.append(tree.map(torch.sub, booster.full_params(state), booster.full_params(new)))
    one, several = map(tree.named_leaves, grads)
    for name, grad in one.items():
        assert (several[name] - grad).norm() < 0.2 * grad.norm(), name


def test_born_sharded_to_the_bit() -> None:
    booster = fb.Booster("cpu", "fp32", plugin=hybrid(tp_size=4, zero_stage=1), mesh=fb.virtual_mesh(8))
    made = booster.init(model("gpt2"), TX, key=fb.random.key(3))
    alone = fb.Booster("cpu").init(model("gpt2"), TX, key=fb.random.key(3))
    assert all(map(torch.equal, tree.leaves(booster.full_params(made)), tree.leaves(alone.params)))
    again = booster.shard(booster.full_params(made), like=made)
    assert all(map(torch.equal, tree.leaves(again.storage), tree.leaves(made.storage)))


def test_a_rank_holds_its_part() -> None:
    state = fb.Booster("cpu", "fp32", plugin=hybrid(tp_size=2), mesh=fb.virtual_mesh(2)).init(
        model("llama"), TX, key=fb.random.key(0)
    )
    layout = state.storage.layout
    split = [slot for slot in layout.slots if slot.cut is not None]
    assert {slot.name.split(".")[-2] for slot in split} == {
        *("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    for slot in split:
        assert layout.axes[slot.bucket] == ("tp",)


@pytest.mark.parametrize("first", [hybrid(tp_size=4, zero_stage=1), hybrid("split_gather", tp_size=3, zero_stage=3)])
def test_checkpoints_know_no_layout(first: fb.HybridParallelPlugin, tmp_path: Any) -> None:
    """What 2 x 4 ranks save, one device and 2 x 3 load, to the bit, optimizer state and padding too; and back."""
    one = fb.Booster("cpu", "fp32", plugin=first, mesh=fb.virtual_mesh(2 * first.tp_size))
    state, _ = trained(one, "llama", True, 1)
    one.save(tmp_path / "first", state)
    for plugin in (None, hybrid(tp_size=2, zero_stage=2)):
        mesh = None if plugin is None else fb.virtual_mesh(4)
        other = fb.Booster("cpu", "fp32" if plugin else None, plugin=plugin, mesh=mesh)
        loaded = other.load(tmp_path / "first", like=other.abstract(model("llama"), TX))
        assert all(map(torch.equal, tree.leaves(other.full_params(loaded)), tree.leaves(one.full_params(state))))
        other.save(tmp_path / "second", loaded)
        back = one.load(tmp_path / "second", like=one.abstract(model("llama"), TX))
        assert all(map(torch.equal, tree.leaves(back.storage), tree.leaves(state.storage)))
        assert all(map(torch.equal, tree.leaves(back.opt_state), tree.leaves(state.opt_state)))


def test_exports_whole_weights(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    booster = fb.Booster("cpu", "fp32", plugin=hybrid(tp_size=4), mesh=fb.virtual_mesh(4))
    state = booster.init(model("llama"), TX, key=fb.random.key(0), params=weights("llama"))
    booster.save_pretrained(tmp_path, state, model("llama"))
    saved = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(saved["lm_head.weight"], weights("llama")["lm_head"]["weight"], rtol=0, atol=0)
    torch.testing.assert_close(
        saved["model.layers.0.self_attn.o_proj.weight"],
        weights("llama")["layers"][0]["self_attn"]["o_proj"]["weight"],
        rtol=0,
        atol=0,
    )


def test_logits_are_hugging_faces() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMA)
    module = LlamaForCausalLM(config).double().eval()
    plugin = hybrid("split_gather", tp_size=4)
    booster = fb.Booster("cpu", "fp32", plugin=plugin, mesh=fb.virtual_mesh(4))
    like = booster.init(model("llama"), TX, key=fb.random.key(0))
    named = {name.removeprefix("model."): value.detach() for name, value in module.state_dict().items()}
    params = tree.map_with_name(lambda name, leaf: named[name], model("llama").init(fb.random.key(0)))
    state = booster.shard(params, like=like)
    found = booster.eval_step(model("llama").loss, jit=False)(state, batch())
    with torch.no_grad():
        total, weight = fb.losses.next_token(module(input_ids=batch()["input_ids"]).logits, batch()["labels"])
    torch.testing.assert_close(found["loss"], total / weight, rtol=1e-6, atol=0)  # rotary tables are in float32


@pytest.mark.parametrize("tx", [fb.optim.sgd(0.1), TX])
def test_leaves_that_are_cut_where_they_are_used(tx: Any) -> None:
    """An optimizer that says nothing of how leaves go together has them whole; the loss sees a rank's part."""
    alone = fb.optim.GradientTransformation(tx.init, tx.update, None)
    plugin = hybrid(tp_size=4, zero_stage=0)
    booster = fb.Booster("cpu", "fp32", plugin=plugin, mesh=fb.virtual_mesh(4))
    one = fb.Booster("cpu")
    results = []
    for each in (booster, one):
        state = each.init(model("llama"), alone, key=fb.random.key(0), params=weights("llama"))
        state, metrics = each.train_step(model("llama").loss, alone, jit=False)(state, batch())
        results.append((tree.leaves(each.full_params(state)), metrics["grad_norm"]))
    for got, expected in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(results[0][1], results[1][1])


def test_an_optimizer_of_whole_leaves_is_refused() -> None:
    booster = fb.Booster("cpu", "fp32", plugin=hybrid(tp_size=2), mesh=fb.virtual_mesh(2))
    state = booster.init(model("gpt2"), fb.optim.lamb(1e-2), key=fb.random.key(0))
    with pytest.raises(ValueError, match="are cut over 'tp': an optimizer that works leaf by leaf cannot"):
        booster.train_step(model("gpt2").loss, fb.optim.lamb(1e-2), jit=False)(state, batch())


@pytest.mark.parametrize("plugin", [hybrid(zero_stage=stage) for stage in range(4)] + [hybrid(tp_size=2, zero_stage=1)])
def test_keeps_the_laws(plugin: fb.HybridParallelPlugin) -> None:
    testing.check_plugin(plugin, max_ranks=4, max_examples=1)


def test_rows_of_tokens_that_ranks_do_not_divide() -> None:
    booster = fb.Booster("cpu", "fp32", plugin=hybrid("split_gather", tp_size=2), mesh=fb.virtual_mesh(2))
    state = booster.init(model("gpt2"), TX, key=fb.random.key(0))
    with pytest.raises(ValueError, match="11 tokens a row, expected a multiple of 2"):
        booster.train_step(model("gpt2").loss, TX, jit=False)(state, {"input_ids": batch()["input_ids"][:, 1:]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp_size": 2}, "pp_size: 2 is not supported"),
        ({"num_microbatches": 4}, "num_microbatches: 4 is not supported"),
        ({"zero_stage": 4}, "zero_stage: 4, expected 0, 1, 2 or 3"),
        ({"sp_size": 2}, "sp_size: 2 with sequence_parallelism_mode=None"),
        ({"enable_sequence_parallelism": True}, "expected both or neither"),
        ({"sequence_parallelism_mode": "split_gather"}, "expected both or neither"),
        ({"sequence_parallelism_mode": "ring"}, "its result is split_gather's"),
        ({"sequence_parallelism_mode": "ring_attn"}, "not implemented yet"),
        ({"sequence_parallelism_mode": "rows"}, "expected None, 'split_gather' or 'all_to_all'"),
        ({"cpu_offload": True}, "cpu_offload: True with zero_stage=0"),
        ({"custom_policy": object()}, "custom_policy"),
        ({"inner_ring_size": 2}, "inner_ring_size: 2 is not supported"),
        ({"norm_type": 1.0}, "norm_type: 1.0, expected 2.0"),
    ],
)
def test_refuses_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.HybridParallelPlugin(**options)


def test_what_has_no_meaning_is_said() -> None:
    with pytest.warns(UserWarning, match="parallel_output, make_vocab_size_divisible_by have no meaning"):
        fb.HybridParallelPlugin(parallel_output=False, make_vocab_size_divisible_by=128)


def test_ranks_that_cannot_be_laid_out() -> None:
    with pytest.raises(ValueError, match="tp_size x sp_size: 2 x 1 does not divide 3 ranks"):
        fb.Booster("cpu", plugin=hybrid(tp_size=2), mesh=fb.virtual_mesh(3))
    booster = fb.Booster("cpu", plugin=hybrid(tp_size=2), mesh=fb.virtual_mesh(dp=2, tp=4))
    with pytest.raises(ValueError, match="tp_size: 2, but the axis 'tp' has another size"):
        booster.init(model("gpt2"), TX, key=fb.random.key(0))


def test_a_spec_that_tp_cannot_cut_by_is_named() -> None:
    odd = Model(init=None, apply=None, abstract={"w": ArrayInfo((4, 4), spec=P(("dp", "tp")))})  # type: ignore[arg-type]
    booster = fb.Booster("cpu", "fp32", plugin=hybrid(tp_size=2), mesh=fb.virtual_mesh(2))
    with pytest.raises(ValueError, match=r"w: .*expected 'tp' alone"):
        booster.abstract(odd, TX)


@pytest.mark.parametrize("options", [{}, {"shard_param_frac": 0.0}])
def test_gemini_over_tensor_parallel_ranks(options: dict[str, Any]) -> None:
    plugin = fb.GeminiPlugin(tp_size=2, min_chunk_size_m=0, search_range_m=0.001, **options)
    booster = fb.Booster("cpu", "fp32", plugin=plugin, mesh=fb.virtual_mesh(4))
    state, measured = trained(booster, "llama", True, 1)
    alone, expected = on_one_device("llama", True, 2)
    for name, value in expected.items():
        torch.testing.assert_close(measured[name], value, rtol=1e-9, atol=1e-11, msg=name)
    for got, leaf in zip(tree.leaves(booster.full_params(state)), tree.leaves(alone.params), strict=True):
        torch.testing.assert_close(got, leaf, rtol=1e-8, atol=1e-10)


def test_a_leaf_of_a_single_head_is_counted_once() -> None:
    """All of it lies on the first rank, whose part has the shape of the whole."""
    model = fb.models.gpt2(
        vocab_size=17, n_embd=8, n_layer=1, n_head=1, n_positions=8, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    ids = torch.randint(17, (4, 8), generator=torch.Generator().manual_seed(0))
    norms = []
    for plugin in (None, fb.HybridParallelPlugin(tp_size=2, zero_stage=1)):
        booster = fb.Booster("cpu", "fp32", plugin, fb.virtual_mesh(2) if plugin else None)
        tx = fb.optim.sgd(0.1)
        state = booster.init(model, tx, key=fb.random.key(0))
        _, metrics = booster.train_step(model.loss, tx, jit=False)(state, {"input_ids": ids})
        norms.append(metrics["grad_norm"])
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
