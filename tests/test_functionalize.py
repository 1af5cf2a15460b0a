"""functionalize: any module as pure functions, equal to the module, which stays as it was."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import functional_booster as fb
from functional_booster import losses
from functional_booster.functionalize import functionalize
from functional_booster.kernels import random, transforms, tree

VOCABULARY, TOKENS = 23, 7


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels, momentum=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU())
        self.blocks = nn.Sequential(Residual(4), Residual(4))
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6, padding_idx=0)
        self.rnn = kind(6, 5, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0][:, -1])


class Case(NamedTuple):
    build: Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    padded: bool = False
    tolerance: float = 1e-12  # of float64 gradients
    empty_rows: bool = True  # whether the module itself survives a row of padding alone in float64


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (3, TOKENS))}


def few_tokens() -> dict[str, torch.Tensor]:  # a trace unrolls a recurrence
    return {"tokens": torch.randint(3, VOCABULARY, (3, 2))}


def two_texts() -> dict[str, torch.Tensor]:
    return tokens() | {"decoder_input_ids": torch.randint(3, VOCABULARY, (3, 4))}


def images(size: int, name: str) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {name: torch.randn(3, 3, size, size)}


SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTHS = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, **SPECIAL
)
GROUPED = WIDTHS | {"num_key_value_heads": 2}


def hf(model: str, config: str, **fields: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**fields))


def gpt2(**fields: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
    return hf("GPT2LMHeadModel", "GPT2Config", **sizes | SPECIAL | fields)()


CASES = {
    "gpt2": Case(gpt2, tokens, padded=True),
    "llama": Case(hf("LlamaForCausalLM", "LlamaConfig", **GROUPED), tokens, padded=True),
    "mistral-window": Case(hf("MistralForCausalLM", "MistralConfig", sliding_window=3, **GROUPED), tokens, padded=True),
    "qwen3": Case(hf("Qwen3ForCausalLM", "Qwen3Config", head_dim=4, **GROUPED), tokens, padded=True),
    # Its own attention, eager, has its softmax in float32 whatever the dtype.
    "gemma2-softcap": Case(
        hf(
            "Gemma2ForCausalLM",
            "Gemma2Config",
            head_dim=4,
            sliding_window=3,
            query_pre_attn_scalar=4,
            **GROUPED | {"num_hidden_layers": 2},  # one with a window, one without
        ),
        tokens,
        padded=True,
        tolerance=1e-6,
        empty_rows=False,
    ),
    "bert": Case(hf("BertForMaskedLM", "BertConfig", **WIDTHS), tokens, padded=True),
    "opt": Case(
        hf(
            "OPTForCausalLM",
            "OPTConfig",
            word_embed_proj_dim=16,
            ffn_dim=24,
            max_position_embeddings=16,
            **{name: value for name, value in WIDTHS.items() if name != "intermediate_size"},
        ),
        tokens,
        padded=True,
    ),
    "t5": Case(
        hf(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=1,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        two_texts,
        padded=True,
    ),
    # Does not go through AttentionInterface: keeps its own attention.
    "gpt-neo": Case(
        hf(
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=3,
            **SPECIAL,
        ),
        tokens,
        padded=True,
    ),
    "vit": Case(
        hf(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
            num_labels=5,
        ),
        images(8, "pixel_values"),
    ),
    "hf-resnet": Case(
        hf(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=4,
            hidden_sizes=[4, 8],
            depths=[1, 1],
            layer_type="basic",
            num_labels=5,
        ),
        images(16, "pixel_values"),
    ),
    "resnet": Case(ResNet, images(8, "x")),
    "lstm": Case(lambda: Recurrent(nn.LSTM), few_tokens),
    "gru": Case(lambda: Recurrent(nn.GRU), few_tokens),
    "transformer-encoder": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2),
        lambda: {"src": torch.randn(3, TOKENS, 8)},
    ),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    case = CASES[name]
    module, inputs = case.build().eval().to(dtype), case.inputs()
    for buffer in module.buffers():  # not the values that a forgotten buffer would have by luck
        if buffer.is_floating_point():
            buffer.mul_(1.25)
    return module, {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def paddings(name: str) -> list[dict[str, torch.Tensor]]:
    right, left = torch.ones(2, 3, TOKENS, dtype=torch.int64).unbind()
    right[0, 4:], left[1, :3] = 0, 0
    return [{}, {"attention_mask": right}, {"attention_mask": left}] if CASES[name].padded else [{}]


def logits(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def valid(name: str, values: torch.Tensor, padding: dict[str, torch.Tensor]) -> torch.Tensor:
    """What padding does not make meaningless; the decoder of an encoder-decoder model is not padded."""
    return values[padding["attention_mask"].bool()] if padding and name != "t5" else values


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Everything about a module that something could have changed."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {
        "tensors": [
            (name, id(t), t.data_ptr(), t._version, t.requires_grad, t.grad, t.detach().flatten().tolist())
            for name, t in tensors
        ],
        "flags": [(name, part.training, type(part)) for name, part in module.named_modules()],
        "attributes": [
            {key: repr(value) for key, value in vars(part).items() if not isinstance(value, torch.Tensor)}
            for part in module.modules()
        ],
        "config": repr(getattr(module, "config", None)),
        "attention": getattr(getattr(module, "config", None), "_attn_implementation", None),
    }


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_the_modules_own(name: str) -> None:
    module, inputs = made(name)
    before = fingerprint(module)
    model = functionalize(module)
    params = model.init()
    for padding in paddings(name):
        expected = valid(name, logits(module(**inputs, **padding)), padding)
        given = valid(name, logits(model.apply(params, **inputs, **padding)), padding)
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)
    assert fingerprint(module) == before


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_modules_own(name: str) -> None:
    module, inputs = made(name, torch.float64)
    model = functionalize(module)
    params = model.init()
    padding = paddings(name)[-1 if CASES[name].empty_rows else 0]
    loss = valid(name, logits(module(**inputs, **padding)), padding).square().sum()
    loss.backward()

    def objective(params: Any) -> torch.Tensor:
        return valid(name, logits(model.apply(params, **inputs, **padding)), padding).square().sum()

    grads, value = transforms.grad_and_value(objective)(params)
    torch.testing.assert_close(value, loss.detach(), rtol=CASES[name].tolerance, atol=0)
    for path, parameter in module.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        scale = expected.abs().max().item()
        assert (grads[path] - expected).abs().max().item() <= CASES[name].tolerance * max(scale, 1.0) * 10, path

    leaves = {path: value.requires_grad_() for path, value in model.init().items()}  # plain autograd
    objective(leaves).backward()
    for path, leaf in leaves.items():
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, grads[path], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_one_graph_holds_no_values(name: str) -> None:
    module, inputs = made(name)
    model = functionalize(module)
    padding = paddings(name)[-1]
    args = (model.init(), model.buffers(), inputs | padding)

    def step(params: Any, buffers: Any, inputs: Any) -> Any:
        return transforms.grad_and_value(lambda p: logits(model.apply(p, buffers=buffers, **inputs)).square().mean())(
            params
        )

    leaves, structure = tree.flatten(args)
    traced = make_fx(lambda *leaves: tree.leaves(step(*tree.unflatten(structure, leaves))), tracing_mode="fake")(
        *leaves
    )
    held = [getattr(traced, str(node.target)) for node in traced.graph.nodes if node.op == "get_attr"]
    assert all(value.numel() <= 4 for value in held)
    for given, expected in zip(traced(*leaves), tree.leaves(step(*args)), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "mistral-window", "t5", "vit", "resnet", "transformer-encoder"])
def test_per_sample_gradients_are_those_of_a_loop(name: str) -> None:
    module, inputs = made(name, torch.float64)
    model = functionalize(module)
    params, batch = model.init(), inputs | paddings(name)[-1]

    def loss(params: Any, row: dict[str, torch.Tensor]) -> torch.Tensor:
        return logits(model.apply(params, **{k: v[None] for k, v in row.items()})).square().mean()

    together = transforms.vmap(transforms.grad(loss), in_axes=(None, 0))(params, batch)
    for index in range(3):
        alone = transforms.grad(loss)(params, {k: v[index] for k, v in batch.items()})
        for path, expected in alone.items():
            torch.testing.assert_close(together[path][index], expected, rtol=1e-10, atol=1e-12)


def test_an_ensemble_trains_under_vmap_with_buffers_of_its_own() -> None:
    module, inputs = made("resnet", torch.float64)
    model = functionalize(module.requires_grad_(True))
    members = [
        tree.map(lambda leaf, by=by: leaf + by if leaf.is_floating_point() else leaf, model.init()) for by in (0, 0.1)
    ]
    buffers = tree.map(lambda leaf: torch.stack([leaf, leaf]), model.buffers())
    # A cumulative average reads its counter by value; give the stem a fixed momentum.
    module.stem[1].momentum = 0.1
    model = functionalize(module)

    def train(params: Any, buffers: Any) -> Any:
        return model.apply(params, inputs["x"], train=True, buffers=buffers, mutable=True)

    outputs, after = transforms.vmap(train)(tree.map(lambda *leaves: torch.stack(leaves), *members), buffers)
    for index, member in enumerate(members):
        expected, expected_buffers = train(member, model.buffers())
        torch.testing.assert_close(outputs[index], expected, rtol=1e-10, atol=1e-12)
        for path, value in expected_buffers.items():
            torch.testing.assert_close(after[path][index], value, rtol=1e-10, atol=1e-12)


def test_bfloat16_and_position_outputs() -> None:
    module, inputs = made("llama", torch.bfloat16)
    model = functionalize(module)
    given = model.apply(model.init(), **inputs)
    assert given.logits.dtype == torch.bfloat16
    assert torch.equal(given.logits, module(**inputs).logits)
    assert given["logits"] is given.logits
    assert getattr(given, "past_key_values", None) is None


def test_attention_sinks() -> None:
    torch.manual_seed(0)
    fields = GROUPED | {"head_dim": 4, "sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1}
    module = hf("GptOssForCausalLM", "GptOssConfig", **fields)().eval()
    for part in module.modules():
        if hasattr(part, "sinks"):
            part.sinks.data.normal_()
    model, inputs = functionalize(module), tokens()
    given = model.apply(model.init(), **inputs).logits
    torch.testing.assert_close(given, module(**inputs).logits, atol=1e-5, rtol=0)


def test_packed_sequences_keep_apart() -> None:
    module, inputs = made("llama")
    model = functionalize(module)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 3)
    expected = module(**inputs, position_ids=positions, use_cache=False).logits  # with a cache they do not
    given = model.apply(model.init(), **inputs, position_ids=positions).logits
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)
    alone = module(inputs["input_ids"][:, :3]).logits
    torch.testing.assert_close(given[:, :3], alone, atol=1e-5, rtol=0)


def test_without_padding_attention_stays_causal_by_flag() -> None:
    module, inputs = made("llama")
    seen: list[tuple[bool, bool]] = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                seen.append((args[3] is None, args[5]))
            return func(*args, **(kwargs or {}))

    model = functionalize(module)
    with Spy():
        model.apply(model.init(), **inputs)
    assert seen == [(True, True)]


def test_the_module_stays_untouched_by_everything() -> None:
    module, inputs = made("resnet")
    module.train()
    module.blocks[0].eval()
    module.head.bias.requires_grad_(False)
    module(inputs["x"]).sum().backward()
    before = fingerprint(module)
    model = functionalize(module)
    params, buffers = model.init(), model.buffers()
    model.apply(params, inputs["x"])
    model.apply(params, inputs["x"], train=True, mutable=True)
    with pytest.raises(ValueError, match="writes buffers"):
        model.apply(params, inputs["x"], train=True)
    with pytest.raises(RuntimeError):
        model.apply(params, torch.ones(1))
    transforms.grad(lambda p: model.apply(p, inputs["x"]).sum())(params)
    for value in [*params.values(), *buffers.values()]:
        value.zero_()
    assert fingerprint(module) == before


def test_one_call_leaves_nothing_for_the_next() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.calls = 0
            self.seen: list[torch.Tensor] = []
            self.last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(x)
            self.calls += len(self.seen)
            self.last = x * self.weight
            return self.last * self.calls

    module = Counting()
    model = functionalize(module)
    first = model.apply(model.init(), torch.ones(2))
    assert torch.equal(model.apply(model.init(), torch.ones(2)), first)
    assert module.calls == 0
    assert module.last is None


def test_threads_do_not_meet() -> None:
    module, inputs = made("gpt2")
    model = functionalize(module)
    params = [tree.map(lambda leaf, by=by: leaf * by, model.init()) for by in (1.0, 0.5)]
    expected = [model.apply(p, **inputs).logits for p in params]
    results: list[list[torch.Tensor]] = [[], []]

    def work(index: int) -> None:
        results[index] = [model.apply(params[index], **inputs).logits for _ in range(10)]

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(value, expected[index]) for index in (0, 1) for value in results[index])
    assert len(results[0]) == len(results[1]) == 10


def test_a_tied_parameter_is_one_leaf_with_the_summed_gradient() -> None:
    module = gpt2()
    model = functionalize(module)
    assert "transformer.wte.weight" in model.abstract
    assert "lm_head.weight" not in model.abstract
    assert set(model.init()) == set(model.abstract) == dict(module.named_parameters()).keys()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.kept = [self.first.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) + self.kept[0].sum()

    model = functionalize(Twice())
    x, w = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    given = transforms.grad(lambda p: model.apply(p, x).sum())({"first.weight": w})
    expected = torch.func.grad(lambda w: (x @ w.T @ w.T + w.sum()).sum())(w)
    torch.testing.assert_close(given["first.weight"], expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"'second.weight' is unexpected: it is tied to 'first.weight'"):
        model.apply({"first.weight": w, "second.weight": w}, x)


def test_abstract_describes_each_leaf() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3, dtype=torch.float64)
            self.linear.bias.requires_grad_(False)
            self.table = nn.Parameter(torch.arange(4), requires_grad=False)
            self.register_buffer("shift", torch.ones(3), persistent=False)
            self.register_buffer("nothing", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.shift + self.table.sum()

    module = Mixed()
    model = functionalize(module)
    infos = {name: (info.shape, info.dtype, info.trainable) for name, info in model.abstract.items()}
    assert infos == {
        "linear.weight": ((3, 2), torch.float64, True),
        "linear.bias": ((3,), torch.float64, False),
        "table": ((4,), torch.int64, False),
    }
    assert model.name == "Mixed"
    assert model.config is None
    assert model.loss is None
    assert list(model.buffers()) == ["shift"]
    x = torch.ones(1, 2, dtype=torch.float64)
    assert torch.equal(model.apply(model.init(), x), module(x))
    unshifted = model.apply(model.init(), x, buffers={"shift": torch.zeros(3)})
    torch.testing.assert_close(unshifted + 1, module(x), rtol=1e-12, atol=1e-12)
    model.init()["table"].zero_()
    model.buffers()["shift"].zero_()
    assert torch.equal(model.apply(model.init(), x), module(x))


@pytest.mark.parametrize("name", ["resnet", "hf-resnet"])
def test_new_buffers_are_those_of_the_module_in_training(name: str) -> None:
    module, inputs = made(name, torch.float64)
    model = functionalize(module)
    buffers = model.buffers()
    twin = copy.deepcopy(module).train()
    for _ in range(2):
        expected = logits(twin(**inputs))
        outputs, buffers = model.apply(model.init(), **inputs, train=True, buffers=buffers, mutable=True)
        torch.testing.assert_close(logits(outputs), expected, rtol=1e-12, atol=1e-12)
    assert buffers.keys() == dict(twin.named_buffers()).keys()
    for path, value in twin.named_buffers():
        torch.testing.assert_close(buffers[path], value, rtol=1e-12, atol=1e-12)
    assert any(path.endswith("num_batches_tracked") and value == 2 for path, value in buffers.items())


def test_new_buffers_come_through_grad_and_a_trace() -> None:
    module, inputs = made("hf-resnet")
    model = functionalize(module)
    params, buffers = model.init(), model.buffers()

    def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        outputs, new = model.apply(params, x, train=True, buffers=buffers, mutable=True)
        return outputs.logits.square().mean(), new

    _, expected = model.apply(params, **inputs, train=True, buffers=buffers, mutable=True)
    leaves, structure = tree.flatten((params, buffers, inputs["pixel_values"]))

    def step(*leaves: torch.Tensor) -> list[torch.Tensor]:
        return tree.leaves(transforms.grad(loss, has_aux=True)(*tree.unflatten(structure, leaves))[1])

    for given in (step(*leaves), make_fx(step, tracing_mode="fake")(*leaves)(*leaves)):
        for value, wanted in zip(given, tree.leaves(expected), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(value, model.buffers()[path]) for path, value in buffers.items())


def test_submodules_keep_their_modes_in_training() -> None:
    module, inputs = made("resnet", torch.float64)
    for root, frozen in ((True, True), (True, False), (False, True)):
        module.train()
        module.blocks[0].norm.train(not frozen)
        module.training = root
        before = fingerprint(module)
        model = functionalize(module)
        twin = copy.deepcopy(module)
        if not root:  # a module in evaluation mode is wholly put into training
            twin.train()
        outputs, buffers = model.apply(model.init(), **inputs, train=True, mutable=True)
        torch.testing.assert_close(outputs, twin(**inputs), rtol=1e-12, atol=1e-12)
        for name, value in twin.named_buffers():
            torch.testing.assert_close(buffers[name], value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            model.apply(model.init(), **inputs), copy.deepcopy(module).eval()(**inputs), rtol=1e-12, atol=1e-12
        )
        assert fingerprint(module) == before


def test_modes_by_name() -> None:
    module, inputs = made("resnet", torch.float64)
    model = functionalize(module)
    module.stem[1].train()
    modes = {name: part.training for name, part in module.named_modules()}
    outputs, buffers = model.apply(model.init(), **inputs, train=modes, mutable=True)
    torch.testing.assert_close(outputs, module(**inputs), rtol=1e-12, atol=1e-12)
    assert [name for name, value in buffers.items() if name.endswith("tracked") and value] == [
        "stem.1.num_batches_tracked"
    ]
    with pytest.raises(ValueError, match=r"ResNet writes buffers in training: stem\.1\.running_mean"):
        model.apply(model.init(), **inputs, train=modes)
    with pytest.raises(
        ValueError, match="expected a mode for each submodule of ResNet; missing or unknown: 'head', 'x'"
    ):
        model.apply(model.init(), **inputs, train={"x": True} | {n: m for n, m in modes.items() if n != "head"})


def test_written_buffers_are_named_and_no_others() -> None:
    class Writer(nn.Module):
        queue: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            for name in ("average", "queue", "still"):
                self.register_buffer(name, torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            self.queue[:1].copy_(x.detach()[:1, 0])
            return self.norm(x) + self.still

    module = Writer()
    model = functionalize(module)
    x = torch.randn(5, 2)
    with pytest.raises(ValueError, match="Writer writes buffers in training") as error:
        model.apply(model.init(), x, train=True)
    named = str(error.value).split("training: ")[1].split(";")[0].split(", ")
    assert sorted(named) == ["average", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "queue"]
    own = model.buffers()
    before = {path: value.clone() for path, value in own.items()}
    model.apply(model.init(), x, buffers=own)  # evaluation drops what it writes
    assert all(torch.equal(own[path], value) for path, value in before.items())
    _, after = model.apply(model.init(), x, train=True, buffers=own, mutable=True)
    assert all(torch.equal(own[path], value) for path, value in before.items())
    torch.testing.assert_close(after["average"], 0.1 * x.mean(0))
    assert torch.equal(after["still"], own["still"])
    assert after["queue"][0] == x[0, 0]
    frozen = functionalize(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)))
    frozen.apply(frozen.init(), x, train=True)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_parametrized_modules(norm: Callable[..., nn.Module]) -> None:
    module = norm(nn.Linear(3, 4)).eval()
    model = functionalize(module)
    x = torch.randn(2, 3)
    torch.testing.assert_close(model.apply(model.init(), x), module(x))
    outputs, after = model.apply(model.init(), x, train=True, mutable=True)
    twin = copy.deepcopy(module).train()
    torch.testing.assert_close(outputs, twin(x))
    for path, value in twin.named_buffers():
        torch.testing.assert_close(after[path], value)


def test_hook_based_weight_norm_is_computed_from_the_given_weights() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = nn.utils.weight_norm(nn.Linear(3, 4))
    model = functionalize(module)
    x = torch.randn(2, 3)
    torch.testing.assert_close(model.apply(model.init(), x), module(x))
    doubled = {path: value * 2 if path == "weight_g" else value for path, value in model.init().items()}
    torch.testing.assert_close(model.apply(doubled, x), 2 * module(x) - module.bias)


def assert_drawn_from_the_key(first: torch.Tensor, again: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Dropped(nn.Module):
    """Two sites of one kind of dropout."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.second = layer, copy.deepcopy(layer)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


DROPOUTS = {
    "dropout": (nn.Dropout(0.3), (64, 80), 0),
    "dropout1d": (nn.Dropout1d(0.3), (64, 80, 3), 1),
    "dropout2d": (nn.Dropout2d(0.3), (64, 80, 2, 2), 2),
    "dropout3d": (nn.Dropout3d(0.3), (64, 80, 1, 2, 2), 3),
    "alpha": (nn.AlphaDropout(0.3), (64, 80), 0),
    "feature-alpha": (nn.FeatureAlphaDropout(0.3), (64, 80, 3), 1),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_is_drawn_from_the_key(name: str) -> None:
    layer, shape, spatial = DROPOUTS[name]
    model = functionalize(Dropped(layer))
    x, key = torch.ones(shape), random.key(3)
    state = torch.get_rng_state()
    first, second = model.apply({}, x, key=key, train=True)
    again, _ = model.apply({}, x, key=key, train=True)
    other, _ = model.apply({}, x, key=random.key(4), train=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert_drawn_from_the_key(first, again, other)
    assert not torch.equal(first, second)
    assert torch.equal(model.apply({}, x, key=key)[0], x)  # evaluation drops nothing
    values, counts = first.unique(return_counts=True)
    assert len(values) == 2
    share = counts[0].item() / first.numel()
    assert abs(share - 0.3) < 5 * (0.21 / (64 * 80)) ** 0.5  # five standard deviations
    if "alpha" not in name:
        torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.7]), rtol=1e-4, atol=0)
    if spatial:
        assert torch.equal(first.flatten(2).amin(-1), first.flatten(2).amax(-1))
    if name in ("dropout1d", "dropout3d"):  # these take one example, (C, ...), too
        single, _ = model.apply({}, x[0], key=key, train=True)
        assert torch.equal(single.flatten(1).amin(-1), single.flatten(1).amax(-1))
        assert single.unique().numel() == 2


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    model = functionalize(nn.AlphaDropout(0.4))
    x = torch.randn(400, 400, generator=torch.Generator().manual_seed(0))
    dropped = model.apply({}, x, key=random.key(0), train=True)
    assert abs(dropped.mean().item()) < 0.02
    assert abs(dropped.var().item() - 1) < 0.03


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "transformer-encoder"])
def test_training_draws_from_the_key_and_needs_it(name: str) -> None:
    module, inputs = made(name)
    model = functionalize(module)
    params = model.init()
    state = torch.get_rng_state()
    first, again, other = (
        logits(model.apply(params, **inputs, key=random.key(seed), train=True)) for seed in (0, 0, 1)
    )
    assert_drawn_from_the_key(first, again, other)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"\(\w+\) draws random numbers \(dropout, p=0.1\): apply needs a key"):
        model.apply(params, **inputs, train=True)


def test_attention_weights_are_dropped_by_key() -> None:
    module = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.5)
    model = functionalize(module)
    inputs = tokens()
    first, again, other = (
        model.apply(model.init(), **inputs, key=random.key(seed), train=True).logits for seed in (0, 0, 1)
    )
    assert_drawn_from_the_key(first, again, other)
    with pytest.raises(ValueError, match=r"transformer.h.0.attn \(GPT2Attention\) draws"):
        model.apply(model.init(), **inputs, train=True)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

        def forward(self, x: torch.Tensor, weights: bool) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=weights)[0]

    model, x = functionalize(Heads()), torch.randn(2, 5, 4)
    for weights in (False, True):
        first, again, other = (model.apply(model.init(), x, weights, key=random.key(k), train=True) for k in (0, 0, 1))
        assert_drawn_from_the_key(first, again, other)


def test_stochastic_depth_and_noise_are_drawn_from_the_key() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keep = torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device) < 0.5
            return x * keep + torch.randn_like(x) + torch.randn(2, 3) + torch.bernoulli(torch.full_like(x, 0.5))

    model, x = functionalize(Noisy()), torch.zeros(2, 3)
    state = torch.get_rng_state()
    first, again, other = (model.apply({}, x, key=random.key(seed)) for seed in (0, 0, 1))
    assert_drawn_from_the_key(first, again, other)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"the module \(Noisy\) draws random numbers \(rand\)"):
        model.apply({}, x)


def test_what_has_no_keyed_form_is_refused_by_name() -> None:
    class Shuffled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[torch.randperm(len(x))]

    key = random.key(0)
    with pytest.raises(NotImplementedError, match=r"\(Shuffled\) calls randperm"):
        functionalize(Shuffled()).apply({}, torch.ones(2), key=key, train=True)
    with pytest.raises(NotImplementedError, match=r"\(RReLU\) calls rrelu"):
        functionalize(nn.RReLU()).apply({}, torch.ones(2), key=key, train=True)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"proj_size": 3}, {"bias": False}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_one_by_one_with_dropout_between(
    kind: Callable[..., nn.RNNBase], options: dict[str, Any]
) -> None:
    if "proj_size" in options and kind is not nn.LSTM:
        options = {"nonlinearity": "relu"} if kind is nn.RNN else {"batch_first": True}
    torch.manual_seed(0)
    module = kind(4, 5, num_layers=3, dropout=1e-12, dtype=torch.float64, **options)
    model, key = functionalize(module), random.key(0)
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 6]), enforce_sorted=False)
    for given in (x, packed):  # nothing is dropped in practice: torch's own layers in one
        expected = tree.leaves(module.eval()(given))
        got = tree.leaves(model.apply(model.init(), given, key=key, train=True))
        assert len(expected) == len(got)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_dropout_between_recurrent_layers_is_drawn_from_the_key() -> None:
    module = nn.LSTM(4, 5, num_layers=2, dropout=0.5, dtype=torch.float64)
    model, key = functionalize(module), random.key(5)
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    layers = [nn.LSTM(size, 5, dtype=torch.float64) for size in (4, 5)]
    for number, layer in enumerate(layers):
        layer.load_state_dict(
            {name[:-1] + "0": v for name, v in module.state_dict().items() if name[-1] == str(number)}
        )
    expected = layers[1](random.dropout(layers[0](x)[0], 0.5, random.fold_in(key, 0)))[0]
    state = torch.get_rng_state()
    torch.testing.assert_close(model.apply(model.init(), x, key=key, train=True)[0], expected)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"the module \(LSTM\) draws random numbers \(dropout between layers, p=0.5\)"):
        model.apply(model.init(), x, train=True)
    torch.testing.assert_close(model.apply(model.init(), x)[0], module.eval()(x)[0])


def test_loss_of_a_causal_language_model() -> None:
    module = gpt2(resid_pdrop=0.3).eval().double()
    model = functionalize(module)
    params, batch = model.init(), tokens()
    assert model.loss is not None
    total, weight = model.loss(params, batch)
    expected = module(**batch, labels=batch["input_ids"]).loss
    torch.testing.assert_close((total / weight).to(expected.dtype), expected.detach(), rtol=1e-6, atol=0)
    assert weight == 3 * (TOKENS - 1)

    mask = paddings("gpt2")[1]["attention_mask"]
    total, weight = model.loss(params, batch | {"attention_mask": mask})
    labels = losses.labels_from(batch["input_ids"], mask)
    expected = module(**batch, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close((total / weight).to(expected.dtype), expected.detach(), rtol=1e-6, atol=0)
    given, _ = model.loss(params, batch | {"attention_mask": mask, "labels": labels})
    assert torch.equal(given, total)

    left = paddings("gpt2")[2]["attention_mask"]  # the first real token is predicted from padding: it does not count
    assert model.loss(params, batch | {"attention_mask": left})[1] == 2 * (TOKENS - 1) + TOKENS - 3 - 1

    trained = [model.loss(params, batch, random.key(seed))[0] for seed in (0, 0, 1)]
    assert trained[0] == trained[1] != trained[2]
    with pytest.raises(KeyError, match="'input_ids' is missing"):
        model.loss(params, {"labels": labels})
    assert functionalize(made("bert")[0]).loss is None
    assert functionalize(made("t5")[0]).loss is None


def test_config_is_a_copy() -> None:
    module = gpt2()
    model = functionalize(module)
    assert type(model.config) is type(module.config)
    assert model.config is not module.config
    assert model.config.to_dict() == module.config.to_dict()


def test_recording_leaves_nothing_behind() -> None:
    module, inputs = made("llama")
    model = functionalize(module)
    for _ in range(2):
        outputs = model.apply(model.init(), **inputs, output_hidden_states=True)
        expected = module(**inputs, output_hidden_states=True)
        assert len(outputs.hidden_states) == len(expected.hidden_states)
        for one, other in zip(outputs.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    again = functionalize(module)  # the module has its hooks now
    assert len(again.apply(again.init(), **inputs, output_hidden_states=True).hidden_states) == 2


def test_a_module_around_a_hugging_face_model() -> None:
    class Reward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = gpt2().transformer
            self.head = nn.Linear(16, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(tokens).last_hidden_state[:, -1])

    module = Reward().eval()
    model, ids = functionalize(module), tokens()["input_ids"]
    torch.testing.assert_close(model.apply(model.init(), ids), module(ids), atol=1e-5, rtol=0)
    rows = transforms.vmap(lambda row: model.apply(model.init(), row[None])[0])(ids)
    torch.testing.assert_close(rows, module(ids), atol=1e-5, rtol=0)


def test_checkpointing_and_cache_of_the_module_are_not_used() -> None:
    module, inputs = made("llama")
    getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()  # by its newer name
    module.train()
    model = functionalize(module)
    transforms.grad(lambda p: model.apply(p, **inputs, train=True).logits.sum())(model.init())
    assert module.model.layers[0].gradient_checkpointing
    assert module.config.use_cache


def test_parameters_that_do_not_fit_are_all_named() -> None:
    model = functionalize(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    params = model.init()
    del params["0.bias"]
    params |= {"0.weight": torch.ones(2, 3), "1.bias": None, "extra": torch.ones(1)}
    with pytest.raises(ValueError, match="params do not fit Sequential") as error:
        model.apply(params, torch.ones(1, 2))
    for fault in (
        "'0.bias' is missing",
        "'0.weight' has shape (2, 3), expected (3, 2)",
        "'1.bias' is NoneType",
        "'extra'",
    ):
        assert fault in str(error.value)
    with pytest.raises(TypeError, match="params: expected a dict of tensors by name, as init gives it, got list"):
        model.apply(list(params.values()), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"buffers do not fit Sequential: '1.running_mean' is missing"):
        model.apply(model.init(), torch.ones(1, 2), buffers={})


class Clashing(nn.Module):
    """Arguments that are called as those of ``apply`` are, and one keyword that is called kwargs."""

    def forward(self, key: Any, train: Any, buffers: Any, mutable: Any, inputs: Any, *, kwargs: Any) -> torch.Tensor:
        return key + 10 * train + 100 * buffers + 1000 * mutable + 1e4 * inputs + 1e5 * kwargs


def test_arguments_that_are_called_as_those_of_apply() -> None:
    model = functionalize(Clashing())
    named = {name: torch.tensor(float(n)) for n, name in enumerate(("key", "train", "buffers", "mutable", "kwargs"), 1)}
    assert model.apply({}, kwargs=named, inputs=torch.tensor(6.0)) == 564321
    with pytest.raises(TypeError, match="given by name and in kwargs: inputs"):
        model.apply({}, kwargs=named | {"inputs": torch.tensor(6.0)}, inputs=torch.tensor(6.0))
    with pytest.raises(TypeError, match="kwargs: Tensor, expected a dict of the module's arguments by name"):
        model.apply({}, kwargs=torch.ones(1))
    with pytest.raises(TypeError, match=r"key: torch.float32 of shape \(3,\), expected int32 .* kwargs=\{\"key\""):
        model.apply({}, key=torch.ones(3))


def test_attention_called_by_name() -> None:
    module = nn.MultiheadAttention(4, 2, dropout=0.3, kdim=3, vdim=5, batch_first=True).eval()
    model = functionalize(module)
    query, key, value = (torch.randn(2, 6, width) for width in (4, 3, 5))
    given = model.apply(model.init(), query=query, value=value, kwargs={"key": key})
    expected = module(query=query, key=key, value=value)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other)
    dropped = [
        model.apply(model.init(), query, value=value, key=random.key(seed), train=True, kwargs={"key": key})[0]
        for seed in (0, 0, 1)
    ]
    assert_drawn_from_the_key(*dropped)

    boosted, *_ = fb.Booster("cpu").boost(copy.deepcopy(module))
    for one, other in zip(boosted(query=query, key=key, value=value), expected, strict=True):
        torch.testing.assert_close(one, other)
    boosted(query=query, key=key, value=value)[0].square().sum().backward()
    expected[0].square().sum().backward()
    grads = {name: leaf.grad for name, leaf in boosted.named_parameters()}
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


def test_modules_that_cannot_be_functionalized() -> None:
    with pytest.raises(TypeError, match=r"expected an instance of torch\.nn\.Module, got dict"):
        functionalize({"weight": torch.ones(1)})  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(TypeError, match="got the class ResNet"):
        functionalize(ResNet)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(TypeError, match=r"a DataParallel wraps the module: hand in its \.module"):
        functionalize(nn.DataParallel(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match="uninitialized parameters: weight, bias"):
        functionalize(nn.LazyLinear(3))
    locked: Any = nn.Linear(1, 1)
    locked.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"Linear cannot be copied by copy\.deepcopy"):
        functionalize(locked)


def test_meta_modules_are_described_but_have_no_values() -> None:
    model = functionalize(nn.BatchNorm1d(3, device="meta"))
    assert model.abstract["weight"].shape == (3,)
    with pytest.raises(ValueError, match="its weights are on the meta device"):
        model.init()
    with pytest.raises(ValueError, match="its buffers are on the meta device"):
        model.buffers()
    real = nn.BatchNorm1d(3).eval()
    x = torch.randn(2, 3)
    values = dict(real.named_parameters()), dict(real.named_buffers())
    torch.testing.assert_close(model.apply(values[0], x, buffers=values[1]), real(x))


def test_a_forward_that_changes_a_parameter_is_refused() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(max=0.5)
            return x * self.weight + self.bias

    model = functionalize(Clamped())
    with pytest.raises(ValueError, match=r"the forward of Clamped changes parameters in place: weight$"):
        model.apply(model.init(), torch.ones(2))


def test_inference_mode() -> None:
    module, inputs = made("gpt2")
    model = functionalize(module)
    params = model.init()
    expected = model.apply(params, **inputs).logits
    with torch.inference_mode():
        assert torch.equal(model.apply(params, **inputs).logits, expected)
