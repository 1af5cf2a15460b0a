"""Checkpoints: what is loaded is what was saved; bad paths, damage and a full disk lose nothing."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import functional_booster as fb
from functional_booster import checkpoint, locking

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
        for leftover in (f"state-{'0123' * 4}.safetensors", "manifest.json.0123abcd"):  # of a first save
            (path / leftover).write_bytes(b"half")
        with pytest.raises(FileNotFoundError, match="is no checkpoint"):
            booster.load(path, like=state)
        booster.save(path, state)
        assert len(list(path.iterdir())) == 2
        (path / f"state-{'0123' * 4}.safetensors").write_bytes(b"half")
        mine = ("state-of-the-art.safetensors", "manifest.json.backup", "state-0123.safetensors")
        for name in mine:
            (path / name).write_text("precious")
        booster.save(path, state)
        assert {p.name for p in path.iterdir()} == {"manifest.json", checkpoint.read_manifest(path)["data"], *mine}

    def test_a_first_save_that_fails_leaves_nothing(
        self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(tensors: Any, path: Path) -> None:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint, "save_file", full)
        (tmp_path / "empty").mkdir()
        for path in ("new", "empty"):
            with pytest.raises(OSError, match="No space left"):
                booster.save(tmp_path / path, state)
        assert [(p.name, list(p.iterdir())) for p in tmp_path.iterdir()] == [("empty", [])]

    def test_what_may_not_be_on_the_disk_replaces_nothing(
        self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The new manifest is in place, but its name is not synced: after a power cut the old one may be back."""
        booster.save(tmp_path, booster.init(MODEL, TX, key=fb.random.key(0)))
        old, real = (tmp_path / "manifest.json").read_bytes(), checkpoint._sync

        def failing(path: Path) -> None:
            if path.is_dir():
                raise OSError(5, "Input/output error")
            real(path)

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "_sync", failing)
            with pytest.raises(OSError, match="Input/output error"):
                booster.save(tmp_path, state)
        new = (tmp_path / "manifest.json").read_bytes()
        for manifest in (old, new):
            (tmp_path / "manifest.json").write_bytes(manifest)
            booster.load(tmp_path, like=state)
        booster.save(tmp_path, state)
        assert len(list(tmp_path.iterdir())) == 2

    def test_savers_on_one_path_take_turns(
        self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second waits until the first is done, and the last one's state stays, alone and whole."""
        first, path = booster.init(MODEL, TX, key=fb.random.key(0)), tmp_path / "ckpt"
        inside, go_on, real = threading.Event(), threading.Event(), checkpoint.save_file
        order: list[str] = []

        def slow(tensors: Any, data: Path) -> None:
            order.append(threading.current_thread().name)
            real(tensors, data)
            if order == ["first"]:
                inside.set()
                go_on.wait()
            order.append(threading.current_thread().name)

        monkeypatch.setattr(checkpoint, "save_file", slow)
        savers = [
            threading.Thread(target=booster.save, args=(path, saved), name=name)
            for name, saved in (("first", first), ("second", state))
        ]
        savers[0].start()
        inside.wait()
        savers[1].start()
        savers[1].join(timeout=0.3)
        assert order == ["first"]
        go_on.set()
        for saver in savers:
            saver.join()
        assert order == ["first", "first", "second", "second"]
        assert same(booster.load(path, like=state), state)
        assert len(list(path.iterdir())) == 2

    def test_without_locks_only_what_was_replaced_goes(
        self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(locking, "fcntl", None)
        booster.save(tmp_path, state)
        (tmp_path / f"state-{'0' * 16}.safetensors").write_bytes(b"another saver's, perhaps")
        booster.save(tmp_path, state)
        names = {p.name for p in tmp_path.iterdir()}
        assert names == {"manifest.json", checkpoint.read_manifest(tmp_path)["data"], f"state-{'0' * 16}.safetensors"}

    def test_the_umask_decides_who_reads_it(self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            booster.save(tmp_path, state)
        finally:
            os.umask(before)
        assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o640}


def test_a_donated_state_is_refused_before_anything_is_written(
    booster: fb.Booster, state: fb.TrainState, tmp_path: Path
) -> None:
    fork = state.replace(key=fb.random.key(9))
    booster.train_step(MODEL.loss, TX, jit=False)(state, BATCH)
    for donated in (state, fork):
        with pytest.raises(fb.DonatedError, match="was donated to train_step"):
            booster.save(tmp_path / "ckpt", donated)
    assert list(tmp_path.iterdir()) == []


def test_leaves_that_share_memory_are_saved_whole(booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
    buffers = {
        "tied": state.key,
        "whole": (whole := torch.arange(6.0)),
        "row": whole[2:4],
        "column": whole.view(2, 3).T,
    }
    shared = state.replace(buffers=buffers)
    booster.save(tmp_path, shared)
    assert same(booster.load(tmp_path, like=shared), shared)


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
        with pytest.raises(FileExistsError, match=r"has another format.* left as it is"):
            booster.save(tmp_path, state)
        assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("data", None),
            ("data", ".."),
            ("data", "../state-0123456789abcdef.safetensors"),
            ("data", "thesis.safetensors"),
            ("sha256", 3),
            ("step", "3"),
            ("position", True),
            ("leaves", []),
            ("leaves", {"step": [2]}),
            ("leaves", {"step": {"shape": 2, "dtype": "int64"}}),
        ],
    )
    def test_a_manifest_of_other_types(
        self, key: str, value: Any, booster: fb.Booster, state: fb.TrainState, tmp_path: Path
    ) -> None:
        booster.save(tmp_path, state)
        manifest = checkpoint.read_manifest(tmp_path)
        for broken in ({**manifest, key: value}, {name: manifest[name] for name in manifest if name != key}):
            (tmp_path / "manifest.json").write_text(json.dumps(broken))
            with pytest.raises(ValueError, match=rf"manifest\.json is damaged: '{key}' is missing, or not"):
                booster.load(tmp_path, like=state)

    @pytest.mark.parametrize("tensors", [None, {}, {"other": torch.ones(1)}, "other shapes"])
    def test_a_data_file_of_other_content(
        self, tensors: Any, booster: fb.Booster, state: fb.TrainState, tmp_path: Path
    ) -> None:
        booster.save(tmp_path, state)
        (data,) = tmp_path.glob("*.safetensors")
        if tensors is None:
            data.write_bytes(b"no safetensors")
        else:
            save_file({n: t[None] for n, t in load_file(data).items()} if isinstance(tensors, str) else tensors, data)
        manifest = checkpoint.read_manifest(tmp_path)
        manifest["sha256"] = hashlib.sha256(data.read_bytes()).hexdigest()
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=r"state-\w+\.safetensors is damaged"):
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
