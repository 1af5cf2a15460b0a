"""Regions of functionalized modules: blocks that repeat are traced once, and everything stays as it is without them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutput

import functional_booster as fb
from functional_booster.module_regions import repeated
from functional_booster.sharding import region
from functional_booster.sharding.environment import bind

VOCABULARY, TOKENS = 19, 5
DEPTH, LAYERS = 3, 2  # of stacks made here, of models that take long to trace
SMALL: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
TEXT = SMALL | {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = TEXT | {"num_key_value_heads": 1, "head_dim": 4}


def llama(depth: int) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=depth, attention_dropout=0.2, **GROUPED)
    )


def gpt2(depth: int, **fields: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_positions": 8,
        "n_embd": 8,
        "n_head": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=depth, **sizes | fields))


def bert(depth: int) -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=depth, **TEXT))


def vit(depth: int) -> Any:
    fields = SMALL | {"image_size": 8, "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.2}
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=depth, **fields))


def encoder(depth: int) -> Any:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), depth)
    return nn.Sequential(nn.Linear(8, 8), layers)


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit, "encoder": encoder}
KEY = fb.random.key(7)


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": fb.random.normal(KEY, (2, 3, 8, 8), torch.float64)}
    if name == "encoder":
        return {"input": fb.random.normal(KEY, (2, TOKENS, 8), torch.float64)}
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[0, 3:] = 0
    return {"input_ids": fb.random.randint(KEY, (2, TOKENS), 3, VOCABULARY), "attention_mask": mask}


def made(name: str, depth: int = LAYERS) -> Any:
    torch.manual_seed(0)
    return MODELS[name](depth).double()


def gradient(model: fb.Model, train: bool) -> Callable[..., Any]:
    """(params, inputs, key) -> (gradients, (loss, outputs))."""

    def loss(params: Any, inputs: dict[str, torch.Tensor], key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model.apply(params, **inputs, key=key if train else None, train=train)
        outputs = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        return outputs.square().sum(), outputs

    return fb.grad_and_value(loss, has_aux=True)


def calls(graph: torch.fx.Graph) -> int:
    return sum(node.target is region.call_op for node in graph.nodes)


def lowered(fn: Callable[..., Any], *args: Any) -> Any:
    """The traced graph of a call, checked against the plain function."""
    low = fb.jit(fn).lower(*args)
    results, expected = low.module(*fb.tree.leaves(args)), fb.tree.leaves(fn(*args))
    for given, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-11, atol=1e-12)
    return low


@pytest.mark.parametrize("name", MODELS)
def test_all_blocks_are_one_region_and_the_numbers_are_the_same(name: str) -> None:
    """With padding, and with dropout: the masks are those of the call without regions."""
    model = fb.functionalize(made(name))
    low = lowered(gradient(model, True), model.init(), inputs_of(name), KEY)
    assert len(low.regions) == 2  # a forward and a backward
    assert calls(low.graph) == 2 * LAYERS


def test_the_graph_hardly_grows_with_depth() -> None:
    def computed(depth: int) -> int:
        model = fb.functionalize(made("bert", depth))
        graph = fb.jit(gradient(model, True)).lower(model.init(), inputs_of("bert"), KEY).graph
        kinds = [node for node in graph.nodes if node.op == "call_function"]
        return sum(getattr(node.target, "__name__", "") != "getitem" for node in kinds)

    assert computed(3) - computed(2) <= 3  # of a layer: its key, its forward, its backward


def test_without_gradients_there_is_a_forward_alone() -> None:
    model = fb.functionalize(made("gpt2"))
    low = lowered(lambda params, inputs: model.apply(params, **inputs).logits, model.init(), inputs_of("gpt2"))
    assert (len(low.regions), calls(low.graph)) == (1, LAYERS)


def test_a_train_step_holds_one_region() -> None:
    booster, tx = fb.Booster("cpu"), fb.optim.sgd(0.1)
    model = fb.functionalize(made("gpt2"))
    state = booster.init(model, tx, key=KEY)
    low = booster.train_step(model.loss, tx, accumulate=2).lower(state, inputs_of("gpt2"))
    assert (len(low.regions), calls(low.graph)) == (2, 2 * LAYERS)


def test_frozen_blocks() -> None:
    """They take no gradient: frozen and trained blocks are two regions."""
    module = made("gpt2", DEPTH)
    module.transformer.h[1].requires_grad_(False)
    model = fb.functionalize(module)
    frozen, trained = fb.tree.partition(model.init(), lambda params: {name: ".h.1." in name for name in params})

    def loss(trained: Any, frozen: Any, inputs: Any) -> torch.Tensor:
        return model.apply(fb.tree.combine(trained, frozen), **inputs, key=KEY, train=True).logits.square().sum()

    low = lowered(fb.grad_and_value(loss), trained, frozen, inputs_of("gpt2"))
    assert (len(low.regions), calls(low.graph)) == (4, 2 * DEPTH)


def test_layers_of_two_kinds_are_two_regions() -> None:
    """Windows in every other layer. What tells layers apart decides, their index alone does not."""
    kinds = ["full_attention", "sliding_attention"] * 2
    fields = GROUPED | {"num_hidden_layers": 4, "sliding_window": 2, "use_sliding_window": True, "layer_types": kinds}
    model = fb.functionalize(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields)).double())
    low = lowered(lambda params, ids: model.apply(params, ids).logits, model.init(), inputs_of("qwen3")["input_ids"])
    assert (len(low.regions), calls(low.graph)) == (2, 4)


class Block(nn.Module):
    """A block whose forward is up to a test: ``fn(self, x)``."""

    def __init__(self, fn: Callable[[Any, torch.Tensor], Any], index: int = 0) -> None:
        super().__init__()
        self.fn, self.index = fn, index
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(self, x)


class Stack(nn.Module):
    def __init__(self, fn: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(fn, index) for index in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            outputs = block(x)
            x = x + (outputs if isinstance(outputs, torch.Tensor) else outputs[0])
        return x


def stack(fn: Callable[[Any, torch.Tensor], Any]) -> Any:
    torch.manual_seed(0)
    return Stack(fn).double()


X = {"x": fb.random.normal(KEY, (3, 4), torch.float64)}


def plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(self.linear(x))


def regions_of(module: nn.Module, train: bool = False) -> int:
    model = fb.functionalize(module)
    return len(lowered(gradient(model, train), model.init(), X, KEY).regions)


READS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "as a number": lambda self, x: plain(self, x) * self.index,
    "as a branch": lambda self, x: plain(self, x) if self.index else x,
    "by getattr": lambda self, x: plain(self, x) * getattr(self, "index", 1),
    "in a custom backward": lambda self, x: Scaled.apply(plain(self, x), self),
}


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled by a module's index, which only the backward reads."""

    @staticmethod
    def forward(x: torch.Tensor, module: Any) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.module = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cotangent * ctx.module.index, None


def test_an_attribute_that_differs_and_is_not_read_does_not_matter() -> None:
    assert regions_of(stack(plain)) == 2


@pytest.mark.parametrize("way", READS)
def test_an_attribute_that_differs_and_is_read_keeps_blocks_apart(way: str) -> None:
    assert regions_of(stack(READS[way])) > 2


def test_an_attribute_that_is_read_for_some_shapes_alone() -> None:
    """The second block comes with another shape, for which the first block's trace says nothing."""

    class Narrowing(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, block in enumerate(self.blocks):
                x = x + block(x if index == 0 else x[:2]).mean(0)
            return x

    torch.manual_seed(0)
    module = Narrowing(lambda self, x: plain(self, x) * (self.index if len(x) == 2 else 1)).double()
    assert regions_of(module) == 6


@dataclass
class Pair:
    first: torch.Tensor

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.first


def note(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last = plain(self, x)
    return self.last


def write(self: Any, x: torch.Tensor) -> torch.Tensor:
    return plain(self, x.mul_(0.5))


def replace(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.average = 0.9 * self.average + x.detach().mean(0)
    return plain(self, x) * self.average


NOT_APART: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "writes an attribute": note,
    "writes its input": write,
    "replaces a buffer": replace,
    "returns a dataclass": lambda self, x: Pair(plain(self, x)),
    "returns a ModelOutput": lambda self, x: BaseModelOutput(last_hidden_state=plain(self, x)),
    "returns a number": lambda self, x: (plain(self, x), 3),
}


@pytest.mark.parametrize("what", NOT_APART)
def test_a_block_that_cannot_be_traced_apart_runs_as_it_is(what: str) -> None:
    assert regions_of(stack(NOT_APART[what])) == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda self, x: (plain(self, x), {"more": (x, None)}),
        lambda self, x: plain(self, x) + CONSTANT + self.average,
    ],
)
def test_what_may_be_in_a_region(fn: Any) -> None:
    assert regions_of(stack(fn)) == 2


CONSTANT = torch.arange(4.0, dtype=torch.float64)


def test_batch_statistics_in_repeated_blocks() -> None:
    """Written buffers come out of the region, by both ways of writing; they are reported and returned."""

    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0))
        return torch.tanh(self.norm(self.linear(x)))

    module = stack(fn)
    model = fb.functionalize(module)

    def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        outputs, new = model.apply(params, x, train=True, buffers=buffers, mutable=True)
        return outputs.square().sum(), new

    low = lowered(fb.grad_and_value(loss, has_aux=True), model.init(), model.buffers(), X["x"])
    assert (len(low.regions), calls(low.graph)) == (2, 2 * DEPTH)
    twin = copy.deepcopy(module).train()
    twin(X["x"])
    _, (_, new) = fb.grad_and_value(loss, has_aux=True)(model.init(), model.buffers(), X["x"])
    for name, value in twin.named_buffers():
        torch.testing.assert_close(new[name], value, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"writes buffers in training: blocks\.0\.average"):
        fb.jit(lambda p, x: model.apply(p, x, train=True)).lower(model.init(), X["x"])


def test_errors_are_those_of_the_call_without_regions() -> None:
    def clamp(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(max=0.5)
        return plain(self, x)

    model = fb.functionalize(stack(clamp))
    with pytest.raises(ValueError, match=r"changes parameters in place: blocks\.0\.linear\.weight"):
        fb.jit(lambda p, x: model.apply(p, x)).lower(model.init(), X["x"])
    keyless = fb.functionalize(gpt2(2, embd_pdrop=0.0))
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn \(GPT2Attention\) draws random numbers"):
        fb.jit(lambda p, i: keyless.apply(p, **i, train=True).logits).lower(keyless.init(), inputs_of("gpt2"))


class TestHooks:
    def test_of_a_block_run_at_each_block(self) -> None:
        module = stack(plain)
        seen: list[torch.Tensor] = []
        for block in module.blocks:
            block.register_forward_hook(lambda block, args, output: output * 2)
        module.blocks[1].register_forward_hook(lambda block, args, output: seen.append(output))
        assert regions_of(module) == 2
        assert len(seen) == 2  # the trace, and the call that it is compared with

    def test_inside_a_block_are_not_skipped(self) -> None:
        module = stack(plain)
        for index, block in enumerate(module.blocks):
            block.linear.register_forward_hook(lambda layer, args, output, index=index: output * index)
        assert regions_of(module) == 0

    def test_on_every_module_are_not_skipped(self) -> None:
        seen: list[nn.Module] = []
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
        try:
            assert regions_of(stack(plain)) == 0
        finally:
            handle.remove()
        assert sum(isinstance(module, Block) for module in seen) == 2 * DEPTH


def test_recorded_hidden_states_and_attentions_of_the_module() -> None:
    """transformers leaves hooks in a module once it was asked for these; they come out of a trace, too."""
    module = made("gpt2").eval()
    inputs = inputs_of("gpt2")
    expected = module(**inputs, output_hidden_states=True).hidden_states
    model = fb.functionalize(module)
    low = fb.jit(lambda params, inputs: model.apply(params, **inputs).logits).lower(model.init(), inputs)
    assert calls(low.graph) == LAYERS

    def states(params: Any, inputs: Any) -> Any:
        return list(model.apply(params, **inputs, output_hidden_states=True).hidden_states)

    for _ in range(2):  # a call leaves no hooks for the next
        for given, wanted in zip(states(model.init(), inputs), expected, strict=True):
            torch.testing.assert_close(given, wanted)
    lowered(states, model.init(), inputs)


def test_a_cache_is_no_input_of_a_region() -> None:
    model, inputs = fb.functionalize(made("llama").eval()), inputs_of("llama")

    def cached(params: Any, inputs: Any) -> Any:
        cache: Any = transformers.DynamicCache()
        return model.apply(params, **inputs, cache=cache, use_cache=True).logits, cache.layers[1].keys

    assert calls(lowered(cached, model.init(), inputs).graph) == 0


def test_lists_that_a_block_adds_to() -> None:
    class Collecting(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            collected: list[torch.Tensor] = []
            for block in self.blocks:
                x = x + block((x, collected))
            return x + sum(collected)

    def fn(self: Any, given: Any) -> torch.Tensor:
        x, collected = given
        collected.append(plain(self, x))
        return collected[-1] * 2

    torch.manual_seed(0)
    assert regions_of(Collecting(fn).double()) == 0


def test_tensors_of_other_modules() -> None:
    """A block that reaches a parameter that is not its own: its gradient must not be lost."""

    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) * self.others[0].scale

    module = stack(fn)
    module.scale = nn.Parameter(torch.full((4,), 1.5, dtype=torch.float64))
    for block in module.blocks:
        block.others = [module]
    assert regions_of(module) == 0

    class Box:
        """Hides a module from sight."""

        def __init__(self, module: Any) -> None:
            self.module = module

        @property
        def scale(self) -> Any:
            return self.module.scale

    for block in module.blocks:
        block.others = [Box(module)]
    assert regions_of(module) == 0


def test_shared_weights() -> None:
    """Blocks that share a layer are regions, each gradient a sum; a block that stands in two places is none."""
    module = stack(plain)
    module.blocks[2].linear.weight = module.blocks[0].linear.weight
    model = fb.functionalize(module)
    assert "blocks.2.linear.weight" not in model.abstract
    assert len(lowered(gradient(model, False), model.init(), X, KEY).regions) == 2
    module.more = nn.ModuleList([module.blocks[0], module.blocks[1]])
    assert repeated(module) == []


def test_which_blocks_repeat() -> None:
    def block(width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    outer = nn.ModuleList(nn.Sequential(block(), block()) for _ in range(2))
    assert repeated(outer) == [list(outer)]  # the outermost
    mixed = nn.Sequential(block(), block(5), block(), nn.Linear(4, 4), nn.Linear(4, 4))
    assert repeated(mixed) == [[mixed[0], mixed[2]]]  # one kind of two, and no single layers
    assert repeated(nn.ModuleDict({"a": block(), "b": block()})) == []
    stages = nn.Sequential(nn.Sequential(block(), block()), nn.Sequential(block(), block(), block()))
    assert [len(group) for group in repeated(stages)] == [2, 3]


def test_under_vmap_remat_and_a_second_gradient() -> None:
    model = fb.functionalize(stack(plain))
    rows = X["x"]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, x[None])[0].square().sum()

    def penalty(params: Any, x: torch.Tensor) -> Any:
        return sum(g.square().sum() for g in fb.grad(loss)(params, x).values())

    lowered(fb.vmap(fb.grad(loss), in_axes=(None, 0)), model.init(), rows)
    lowered(fb.grad(fb.remat(loss)), model.init(), rows[0])
    lowered(fb.grad(penalty), model.init(), rows[0])


def test_autograd_through_regions() -> None:
    model, inputs = fb.functionalize(made("gpt2")), inputs_of("gpt2")
    expected, _ = gradient(model, True)(model.init(), inputs, KEY)
    leaves = {name: value.requires_grad_() for name, value in model.init().items()}
    with bind(outline=True):
        model.apply(leaves, **inputs, key=KEY, train=True).logits.square().sum().backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, expected[name], rtol=1e-11, atol=1e-12)


def test_autocast_and_foreign_modes_reach_the_inside_of_blocks() -> None:
    model = fb.functionalize(stack(plain).float())
    x = X["x"].float()

    def cast(params: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.apply(params, x)

    low = fb.jit(cast).lower(model.init(), x)
    assert torch.equal(low.module(*fb.tree.leaves((model.init(), x)))[0], cast(model.init(), x))
    assert not torch.equal(cast(model.init(), x), model.apply(model.init(), x))

    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.tanh else result

    def doubled(params: Any, x: torch.Tensor) -> torch.Tensor:
        with Doubling():
            return model.apply(params, x)

    lowered(doubled, model.init(), x)


def test_outside_of_jit_nothing_is_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a region outside of jit")

    monkeypatch.setattr(region, "call", never)
    model = fb.functionalize(made("gpt2"))
    gradient(model, True)(model.init(), inputs_of("gpt2"), KEY)


def test_each_block_draws_from_a_key_of_its_own() -> None:
    masks: list[torch.Tensor] = []

    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        masks.extend(F.dropout(torch.ones(64, 64), 0.5, self.training) for _ in range(2))
        return plain(self, x)

    model = fb.functionalize(stack(fn))
    model.apply(model.init(), **X, key=KEY, train=True)
    assert len(masks) == 2 * DEPTH
    for index, mask in enumerate(masks):
        for other in masks[:index]:
            agreement = (mask == other).double().mean().item()
            assert abs(agreement - 0.5) < 5 * (0.25 / 64**2) ** 0.5  # five standard deviations
