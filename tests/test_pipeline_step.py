"""A train step over a pipeline is the step of one device, whatever the schedule and the layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import RankError, run_on_ranks

import functional_booster as fb
from functional_booster import optim, pipeline, step
from functional_booster.kernels import tree
from functional_booster.pipeline import PipelineParallel, train_step
from functional_booster.pipeline.execute_pipeline import execute_pipeline
from functional_booster.plugins import Plan

VOCABULARY, WIDTH = 7, 4


def model(layers: int, trainable: str = "") -> fb.Model:
    """Layers with dropout between a tied embedding and head; leaves that ``trainable`` does not begin are frozen."""

    def info(name: str, *shape: int) -> fb.ArrayInfo:
        return fb.ArrayInfo(shape, torch.float64, fb.P(), fb.initializers.normal(0.5), name.startswith(trainable))

    abstract = {
        "embed": info("embed", VOCABULARY, WIDTH),
        "layers": [{"w": info("layers", WIDTH, WIDTH), "b": info("layers", WIDTH)} for _ in range(layers)],
        "scale": info("scale", WIDTH),
    }
    return fb.Model(lambda key: fb.initialize(abstract, key), loss_fn, abstract)


def loss_fn(params: Any, batch: Any, key: Any = None) -> Any:
    """Next tokens' cross entropy over those that are not 0, as a sum with its weight, and an aux of the first layer."""
    x, sizes = params["embed"][batch["tokens"]], []
    for index, layer in enumerate(params["layers"]):
        h = torch.tanh(x @ layer["w"] + layer["b"])
        if key is not None:
            h = h * fb.random.bernoulli(fb.random.fold_in(key, index), 0.8, h.shape) / 0.8
        sizes.append(h.square().mean())
        x = x + h
    logits = (x * params["scale"]) @ params["embed"].T
    valid = (batch["labels"] != 0).to(torch.float64)
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * valid.flatten()).sum(), valid.sum(), {"size": sizes[0]}


def batch_of(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(VOCABULARY, (rows, 3), generator=generator) for name in ("tokens", "labels")}


def steps(booster: fb.Booster, made: fb.Model, batches: list[Any], accumulate: int) -> tuple[Any, list[Any]]:
    """The parameters after these steps, and the metrics of each."""
    tx = fb.optim.adamw(1e-2, weight_decay=0.1)
    state = booster.init(made, tx, key=fb.random.key(1))
    recipe = step.Recipe(loss_fn, optim.as_transformation(tx), booster.precision, accumulate, 0.3, True)
    metrics = []
    if isinstance(booster.plan.plugin, PipelineParallel):
        run: Any = train_step.build(recipe, booster.plan, False, True)
    else:
        run = booster.train_step(loss_fn, tx, accumulate=accumulate, max_norm=0.3, jit=False)
    for batch in batches:
        state, found = run(state, batch)
        metrics.append(found)
    return booster.full_params(state), metrics


def assert_same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    assert tree.structure(found) == tree.structure(expected)
    for name, one in tree.named_leaves(found).items():
        torch.testing.assert_close(one, tree.named_leaves(expected)[name], rtol=tolerance, atol=tolerance, msg=name)


def referee(data_ranks: int) -> fb.Booster:
    """Without pipelines, over as many data ranks, which drop other values each."""
    return fb.Booster(plugin=fb.TorchDDPPlugin(), mesh=fb.virtual_mesh(data_ranks))


@pytest.mark.parametrize("style", ["gpipe", "1f1b", "interleaved", "zbv"])
@given(data=st.data())
@settings(max_examples=2)
def test_a_pipeline_is_one_device(style: str, data: st.DataObject) -> None:
    ranks, data_ranks, number = (data.draw(st.integers(1, most)) for most in (3, 2, 4))
    chunks = 2 if style == "interleaved" else 1
    stages = ranks * (2 if style == "zbv" else chunks)
    made = model(data.draw(st.integers(stages, stages + 2)), data.draw(st.sampled_from(["", "layers", "embed"])))
    plugin = PipelineParallel(
        pp_size=ranks,
        pp_style=style,
        num_microbatches=number,
        num_model_chunks=chunks,
        zero_stage=data.draw(st.integers(0, 1)),
    )
    batches = [batch_of(data_ranks * number + extra, extra) for extra in data.draw(st.sampled_from([[0, 0], [1, 3]]))]
    booster = fb.Booster(plugin=plugin, mesh=fb.virtual_mesh(data_ranks * ranks))
    assert_same(steps(booster, made, batches, 1), steps(referee(data_ranks), made, batches, number))


@pytest.mark.parametrize("family", ["gpt2", "llama", "hf_llama", "hf_gpt2"])
def test_models_are_cut_where_only_the_residual_stream_is(family: str) -> None:
    """Own and Hugging Face models, embedding tied over the ends, dropout on: the whole gradient, and what travels."""
    sizes: Any = {"vocab_size": 11, "n_positions": 8, "n_embd": 4, "n_layer": 2, "n_head": 2}
    llama: Any = {"vocab_size": 11, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2}
    llama |= {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.1}
    llama |= {"tie_word_embeddings": True, "max_position_embeddings": 8}
    if family.startswith("hf"):
        import transformers

        kinds: Any = {
            "hf_llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)),
            "hf_gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)),
        }
        made = fb.functionalize(kinds[family]().double().train())
    else:
        made = fb.models.gpt2(**sizes) if family == "gpt2" else fb.models.llama(**llama)
    params = tree.map(lambda leaf: leaf.double(), made.init(fb.random.key(0)))
    microbatches = [{"ids": torch.randint(11, (2, 6)), "key": fb.random.key(seed)} for seed in range(2)]

    def fn(params: Any, microbatch: Any) -> Any:
        loss, weight = made.loss(params, {"input_ids": microbatch["ids"]}, microbatch["key"])
        return loss, weight

    objective = pipeline.Objective(fn, pipeline.split(made, 2))
    outcome = pipeline.run(pipeline.one_f_one_b(2, 2), pipeline.Program(objective, params, microbatches))

    def total(params: Any) -> torch.Tensor:
        return torch.stack([fn(params, one)[0] for one in microbatches]).sum()

    expected = tree.named_leaves(fb.grad(total)(params))
    found: dict[str, torch.Tensor] = {}
    for terms in outcome.gradients.values():
        for name, term in terms.items():
            found[name] = found[name] + term if name in found else term
    assert_same(found, expected)
    tied = [name for name in outcome.gradients[0] if name in outcome.gradients[1]]
    assert len(tied) == 1 and ("wte" in tied[0] or "embed_tokens" in tied[0])
    first, last = objective.traced(params, microbatches[0]).stages
    assert [tuple(one.shape) for one in first.sent] == [(2, 6, 4)]
    assert [tuple(one.shape) for one in last.sent_cotangents] == [(2, 6, 4)]


def test_an_evaluation_drops_nothing_and_changes_nothing() -> None:
    made, tx = model(4), fb.optim.sgd(0.1)
    booster = fb.Booster(plugin=PipelineParallel(pp_size=2, pp_style="zbv"), mesh=fb.virtual_mesh(2))
    state = booster.init(made, tx, key=fb.random.key(1))
    alone = fb.Booster()
    expected = alone.eval_step(loss_fn, jit=False)(alone.init(made, tx, key=fb.random.key(1)), batch_of(5))
    assert_same(booster.eval_step(loss_fn, jit=False)(state, batch_of(5)), expected)


def test_a_scaled_loss_that_overflows_is_skipped_by_all_stages() -> None:
    made, tx = model(2), fb.optim.sgd(0.1)
    precision = fb.MixedPrecision(fb.Policy(), scaling=fb.DynamicScaling(hysteresis=1))
    booster = fb.Booster(mixed_precision=precision, plugin=PipelineParallel(pp_size=2), mesh=fb.virtual_mesh(2))
    state = booster.init(made, tx, key=fb.random.key(1))
    recipe = step.Recipe(loss_fn, optim.as_transformation(tx), booster.precision, 1, None, True)
    before, scale = booster.full_params(state), float(state.loss_scale.factor)
    infinite = tree.map_with_name(lambda name, leaf: leaf * float("inf") if name == "layers.0.w" else leaf, before)
    state = booster.shard(infinite, like=state)
    run = train_step.build(recipe, booster.plan, False, False)
    after, metrics = run(state, batch_of(4))
    assert float(metrics["skipped"]) == 1 and float(after.loss_scale.factor) < scale
    _, metrics = run(booster.shard(before, like=state), batch_of(4))
    assert float(metrics["skipped"]) == 0
    plain = fb.Booster()
    start = plain.init(made, tx, key=fb.random.key(1))
    _, expected = plain.train_step(loss_fn, tx, accumulate=2, jit=False)(start, batch_of(4))
    assert_same(metrics["grad_norm"], expected["grad_norm"], 1e-6)  # the factor is a float32


def test_a_checkpoint_of_a_pipeline_is_any_layouts(tmp_path: Any) -> None:
    made, tx = model(3), fb.optim.adamw(0.1)
    booster = fb.Booster(plugin=PipelineParallel(pp_size=3, zero_stage=1), mesh=fb.virtual_mesh(6))
    state = booster.init(made, tx, key=fb.random.key(1))
    booster.save(tmp_path / "pp", state)
    plain = fb.Booster()
    loaded = plain.load(tmp_path / "pp", like=plain.abstract(made, tx))
    assert_same(plain.full_params(loaded), booster.full_params(state), 0)
    plain.save(tmp_path / "plain", loaded)
    again = booster.load(tmp_path / "plain", like=booster.abstract(made, tx))
    assert_same(booster.full_params(again), booster.full_params(state), 0)


CASES: list[tuple[dict[str, Any], int]] = [
    ({"pp_size": 2, "pp_style": "1f1b", "num_microbatches": 3}, 7),
    ({"pp_size": 2, "pp_style": "zbv", "microbatch_size": 2, "zero_stage": 1}, 8),
    ({"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2, "num_microbatches": 2}, 4),
]


def on_this_rank(ranks: int, cases: list[tuple[dict[str, Any], int]]) -> list[tuple[Any, list[Any]]]:
    found = []
    for arguments, rows in cases:
        plugin = PipelineParallel(**arguments)
        booster = fb.Booster(device="cpu", plugin=plugin)
        assert isinstance(booster.plan, Plan)
        place, mesh = dict(zip(booster.plan.mesh.names, booster.plan.mesh.place, strict=True)), booster.plan.mesh
        each = rows // mesh.extent("dp")
        own = {name: leaf[place["dp"] * each :][:each] for name, leaf in batch_of(rows).items()}
        found.append(steps(booster, model(4), [own, own], 1))
    return found


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("ranks", "which"), [(2, [0, 1, 2]), (4, [1])])
def test_real_ranks_are_the_virtual_ones(ranks: int, which: list[int]) -> None:
    cases = [CASES[each] for each in which]
    by_rank = run_on_ranks(ranks, on_this_rank, ranks, cases)
    for case, (arguments, rows) in enumerate(cases):
        booster = fb.Booster(plugin=PipelineParallel(**arguments), mesh=fb.virtual_mesh(ranks))
        expected = steps(booster, model(4), [batch_of(rows)] * 2, 1)
        for found in by_rank:
            assert_same(found[case], expected)


def test_splitting() -> None:
    tied = fb.models.gpt2(vocab_size=8, n_positions=4, n_embd=4, n_layer=11, n_head=2)
    split = pipeline.split(tied, 4)
    homes = dict(split.homes)
    assert [sum(homes[f"h.{n}.ln_1.weight"] == stage for n in range(11)) for stage in range(4)] == [2, 3, 3, 3]
    assert homes["wte.weight"] == homes["wpe.weight"] == 0 and homes["ln_f.weight"] == 3
    uneven = dict(pipeline.split(tied, 3, (2, 5, 4)).homes)
    assert [uneven[f"h.{n}.ln_1.weight"] for n in range(11)] == [0] * 2 + [1] * 5 + [2] * 4
    with pytest.raises(ValueError, match="stages: 12, but the model has 11 layers"):
        pipeline.split(tied, 12)
    with pytest.raises(ValueError, match=r"num_layers_per_stage: \[5, 5\], expected 2 numbers"):
        pipeline.split(tied, 2, (5, 5))
    with pytest.raises(ValueError, match="layers: 'blocks' is no list of layers"):
        pipeline.split(tied, 2, layers="blocks")


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="pp_style: '2f2b'"):
        PipelineParallel(pp_style="2f2b")
    with pytest.raises(ValueError, match="num_microbatches and microbatch_size"):
        PipelineParallel(num_microbatches=2, microbatch_size=2)
    with pytest.raises(ValueError, match="num_model_chunks: 2 with pp_style='1f1b'"):
        PipelineParallel(num_model_chunks=2)
    with pytest.raises(ValueError, match="pp_size: 3 does not divide 4 ranks"):
        fb.Booster(plugin=PipelineParallel(pp_size=3), mesh=fb.virtual_mesh(4))
    assert dataclasses.replace(PipelineParallel(), microbatch_size=4).microbatches(9) == 3


@pytest.mark.parametrize("style", ["1f1b", "zbv"])
def test_execute_pipeline_is_a_forward_and_a_backward(style: str) -> None:
    """The imperative loop's loss, outputs and update over a pipeline, beside torch's own."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()) for _ in range(4)]
    module = torch.nn.Sequential(*blocks).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    x = torch.randn(6, 3, dtype=torch.float64)
    booster = fb.Booster(plugin=PipelineParallel(2, style, num_microbatches=3), mesh=fb.virtual_mesh(4))
    boosted, handle, *_ = booster.boost(module, optimizer)
    batches = iter([x, x])
    found = execute_pipeline(batches, boosted, lambda out, rows: (out - rows).square().mean(), handle, True, True)
    outputs = module(x)
    loss = (outputs - x).square().mean()
    assert_same(found, {"loss": loss.detach(), "outputs": outputs.detach()})
    handle.step()
    loss.backward()
    optimizer.step()
    assert_same(dict(boosted.state_dict()), dict(module.state_dict()), 1e-9)
    after = execute_pipeline(batches, boosted, lambda out, rows: (out - rows).square().mean())
    assert_same(after["loss"], (module(x) - x).square().mean().detach(), 1e-9)
    assert after["outputs"] is None


def test_remat_keeps_the_inputs_of_layers_alone() -> None:
    """The same gradients, less left behind by F; by part of the layers, or by number at each stage."""
    made = model(6)
    split, batch = pipeline.split(made, 2), {"batch": batch_of(4), "key": fb.random.key(2)}
    params = made.init(fb.random.key(0))

    def fn(params: Any, microbatch: Any) -> Any:
        return loss_fn(params, microbatch["batch"], microbatch["key"])[0], ()

    def kept(amount: Any) -> list[int]:
        objective = pipeline.Objective(fn, split, remat=split.remat(amount))
        outcome = pipeline.run(pipeline.zero_bubble_v(1, 1), pipeline.Program(objective, params, [batch]))
        for stage, terms in outcome.gradients.items():
            assert_same(terms, whole.gradients[stage])
        return [len(stage.forward.residuals) for stage in objective.traced(params, batch).stages]

    objective = pipeline.Objective(fn, split)
    whole = pipeline.run(pipeline.zero_bubble_v(1, 1), pipeline.Program(objective, params, [batch]))
    everything, half, some, nothing = kept(0.0), kept(0.5), kept((3, 0)), kept(1.0)
    assert everything[0] > half[0] > nothing[0] and everything[1] > half[1] > nothing[1]
    assert some == [nothing[0], everything[1]]
    with pytest.raises(ValueError, match=r"remat: \(4, 0\), expected a part from 0 to 1"):
        split.remat((4, 0))


def step_with_a_wrong_token() -> None:
    booster = fb.Booster(device="cpu", plugin=PipelineParallel(pp_size=2, num_microbatches=2))
    batch = batch_of(4)
    batch["tokens"][3, 0] = VOCABULARY  # only the first stage looks it up
    with pytest.raises(IndexError):
        steps(booster, model(2), [batch], 1)


@pytest.mark.xdist_group("ranks")
def test_a_stage_that_fails_ends_all_ranks_with_its_error() -> None:
    """The second stage waits for what the first will never send: it is ended, with the error of the first."""
    with pytest.raises(RankError, match="RankFailure: rank 0 failed in train step 1: IndexError"):
        run_on_ranks(2, step_with_a_wrong_token)
