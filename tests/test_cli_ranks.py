"""The command line on many ranks, virtual and real: the run of one device, resumed anywhere, ended by all together."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks

from functional_booster import cli
from functional_booster.checkpoint import read_manifest, read_tensors
from functional_booster.trackers import read_jsonl

TINY = ("--n-layer 1 --n-embd 16 --n-head 2 --length 16 --batch-size 4 --steps 6 --warmup 2 --log-every 1 "
        "--eval-every 3 --save-every 100 --sample 8 --no-jit --device cpu").split()  # fmt: skip
FREE = ["--sample", "8", "--device", "cpu"]  # of a resumed run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on, and ``none``, what one device makes of it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(100)))
    assert cli.main(options(folder, "none")) == 0
    return folder


def options(folder: Path, out: str, *more: object) -> list[str]:
    return ["train", "--data", str(folder / "text.txt"), *TINY, "--out", str(folder / out), *map(str, more)]


def resume(folder: Path, out: str, *more: object) -> list[str]:
    return ["train", "--resume", "--out", str(folder / out), *FREE, *map(str, more)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Everything in the checkpoint: parameters, optimizer state, counters, keys."""
    return read_tensors(run / "checkpoint")


def assert_same_run(run: Path, expected: Path, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Checkpoints and logged metrics, those of the validations too."""
    for name, leaf in (ours := weights(run)).items():
        torch.testing.assert_close(leaf, weights(expected)[name], rtol=rtol, atol=atol, msg=name)
    assert ours.keys() == weights(expected).keys()
    for record, other in zip(curve(run), curve(expected), strict=True):
        assert record == pytest.approx(other, rel=1e-5 if rtol else 0, abs=0)


def curve(run: Path) -> list[dict[str, float]]:
    """What metrics.jsonl holds, without what a clock has measured."""
    records = read_jsonl(run / "metrics.jsonl")
    return [{name: value for name, value in each.items() if name != "tokens_per_second"} for each in records]


def call(arguments: list[str]) -> tuple[Any, str, str]:
    """The exit status of the command on this process, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(arguments)
        except SystemExit as exit_:
            status = exit_.code
    return status, out.getvalue(), err.getvalue()


def test_processes_are_one_device(folder: Path) -> None:
    """The first process alone prints, and leaves what a run on one device leaves."""
    ends = run_on_ranks(
        2, call, options(folder, "real", "--plugin", "low_level_zero_2", "--accumulate", 2, "--profile")
    )
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert_same_run(folder / "real", folder / "none")
    assert "unigram entropy" in ends[0][1]
    assert ends[1][1:] == ("", "")
    left = {path.name for path in (folder / "none").iterdir()}
    assert {path.name for path in (folder / "real").iterdir()} == left


def test_a_run_goes_on_anywhere(folder: Path) -> None:
    """One device, then two virtual ranks, then two processes, then four virtual ranks: as if it had never stopped."""
    assert cli.main(options(folder, "travels", "--stop-after", 2)) == 0
    assert cli.main(resume(folder, "travels", "--stop-after", 3, "--plugin", "torch_fsdp", "--virtual-ranks", 2)) == 0
    ends = run_on_ranks(2, call, resume(folder, "travels", "--stop-after", 5, "--plugin", "torch_ddp"))
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert "go on with: torchrun --nproc-per-node" in ends[0][1]
    assert cli.main(resume(folder, "travels", "--plugin", "gemini", "--virtual-ranks", 4)) == 0
    assert_same_run(folder / "travels", folder / "none")


def test_the_same_layout_goes_on_bit_for_bit(folder: Path) -> None:
    """Which is what a resumed run has where nothing else is said; and it is the run of one device."""
    layout = "--plugin", "low_level_zero", "--virtual-ranks", 2
    assert cli.main(options(folder, "straight", *layout)) == 0
    assert_same_run(folder / "straight", folder / "none")
    assert cli.main(options(folder, "parts", *layout, "--stop-after", 3)) == 0
    assert cli.main(resume(folder, "parts")) == 0
    assert_same_run(folder / "parts", folder / "straight", 0, 0)
    assert json.loads((folder / "parts/config.json").read_text())["config"]["virtual_ranks"] == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--virtual-ranks 2", "--virtual-ranks: 2, but --plugin none has one; choose a plugin"),
        ("--virtual-ranks 0 --plugin gemini", "--virtual-ranks: 0, expected at least 1"),
        (
            "--virtual-ranks 3 --plugin torch_ddp",
            "--batch-size: 4, expected a multiple of 3: 3 data-parallel ranks x --accumulate 1",
        ),
        (
            "--virtual-ranks 2 --accumulate 4 --plugin torch_ddp",
            "--batch-size: 4, expected a multiple of 8: 2 data-parallel ranks x --accumulate 4",
        ),
        (
            "--virtual-ranks 16 --batch-size 16 --length 32 --plugin torch_ddp",
            "makes 9 windows of --length 32, fewer than 16 data-parallel ranks",
        ),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(folder: Path, more: str, message: str) -> None:
    status, out, err = call(options(folder, "refused", *more.split()))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert not (folder / "refused").exists()


def calls(of_many: list[list[str]]) -> list[tuple[Any, str, str]]:
    return [call(arguments) for arguments in of_many]


def test_processes_refuse_together_and_one_says_so(folder: Path) -> None:
    refused = {
        "": "--plugin: none, but 2 processes were started; choose a plugin",
        "--plugin torch_ddp --virtual-ranks 2": "--virtual-ranks: 2, but 2 processes were started",
        "--plugin torch_ddp --device cuda:0": "--device: cuda:0, but 2 processes were started",
        "--plugin torch_ddp --accumulate 4": "--batch-size: 4, expected a multiple of 8: 2 data-parallel ranks",
        "--plugin torch_ddp --data nowhere": "--data: nowhere: no such file or folder",
        f"--plugin torch_ddp --out {folder}/none": "exists already; give --resume",
        f"--plugin torch_ddp --out {folder}/nowhere --resume": "nowhere/config.json does not exist",
    }
    unknown = "--plugin zero"
    ends = run_on_ranks(2, calls, [options(folder, "refused", *more.split()) for more in (*refused, unknown)])
    for (first, *_), (second, *others) in zip(*ends, strict=True):
        assert (first, second, *others) == (2, 2, "", "")
    for (_, out, err), message in zip(ends[0], refused.values(), strict=False):
        assert (out, len(err.splitlines())) == ("", 1)
        assert message in err
    assert "low_level_zero_2" in ends[0][-1][2], "the choices are shown"
    assert not (folder / "refused").exists()


def test_a_full_disk_on_processes_is_named_and_loses_nothing(folder: Path) -> None:
    ends = run_on_ranks(2, call_with_a_full_disk, options(folder, "full", "--plugin", "torch_fsdp", "--save-every", 2))
    assert [status for status, _, _ in ends] == [1, 1], ends
    assert "error: the checkpoint" in ends[0][2] and "could not be written (no space" in ends[0][2]
    assert f"the checkpoint of step 2 is kept in {folder}/full/checkpoint" in ends[0][2]
    assert read_manifest(folder / "full/checkpoint")["position"] == 2


def call_with_a_full_disk(arguments: list[str]) -> tuple[Any, str, str]:
    from functional_booster.checkpoint import data_files

    original, saves = data_files.write, []

    def write(*args: Any) -> Any:
        saves.append(args)
        if len(saves) > 1:
            raise OSError("no space left on device")
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_files, "write", write)
        return call(arguments)


def torchrun(folder: Path, *program: str, arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *program, *arguments], env=variables, stdout=pipe, stderr=pipe, text=True)


def test_ctrl_c_under_torchrun_stops_all_after_one_step_and_saves(folder: Path) -> None:
    """The launcher hands the signal on; one device then goes on from the checkpoint."""
    long = options(folder, "long", "--steps", 100_000, "--eval-every", 100_000, "--save-every", 100_000)
    process = torchrun(folder, "-m", "functional_booster", arguments=[*long, "--plugin", "torch_fsdp"])
    metrics = folder / "long/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0, (out, err)
    assert "RankFailure" not in err, err
    assert out.count("stopped after step") == 1
    assert "go on with: torchrun --nproc-per-node 2 -m functional_booster train --resume" in out
    n = read_manifest(folder / "long/checkpoint")["position"]
    assert read_jsonl(metrics)[-1]["step"] <= n
    straight = options(folder, "short", "--steps", 100_000, "--eval-every", 100_000, "--save-every", 100_000)
    assert cli.main([*straight, "--stop-after", str(n)]) == 0
    assert_same_run(folder / "long", folder / "short")


def test_a_rank_that_fails_under_torchrun_is_named_by_the_first(folder: Path) -> None:
    program = folder / "program.py"
    program.write_text(
        """
import os, sys
from functional_booster import cli, data
batches = data.batches
def breaking(text, *args):
    def batch(position):
        if position == 2 and len(text) > 1500 and os.environ["RANK"] == "1":  # of the training, not of the validation
            raise OSError("the disk is gone")
        return batches(text, *args)(position)
    return batch
data.batches = breaking
sys.exit(cli.main())
"""
    )
    arguments = options(folder, "broken", "--plugin", "low_level_zero", "--eval-every", 100, "--save-every", 1)
    process = torchrun(folder, str(program), arguments=arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0, (out, err)
    assert err.count("error: rank 1 failed in train step 3: OSError: the disk is gone") == 1, err
    assert f"the checkpoint of step 2 is kept in {folder}/broken/checkpoint" in err
    assert read_manifest(folder / "broken/checkpoint")["position"] == 2
