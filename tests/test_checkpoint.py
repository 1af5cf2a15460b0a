"""Checkpoints: what is loaded is what was saved; bad paths, damage and a full disk lose nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import resource
import shutil
import signal
import stat
import threading
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import functional_booster as fb
from functional_booster import checkpoint, locking
from functional_booster.checkpoint import folders, saving

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


def data_files(path: Path) -> list[str]:
    return [file["name"] for file in checkpoint.read_manifest(path)["files"]]


@contextlib.contextmanager
def other_process(work: Callable[[], object]) -> Generator[tuple[int, list[int]]]:
    """(id of a process that does this work, []); afterwards its exit status: 0, 1 where it raised, -9 where killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, none of which it needs
        child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    statuses: list[int] = []
    try:
        yield child, statuses
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def in_a_child(work: Callable[[], object]) -> int:
    """The exit status of a process that does this work."""
    with other_process(work) as (_, statuses):
        pass
    return statuses[0]


def at_point(n: int, act: str, work: Callable[[], object]) -> int:
    """Have a child process killed, or its disk full, at the n-th time that it asks the disk for something.

    In the midst of a write, half of it is done before. Returns the exit status: 0 where it asked less often, 1 where it
    raised a clear error, 4 where it went on.
    """
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1
        if asked == n and act == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if asked == n:
            raise OSError(28, "No space left on device")

    def asking(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            ask()
            return real(*args, **options)

        return call

    new = folders._new

    @contextlib.contextmanager
    def halving(path: Path) -> Generator[Any]:
        ask()
        with new(path) as stream:
            yield Halving(stream, ask)

    def patched() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folders, "open", asking(open), raising=False)
            patch.setattr(folders, "_new", halving)
            for name in ("fsync", "replace", "unlink", "mkdir"):
                patch.setattr(os, name, asking(getattr(os, name)))
            try:
                work()
            except OSError as error:
                told = "No space left" in str(error) and "what was there before is whole" in str(error)
                os._exit(1 if told else 3)
            os._exit(0 if asked < n else 4)

    return in_a_child(patched)


class Halving:
    """A stream that asks in the midst of each write."""

    def __init__(self, stream: Any, ask: Callable[[], None]) -> None:
        self.stream, self.ask = stream, ask

    def write(self, data: Any) -> None:
        data = memoryview(data)
        self.stream.write(data[: len(data) // 2])
        self.stream.flush()
        self.ask()
        self.stream.write(data[len(data) // 2 :])

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()


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

    @pytest.mark.parametrize("act", ["killed", "full"])
    def test_a_kill_or_a_full_disk_at_any_point_leaves_one_of_them_whole(
        self, act: str, booster: fb.Booster, tmp_path: Path
    ) -> None:
        """At the n-th time that the disk is asked for something, for every n; the next save cleans up."""
        model, tx = fb.functionalize(torch.nn.Linear(3, 4)), fb.optim.sgd(0.1)
        old, path = booster.init(model, tx, key=fb.random.key(0)), tmp_path / "ckpt"
        new = old.replace(step=old.step + 1, params=fb.tree.map(lambda leaf: leaf + 1, old.params))
        booster.save(path, old)
        outcomes = []
        for n in itertools.count(1):
            shutil.copytree(path, copied := tmp_path / str(n))
            ended = at_point(n, act, functools.partial(booster.save, copied, new))
            if ended == 0:
                break
            assert ended in ((-signal.SIGKILL,) if act == "killed" else (1, 4))
            found = booster.load(copied, like=old)
            outcomes.append(int(found.step))
            assert same(found, new if outcomes[-1] else old)
            assert outcomes[-1] or ended != 4
            if ended == 1 and not outcomes[-1]:
                assert len(list(copied.iterdir())) == 2  # nothing half-written is left behind
            booster.save(copied, new)
            assert same(booster.load(copied, like=old), new)
            assert len(list(copied.iterdir())) == 2
        assert outcomes.count(0) > 10 and outcomes[-1] == 1

    def test_a_disk_that_is_really_full(self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
        old = booster.init(MODEL, TX, key=fb.random.key(0))
        booster.save(tmp_path, old)

        def save() -> None:  # no file may grow beyond this: the kernel refuses
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            with pytest.raises(OSError, match=r"could not be written .*File too large.* is whole"):
                booster.save(tmp_path, state)

        assert in_a_child(save) == 0
        assert same(booster.load(tmp_path, like=old), old)
        assert len(list(tmp_path.iterdir())) == 2

    def test_what_a_crash_left_is_cleaned(self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
        path = tmp_path / "ckpt"
        path.mkdir()
        token = "0123" * 4
        for leftover in (
            f"state-{token}.safetensors",  # of format 1
            f"state-{token}-00001.safetensors",
            f"state-{token}-00001.json",
            "manifest.json.0123abcd",
            "manifest.json.saving",
        ):  # of a first save
            (path / leftover).write_bytes(b"half")
        with pytest.raises(FileNotFoundError, match="is no checkpoint"):
            booster.load(path, like=state)
        booster.save(path, state)
        assert len(list(path.iterdir())) == 2
        (path / f"state-{token}-00000.safetensors").write_bytes(b"half")
        mine = ("state-of-the-art.safetensors", "manifest.json.backup", "state-0123.safetensors")
        for name in mine:
            (path / name).write_text("precious")
        booster.save(path, state)
        assert {p.name for p in path.iterdir()} == {"manifest.json", *data_files(path), *mine}

    def test_a_first_save_that_fails_leaves_nothing(
        self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(place: Any, name: str, taken: Any) -> None:
            (place.path / name).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(saving.data_files, "write", full)
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
        old, real = (tmp_path / "manifest.json").read_bytes(), folders.sync

        def failing(path: Path) -> None:
            if (path / "manifest.json").read_bytes() != old:
                raise OSError(5, "Input/output error")
            real(path)

        with monkeypatch.context() as patched:
            patched.setattr(folders, "sync", failing)
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
        inside, go_on, real = threading.Event(), threading.Event(), saving.data_files.write
        order: list[str] = []

        def slow(*args: Any) -> Any:
            order.append(threading.current_thread().name)
            written = real(*args)
            if order == ["first"]:
                inside.set()
                go_on.wait()
            order.append(threading.current_thread().name)
            return written

        monkeypatch.setattr(saving.data_files, "write", slow)
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

    @pytest.mark.parametrize("before", [True, False])
    def test_another_job_that_saves_there_is_refused_and_may_come_later(
        self, before: bool, booster: fb.Booster, state: fb.TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The job at work is killed in the end, and holds nothing then."""
        path, first = tmp_path / "ckpt", booster.init(MODEL, TX, key=fb.random.key(0))
        if before:
            booster.save(path, first)
        at_work, told = os.pipe()

        def stuck(*_: Any) -> None:
            os.write(told, b"!")
            signal.pause()

        def job() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(saving.data_files, "write", stuck)
                booster.save(path, state)

        with ThreadPoolExecutor(1) as threads, other_process(job) as (pid, _):
            assert os.read(at_work, 1) == b"!"
            names = sorted(path.iterdir())
            saves: list[Callable[..., object]] = [booster.save, lambda *args: checkpoint.save_async(*args).result()]
            for save in saves:
                with pytest.raises(FileExistsError, match="ckpt: another process is writing there; nothing was"):
                    threads.submit(save, path, state).result(timeout=30)
            assert sorted(path.iterdir()) == names
            booster.save(tmp_path / "other", state)
            os.kill(pid, signal.SIGKILL)
        booster.save(path, state)
        assert same(booster.load(path, like=state), state)

    def test_without_locks_only_what_was_replaced_goes(
        self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(locking, "fcntl", None)
        booster.save(tmp_path, state)
        (tmp_path / f"state-{'0' * 16}-00000.safetensors").write_bytes(b"another saver's, perhaps")
        booster.save(tmp_path, state)
        names = {p.name for p in tmp_path.iterdir()}
        assert names == {"manifest.json", *data_files(tmp_path), f"state-{'0' * 16}-00000.safetensors"}

    def test_what_is_not_whole_is_not_published(
        self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path
    ) -> None:
        """A share that lacks a piece, as of a layout that ranks understand differently."""
        booster.save(tmp_path, state)
        taken = checkpoint.snapshot(state.replace(step=state.step + 1))
        piece = taken.pieces[-1]
        with pytest.raises(OSError, match=rf"could not be written \({piece.leaf}: its pieces do not make up the leaf"):
            checkpoint.write(tmp_path, dataclasses.replace(taken, pieces=taken.pieces[:-1]))
        assert same(booster.load(tmp_path, like=state), state)
        assert len(list(tmp_path.iterdir())) == 2
        checkpoint.write(tmp_path, taken)
        assert booster.load(tmp_path, like=state).step == state.step + 1

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
        "strided": whole[::2],
        "conjugate": (turned := torch.view_as_complex(whole.view(3, 2)).conj()),
        "negative": turned.imag,
        "expanded": whole[:1].expand(3),
    }
    shared = state.replace(buffers=buffers)
    booster.save(tmp_path, shared)
    assert same(booster.load(tmp_path, like=shared), shared)
    checkpoint.save_async(tmp_path, shared).result()
    assert same(booster.load(tmp_path, like=shared), shared)


def test_a_dtype_that_files_do_not_have_is_refused_at_once(
    booster: fb.Booster, state: fb.TrainState, tmp_path: Path
) -> None:
    odd = state.replace(buffers={"odd": torch.zeros(2, dtype=torch.complex128)})
    for save in (checkpoint.save, checkpoint.save_async):
        with pytest.raises(TypeError, match=r"buffers\.odd: torch\.complex128, which safetensors does not have"):
            save(tmp_path / "ckpt", odd)
    assert list(tmp_path.iterdir()) == []


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
            ("files", None),
            ("files", [{"name": "..", "size": 1}]),
            ("files", [{"name": "../state-0123456789abcdef-00000.safetensors", "size": 1}]),
            ("files", [{"name": "thesis.safetensors", "size": 1}]),
            ("files", [{"name": "state-0123456789abcdef-00000.safetensors"}]),
            ("chunk", 0),
            ("step", "3"),
            ("position", True),
            ("leaves", []),
            ("leaves", {"step": [2]}),
            ("leaves", {"step": {"shape": [], "dtype": "int64"}}),
            ("leaves", {"step": {"shape": 2, "dtype": "int64", "pieces": []}}),
            ("leaves", {"step": {"shape": [2], "dtype": "save", "pieces": []}}),
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

    @pytest.mark.parametrize(
        "change",
        [
            {"file": 1},
            {"offset": 10**9},
            {"range": [0, 161]},
            {"range": [5, 5]},
            {"range": 3},
            {"crc32": []},
            {"box": [[0, 1]]},
        ],
        ids=str,
    )
    def test_a_piece_that_cannot_be_or_is_of_a_newer_kind(
        self, change: dict[str, Any], booster: fb.Booster, state: fb.TrainState, tmp_path: Path
    ) -> None:
        booster.save(tmp_path, state)
        manifest = checkpoint.read_manifest(tmp_path)
        manifest["leaves"]["params.wte.weight"]["pieces"][0].update(change)
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=r"damaged, or of a newer version: .* params\.wte\.weight has the piece"):
            booster.load(tmp_path, like=state)

    def test_a_leaf_that_is_not_whole(self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
        booster.save(tmp_path, state)
        manifest = checkpoint.read_manifest(tmp_path)
        manifest["leaves"]["params.wte.weight"]["pieces"] = []
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=r"params\.wte\.weight is not whole"):
            booster.load(tmp_path, like=state)

    def test_damage_is_found_wherever_it_is(self, booster: fb.Booster, state: fb.TrainState, tmp_path: Path) -> None:
        """One changed bit in any leaf; a file that is too short; one that is gone."""
        booster.save(tmp_path, state)
        (name,), leaves = data_files(tmp_path), checkpoint.read_manifest(tmp_path)["leaves"]
        data = tmp_path / name
        raw = data.read_bytes()
        for leaf, place in ((leaf, entry["pieces"][0]["offset"]) for leaf, entry in leaves.items()):
            broken = bytearray(raw)
            broken[place] ^= 1
            data.write_bytes(broken)
            with pytest.raises(ValueError, match=rf"is damaged: its checksum does not match, in {leaf}$"):
                booster.load(tmp_path, like=state)
        data.write_bytes(raw[:-1])
        with pytest.raises(ValueError, match=rf"is damaged: {len(raw) - 1} bytes, expected {len(raw)}"):
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
    (name,) = data_files(tmp_path)
    named = checkpoint.named_tensors(state)
    for tensors in (load_file(tmp_path / name), checkpoint.read_tensors(tmp_path)):
        assert tensors.keys() == named.keys()
        assert same(tensors, named)
