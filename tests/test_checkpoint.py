"""Checkpoints: what is loaded is what was saved; bad paths, damage and a full disk lose nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import functional_booster as fb
from functional_booster import checkpoint

SIZES = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_head": 2}
MODEL = fb.models.gpt2(**SIZES, n_layer=2)
TX = fb.optim.adamw(
    fb.schedules.linear(0.1, 0.0, 10), mask=lambda params: fb.tree.map(lambda p: len(p.shape) > 1, params)
)
BATCH = {"input_ids": torch.arange(16).view(2, 8)}


@pytest.fixture
def booster() -> fb.Booster:
    return fb.Booster(device="cpu")


@pytest.fixture
def state(booster: fb.Booster) -> fb.TrainState:
    step = booster.train_step(MODEL.loss, TX, jit=False)
    return step(booster.init(MODEL, TX, key=fb.random.key(3)), BATCH)[0]


def same(left: Any, right: Any) -> bool:
    equal = fb.tree.map(lambda a, b: a.dtype == b.dtype and torch.equal(a, b), left, right)
    return fb.tree.all(bool, equal)


def test_load_gives_what_was_saved(booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
    booster.save(tmp_path / "ckpt", state)
    loaded = booster.load(tmp_path / "ckpt", like=booster.abstract(MODEL, TX))
    assert same(loaded, state)
    assert loaded.abstract == state.abstract
    assert same(booster.load(tmp_path / "ckpt", like=state), state)


def test_resume_is_as_if_never_stopped(booster: fb.Booster, tmp_path: Path) -> None:
    dropout = fb.models.gpt2(**SIZES, n_layer=1)  # with dropout: keys are resumed, too
    step = booster.train_step(dropout.loss, TX, jit=False)
    state = booster.init(dropout, TX, key=fb.random.key(0))
    for _ in range(2):
        state, _ = step(state, BATCH)
    booster.save(tmp_path / "ckpt", state)
    resumed = booster.load(tmp_path / "ckpt", like=booster.abstract(dropout, TX))
    for _ in range(3):
        state, expected = step(state, BATCH)
        resumed, metrics = step(resumed, BATCH)
    assert same(resumed, state)
    assert same(metrics, expected)


def test_names_are_the_models_whatever_the_layout(booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
    """A flat optimizer's checkpoint loads into one that keeps every leaf, and the other way round."""
    booster.save(tmp_path / "flat", state)
    names = checkpoint.read_manifest(tmp_path / "flat")["leaves"]
    assert "params.h.0.attn.q.weight" in names
    assert "opt_state.0.mu.h.1.mlp.c_fc.bias" in names
    leafwise = fb.optim.GradientTransformation(TX.init, TX.update)
    loaded = booster.load(tmp_path / "flat", like=booster.abstract(MODEL, leafwise))
    assert len(loaded.storage.buffers) > len(state.storage.buffers)
    assert same(loaded.params, state.params)
    booster.save(tmp_path / "leaves", loaded)
    assert same(booster.load(tmp_path / "leaves", like=booster.abstract(MODEL, TX)), state)


def test_frozen_leaves_and_buffers_travel(booster: fb.Booster, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    module[0].bias.requires_grad_(False)
    model = fb.functionalize(module)
    state = booster.init(model, TX, key=fb.random.key(0))
    booster.save(tmp_path / "ckpt", state)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
    assert same(booster.load(tmp_path / "ckpt", like=booster.abstract(model, TX)), state)


class TestOverwriting:
    def test_the_newer_takes_the_place(self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
        path = tmp_path / "ckpt"
        booster.save(path, booster.init(MODEL, TX, key=fb.random.key(0)))
        booster.save(path, state)
        assert same(booster.load(path, like=state), state)
        assert len(list(path.iterdir())) == 2

    @pytest.mark.parametrize("stage", ["save_file", "_sync", "_sha256"])
    def test_a_failure_leaves_the_old_one_whole(
        self, stage: str, booster: fb.Booster, state: fb.TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old, path = booster.init(MODEL, TX, key=fb.random.key(0)), tmp_path / "ckpt"
        booster.save(path, old)

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, stage, full)
            with pytest.raises(OSError, match=r"ckpt could not be written .*No space left.* is whole"):
                booster.save(path, state)
        assert same(booster.load(path, like=old), old)
        assert len(list(path.iterdir())) == 2  # nothing half-written is left behind

    def test_what_a_crash_left_is_cleaned(self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
        path = tmp_path / "ckpt"
        path.mkdir()
        (path / "state-0123.safetensors").write_bytes(b"half")
        booster.save(path, state)
        assert len(list(path.iterdir())) == 2


class TestBadInput:
    def test_no_checkpoint(self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(FileNotFoundError, match=r"is no checkpoint: it has no manifest\.json"):
                booster.load(path, like=state)
        (tmp_path / "manifest.json").write_text("{")
        with pytest.raises(ValueError, match=r"manifest\.json is no manifest of a checkpoint"):
            booster.load(tmp_path, like=state)
        (tmp_path / "manifest.json").write_text(json.dumps({"format": "other"}))
        with pytest.raises(ValueError, match="has another format"):
            booster.load(tmp_path, like=state)

    def test_damage_is_found(self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
        booster.save(tmp_path, state)
        (data,) = tmp_path.glob("*.safetensors")
        raw = bytearray(data.read_bytes())
        raw[-3] ^= 1
        data.write_bytes(raw)
        with pytest.raises(ValueError, match="is damaged: its checksum does not match"):
            booster.load(tmp_path, like=state)
        data.unlink()
        with pytest.raises(ValueError, match="is missing"):
            booster.load(tmp_path, like=state)

    def test_every_difference_is_listed(self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
        booster.save(tmp_path, state)
        other = fb.models.gpt2(**{**SIZES, "vocab_size": 21}, n_layer=1)
        with pytest.raises(ValueError, match="does not fit") as error:
            booster.load(tmp_path, like=booster.abstract(other, fb.optim.sgd(0.1)))
        message = str(error.value)
        assert "params.wte.weight: float32[20, 8], expected float32[21, 8]" in message
        assert "params.h.1.ln_1.bias: not in the model and optimizer" in message

    def test_a_folder_with_other_things_is_left_alone(
        self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path
    ) -> None:
        (tmp_path / "thesis.txt").write_text("precious")
        with pytest.raises(FileExistsError, match="holds other files"):
            booster.save(tmp_path, state)
        assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
        with pytest.raises(FileExistsError, match="is a file, expected a directory"):
            booster.save(tmp_path / "thesis.txt", state)

    def test_only_states(self, booster: fb.Booster, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="state: dict, expected a TrainState"):
            booster.save(tmp_path / "x", {})  # type: ignore[arg-type]


def test_the_data_file_is_plain_safetensors(booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
    booster.save(tmp_path, state)
    (data,) = tmp_path.glob("*.safetensors")
    tensors = load_file(data)
    assert torch.equal(tensors["params.wte.weight"], state.params["wte"]["weight"])
