"""Lazy initialization: any module is described without memory, and its values are those of eager initialization."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from live_memory import Live
from torch import nn
from torch.nn.utils import parametrizations

import functional_booster as fb
from functional_booster.kernels import graph

MEBIBYTE = 2**20


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def made(make: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, nn.Module]:
    """(eager, lazy) with one seed."""
    torch.manual_seed(seed)
    eager = make()
    torch.manual_seed(seed)
    with fb.LazyInitContext():
        lazy = make()
    return eager, lazy


def same(given: nn.Module, expected: nn.Module) -> None:
    """Equal bit by bit: values, dtypes, strides, and what is trained, tied and kept."""
    ours, theirs = tensors(given), tensors(expected)
    assert ours.keys() == theirs.keys()
    assert given.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in theirs.items():
        own = ours[name]
        assert (own.dtype, own.shape, own.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert torch.equal(own, tensor), name
        assert own.requires_grad == tensor.requires_grad, name
    shared = [
        [a for a, one in of.items() for b, other in of.items() if a < b and graph.shares_storage(one, other)]
        for of in (ours, theirs)
    ]
    assert shared[0] == shared[1]
    ties = [[name for name, _ in m.named_parameters(remove_duplicate=False)] for m in (given, expected)]
    assert ties[0] == ties[1]


class Layers(nn.Module):
    """One of each of torch's layers and initializers, some read from others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.conv = nn.Linear(20, 30), nn.BatchNorm1d(4), nn.Conv2d(2, 6, 3, groups=2)
        self.embedding, self.rnn = nn.Embedding(11, 20, padding_idx=3), nn.LSTM(5, 7, num_layers=2)
        self.attention, self.head = nn.MultiheadAttention(8, 2), nn.Linear(20, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.copies = nn.ModuleList(copy.deepcopy(self.linear) for _ in range(2))
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.orthogonal_(self.rnn.weight_hh_l0)  # pyrefly: ignore[bad-argument-type]
        nn.init.sparse_(self.copies[0].weight, 0.3)  # pyrefly: ignore[bad-argument-type]
        nn.init.dirac_(self.conv.weight[:, :1])
        nn.init.xavier_normal_(self.copies[1].weight)  # pyrefly: ignore[bad-argument-type]
        self.attention.requires_grad_(False)


class Tensors(nn.Module):
    """Tensors made by hand: parts, views, random choices, dtypes, generators, and Python that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.listed = torch.arange(4).tolist()
        weight = torch.empty(6, 4)
        weight.normal_(0, 0.1)[:, 1].uniform_()
        self.weight, self.other = nn.Parameter(weight), nn.Parameter(weight.t()[1:])
        self.copied = nn.Parameter(weight.detach().clone() * 2 + torch.tensor(self.rates))
        self.kept = torch.arange(6) * torch.rand(())
        self.register_buffer("chosen", torch.randn(9)[torch.randperm(9)])
        self.register_buffer("flags", torch.bernoulli(torch.full((5,), 0.5)), persistent=False)
        self.register_buffer("constant", torch.tensor([1.0, 2.0]))
        self.register_buffer("complex", torch.polar(torch.ones(3), torch.rand(3)).conj())
        self.half = nn.Linear(4, 4).to(torch.bfloat16)
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Parameter(torch.randn(3, generator=generator))
        self.second = nn.Parameter(torch.rand(3, generator=generator))
        if torch.rand(()).item() < 2:  # drawn at once
            self.third = nn.Parameter(torch.randn(20))
        torch.manual_seed(7)
        self.fourth = nn.Parameter(torch.randn(20))
        torch.manual_seed(7)
        self.again = nn.Parameter(torch.randn(20))
        self.dropped = nn.Parameter(torch.ones(20).bernoulli_(0.5).exponential_())


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Conv1d(3, 4, 2))
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 3))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(4, 4))


SMALL: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
GPT2 = transformers.GPT2Config(
    n_embd=8, n_layer=2, n_head=2, vocab_size=33, n_positions=16, bos_token_id=0, eos_token_id=0
)
LLAMA = transformers.LlamaConfig(vocab_size=33, **SMALL)
HF: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(GPT2),
    "llama": lambda: transformers.LlamaForCausalLM(LLAMA),
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=33, **SMALL)),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **SMALL)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=8, num_layers=1, num_heads=2, d_kv=4, d_ff=16, vocab_size=33)
    ),
    "bfloat16": lambda: transformers.AutoModelForCausalLM.from_config(copy.deepcopy(LLAMA), dtype=torch.bfloat16),
}


@pytest.mark.parametrize("make", [Layers, Tensors, Parametrized, *HF.values()], ids=[*"ltp", *HF])
def test_values_are_those_of_eager_initialization(make: Callable[[], nn.Module]) -> None:
    eager, lazy = made(make)
    assert all(parameter.is_meta for parameter in lazy.parameters())
    parameters, state = list(lazy.parameters()), torch.get_rng_state()
    assert fb.LazyInitContext.materialize(lazy) is lazy
    same(lazy, eager)
    assert all(one is other for one, other in zip(parameters, lazy.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_python_sees_the_values_that_it_asks_for() -> None:
    eager, lazy = made(Tensors)
    assert (lazy.rates, lazy.listed) == (eager.rates, eager.listed)  # pyrefly: ignore[missing-attribute]


@given(
    st.lists(
        st.sampled_from(["normal", "uniform", "part", "copy", "zero", "scale", "trunc", "seed", "add", "view"]),
        max_size=12,
    ),
    st.integers(0, 2**31),
)
def test_any_sequence_of_initializers_gives_the_same_values(steps: list[str], seed: int) -> None:
    def make() -> nn.Module:
        a, b = nn.Parameter(torch.zeros(5, 7)), nn.Parameter(torch.ones(5, 7))
        for number, step in enumerate(steps):
            with torch.no_grad():
                match step:
                    case "normal":
                        a.normal_()
                    case "uniform":
                        b.data.uniform_(-1, 1)
                    case "part":
                        a[1:3].normal_()
                    case "copy":
                        b.copy_(a)
                    case "zero":
                        a[number % 5].zero_()
                    case "scale":
                        a.mul_(b)
                    case "trunc":
                        nn.init.trunc_normal_(b, std=0.5)
                    case "seed":
                        torch.manual_seed(number)
                    case "add":
                        b.add_(torch.randn(7))
                    case "view":
                        a.view(-1)[::2].copy_(torch.rand(18))
        return nn.ParameterList([a, b])

    eager, lazy = made(make, seed)
    same(fb.LazyInitContext.materialize(lazy), eager)


def test_a_model_of_any_size_is_described_for_free() -> None:
    class Real(Live):
        def count(self, storage: Any) -> None:
            if storage.device.type != "meta":
                super().count(storage)

    with Real() as live, fb.LazyInitContext():
        module = nn.Sequential(*[nn.Linear(2**20, 2**20) for _ in range(4)])  # 16 TiB
    assert live.peak < MEBIBYTE
    model = fb.functionalize(module)
    assert math.prod(model.abstract["3.weight"].shape) == 2**40


def test_materialized_one_by_one_a_module_takes_its_own_memory_and_a_tensor() -> None:
    with fb.LazyInitContext():
        module = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
        for part in module:  # as transformers does: each is initialized a second time, when all are there
            nn.init.normal_(part.weight)  # pyrefly: ignore[bad-argument-type]
    one, own = 128 * 128 * 4, sum(parameter.nbytes for parameter in module.parameters())
    with Live() as live:
        fb.LazyInitContext.materialize(module)
    assert own <= live.peak <= own + one


def test_values_come_one_at_a_time() -> None:
    _, lazy = made(HF["gpt2"])
    one = max(parameter.nbytes for parameter in lazy.parameters())
    model = fb.functionalize(lazy)
    with Live() as live:
        names = [name for name, _ in model.leaves(fb.random.key(0))]
    assert sorted(names) == sorted(model.abstract)
    assert live.peak <= 2 * one + 64


def test_contexts_nest_and_go_on() -> None:
    context = fb.LazyInitContext()
    torch.manual_seed(0)
    eager = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3).double()]
    torch.manual_seed(0)
    with context:
        first = nn.Linear(3, 3)
        with fb.LazyInitContext(), context:
            second = nn.Linear(3, 3)
        third = nn.Linear(3, 3)
    with context:
        third.double()
    for lazy, expected in zip((third, second, first), reversed(eager), strict=True):
        same(fb.LazyInitContext.materialize(lazy), expected)


def test_two_contexts_draw_different_numbers() -> None:
    modules = []
    for _ in range(2):
        with fb.LazyInitContext():
            modules.append(nn.Linear(3, 3))
    one, other = map(fb.LazyInitContext.materialize, modules)
    assert not torch.equal(one.weight, other.weight)  # pyrefly: ignore[bad-argument-type]


def test_what_was_replaced_is_back_after_an_exception() -> None:
    before = nn.init._no_grad_trunc_normal_, vars(transformers.PreTrainedModel)["from_pretrained"]
    with pytest.raises(ZeroDivisionError), fb.LazyInitContext(default_device="cpu"), fb.LazyInitContext():
        raise ZeroDivisionError
    assert before == (nn.init._no_grad_trunc_normal_, vars(transformers.PreTrainedModel)["from_pretrained"])
    assert (torch.get_default_dtype(), torch.get_default_device()) == (torch.float32, torch.device("cpu"))
    assert not torch.empty(1).is_meta
    assert torch.overrides._get_current_function_mode_stack() == []


def test_inside_tensors_say_where_they_will_be() -> None:
    with fb.LazyInitContext(default_device="cpu"):
        weight = torch.empty(3)
        assert (weight.device, weight.is_meta, weight.is_cpu) == (torch.device("cpu"), False, True)
        other = torch.zeros(3, device=weight.device)
    assert weight.is_meta
    assert other.is_meta
    with pytest.raises(RuntimeError, match="nowhere"):
        fb.LazyInitContext(default_device="nowhere")
    with pytest.raises(ValueError, match=r"tensor_cls: .*Parameter.*, expected None"):
        fb.LazyInitContext(tensor_cls=nn.Parameter)
    with pytest.raises(TypeError, match="default_device='cpu'"):
        fb.LazyInitContext("cpu")  # type: ignore[arg-type]


def test_tensors_with_values_are_as_ever() -> None:
    real = nn.Linear(3, 3)
    torch.manual_seed(1)
    expected = torch.randn(3), torch.zeros(3).normal_()
    torch.manual_seed(1)
    values = torch.tensor([0.0, 0.0, 0.0])
    with fb.LazyInitContext():
        first = nn.Parameter(torch.randn(3))
        values.normal_()  # drawn at once, after what is not drawn yet
        assert torch.equal(real(torch.tensor([1.0, 2.0, 3.0])), real.weight @ torch.tensor([1.0, 2.0, 3.0]) + real.bias)
        values.add_(first.detach())
    module = fb.LazyInitContext.materialize(nn.ParameterList([first]))
    assert torch.equal(module[0], expected[0])  # pyrefly: ignore[bad-index]
    assert torch.equal(values, expected[0] + expected[1])


class TestWhatHasNoValues:
    def test_never_initialized(self) -> None:
        with fb.LazyInitContext():
            module = nn.Linear(2, 2)
            module.extra = nn.Parameter(torch.empty(3))
        with pytest.raises(ValueError, match=r"Linear: its parameters and buffers: never initialized: extra$"):
            fb.LazyInitContext.materialize(module)
        with pytest.raises(ValueError, match=r"Linear: its weights: never initialized: extra$"):
            fb.Booster("cpu").boost(module)

    def test_changed_outside(self) -> None:
        with fb.LazyInitContext():
            module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].double()
        with pytest.raises(ValueError, match=r"no values to start from: 1\.weight, 1\.bias; .* outside of it"):
            fb.LazyInitContext.materialize(module)

    def test_of_another_context(self) -> None:
        with fb.LazyInitContext():
            weight = torch.randn(3)
        with fb.LazyInitContext(), pytest.raises(ValueError, match="was made in another LazyInitContext"):
            weight.mul_(2)


class TestFunctionalized:
    def test_outputs_are_those_of_the_eager_module(self) -> None:
        eager, lazy = made(HF["llama"])
        model, ids = fb.functionalize(lazy), torch.arange(6)[None]
        params = model.init()
        torch.testing.assert_close(model.apply(params, ids).logits, eager(ids).logits)
        assert all(torch.equal(params[name], value) for name, value in eager.named_parameters())
        assert all(parameter.is_meta for parameter in lazy.parameters())
        again = model.init()
        assert all(torch.equal(params[name], again[name]) and params[name] is not again[name] for name in params)

    def test_tensors_that_are_no_buffers(self) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale, self.weight = torch.rand(3), nn.Parameter(torch.randn(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.scale * self.weight

        eager, lazy = made(Scaled)
        model = fb.functionalize(lazy)
        torch.testing.assert_close(model.apply(model.init(), torch.ones(3)), eager(torch.ones(3)))


class TestPretrained:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> tuple[Any, Path]:
        torch.manual_seed(0)
        module: Any = HF["llama"]()
        module.save_pretrained(tmp_path, max_shard_size="3KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        return module, tmp_path

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_a_rank_reads_its_part(self, saved: tuple[Any, Path], dtype: torch.dtype | None) -> None:
        _, path = saved
        with fb.LazyInitContext():
            lazy = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        assert all(parameter.is_meta for parameter in lazy.parameters())
        assert not lazy.training
        expected = transformers.LlamaForCausalLM.from_pretrained(path, dtype=dtype)
        booster = fb.Booster("cpu", plugin=fb.TorchFSDPPlugin(), mesh=fb.virtual_mesh(2))
        state = booster.init(fb.functionalize(lazy), fb.optim.sgd(0.1), key=fb.random.key(0))
        full = booster.full_params(state)
        for name, value in expected.named_parameters():
            assert full[name].dtype == value.dtype
            assert torch.equal(full[name], value), name

    def test_what_is_read_can_be_changed_inside(self, saved: tuple[Any, Path]) -> None:
        module, path = saved
        with fb.LazyInitContext():
            lazy = transformers.LlamaForCausalLM.from_pretrained(path).double()
        same(fb.LazyInitContext.materialize(lazy), module.double().eval())

    def test_weights_that_the_files_lack_are_initialized(self, saved: tuple[Any, Path], tmp_path: Path) -> None:
        module, _ = saved
        module.model.save_pretrained(tmp_path / "base")
        with fb.LazyInitContext(), pytest.warns(UserWarning, match=r"has no weights for lm_head\.weight of Llama"):
            lazy: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
        fb.LazyInitContext.materialize(lazy)
        assert torch.equal(lazy.model.norm.weight, module.model.norm.weight)
        assert torch.equal(lazy.model.layers[1].mlp.up_proj.weight, module.model.layers[1].mlp.up_proj.weight)
        assert 0.01 < lazy.lm_head.weight.std() < 0.03

    def test_other_shapes_are_refused(self, saved: tuple[Any, Path]) -> None:
        config = copy.deepcopy(LLAMA)
        config.vocab_size = 34
        with fb.LazyInitContext(), pytest.raises(ValueError, match=r"embed_tokens\.weight: shape \(33, 8\)"):
            transformers.LlamaForCausalLM.from_pretrained(saved[1], config=config)

    def test_what_is_not_supported_is_refused_by_name(self, saved: tuple[Any, Path], tmp_path: Path) -> None:
        with fb.LazyInitContext(), pytest.raises(ValueError, match="device_map not supported"):
            transformers.LlamaForCausalLM.from_pretrained(saved[1], device_map="auto")
        (tmp_path / "empty").mkdir()
        with fb.LazyInitContext(), pytest.raises(FileNotFoundError, match="holds no weights"):
            transformers.LlamaForCausalLM.from_pretrained(tmp_path / "empty", config=LLAMA)
