"""Weights in Hugging Face's form: transformers opens what we write, we open what it writes, under every layout."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from live_memory import Live
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import functional_booster as fb
from functional_booster import booster_io, hf_checkpoint, hf_reading, hf_writing, locking, plugins
from functional_booster.checkpoint import folders
from functional_booster.kernels import random, tree
from functional_booster.models import hf

LAYOUTS: dict[str, Callable[[], Any]] = {
    "one device": lambda: fb.Booster("cpu"),
    "ddp": lambda: fb.Booster("cpu", "fp32", plugin=plugins.TorchDDPPlugin(), mesh=fb.virtual_mesh(3)),
    "zero1": lambda: fb.Booster("cpu", "fp32", plugin=plugins.LowLevelZeroPlugin(), mesh=fb.virtual_mesh(3)),
    "zero2": lambda: fb.Booster(
        "cpu", "fp32", plugin=plugins.LowLevelZeroPlugin(stage=2, extra_dp_size=2), mesh=fb.virtual_mesh(4)
    ),
    "fsdp": lambda: fb.Booster("cpu", "fp32", plugin=plugins.TorchFSDPPlugin(), mesh=fb.virtual_mesh(5)),
    "gemini": lambda: fb.Booster(
        "cpu",
        "fp32",
        plugin=plugins.GeminiPlugin(offload_optim_frac=0.5, min_chunk_size_m=0.001, search_range_m=0.001),
        mesh=fb.virtual_mesh(3),
    ),
}
TINY = 0.003  # MB
FEW = 0.004  # MB: a few files
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def gpt2_config() -> transformers.GPT2Config:
    return transformers.GPT2Config(
        vocab_size=37, n_positions=16, n_embd=12, n_layer=2, n_head=3, bos_token_id=1, eos_token_id=2
    )


def llama_config(tied: bool = False) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )


def theirs(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2_config,
    "llama": llama_config,
    "tied llama": lambda: llama_config(tied=True),
}


def opened(path: Path, **options: Any) -> Any:
    """What transformers makes of a directory: nothing may be missing, left over or of another shape."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(TOKENS).logits


def started(booster: Any, model: Any, seed: int = 0) -> Any:
    return booster.init(model, fb.optim.adamw(1e-3), key=random.key(seed))


def assert_equal(given: Any, expected: Any) -> None:
    given, expected = tree.named_leaves(given), tree.named_leaves(expected)
    assert given.keys() == expected.keys()
    for name in expected:
        assert torch.equal(given[name], expected[name]), name


# Functional form: own models


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_opens_what_an_own_model_writes(family: str, layout: str, tmp_path: Path) -> None:
    booster, module = LAYOUTS[layout](), theirs(CONFIGS[family]())
    model, params = hf.from_hf(module)
    state = booster.init(model, fb.optim.adamw(1e-3), key=random.key(0), params=params)
    hf_checkpoint.save(tmp_path / "x", state, model, size_per_shard=TINY)
    again = opened(tmp_path / "x")
    assert torch.equal(logits(again), logits(module))
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{place:05d}-of-{len(names):05d}.safetensors" for place in range(1, len(names) + 1)]
    assert len(names) > 3
    stored = {name: value for file in names for name, value in load_file(tmp_path / "x" / file).items()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored.values())
    assert stored.keys() == index["weight_map"].keys()
    assert ("lm_head.weight" in stored) == (family == "llama")
    with safe_open(tmp_path / "x" / names[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert {file.name for file in (tmp_path / "x").iterdir()} == {*names, "config.json", "model.safetensors.index.json"}


@pytest.mark.parametrize(("layout", "size"), [*((layout, "4KB") for layout in LAYOUTS), ("fsdp", "1GB")])
@pytest.mark.parametrize("family", CONFIGS)
def test_an_own_model_opens_what_transformers_writes(family: str, layout: str, size: str, tmp_path: Path) -> None:
    booster, module = LAYOUTS[layout](), theirs(CONFIGS[family](), seed=1)
    module.save_pretrained(tmp_path, max_shard_size=size)
    model, params = hf.from_hf(module)
    before = started(booster, model)
    kept = tree.map(torch.clone, before.storage)
    state, report = hf_checkpoint.load(tmp_path, before, model)
    assert not report
    assert_equal(booster.full_params(state), params)
    assert_equal(before.storage, kept)  # a value: what it was made of stays
    assert_equal(state.storage, booster.init(model, fb.optim.adamw(1e-3), key=random.key(0), params=params).storage)


@pytest.mark.parametrize("reader", LAYOUTS)
def test_what_one_layout_writes_another_reads(reader: str, tmp_path: Path) -> None:
    model = fb.models.gpt2(vocab_size=37, n_positions=16, n_embd=12, n_layer=2, n_head=3)
    booster, other = LAYOUTS["fsdp"](), LAYOUTS[reader]()
    state = started(booster, model)
    hf_checkpoint.save(tmp_path, state, model, size_per_shard=TINY)
    again, _ = hf_checkpoint.load(tmp_path, started(other, model, seed=5), model)
    assert_equal(other.full_params(again), booster.full_params(state))


def test_the_dtype_on_save_is_chosen(tmp_path: Path) -> None:
    module = theirs(llama_config())
    model, params = hf.from_hf(module)
    state = fb.Booster("cpu").init(model, fb.optim.sgd(1.0), key=random.key(0), params=params)
    hf_checkpoint.save(tmp_path, state, model, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(logits(opened(tmp_path)), logits(module.to(torch.bfloat16)))
    again, _ = hf_checkpoint.load(tmp_path, state, model)  # into float32
    assert_equal(again.params, tree.map(lambda leaf: leaf.bfloat16().float(), params))


# Functional form: functionalized modules


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_functionalized_modules_go_to_transformers_and_back(family: str, layout: str, tmp_path: Path) -> None:
    booster, module = LAYOUTS[layout](), theirs(CONFIGS[family]())
    next(module.parameters()).requires_grad_(False)  # a frozen leaf
    model = fb.functionalize(module)
    state = started(booster, model)
    hf_checkpoint.save(tmp_path / "x", state, model, size_per_shard=TINY, generation_config=module.generation_config)
    assert torch.equal(logits(opened(tmp_path / "x")), logits(module))
    assert (tmp_path / "x" / "generation_config.json").exists()
    other = theirs(CONFIGS[family](), seed=1)
    other.save_pretrained(tmp_path / "y", max_shard_size="4KB")
    loaded, report = hf_checkpoint.load(tmp_path / "y", state, model)
    assert not report
    assert_equal(booster.full_params(loaded), fb.functionalize(other).init())


# Memory


@pytest.mark.parametrize("layout", ["one device", "fsdp", "zero1"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_save_holds_one_tensor_and_one_leaf(family: str, layout: str, tmp_path: Path) -> None:
    booster = LAYOUTS[layout]()
    model = {
        "gpt2": lambda: fb.models.gpt2(vocab_size=64, n_positions=16, n_embd=64, n_layer=4, n_head=4),
        "llama": lambda: fb.models.llama(
            vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
        ),
    }[family]()
    state = started(booster, model)
    entries = hf_checkpoint._entries(model, state, None)
    largest = max(info.nbytes for info in tree.leaves(model.abstract))
    bound = max(entry.nbytes for entry in entries) + largest
    assert bound < sum(info.nbytes for info in tree.leaves(model.abstract)) / 2
    with Live() as live:
        hf_checkpoint.save(tmp_path, state, model, size_per_shard=0.25)
    assert largest <= live.peak <= bound
    with Live() as reading:
        hf_checkpoint.read_into(tmp_path, entries, lambda name: False, strict=True)
    assert reading.peak <= 2 * largest


# Errors


def saved(tmp_path: Path) -> tuple[Any, Any, Path]:
    model = fb.models.llama(llama_config())
    state = started(fb.Booster("cpu"), model)
    hf_checkpoint.save(tmp_path / "x", state, model)
    return state, model, tmp_path / "x" / "model.safetensors"


def test_one_error_names_all_that_does_not_fit(tmp_path: Path) -> None:
    state, model, file = saved(tmp_path)
    tensors = load_file(file)
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["extra"] = torch.ones(2)
    tensors["model.embed_tokens.weight"] = torch.ones(3, 12)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(20, 12, dtype=torch.int32)
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 2
    save_file(tensors, file)
    kept = tree.map(torch.clone, state.params)
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        hf_checkpoint.load(file.parent, state, model)
    missing = ("model.norm.weight: missing", "lm_head.weight: missing")
    for part in (*missing, "extra: unexpected", "(3, 12)", "up_proj.weight: torch.int32, expected torch.float32"):
        assert part in str(caught.value)
    loaded, report = hf_checkpoint.load(file.parent, state, model, strict=False)
    assert report.missing == ["lm_head.weight", "model.norm.weight"] or set(report.missing) == {
        "lm_head.weight",
        "model.norm.weight",
    }
    assert report.unexpected == ["extra"]
    assert len(report.mismatched) == 2
    assert torch.equal(loaded.params["embed_tokens"]["weight"], kept["embed_tokens"]["weight"])
    query = loaded.params["layers"][0]["self_attn"]["q_proj"]["weight"]
    assert torch.equal(query, 2 * kept["layers"][0]["self_attn"]["q_proj"]["weight"])


def test_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    module = theirs(gpt2_config())
    model, params = hf.from_hf(module)
    state = started(fb.Booster("cpu"), model)
    tensors = {name: value.clone() for name, value in hf.to_hf(model, params).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded, _ = hf_checkpoint.load(tmp_path, state, model)
    assert_equal(loaded.params, params)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight: differs from transformer.wte.weight"):
        hf_checkpoint.load(tmp_path, state, model)


def test_pickles_are_read_by_the_weights_only_unpickler_alone(tmp_path: Path) -> None:
    module = theirs(gpt2_config())
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    model, params = hf.from_hf(module)
    state = started(LAYOUTS["fsdp"](), model)
    with pytest.raises(ValueError, match="is a pickle, which can run any code"):
        hf_checkpoint.load(tmp_path, state, model)
    loaded, _ = hf_checkpoint.load(tmp_path, state, model, weights_only=True)
    assert_equal(LAYOUTS["fsdp"]().full_params(loaded), params)

    class Code:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "it ran"),)

    torch.save({"wte": Code()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="it holds more than tensors, or is damaged, and is not read"):
        hf_checkpoint.load(tmp_path, state, model, weights_only=True)
    assert not (tmp_path / "it ran").exists()


def test_pickles_of_old_and_damaged_ones(tmp_path: Path) -> None:
    """torch's form of before 1.6 is no zip archive, and cannot be mapped to memory."""
    module, file = nn.Linear(3, 2), tmp_path / "pytorch_model.bin"
    model = fb.functionalize(module)
    state = started(fb.Booster("cpu"), model)
    torch.save(module.state_dict(), file, _use_new_zipfile_serialization=False)
    loaded, _ = hf_checkpoint.load(tmp_path, state, model, weights_only=True)
    assert_equal(loaded.params, dict(module.named_parameters()))
    torch.save(module.state_dict(), file)
    whole = file.read_bytes()
    for content in (b"", b"a text", whole[: len(whole) // 2], whole[:-1]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin.* damaged"):
            hf_checkpoint.load(tmp_path, state, model, weights_only=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "holds no weights"),
        (lambda file: file.write_bytes(file.read_bytes()[:-5]), "damaged"),
        (lambda file: file.write_bytes(b""), "damaged"),
        (lambda file: (file.parent / "model.safetensors").rename(file.parent / "elsewhere"), "holds no weights"),
    ],
)
def test_damaged_files_are_refused(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    state, model, file = saved(tmp_path)
    damage(file)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        hf_checkpoint.load(file.parent, state, model)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is damaged"),
        ('{"weight_map": 3}', "no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "is not a file beside it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "missing gone.safetensors"),
        ('{"weight_map": {"a": "part.safetensors"}}', "do not hold the same tensors: a, b"),
    ],
)
def test_indices_that_lead_nowhere_are_refused(index: str, message: str, tmp_path: Path) -> None:
    state, model, _ = saved(tmp_path)
    save_file({"b": torch.ones(1)}, tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        hf_checkpoint.load(tmp_path, state, model)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    state, model, _ = saved(tmp_path)
    with pytest.raises(ValueError, match="size_per_shard: 0"):
        hf_checkpoint.save(tmp_path, state, model, size_per_shard=0)
    with pytest.raises(ValueError, match=r"dtype: torch\.int8"):
        hf_checkpoint.save(tmp_path, state, model, dtype=torch.int8)
    with pytest.raises(TypeError, match="state: dict"):
        hf_checkpoint.save(tmp_path, {}, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model: Linear"):
        hf_checkpoint.save(tmp_path, state, nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has other parameters than the state"):
        hf_checkpoint.save(tmp_path, state, fb.models.llama(llama_config(tied=True)))
    with pytest.raises(ValueError, match="it is abstract"):
        hf_checkpoint.load(tmp_path, fb.Booster("cpu").abstract(model, fb.optim.sgd(1.0)), model)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        hf_checkpoint.save(tmp_path / "file", state, model)


# A save that dies


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether bytes have reached the disk shows after a power failure alone, and syncing takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Died(BaseException):
    pass


def dying(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """End a save, as a kill does, at the change number ``after`` that it makes in the file system; nothing follows."""
    count = 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > after:
                raise Died
            return change(*args, **kwargs)

        return run

    for name in ("replace", "link", "fsync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(hf_writing, "as_bytes", counted(hf_writing.as_bytes))
    monkeypatch.setattr(folders.Local, "create", counted(folders.Local.create))


@pytest.mark.parametrize(("before", "after"), [(FEW, FEW), (FEW, 2 * FEW), (FEW, 1), (1, FEW), (1, 1)])
def test_a_save_that_dies_anywhere_leaves_the_old_or_the_new(
    before: float, after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"vocab_size": 37, "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 3}
    model = fb.models.llama(**config, num_hidden_layers=1)
    old, new, none = (started(fb.Booster("cpu"), model, seed) for seed in (1, 2, 3))
    hf_checkpoint.save(tmp_path / "old", old, model, size_per_shard=before)
    hf_checkpoint.save(tmp_path / "fresh", new, model, size_per_shard=after)
    fresh = {file.name for file in (tmp_path / "fresh").iterdir()}
    seen, number = set(), 0
    while True:
        folder = shutil.copytree(tmp_path / "old", tmp_path / str(number))
        with monkeypatch.context() as patch:
            dying(patch, number)
            try:
                hf_checkpoint.save(folder, new, model, size_per_shard=after)
            except Died:
                ended = False
            else:
                ended = True
        found, _ = hf_checkpoint.load(folder, none, model)
        value = found.params["norm"]["weight"], found.params["lm_head"]["weight"]
        is_new = torch.equal(value[1], new.params["lm_head"]["weight"])
        assert_equal(found.params, (new if is_new else old).params)
        module = opened(folder) if number % 5 == 0 or ended else None
        assert module is None or torch.equal(module.lm_head.weight, value[1])
        seen.add(is_new)
        hf_checkpoint.save(folder, new, model, size_per_shard=after)  # which cleans up
        assert {file.name for file in folder.iterdir()} == fresh
        if ended:
            assert is_new
            break
        number += 1
    assert seen == {False, True}
    assert number > 5


@pytest.mark.parametrize("size", [TINY, 1])
def test_a_full_disk_leaves_the_old_one_and_no_trace(
    size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fb.models.llama(llama_config())
    old, new = (started(fb.Booster("cpu"), model, seed) for seed in (1, 2))
    hf_checkpoint.save(tmp_path / "x", old, model, size_per_shard=size)
    names = {file.name for file in (tmp_path / "x").iterdir()}

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_writing, "as_bytes", full)
    with pytest.raises(OSError, match=r"could not be written .*No space left.*; what was there before is whole"):
        hf_checkpoint.save(tmp_path / "x", new, model, size_per_shard=size)
    with pytest.raises(OSError, match="No space left"):
        hf_checkpoint.save(tmp_path / "y", new, model, size_per_shard=size)
    monkeypatch.undo()
    assert {file.name for file in (tmp_path / "x").iterdir()} == names
    assert not (tmp_path / "y").exists()
    assert_equal(hf_checkpoint.load(tmp_path / "x", new, model)[0].params, old.params)


def test_two_saves_to_one_directory_are_refused(tmp_path: Path) -> None:
    state, model, file = saved(tmp_path)
    with locking.exclusive(file.parent, wait=False) as held:
        assert held
        with pytest.raises(FileExistsError, match="another process is writing there"):
            hf_checkpoint.save(file.parent, state, model)


# The Booster's methods


class Net(nn.Module):
    """A tied, a frozen, a non-persistent, an integer, a one-element tensor; a batch norm; odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.last.weight
        self.still = nn.Linear(5, 7)
        self.still.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.scale * self.still(self.tied(torch.tanh(self.last(x)))).sum(-1)


def boosted(layout: str, seed: int, steps: int = 2) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    net = Net()
    groups = [{"params": [net.first.weight, net.scale], "lr": 0.1}, {"params": [net.last.weight, net.first.bias]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.3)
    model, handle, _, _, schedule = LAYOUTS[layout]().boost(net, optimizer, lr_scheduler=scheduler)
    train((model, handle, schedule), steps, seed)
    return model, handle, schedule


def train(handles: tuple[Any, Any, Any], steps: int, seed: int) -> None:
    model, handle, schedule = handles
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        handle.backward(model(torch.randn(60, 3, generator=generator)).square().mean())
        handle.step()
        handle.zero_grad()
        schedule.step()


@pytest.mark.parametrize("before", [True, False])
def test_two_saves_to_one_file_are_refused(before: bool, tmp_path: Path) -> None:
    """Saves to another file of the folder are not, nor one after a job that was killed."""
    model, _, _ = boosted("one device", 0)
    one, other, mark = (tmp_path / name for name in ("a.safetensors", "b.safetensors", ".a.safetensors.saving"))
    if before:
        booster_io.save_model(model, one)
    names = {file.name for file in tmp_path.iterdir()}
    with locking.shared(tmp_path), locking.marked(mark) as held:  # as another job does
        assert held
        saves: list[Callable[..., Any]] = [
            booster_io.save_model,
            lambda *given: booster_io.save_model(*given, use_async=True).result(),  # type: ignore[union-attr]
        ]
        for save in saves:
            with pytest.raises(FileExistsError, match=r"a\.safetensors: another process is writing it; nothing was"):
                save(model, one)
        booster_io.save_model(model, other)
        with pytest.raises(FileExistsError, match="another process is writing there"):
            booster_io.save_model(model, tmp_path, shard=True)
        assert {file.name for file in tmp_path.iterdir()} == {*names, mark.name, other.name}
    mark.touch()
    booster_io.save_model(model, one)
    assert {file.name for file in tmp_path.iterdir()} == {one.name, other.name}


@pytest.mark.parametrize("before", [True, False])
def test_a_save_to_one_file_that_dies_anywhere(before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one is whole, or the new one is, and whatever else is there stays; the next save cleans up."""
    (old, _, _), (new, _, _), (reader, _, _) = (boosted("one device", seed) for seed in range(3))
    values, seen = {True: new.state_dict(), False: old.state_dict()}, set()
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "other.safetensors").write_bytes(b"another's")
        if before:
            booster_io.save_model(old, folder / "it.safetensors")
        ended = False
        with monkeypatch.context() as patch, contextlib.suppress(Died):
            dying(patch, number)
            booster_io.save_model(new, folder / "it.safetensors")
            ended = True
        if (folder / "it.safetensors").exists():
            booster_io.load_model(reader, folder / "it.safetensors")
            found = reader.state_dict()
            seen.add(is_new := torch.equal(found["last.weight"], values[True]["last.weight"]))
            assert_equal(found, values[is_new])
        else:
            assert not before and not ended
        booster_io.save_model(new, folder / "it.safetensors")
        assert {file.name for file in folder.iterdir()} == {"it.safetensors", "other.safetensors"}
        if ended:
            break
    assert seen == ({False, True} if before else {True}) and number > 3


@pytest.mark.parametrize("writer", LAYOUTS)
@pytest.mark.parametrize(("reader", "shard"), [("one device", True), ("fsdp", False), ("the same", True)])
def test_handles_resume_under_another_layout(writer: str, reader: str, shard: bool, tmp_path: Path) -> None:
    reader = writer if reader == "the same" else reader
    first, second = boosted(writer, 0), boosted(reader, 1, steps=3)
    names = ("m", "o") if shard else ("m.safetensors", "o.safetensors")
    options = {"shard": shard, "size_per_shard": 1e-4}
    booster_io.save_model(first[0], tmp_path / names[0], **options)
    booster_io.save_optimizer(first[1], tmp_path / names[1], **options)
    booster_io.save_lr_scheduler(first[2], tmp_path / "s.json")
    assert not booster_io.load_model(second[0], tmp_path / names[0])
    booster_io.load_optimizer(second[1], tmp_path / names[1])
    booster_io.load_lr_scheduler(second[2], tmp_path / "s.json")
    assert_equal(second[0].state_dict(), first[0].state_dict())
    assert_equal(second[1].state_dict()["state"], first[1].state_dict()["state"])
    assert second[1].state_dict()["param_groups"] == first[1].state_dict()["param_groups"]
    assert second[2].state_dict() == first[2].state_dict()
    if reader == writer:  # elsewhere, batch norms see other batches
        for handles in (first, second):
            train(handles, 2, 7)
        assert_equal(second[0].state_dict(), first[0].state_dict())
    if shard:
        assert len(list((tmp_path / "o").glob("optimizer-*-of-*.safetensors"))) > 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_boosted_transformer_is_opened_by_transformers(family: str, layout: str, tmp_path: Path) -> None:
    module = theirs(CONFIGS[family]())
    expected = logits(module)
    model = LAYOUTS[layout]().boost(module)[0]
    booster_io.save_model(model, tmp_path, shard=True, size_per_shard=TINY)
    assert torch.equal(logits(opened(tmp_path)), expected)
    assert (tmp_path / "generation_config.json").exists()
    other = LAYOUTS[layout]().boost(theirs(CONFIGS[family](), seed=1))[0]
    assert not booster_io.load_model(other, tmp_path)
    assert_equal(other.state_dict(), model.state_dict())


def test_a_prefix_stands_in_the_names_and_is_found(tmp_path: Path) -> None:
    model, handle, _ = boosted("one device", 0)
    booster_io.save_model(model, tmp_path / "m", shard=True, prefix="mine", size_per_shard=1e-4)
    booster_io.save_optimizer(handle, tmp_path / "o", shard=True, prefix="mine")
    assert (tmp_path / "m" / "model.mine.safetensors.index.json").exists()
    assert (tmp_path / "o" / "optimizer.mine.safetensors").exists()
    other = boosted("fsdp", 1)
    booster_io.load_model(other[0], tmp_path / "m")
    booster_io.load_optimizer(other[1], tmp_path / "o")
    assert_equal(other[0].state_dict(), model.state_dict())


def test_model_and_optimizer_share_a_directory(tmp_path: Path) -> None:
    model, handle, _ = boosted("fsdp", 0)
    for _ in range(2):
        booster_io.save_model(model, tmp_path, shard=True, size_per_shard=1e-4)
        booster_io.save_optimizer(handle, tmp_path, shard=True, size_per_shard=1e-4)
    other = boosted("one device", 1)
    booster_io.load_model(other[0], tmp_path)
    booster_io.load_optimizer(other[1], tmp_path)
    assert_equal(other[0].state_dict(), model.state_dict())
    assert_equal(other[1].state_dict()["state"], handle.state_dict()["state"])


def test_handles_that_do_not_fit_are_refused_and_stay(tmp_path: Path) -> None:
    model, handle, schedule = boosted("fsdp", 0)
    booster_io.save_model(model, tmp_path / "m.safetensors")
    booster_io.save_optimizer(handle, tmp_path / "o.safetensors")
    booster_io.save_lr_scheduler(schedule, tmp_path / "s.json")
    before = model.state_dict(), handle.state_dict()
    tensors = load_file(tmp_path / "m.safetensors")
    save_file({name: value for name, value in tensors.items() if name != "scale"}, tmp_path / "less.safetensors")
    with pytest.raises(ValueError, match="scale: missing"):
        booster_io.load_model(model, tmp_path / "less.safetensors")
    report = booster_io.load_model(model, tmp_path / "less.safetensors", strict=False)
    assert report == hf_reading.Report(["scale"], [], [])
    with pytest.raises(ValueError, match="holds no optimizer"):
        booster_io.load_optimizer(handle, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "o.safetensors", "pt") as file:
        metadata = file.metadata()
    state = load_file(tmp_path / "o.safetensors")
    name = next(iter(state))
    changed = {**{key: value for key, value in state.items() if key != name}, "odd": torch.ones(1)}
    save_file(changed, tmp_path / "changed.safetensors", metadata)
    with pytest.raises(ValueError, match="does not fit") as caught:
        booster_io.load_optimizer(handle, tmp_path / "changed.safetensors")
    assert f"{name}: missing" in str(caught.value)
    assert "odd: unexpected" in str(caught.value)
    assert_equal(model.state_dict(), before[0])
    assert_equal(handle.state_dict()["state"], before[1]["state"])
    assert handle.state_dict()["param_groups"] == before[1]["param_groups"]
    step = torch.optim.lr_scheduler.StepLR(handle.optimizer, 1)
    with pytest.raises(ValueError, match="state of another scheduler"):
        booster_io.load_lr_scheduler(step, tmp_path / "s.json")


def test_what_is_not_boosted_and_names_of_pickles_are_refused(tmp_path: Path) -> None:
    model, handle, schedule = boosted("one device", 0)
    with pytest.raises(TypeError, match="model: Net, expected the one that boost returned"):
        booster_io.save_model(model.module, tmp_path)
    with pytest.raises(TypeError, match="optimizer: AdamW, expected the one that boost returned"):
        booster_io.load_optimizer(handle.optimizer, tmp_path)
    with pytest.raises(ValueError, match="is named as a pickle"):
        booster_io.save_model(model, tmp_path / "model.bin")
    with pytest.raises(ValueError, match="is named as a pickle"):
        booster_io.save_lr_scheduler(schedule, tmp_path / "schedule.pt")
    with pytest.raises(ValueError, match="gather_dtensor: False"):
        booster_io.save_model(model, tmp_path / "x", gather_dtensor=False)
    with pytest.raises(FileExistsError, match="is a directory"):
        booster_io.save_model(model, tmp_path)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "multi step": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=20),
    "restarts": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.MultiStepLR(optimizer, [4])],
        [3],
    ),
    "ours": lambda optimizer: fb.lr_scheduler.CosineAnnealingWarmupLR(optimizer, 20, warmup_steps=3),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_where_they_were(kind: str, tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5}], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[kind](optimizer)

    def go(optimizer: Any, scheduler: Any, steps: int) -> list[Any]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "plateau" else []))
            rates.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        return rates

    optimizer, scheduler = make()
    go(optimizer, scheduler, 2)
    booster_io.save_lr_scheduler(scheduler, tmp_path / "s.json")
    other, again = make()
    other.load_state_dict(optimizer.state_dict())
    booster_io.load_lr_scheduler(again, tmp_path / "s.json")
    assert again.state_dict() == scheduler.state_dict()
    assert go(other, again, 6) == go(optimizer, scheduler, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size_per_shard": float("inf")}, "size_per_shard: inf, expected a positive number of MB"),
        ({"dtype": torch.float8_e8m0fnu}, "dtype: torch.float8_e8m0fnu, expected one of torch.float64"),
        ({"path": "nowhere://weights"}, "Protocol not known: nowhere"),
    ],
)
def test_what_a_save_does_not_take_is_named(options: Any, message: str, tmp_path: Path) -> None:
    booster, model = fb.Booster("cpu"), fb.functionalize(torch.nn.Linear(3, 2))
    state = booster.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))
    arguments: dict[str, Any] = {"path": tmp_path / "out", **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        booster.save_pretrained(state=state, model=model, **arguments)
    assert not (tmp_path / "out").exists() and not Path("nowhere:").exists()


def test_a_prefix_is_no_path(tmp_path: Path) -> None:
    booster = fb.Booster("cpu")
    model, *_ = booster.boost(torch.nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"prefix: '\.\./up', expected a part of a file's name"):
        booster.save_model(model, tmp_path / "out", shard=True, prefix="../up")


def test_an_abstract_state_has_nothing_to_save(tmp_path: Path) -> None:
    booster, model = fb.Booster("cpu"), fb.functionalize(torch.nn.Linear(3, 2))
    with pytest.raises(TypeError, match="state: it is abstract, expected one with values"):
        booster.save(tmp_path / "out", booster.abstract(model, fb.optim.sgd(0.1)))
