"""Generation: Hugging Face's greedy decoding is the reference; sampling obeys its laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from functional_booster.booster import Booster
from functional_booster.generate import _cut, generate
from functional_booster.kernels import random, tree
from functional_booster.models import Model, from_hf, gpt2
from functional_booster.optim import sgd

SIZES = {"vocab_size": 23, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}


def prompt(rows: int = 3, length: int = 4) -> torch.Tensor:
    return torch.randint(23, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def small() -> tuple[Model, tree.Tree]:
    model = gpt2(**SIZES)
    return model, tree.map(lambda leaf: 8 * leaf, model.init(random.key(0)))


def scripted(logits: torch.Tensor) -> Model:
    """A model without hidden and head, whose logits at every token are these (V,)."""
    return Model(
        init=lambda key: {},
        apply=lambda params, ids: logits.expand(*ids.shape, -1),
        abstract={},
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_greedy_is_that_of_hugging_face(family: str) -> None:
    torch.manual_seed(0)
    if family == "gpt2":
        module: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**SIZES, bos_token_id=1, eos_token_id=5, initializer_range=0.3)
        )
    else:
        module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=23,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                initializer_range=0.3,
                eos_token_id=5,
            )
        )
    model, params = from_hf(module.eval())
    expected = module.generate(
        prompt(6), attention_mask=torch.ones_like(prompt(6)), do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    actual = generate(model, params, prompt(6), temperature=0, max_new_tokens=12, eos_token_id=5, pad_token_id=0)
    assert torch.equal(actual, expected)
    assert len(set(actual[:, 4:].flatten().tolist())) > 4  # not one token over and over


def test_beyond_the_longest_row_the_latest_tokens_are_read(small: tuple[Model, tree.Tree]) -> None:
    model, params = small
    rows = generate(model, params, prompt(2, 14), temperature=0, max_new_tokens=8)
    assert rows.shape == (2, 22)
    for end in range(17, 22):
        logits = model.apply(params, rows[:, end - 16 : end])[:, -1]
        assert torch.equal(rows[:, end], logits.argmax(-1))


def test_a_sample_is_a_function_of_the_key_and_its_own_row(small: tuple[Model, tree.Tree]) -> None:
    model, params = small
    key = random.key(3)
    rows = generate(model, params, prompt(), key=key, max_new_tokens=6)
    assert torch.equal(rows, generate(model, params, prompt(), key=key, max_new_tokens=6))
    assert not torch.equal(rows, generate(model, params, prompt(), key=random.key(4), max_new_tokens=6))
    others = prompt()
    others[1:] = (others[1:] + 1) % 23
    assert torch.equal(rows[:1], generate(model, params, others, key=key, max_new_tokens=6)[:1])
    assert torch.equal(rows[:2], generate(model, params, prompt()[:2], key=key, max_new_tokens=6))
    same = prompt()[:1].expand(3, -1)
    drawn = generate(model, params, same, key=key, max_new_tokens=6)
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_have_the_probabilities_of_the_model(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    count = 4000
    start = torch.zeros(count, 1, dtype=torch.int64)
    drawn = generate(scripted(logits), {}, start, key=random.key(0), max_new_tokens=2, temperature=temperature)[:, 1:]
    expected = (logits / temperature).softmax(-1) * drawn.numel()
    chi_squared = ((torch.bincount(drawn.flatten(), minlength=4) - expected) ** 2 / expected).sum()
    assert chi_squared < 16.3  # 0.999 quantile, 3 degrees of freedom


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {3, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.01}, {3}),
        ({"top_p": 0.39}, {3}),  # probabilities: 0.1, 0.3, 0.2, 0.4
        ({"top_p": 0.41}, {3, 1}),
        ({"top_p": 0.75}, {3, 1, 2}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.5}, {3, 1}),
        ({"top_k": 2, "top_p": 0.56}, {3}),  # 4/7 of what top_k leaves
    ],
)
def test_top_k_and_top_p_leave_the_likeliest(options: dict[str, Any], allowed: set[int]) -> None:
    model = scripted(torch.tensor([0.1, 0.3, 0.2, 0.4]).log())
    start = torch.zeros(200, 1, dtype=torch.int64)
    drawn = generate(model, {}, start, key=random.key(0), max_new_tokens=1, **options)[:, 1:]
    assert set(drawn.flatten().tolist()) == allowed


def test_top_k_and_top_p_are_those_of_hugging_face() -> None:
    logits = torch.randn(50, 23, generator=torch.Generator().manual_seed(0))
    for top_k in (1, 4, 22):
        expected = transformers.TopKLogitsWarper(top_k)(None, logits)
        assert torch.equal(_cut(logits, top_k, None), expected)
        for top_p in (0.1, 0.5, 0.95):
            both = transformers.TopPLogitsWarper(top_p)(None, expected)
            assert torch.equal(_cut(logits, top_k, top_p), both)


def test_a_row_ends_at_eos_and_all_rows_ended_it_stops(small: tuple[Model, tree.Tree]) -> None:
    model, params = small
    free = generate(model, params, prompt(8), key=random.key(1), max_new_tokens=12)
    eos = int(free[0, 6])
    cut = generate(model, params, prompt(8), key=random.key(1), max_new_tokens=12, eos_token_id=eos, pad_token_id=22)
    for row, whole in zip(cut, free, strict=True):
        ends = (whole[4:] == eos).nonzero().flatten()
        end = 4 + int(ends[0]) + 1 if len(ends) else len(row)
        assert torch.equal(row[:end], whole[:end])
        assert (row[end:] == 22).all()
    alone = generate(model, params, prompt(8)[:1], key=random.key(1), max_new_tokens=12, eos_token_id=eos)
    assert torch.equal(alone, free[:1, : 4 + int((free[0, 4:] == eos).nonzero()[0]) + 1])


def test_nothing_new_is_the_prompt_in_storage_of_its_own(small: tuple[Model, tree.Tree]) -> None:
    given = prompt()
    same = generate(*small, given, temperature=0, max_new_tokens=0)
    assert torch.equal(same, given)
    assert same.data_ptr() != given.data_ptr()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": torch.zeros(1, 3)}, TypeError, "prompt: torch.float32"),
        ({"prompt": torch.zeros(3, dtype=torch.int64)}, ValueError, r"prompt: shape \(3,\)"),
        ({"prompt": [[1, 2]]}, TypeError, "prompt: list, expected a tensor of torch.int64"),
        ({"prompt": torch.zeros(3, 0, dtype=torch.int64)}, ValueError, r"prompt: shape \(3, 0\), expected .* a token"),
        ({"prompt": torch.zeros(0, 3, dtype=torch.int64)}, ValueError, r"prompt: shape \(0, 3\), expected .* a row"),
        ({"prompt": prompt(1, 17)}, ValueError, "prompt: 17 tokens a row, but the model reads 16"),
        ({"prompt": torch.tensor([[3, 23]])}, ValueError, "prompt: tokens from 3 to 23, but the vocabulary is 0 to 22"),
        ({"prompt": torch.tensor([[3, -1]])}, ValueError, "prompt: tokens from -1 to 3, but the vocabulary is 0 to 22"),
        ({"prompt": prompt().to("meta")}, ValueError, "prompt: on meta, expected cpu, as params"),
        ({"model": torch.nn.Linear(1, 1)}, TypeError, "model: Linear, expected a fb.Model; for an nn.Module"),
        ({"params": None}, ValueError, r"params do not fit the model:\n  h\.0\.attn"),
        ({"params": torch.zeros(3)}, ValueError, r"params do not fit the model:\n  Tensor: unexpected\n  h\.0\.attn"),
        ({"params": []}, ValueError, r"params do not fit the model:\n  h\.0\.attn"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens: got -1"),
        ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens: got float 2.5"),
        ({"temperature": -0.5}, ValueError, "temperature: got -0.5"),
        ({"temperature": "hot"}, TypeError, "temperature: got str 'hot'"),
        ({"key": None}, ValueError, "key: missing"),
        ({"key": 0}, TypeError, r"key: expected int32 of shape \(2,\), as fb.random.key makes it, got int"),
        ({"top_k": 0}, ValueError, "top_k: got 0"),
        ({"top_k": 2.0}, TypeError, "top_k: got float 2.0"),
        ({"top_p": 0.0}, ValueError, "top_p: 0.0"),
        ({"top_p": 1.5}, ValueError, "top_p: 1.5"),
        ({"eos_token_id": 23}, ValueError, "eos_token_id: 23, expected a token below the vocabulary's 23"),
        ({"pad_token_id": 1}, ValueError, "pad_token_id: given without eos_token_id"),
    ],
)
def test_bad_arguments_are_named(
    small: tuple[Model, tree.Tree], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, params = small
    arguments: dict[str, Any] = {"model": model, "params": params, "prompt": prompt(), "max_new_tokens": 2}
    with pytest.raises(error, match=message):
        generate(**arguments | {"key": random.key(0)} | changes)


def test_params_that_are_not_the_models_are_listed(small: tuple[Model, tree.Tree]) -> None:
    model, params = small
    changed = {name: leaf for name, leaf in params.items() if name != "wte"} | {"wide": params["wte"], "ln_f": {}}
    changed["wpe"] = {"weight": torch.zeros(3, 16)}
    with pytest.raises(ValueError, match="params do not fit the model:") as raised:
        generate(model, changed, prompt(), temperature=0, max_new_tokens=1)
    assert str(raised.value).splitlines()[1:] == [
        "  ln_f.bias: missing",
        "  ln_f.weight: missing",
        "  wide.weight: unexpected",
        "  wpe.weight: shape (3, 16), expected (16, 16)",
        "  wte.weight: missing",
    ]
    state = Booster(device="cpu").init(model, sgd(0.1), key=random.key(0))
    with pytest.raises(TypeError, match=r"params: TrainState, expected a tree of parameters: state\.params"):
        generate(model, state, prompt(), temperature=0, max_new_tokens=1)
