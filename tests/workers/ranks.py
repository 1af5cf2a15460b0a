"""Ranks that go wrong, and others: for each line of its input this process forks the ranks of a scenario, and says how
they ended.

Each rank is a process of its own, that ends as a script does (sys.excepthook, atexit), its output in a file. Forking
saves the imports.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it, which takes seconds
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import run

import functional_booster as fb
from functional_booster import rank_watch, watchdog
from functional_booster.launch import launch
from functional_booster.rank_failure import RankFailure

DEADLINE = 40  # seconds after which a rank counts as hung, where the request says nothing else


def train(steps: int) -> None:
    for step in range(steps):
        train_step(step)


def train_step(step: int) -> None:
    with watchdog.guard("train step", step):
        dist.all_reduce(torch.ones(4))


def start(request: dict, **settings: float) -> int:
    """Without launch, so that the watchdog's settings are short."""
    rank, world = request["rank"], request["world"]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{request['port']}", rank=rank, world_size=world)
    watchdog.started(**{"grace": 1.0, **settings})
    return rank


def normal(request: dict) -> None:
    atexit.register(lambda: print("left", [t.name for t in threading.enumerate()], dist.is_initialized()))
    launch(request["rank"], request["world"], "127.0.0.1", request["port"], timeout=60)
    print("watched by", [t.name for t in threading.enumerate()])
    train(10)


def slow(request: dict) -> None:
    """A rank that sleeps longer than a dead one stays silent, but not longer than the timeout."""
    rank = start(request, dead_after=1.0, timeout=30.0)
    train(3)
    if rank == 1:
        time.sleep(2.5)
    train_step(3)


def data_raises(request: dict) -> None:
    rank = start(request)
    train(3)
    if rank == 1:
        raise ValueError("bad file")
    train_step(3)


def step_raises(request: dict) -> None:
    rank = start(request)
    train(3)
    with watchdog.guard("train step", 3):
        if rank == request.get("culprit", 1):
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(4))


def step_raises_and_is_caught(request: dict) -> None:
    """The process that failed lives on, so that gloo's connections do, too."""
    try:
        step_raises(request)
    except ValueError:
        time.sleep(4)
        train_step(4)


def fewer_batches(request: dict) -> None:
    rank = start(request)
    train(5 if rank != 1 else 3)


def fewer_batches_and_agree(request: dict) -> None:
    rank = start(request)
    train(5 if rank != 1 else 3)
    watchdog.agree(None, "end of epoch 0")


def killed(request: dict) -> None:
    rank = start(request)
    train(3)
    with watchdog.guard("train step", 3):
        time.sleep(0.5)
        if rank == request["culprit"]:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))


def silent(request: dict) -> None:
    """A stopped process is what one on a host without power looks like: no beat, and connections that stay open."""
    rank = start(request, dead_after=2.0)
    train(3)
    time.sleep(0.5)
    if rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    train_step(3)


def sleeps_before_step(request: dict) -> None:
    rank = start(request, timeout=2.0)
    train(3)
    if rank == 1:
        time.sleep(60)
    train_step(3)


def sleeps_in_step(request: dict) -> None:
    rank_watch.PATIENCE = 1.0
    rank = start(request)
    group = dist.new_group(timeout=timedelta(seconds=2))
    with watchdog.guard("train step", 0):
        if rank == 1:
            time.sleep(6)
        dist.all_reduce(torch.ones(4), group=group)


def agrees(request: dict) -> None:
    """Errors that all ranks hear of in the same work: they may go on."""
    rank = start(request)
    for step in range(3):
        watchdog.agree(None, "check", step)
        with watchdog.guard("save", step):
            try:
                watchdog.agree(OSError("disk full") if rank == 1 else None, "write", step)
            except (OSError, RankFailure) as error:
                print(type(error).__name__, error)
        try:
            with watchdog.guard("train step", step):
                time.sleep(0.6 * rank)
                raise ValueError("bad on all")
        except ValueError as error:
            print(error)
        time.sleep(0.6 * (1 - rank))
        dist.barrier()
    train(3)
    print("done")


def stuck_after_failure(request: dict) -> None:
    """As on NCCL: a main thread that raised, but cannot end."""
    rank = start(request)
    if (handle := watchdog.started()) is not None:
        handle._nccl = True
    train(3)
    if rank == 1:
        raise ValueError("bad file")
    try:
        train_step(3)
    finally:
        time.sleep(60)


def imperative_loop(request: dict) -> None:
    """Five steps of a boosted loop under ``plugin``; one rank goes wrong in the third as ``fault`` says."""
    rank = start(request, grace=0.3)
    plugin = {"ddp": fb.TorchDDPPlugin, "zero": fb.LowLevelZeroPlugin, "fsdp": fb.TorchFSDPPlugin}[request["plugin"]]()
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if request["norm"] else nn.Tanh(), nn.Linear(4, 1))
    booster = fb.Booster(device="cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(module, torch.optim.AdamW(module.parameters()))
    fault = request["fault"] if rank == request.get("culprit", 1) else ""
    for step in range(5):
        x = torch.randn(4, 3)
        if step == 2 and fault == "fewer batches":
            return
        if step == 2 and fault == "forward":
            x = x[:, :2]
        if step == 2 and fault == "forward, caught":
            try:
                model(x[:, :2])
            except RuntimeError:
                time.sleep(1.5)
                continue  # as loops do that skip a batch for want of memory
        loss = F.mse_loss(model(x), torch.ones(4, 1))
        if step == 2 and fault == "killed":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        booster.backward(loss, optimizer)
        if step == 2 and fault == "between":
            raise ValueError("bad gradients")
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and fault == "state_dict":
            model.state_dict()
        if step == 1 and fault == "load":
            model.load_state_dict({})
        elif step == 1 and request["fault"] == "load":
            model.load_state_dict(model.state_dict())


def looks_alone(request: dict) -> None:
    """Where nothing is split, what reads weights is no work of all ranks: the first evaluates and saves alone."""
    rank = start(request, grace=0.0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    booster = fb.Booster(device="cpu", plugin=fb.TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(module, torch.optim.AdamW(module.parameters()))
    for _ in range(3):
        booster.backward(model(torch.randn(4, 3)).sum(), optimizer)
        optimizer.step()
        if rank == 0:
            model.eval()
            model(torch.randn(4, 3))
            time.sleep(0.6)
            model.state_dict(), optimizer.state_dict(), model.unwrap()
            model.train()
    print("done")


def program(request: dict) -> None:
    """A program of the test's own, with variables of the environment."""
    os.environ |= request["environ"]
    exec(request["program"], {"rank": request["rank"], "port": request["port"]})


def torchrun(request: dict) -> None:
    """The launcher itself, which starts the ranks."""
    run.main(["--standalone", "--nproc-per-node=2", request["path"]])


def serve() -> dict | None:
    """Forks; returns the request in a rank, None at the end."""
    for line in sys.stdin:
        request = json.loads(line)
        ranks: dict[int, int] = {}
        for rank in range(request["world"]):
            if (pid := os.fork()) == 0:
                out = os.open(Path(request["folder"]) / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(out, 1)
                os.dup2(out, 2)
                return {**request, "rank": rank}
            ranks[pid] = rank
        print(json.dumps(statuses(ranks, request.get("deadline", DEADLINE))), flush=True)
    return None


def statuses(ranks: dict[int, int], deadline: float) -> list[int | str]:
    """The exit statuses in order of rank, negative for a signal, "hung" for a rank that had to be ended."""
    ends: dict[int, int | str] = {}
    until = time.monotonic() + deadline
    while len(ends) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ends.setdefault(ranks[pid], os.waitstatus_to_exitcode(status))
        elif time.monotonic() > until:
            for each, rank in ranks.items():
                if rank not in ends:
                    os.kill(each, signal.SIGKILL)
                    os.waitpid(each, 0)
                    ends[rank] = "hung"
        time.sleep(0.02)
    return [ends[rank] for rank in sorted(ends)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # the ranks end faster
    if (asked := serve()) is not None:
        globals()[asked["scenario"]](asked)
