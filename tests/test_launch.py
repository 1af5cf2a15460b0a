"""launch and its kin, in processes of their own, by torchrun too."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import free_port, run_as_scripts

from functional_booster.launch import launch, launch_from_openmpi, launch_from_slurm, launch_from_torch

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
HEAD = """
import random
import numpy as np, torch, torch.distributed as dist
from functional_booster.launch import launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
"""


def test_ranks_meet_where_they_are_told_and_leave_silently(tmp_path: Path) -> None:
    """Another launch at the same place is the same one; at another it is refused. ``seed`` makes draws repeat."""
    program = """
random.seed(5); np.random.seed(5); torch.manual_seed(5)
launch(rank, 2, "127.0.0.1", port, seed=None, timeout=60)
untouched = random.random(), np.random.rand(), torch.rand(()).item()
random.seed(5); np.random.seed(5); torch.manual_seed(5)
assert untouched == (random.random(), np.random.rand(), torch.rand(()).item())
launch(rank, 2, "127.0.0.1", port, seed=7, verbose=False)
first = random.random(), np.random.rand(), torch.rand(()).item()
launch(rank, 2, "127.0.0.1", port, seed=7, verbose=False)
assert first == (random.random(), np.random.rand(), torch.rand(()).item())
x = torch.tensor(float(rank + 1)); dist.all_reduce(x)
print(dist.get_rank(), dist.get_world_size(), dist.get_backend(), x.item())
try:
    launch(1 - rank, 2, "127.0.0.1", port)
except RuntimeError as error:
    print(error)
"""
    port = free_port()
    ends = run_as_scripts(tmp_path, "program", 2, program=HEAD + program, environ={}, port=port)
    for rank, (status, output) in enumerate(ends):
        assert status == 0, output
        told = [f"2 ranks, backend cpu:gloo,cuda:gloo, at 127.0.0.1:{port}"] if rank == 0 else []
        refused = f"torch.distributed is initialized as rank {rank} of 2, expected rank {1 - rank} of 2"
        told += [f"{rank} 2 gloo 3.0", f"launch: {refused}: call torch.distributed.destroy_process_group() first"]
        assert sorted(output.splitlines()) == sorted(told)


def test_torchrun(tmp_path: Path) -> None:
    """The launcher holds the store here, not rank 0."""
    program = tmp_path / "program.py"
    program.write_text(
        HEAD
        + """
launch_from_torch(timeout=60)
x = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(x)
print(f"sum {x.item()}\\n", end="", flush=True)
"""
    )
    ((status, output),) = run_as_scripts(tmp_path, "torchrun", 1, path=str(program), deadline=200)
    assert status == 0, output
    assert output.count("sum 3.0\n") == 2
    assert "RankFailure" not in output and "Traceback" not in output


def test_other_launchers_by_their_variables(tmp_path: Path) -> None:
    program = """
for call in launch_from_slurm, launch_from_openmpi:
    call("127.0.0.1", port, verbose=False)
    print(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
"""
    slurm = {"SLURM_PROCID": "0", "SLURM_NPROCS": "1", "SLURM_LOCALID": "0"}
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    (end,) = run_as_scripts(tmp_path, "program", 1, program=HEAD + program, environ=slurm | mpi)
    assert end == (0, "0 1\n" * 2)


def test_without_a_launcher_the_missing_variables_and_the_remedy_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT, MASTER_ADDR not set.*torchrun"):
        launch_from_torch()
    for name in VARIABLES[1:]:
        monkeypatch.setenv(name, "1")
    with pytest.raises(RuntimeError, match="launch_from_torch: RANK not set"):
        launch_from_torch()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(RuntimeError, match="RANK is 'first', expected a number"):
        launch_from_torch()
    with pytest.raises(RuntimeError, match=r"SLURM_PROCID.*srun"):
        launch_from_slurm("127.0.0.1", 29500)
    with pytest.raises(RuntimeError, match=r"OMPI_COMM_WORLD_RANK.*mpirun"):
        launch_from_openmpi("127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, "rank 2 of world_size 2"),
        ({"rank": -1}, "rank -1 of world_size 2"),
        ({"port": 0}, "port 0, expected 1 to 65535"),
        ({"timeout": 0}, "timeout 0 s"),
    ],
)
def test_arguments_out_of_range_are_refused_before_work_starts(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"rank": 0, "world_size": 2, "host": "127.0.0.1", "port": 29500, **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        launch(**arguments)


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="backend 'nccl' needs a CUDA device"):
        launch(0, 1, "127.0.0.1", 29500, backend="nccl")


def test_the_arguments_are_colossal_ais() -> None:
    """Its names, order and defaults, but for backend, which is None here; ours come after."""
    theirs = {
        launch: "rank world_size host port backend local_rank seed verbose",
        launch_from_torch: "backend seed verbose",
        launch_from_slurm: "host port backend seed verbose",
        launch_from_openmpi: "host port backend seed verbose",
    }
    for function, names in theirs.items():
        parameters = inspect.signature(function).parameters
        assert list(parameters)[: len(names.split())] == names.split()
        assert parameters["seed"].default == 1024 and parameters["verbose"].default is True
