"""launch: this process becomes one rank of many. (Colossal-AI's names and arguments.)"""

from __future__ import annotations

import atexit
import os
import random
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from . import watchdog


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int | None = 1024,
    verbose: bool = True,
    timeout: float = 600.0,
) -> None:
    """Join ``world_size`` processes, of which this is number ``rank``; rank 0 listens at ``host``:``port``.

    ``backend``: None is NCCL with gloo beside it for CPU tensors where there is a GPU, else gloo. ``local_rank``: the
    GPU of this process (None: the rank modulo the GPUs of the host). ``seed`` goes to the generators of Python, NumPy
    and torch, which this library itself never draws from; None leaves them alone. ``timeout``: seconds for which a rank
    waits for the others, here and in collectives. The process group is destroyed at exit.

    Where torch.distributed is initialized already, with the same rank and size, it is kept; with others that is a
    RuntimeError. Raises ValueError for arguments out of range.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"launch: rank {rank} of world_size {world_size}, expected 0 <= rank < world_size")
    if not 0 < port < 2**16:
        raise ValueError(f"launch: port {port}, expected 1 to 65535")
    if not timeout > 0:
        raise ValueError(f"launch: timeout {timeout} s, expected more than 0")
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if gpus and dist.is_nccl_available() else "gloo"
    elif "nccl" in backend and not gpus:
        raise ValueError(f"launch: backend {backend!r} needs a CUDA device, and there is none; expected None or 'gloo'")
    if gpus:
        device = rank % gpus if local_rank is None else local_rank
        if not 0 <= device < gpus:
            raise ValueError(f"launch: local_rank {device}, but there are {gpus} CUDA devices")
        torch.cuda.set_device(device)
    if dist.is_initialized():
        _refuse_another_place(rank, world_size)
    else:
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        wait = timedelta(seconds=timeout)
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size, timeout=wait)
        atexit.unregister(_leave)
        atexit.register(_leave)  # before the watchdog's, which thus runs first
    watchdog.started(timeout=timeout)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # the global generator is the one meant
        torch.manual_seed(seed)
    if verbose and rank == 0:
        print(f"{world_size} ranks, backend {dist.get_backend_config()}, at {host}:{port}", file=sys.stderr)


def launch_from_torch(
    backend: str | None = None, seed: int | None = 1024, verbose: bool = True, timeout: float = 600.0
) -> None:
    """``launch`` of a process that torchrun started.

    Raises RuntimeError, naming the missing environment variables, where it did not.
    """
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"
    _require("launch_from_torch", names, "torchrun --nproc_per_node=2 program.py")
    rank, world_size, local_rank, port = map(_number, names[:4])
    launch(rank, world_size, os.environ["MASTER_ADDR"], port, backend, local_rank, seed, verbose, timeout)


def launch_from_slurm(
    host: str,
    port: int,
    backend: str | None = None,
    seed: int | None = 1024,
    verbose: bool = True,
    timeout: float = 600.0,
) -> None:
    """``launch`` of a process that srun started; ``host`` is where its rank 0 runs.

    Raises RuntimeError, naming the missing environment variables, where it did not.
    """
    names = "SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID"
    _launch_by(
        "launch_from_slurm", names, "srun --ntasks=2 python program.py", host, port, backend, seed, verbose, timeout
    )


def launch_from_openmpi(
    host: str,
    port: int,
    backend: str | None = None,
    seed: int | None = 1024,
    verbose: bool = True,
    timeout: float = 600.0,
) -> None:
    """``launch`` of a process that Open MPI's mpirun started; ``host`` is where its rank 0 runs.

    Raises RuntimeError, naming the missing environment variables, where it did not.
    """
    names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    _launch_by(
        "launch_from_openmpi", names, "mpirun -n 2 python program.py", host, port, backend, seed, verbose, timeout
    )


def _launch_by(caller: str, names: tuple[str, str, str], command: str, host: str, port: int, *options: Any) -> None:
    """``launch`` with rank, number of ranks and local rank from the environment variables of these names."""
    _require(caller, names, command)
    rank, world_size, local_rank = map(_number, names)
    backend, *rest = options
    launch(rank, world_size, host, port, backend, local_rank, *rest)


def _require(caller: str, names: tuple[str, ...], command: str) -> None:
    if missing := [name for name in names if not os.environ.get(name)]:
        raise RuntimeError(
            f"{caller}: {', '.join(missing)} not set in the environment: start the program with `{command}`"
        )


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise RuntimeError(f"environment variable {name} is {os.environ[name]!r}, expected a number") from None


def _refuse_another_place(rank: int, world_size: int) -> None:
    is_rank, is_size = dist.get_rank(), dist.get_world_size()
    if (is_rank, is_size) != (rank, world_size):
        raise RuntimeError(
            f"launch: torch.distributed is initialized as rank {is_rank} of {is_size}, expected rank {rank} of "
            f"{world_size}: call torch.distributed.destroy_process_group() first"
        )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
