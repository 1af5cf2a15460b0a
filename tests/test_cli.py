"""The command line: a run leaves what it promises, resumes bit for bit, and refuses bad input with one clear error."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_booster as fb
from functional_booster import cli, data, locking, training_run
from functional_booster.checkpoint import read_manifest, read_tensors
from functional_booster.trackers import read_jsonl

TINY = ("--n-layer 1 --n-embd 16 --n-head 2 --length 16 --batch-size 4 --steps 12 --warmup 2 --log-every 2 "
        "--eval-every 4 --save-every 5 --sample 8 --no-jit --device cpu").split()  # fmt: skip
TEXT = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(300))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, with a text to train on."""
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*options: object) -> int:
    return cli.main(["train", "--data", "text.txt", *TINY, *map(str, options)])


def weights(out: str) -> dict[str, torch.Tensor]:
    """Everything in the checkpoint: parameters, optimizer state, counters, keys."""
    return read_tensors(Path(out) / "checkpoint")


def curve(out: str) -> list[tuple[Any, ...]]:
    """What metrics.jsonl holds, without what a clock has measured."""
    return [tuple((k, v) for k, v in r.items() if k != "tokens_per_second") for r in read_jsonl(f"{out}/metrics.jsonl")]


def assert_same_run(left: str, right: str) -> None:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    assert [name for name, leaf in ours.items() if not torch.equal(leaf, theirs[name])] == []
    assert curve(left) == curve(right)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_run_leaves_what_it_promises(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("--out", "run", "--model", model, "--precision", "bf16", "--accumulate", 2, "--profile") == 0
    records = read_jsonl("run/metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 4, 6, 8, 10, 12]
    assert [record["step"] for record in records if "eval_loss" in record] == [4, 8, 12]
    events = EventAccumulator("run/tensorboard")
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 4, 6, 8, 10, 12]
    assert Path("run/loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("run/profile/trace.json").read_text())["traceEvents"]
    assert read_manifest("run/checkpoint")["position"] == 12
    printed = capsys.readouterr().out
    entropy = data.unigram_entropy(data.bytes_of(["text.txt"]))
    assert f"unigram entropy  {entropy:.3f}" in printed
    assert f"loss             {records[-1]['loss']:.3f} nats per byte" in printed
    assert f"validation loss  {records[-1]['eval_loss']:.3f}" in printed
    assert Path("run/sample.txt").read_text() in printed


def test_training_learns() -> None:
    assert train("--out", "run", "--steps", 100, "--lr", 0.01, "--batch-size", 8, "--n-embd", 32) == 0
    text = data.bytes_of(["text.txt"])
    assert read_jsonl("run/metrics.jsonl")[-1]["loss"] < data.unigram_entropy(text) / 2


def test_a_resumed_run_is_the_run_that_never_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "straight") == 0
    assert train("--out", "parts", "--stop-after", 5) == 0
    assert "stopped after step 5 of 12" in capsys.readouterr().out
    assert cli.main(["train", "--resume", "--out", "parts", "--stop-after", "7"]) == 0
    assert cli.main(["train", "--resume", "--out", "parts", "--no-jit", "--steps", "12", "--sample", "8"]) == 0
    assert_same_run("straight", "parts")
    assert Path("straight/sample.txt").read_text() == Path("parts/sample.txt").read_text()
    before = weights("parts")
    assert cli.main(["train", "--resume", "--out", "parts", "--sample", "8"]) == 0  # nothing is left to do
    assert before.keys() == weights("parts").keys()
    assert curve("straight") == curve("parts")


def test_what_a_crash_left_is_resumed() -> None:
    assert train("--out", "straight") == 0
    assert train("--out", "parts", "--stop-after", 7) == 0
    with Path("parts/metrics.jsonl").open("a") as file:  # logged, and then lost: the checkpoint is older
        file.write('{"step": 8, "loss": 99.0}\n{"step": 10, "lo')
    assert cli.main(["train", "--resume", "--out", "parts", "--sample", "8"]) == 0
    assert_same_run("straight", "parts")
    early = Path("early")
    early.mkdir()
    (early / "config.json").write_bytes(Path("straight/config.json").read_bytes())  # before the first checkpoint
    assert cli.main(["train", "--resume", "--out", "early", "--sample", "8"]) == 0
    assert_same_run("straight", "early")


def test_the_checkpoint_is_one_that_the_library_loads() -> None:
    assert train("--out", "run", "--model", "gpt2") == 0
    model = fb.models.gpt2(vocab_size=256, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    tx = fb.optim.adamw(fb.schedules.cosine_warmup(peak=3e-3, total_steps=12, warmup_steps=2), weight_decay=0.1)
    booster = fb.Booster(device="cpu")
    state = booster.load("run/checkpoint", like=booster.abstract(model, tx))
    assert int(state.position) == int(state.step) == 12


def command(*options: object) -> list[str]:
    return [sys.executable, "-m", "functional_booster", "train", "--data", "text.txt", *TINY, *map(str, options)]


def test_an_interrupted_run_leaves_a_good_checkpoint() -> None:
    process = subprocess.Popen(
        command("--out", "run", "--steps", 100_000, "--save-every", 100_000), stderr=subprocess.PIPE
    )
    metrics = Path("run/metrics.jsonl")
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == cli.INTERRUPTED, errors
    assert b"Traceback" not in errors
    n = read_manifest("run/checkpoint")["position"]
    assert read_jsonl(metrics)[-1]["step"] <= n
    assert train("--out", "straight", "--steps", 100_000, "--save-every", 100_000, "--stop-after", n) == 0
    assert_same_run("straight", "run")


def test_a_full_disk_is_named_and_loses_nothing() -> None:
    assert train("--out", "run", "--stop-after", 5) == 0
    before = weights("run")

    def small_files() -> None:  # no file may grow beyond this: the kernel refuses, as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    resumed = [sys.executable, "-m", "functional_booster", "train", "--resume", "--out", "run"]
    done = subprocess.run(resumed, preexec_fn=small_files, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: the checkpoint run/checkpoint could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert all(torch.equal(leaf, before[name]) for name, leaf in weights("run").items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "--steps: 0, expected at least 1"),
        ("--stop-after 0", "--stop-after: 0"),
        ("--n-head 3", "--n-head: 3 does not divide --n-embd 16"),
        ("--accumulate 3", "--accumulate: 3 does not divide --batch-size 4"),
        ("--warmup 12", "--warmup: 12"),
        ("--lr -1", "--lr: -1"),
        ("--max-norm 0", "--max-norm: 0"),
        ("--weight-decay -1", "--weight-decay: -1"),
        ("--length 1", "--length: 1"),
        ("--lr inf", "--lr: inf"),
        ("--weight-decay inf", "--weight-decay: inf"),
        ("--device tpu", "--device: 'tpu'"),
        ("--data nowhere", "--data: nowhere: no such file or folder"),
        ("--data /dev/null", "/dev/null: a device or a pipe"),
        ("--data empty.txt", "empty.txt: empty"),
        ("--batch-size 4000", "--batch-size: 4000, but the"),
        ("--length 900 --batch-size 10", "hold 9 windows of --length 900"),
        ("--length 50000", "too few"),
        ("--out text.txt/run", "text.txt"),
        ("--resume --out nowhere", "--resume: nowhere/config.json does not exist"),
    ],
)
def test_bad_input_is_one_clear_error(
    folder: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    (folder / "empty.txt").touch()
    before = sorted(folder.iterdir())
    assert train("--out", "run", *options.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("options", ["--model bert", "--plugin ddp", "--precision fp7", "--steps many", "--unknown 1"])
def test_unknown_names_are_refused_with_the_list(capsys: pytest.CaptureFixture[str], options: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        train("--out", "run", *options.split())
    assert exit_.value.code == 2
    assert options.split()[0] in capsys.readouterr().err


def test_a_run_that_exists_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "run", "--stop-after", 2) == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert train("--out", "run") == 2
    assert "--out: run exists already; give --resume to go on with it, or another --out" in capsys.readouterr().err
    for options, message in (
        ("--lr 1", "--lr: 1"),
        ("--jit", "--jit: True"),
        ("--stop-after 2", "is at step 2"),
        ("--data other.txt", "--data: the text in other.txt is not what the run began with"),
    ):
        Path("other.txt").write_text("x" * 5000)
        assert cli.main(["train", "--resume", "--out", "run", *options.split()]) == 2
        assert message in capsys.readouterr().err
    text = Path("text.txt").read_text()
    Path("text.txt").write_text(text.replace("f7", "g7"))
    assert cli.main(["train", "--resume", "--out", "run"]) == 2
    assert "is not what the run began with" in capsys.readouterr().err
    Path("text.txt").write_text(text)
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def resume(*options: object) -> int:
    return cli.main(["train", "--resume", "--out", "run", "--sample", "8", *map(str, options)])


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command prints."""
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert len(printed.err.splitlines()) == 1
    return printed.err


def test_a_first_save_that_fails_can_be_resumed() -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = subprocess.run(command("--out", "run"), preexec_fn=small_files, capture_output=True, text=True)
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert "there is no checkpoint in run" in done.stderr
    assert "go on with" not in done.stderr
    assert not Path("run/checkpoint").exists()
    Path("run/checkpoint").mkdir()
    Path(f"run/checkpoint/state-{'0' * 16}.safetensors").write_bytes(b"half")  # what a crash leaves
    assert resume() == 0
    assert train("--out", "straight") == 0
    assert_same_run("straight", "run")
    assert len(list(Path("run/checkpoint").iterdir())) == 2


def test_one_process_trains_in_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    with locking.exclusive(Path("run/lock"), wait=False):
        assert train("--out", "run") == 2
        assert "--out: another process trains in run" in refused(capsys)
    assert train("--out", "run", "--stop-after", 5) == 0
    capsys.readouterr()
    with locking.exclusive(Path("run/lock"), wait=False):
        assert resume() == 2
        assert "--out: another process trains in run" in refused(capsys)
    assert resume() == 0


def test_a_run_inside_its_data_resumes() -> None:
    assert train("--data", ".", "--out", "run", "--stop-after", 5) == 0
    assert json.loads(Path("run/config.json").read_text())["text"]["bytes"] == Path("text.txt").stat().st_size
    assert resume() == 0


def test_data_that_moved_is_named_anew(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "straight") == 0
    assert train("--out", "run", "--stop-after", 5) == 0
    capsys.readouterr()
    Path("text.txt").rename("moved.txt")
    assert resume() == 2
    assert "text.txt: no such file or folder" in (line := refused(capsys))
    assert "name it with --data" in line
    assert resume("--data", "moved.txt") == 0
    assert_same_run("straight", "run")


@pytest.mark.parametrize("options", ["--log-every 5", "--log-every 100 --save-every 100"])
def test_a_run_that_diverges_fails_and_keeps_what_was_good(capsys: pytest.CaptureFixture[str], options: str) -> None:
    assert train("--out", "run", "--lr", 1e38, "--weight-decay", 1e38, *options.split()) == 1
    printed = capsys.readouterr()
    assert "error: step " in printed.err
    assert ": params" in printed.err
    assert "there is no checkpoint in run" in printed.err
    assert "validation loss" not in printed.out
    assert not Path("run/checkpoint").exists()


def test_a_last_loss_that_is_not_finite_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "run") == 0
    capsys.readouterr()
    lines = read_jsonl("run/metrics.jsonl")
    lines[-1]["loss"] = None
    Path("run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert resume() == 1
    printed = capsys.readouterr()
    assert "error: the loss of the last step is not finite" in printed.err
    assert "nats per byte" not in printed.out


def test_a_terminal_that_cannot_show_everything() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command("--out", "run", "--sample", 200), env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert not Path("run/sample.txt").read_text(encoding="utf-8").isascii()
    assert b"validation loss" in done.stdout


def test_the_rise_of_a_short_run_is_a_tenth() -> None:
    rises = {steps: cli.Train(steps=steps).warmup_steps for steps in (1, 9, 10, 55, 200, 400)}
    assert rises == {1: 0, 9: 0, 10: 1, 55: 5, 200: 20, 400: 20}
    assert cli.Train(warmup=7).warmup_steps == 7
    assert train("--out", "run", "--steps", 10, "--warmup", "None") == 0


CONFIG = "run/config.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda: replace(CONFIG, '"n_layer": 1', '"n_layer": "1"'), "config.json is not the config.*n_layer is '1'"),
        (lambda: replace(CONFIG, '"n_layer": 1', '"n_layer": true'), "config.json is not the config.*n_layer is True"),
        (lambda: replace(CONFIG, '"llama"', '"bert"'), "config.json is not the config.*model is 'bert'"),
        (lambda: replace(CONFIG, '"jit": false', '"jit": 0'), "config.json is not the config.*jit is 0"),
        (lambda: replace(CONFIG, '"n_layer": 1,', ""), "config.json is not the config.*settings .'n_layer'"),
        (lambda: replace(CONFIG, '"text"', '"test"'), "config.json is not the config.*'text'"),
        (lambda: Path(CONFIG).write_text('{"config": [1]}'), "config.json is not the config"),
        (lambda: Path(CONFIG).write_bytes(b"\xff"), "config.json is not the config"),
        (lambda: Path("run/metrics.jsonl").write_bytes(b"\xff\n"), "metrics.jsonl, line 1: "),
        (lambda: Path("run/metrics.jsonl").write_text('{"step": "1"}\n'), "metrics.jsonl, line 1: "),
        (lambda: Path("run/metrics.jsonl").unlink(), "is finished, and its metrics.jsonl is gone"),
        (lambda: Path("run/checkpoint/manifest.json").write_text("[]"), "manifest.json has another format"),
        (lambda: replace("run/checkpoint/manifest.json", '"step": 12', '"step": "x"'), "manifest.json is damaged"),
    ],
)
def test_a_damaged_run_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], finished: Path, damage: Callable[[], Any], message: str
) -> None:
    shutil.copytree(finished, "run")
    damage()
    assert resume("--data", "text.txt") == 2
    assert re.search(message, refused(capsys))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is complete."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(TEXT)
    assert cli.main(["train", "--data", str(folder / "text.txt"), *TINY, "--out", str(folder / "run")]) == 0
    return folder / "run"


def replace(path: str, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def test_a_folder_that_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("precious")
    assert train("--out", "run") == 2
    assert "--out: run is not empty, and holds no run; give another --out" in refused(capsys)
    assert [path.name for path in Path("run").iterdir()] == ["thesis.txt"]


def interrupt(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_says_what_is_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(training_run, "prepare", interrupt)
        assert train("--out", "a run") == cli.INTERRUPTED
    assert capsys.readouterr().err == "interrupted before the training began\n"
    with monkeypatch.context() as patched:
        patched.setattr(training_run, "fit", interrupt)  # a second Ctrl-C ends the loop like this
        assert train("--out", "a run") == cli.INTERRUPTED
    assert capsys.readouterr().err == "interrupted: there is no checkpoint in a run\n"
    assert cli.main(["train", "--resume", "--out", "a run", "--stop-after", "5"]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(training_run, "fit", interrupt)
        assert cli.main(["train", "--resume", "--out", "a run"]) == cli.INTERRUPTED
    kept = "interrupted: the checkpoint of step 5 is kept in a run/checkpoint\n"
    go_on = "go on with: functional-booster train --resume --out 'a run'\n"
    assert capsys.readouterr().err == kept + go_on


def test_a_run_too_short_for_a_profile_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--out", "run", "--profile", "--stop-after", 7) == 0
    assert "--profile: nothing was recorded" in capsys.readouterr().out
    assert not Path("run/profile").exists()
    assert train("--out", "long", "--profile") == 0
    assert "config.json, tensorboard, profile" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"functional-booster {fb.__version__}\n"


def test_every_option_is_documented(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", "--help"])
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for field in fields(cli.Train):
        flag = "--" + field.name.replace("_", "-")
        place = next(
            index for index, line in enumerate(lines) if line.strip(" │").startswith((f"{flag} ", f"{flag}, "))
        )
        described = " ".join(lines[place : place + 3])
        assert "(default: " in described, flag
        assert len(described.split()) > 6, flag
