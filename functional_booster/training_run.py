"""A training run from the terminal: prepared with everything checked, trained, and reported."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from functional_booster.kernels import random, tree
from functional_booster.sharding.mesh import virtual_mesh

from . import checkpoint, data, models, optim, plugins, profile, run_folder, schedules, trackers, visualize, watchdog
from .booster import Booster
from .fit import fit
from .generate import generate
from .hooks import Checkpoint, Hook, Profiler, evaluate, every, mean_metrics, stop, stop_on_nan
from .plugins.dataloaders import share
from .train_options import Train, check

INTERRUPTED = 130  # the shell's exit status for a command that Ctrl-C ended
VALIDATION = 8  # batches
TEMPERATURE = 0.8
PROMPT = b"\n"

_PLUGINS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "torch_ddp": plugins.TorchDDPPlugin,
    "low_level_zero": plugins.LowLevelZeroPlugin,
    "low_level_zero_2": lambda: plugins.LowLevelZeroPlugin(stage=2),
    "torch_fsdp": plugins.TorchFSDPPlugin,
    "gemini": plugins.GeminiPlugin,
}


@dataclass(frozen=True)
class Run:
    """What ``prepare`` has checked and built."""

    config: Train
    booster: Booster
    model: Any
    tx: Any
    state: Any
    batches: Callable[[int], Any]
    validation: list[Any]
    entropy: float  # nats per byte


def processes() -> tuple[int, int]:
    """(number of this process, how many there are); the first one prints, and writes to the run's folder."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def prepare(config: Train, holding: contextlib.ExitStack) -> Run:
    """Check everything before work starts, make the run's folder, and build or load the state.

    The folder is this process's until ``holding`` is closed. Raises ValueError or OSError, naming the option or the
    path (on the other processes RankFailure); then nothing has been written.
    """
    first = processes()[0] == 0
    with watchdog.all_or_none("preparation"):
        check(config)
        _check_processes(config)
        if first and config.resume:
            holding.enter_context(run_folder.held(config.out))
        elif first:
            run_folder.check_new(config.out)
    booster = _booster(config)
    with watchdog.all_or_none("preparation"):
        text = _text(config)
        training, held_out = data.split(text)
        rows = _check_size(config, booster, len(training), len(held_out))
        batches = _shared(
            data.batches(training, config.batch_size, config.length, config.seed, booster.device), booster
        )
        validate = _shared(data.batches(held_out, rows, config.length, 0, booster.device), booster)
        validation = [validate(index) for index in range(min(VALIDATION, len(held_out) // (rows * config.length)))]
        model = model_of(config)
        schedule = schedules.cosine_warmup(peak=config.lr, total_steps=config.steps, warmup_steps=config.warmup_steps)
        tx = optim.adamw(schedule, weight_decay=config.weight_decay, mask=optim.matrices)
        described = run_folder.describe(config, text)
    if config.resume:
        state = _resume(config, described, booster, model, tx)
    else:
        with watchdog.all_or_none("preparation"):
            state = booster.init(model, tx, key=random.key(config.seed))
            if first:
                run_folder.make(config.out)
                holding.enter_context(run_folder.held(config.out))
                run_folder.check_new(config.out)  # another process may have been faster
                run_folder.write(config.out, described)
    return Run(config, booster, model, tx, state, batches, validation, data.unigram_entropy(text))


def train(run: Run) -> int:
    """Train, and leave metrics, picture, sample and checkpoint in the run's folder; returns the exit status."""
    config, out, first = run.config, run.config.out, processes()[0] == 0
    start = int(run.state.position)
    step = run.booster.train_step(
        run.model.loss, run.tx, accumulate=config.accumulate, max_norm=config.max_norm, jit=config.jit
    )
    eval_step = run.booster.eval_step(run.model.loss, jit=config.jit)
    hooks: list[Hook] = [
        every(config.log_every, stop_on_nan),
        evaluate(eval_step, run.validation, config.eval_every),
        Checkpoint(lambda path, state: run.booster.save(path, state), out / run_folder.CHECKPOINT, config.save_every),
    ]
    if config.profile and first:
        hooks.append(Profiler(out / "profile"))
    if config.stop_after is not None:
        hooks.append(every(config.stop_after, stop))
    precision = run.booster.precision
    multiplied = torch.float8_e4m3fn if precision.fp8 else precision.policy.compute or precision.autocast
    peak = profile.peak_flops(run.booster.device, multiplied or torch.float32)
    with contextlib.ExitStack() as closing:
        with watchdog.all_or_none("opening of the metrics"):
            tracker = closing.enter_context(contextlib.closing(_trackers(config, start))) if first else None
        state = fit(
            step,
            run.state,
            run.batches,
            steps=config.steps,
            hooks=hooks,
            tracker=tracker,
            log_every=config.log_every,
            flops_per_token=profile.flops_per_token(run.model, config.length),
            peak_flops=None if peak is None else peak * processes()[1],
        )
    validation = params = None
    if int(state.position) == config.steps:  # together: the processes hold the parameters, and the held-out text
        validation = float(mean_metrics(eval_step, state, run.validation)["loss"])
        params = run.booster.full_params(state)
    status = 0
    with watchdog.all_or_none("report"):
        if first:
            status = _report(run, int(state.position), validation, params)
    return status


def _trackers(config: Train, start: int) -> trackers.Tracker:
    resumed_at = start if config.resume else None
    return trackers.combine(
        trackers.JsonlTracker(config.out / run_folder.METRICS, resumed_at),
        trackers.TensorBoardTracker(config.out / "tensorboard", resumed_at),
        trackers.ProgressTracker(config.steps, start, waiting="compiling the step" if config.jit else "first step"),
    )


def _report(run: Run, n: int, validation: float | None, params: Any) -> int:
    """What the first process prints and leaves after ``n`` steps, the loss of the validation and whole params given
    where these are all. Returns the exit status."""
    config, out = run.config, run.config.out
    records = [record for record in trackers.read_jsonl(out / run_folder.METRICS) if "loss" in record]
    if any(record["loss"] is not None for record in records):
        visualize.loss(
            out / run_folder.METRICS, out / "loss.png", references={"unigram entropy": run.entropy}, unit="byte"
        )
    if config.profile and not _trace(run).exists():
        print(
            "--profile: nothing was recorded: it takes the eighth to the tenth step of a session, and there were fewer"
        )
    if validation is None:
        print(f"stopped after step {n} of {config.steps}, with a checkpoint in {out / run_folder.CHECKPOINT}")
        print(run_folder.go_on(out))
        return 0 if n == config.stop_after else INTERRUPTED
    loss = records[-1]["loss"]
    if loss is None or not math.isfinite(validation):
        what = "the loss of the last step" if loss is None else "the validation loss"
        print(f"error: {what} is not finite: the run has diverged", file=sys.stderr)
        return 1
    sample = _sample(run, params)
    (out / "sample.txt").write_text(sample, encoding="utf-8")
    size = sum(leaf.numel() for leaf in tree.leaves(params))
    print(f"--- a sample, at temperature {TEMPERATURE} ---\n{sample}\n---")
    print(f"{config.model} with {size:,} parameters, {n} steps of {config.batch_size} x {config.length} bytes")
    print(f"loss             {loss:.3f} nats per byte")
    print(f"validation loss  {validation:.3f}")
    print(f"unigram entropy  {run.entropy:.3f} (the best without context)")
    left = ["checkpoint", "metrics.jsonl", "loss.png", "sample.txt", "config.json", "tensorboard"]
    print(f"in {out}: {', '.join([*left, 'profile'] if _trace(run).exists() else left)}")
    return 0


def _trace(run: Run) -> Any:
    return run.config.out / "profile" / "trace.json"


def _check_processes(config: Train) -> None:
    """Raise ValueError for settings that make no sense on the processes there are."""
    _, world = processes()
    if world == 1:
        return
    if config.plugin == "none":
        raise ValueError(f"--plugin: none, but {world} processes were started; choose a plugin, or start one process")
    if config.virtual_ranks is not None:
        raise ValueError(
            f"--virtual-ranks: {config.virtual_ranks}, but {world} processes were started, which are the ranks"
        )
    if config.device.startswith("cuda:"):
        raise ValueError(f"--device: {config.device}, but {world} processes were started; cuda gives each its own")


def _booster(config: Train) -> Booster:
    """On processes, each must call it."""
    mesh = None if config.virtual_ranks is None else virtual_mesh(config.virtual_ranks)
    device = None if config.device == "auto" else config.device
    try:
        return Booster(device=device, mixed_precision=config.precision, plugin=_PLUGINS[config.plugin](), mesh=mesh)
    except ValueError as error:
        raise ValueError(f"--device: {str(error).removeprefix('device: ')}") from error


def _shared(batches: Callable[[int], Any], booster: Booster) -> Callable[[int], Any]:
    """This process's rows of each batch."""
    which, of = share(booster.plan.mesh, booster.plan.plugin.data_axes)
    if of == 1:
        return batches

    def mine(leaf: torch.Tensor) -> torch.Tensor:
        rows = leaf.shape[0] // of
        return leaf[which * rows : (which + 1) * rows].clone()  # at the start of its memory, as kernels expect

    return lambda position: tree.map(mine, batches(position))


def _text(config: Train) -> torch.Tensor:
    try:
        return data.bytes_of(data.text_files(config.data, without=config.out))
    except (ValueError, OSError) as error:
        hint = "; the text of the run may have moved: name it with --data" if config.resume else ""
        raise ValueError(f"--data: {error}{hint}") from error


def _check_size(config: Train, booster: Booster, training: int, held_out: int) -> int:
    """The rows of a validation batch; raises ValueError where the text (in bytes) is too short, or ranks do not divide
    a batch."""
    given = config.data or "the standard library"
    ranks = booster.plan.mesh.extent(booster.plan.plugin.data_axes)
    if config.batch_size % (ranks * config.accumulate):
        raise ValueError(
            f"--batch-size: {config.batch_size}, expected a multiple of {ranks * config.accumulate}: "
            f"{ranks} data-parallel ranks x --accumulate {config.accumulate}"
        )
    if held_out < config.length:
        raise ValueError(
            f"--data: {given} has {training + held_out} bytes, too few: the tenth of them that is held out is shorter "
            f"than --length {config.length}"
        )
    if (windows := training // config.length) < config.batch_size:
        raise ValueError(
            f"--batch-size: {config.batch_size}, but the {training} bytes of {given} to train on hold "
            f"{windows} windows of --length {config.length}"
        )
    rows = min(config.batch_size, held_out // config.length)
    if rows < ranks:
        raise ValueError(
            f"--data: {given} has too few bytes: the tenth of them that is held out makes {rows} windows of --length "
            f"{config.length}, fewer than {ranks} data-parallel ranks"
        )
    return rows - rows % ranks


def model_of(config: Train) -> Any:
    if config.model == "gpt2":
        return models.gpt2(
            vocab_size=data.VOCABULARY,
            n_positions=config.length,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
        )
    return models.llama(
        vocab_size=data.VOCABULARY,
        max_position_embeddings=config.length,
        hidden_size=config.n_embd,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_head,
        intermediate_size=-(-config.n_embd * 8 // 3 // 64) * 64,
        tie_word_embeddings=True,
    )


def _resume(config: Train, described: dict[str, Any], booster: Booster, model: Any, tx: Any) -> Any:
    """The state that the run in ``config.out`` has come to: its checkpoint's, or the first where there is none yet."""
    out, metrics = config.out, config.out / run_folder.METRICS
    first = processes()[0] == 0
    with watchdog.all_or_none("preparation"):
        if run_folder.read(out)["text"] != described["text"]:
            given = config.data or "the standard library"
            raise ValueError(f"--data: the text in {given} is not what the run began with")
        records = trackers.read_jsonl(metrics) if first and metrics.exists() else []  # broken ones are refused now
    if not (out / run_folder.CHECKPOINT / checkpoint.MANIFEST).exists():
        return booster.init(model, tx, key=random.key(config.seed))
    state = booster.load(out / run_folder.CHECKPOINT, like=booster.abstract(model, tx))
    position = int(state.position)
    with watchdog.all_or_none("preparation"):
        if config.stop_after is not None and config.stop_after <= position:
            raise ValueError(f"--stop-after: {config.stop_after}, but the run in {out} is at step {position}")
        if first and position >= config.steps and not any("loss" in record for record in records):
            gone = f"its {metrics.name} is gone: nothing to report"
            raise ValueError(f"--resume: the run in {out} is finished, and {gone}")
    return state


def _sample(run: Run, params: Any) -> str:
    prompt = torch.tensor([list(PROMPT)], device=run.booster.device)
    key = random.key(run.config.seed)
    tokens = generate(run.model, params, prompt, key=key, max_new_tokens=run.config.sample, temperature=TEMPERATURE)
    text = bytes(tokens[0, len(PROMPT) :].tolist()).decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
