"""A training run from the terminal: prepared with everything checked, trained, and reported."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from functional_booster.kernels import random, tree

from . import checkpoint, data, models, optim, profile, run_folder, schedules, trackers, visualize
from .booster import Booster
from .fit import fit
from .generate import generate
from .hooks import Checkpoint, Hook, Profiler, evaluate, every, mean_metrics, stop, stop_on_nan
from .train_options import Train, check

INTERRUPTED = 130  # the shell's exit status for a command that Ctrl-C ended
VALIDATION = 8  # batches
TEMPERATURE = 0.8
PROMPT = b"\n"

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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


def prepare(config: Train, holding: contextlib.ExitStack) -> Run:
    """Check everything before work starts, make the run's folder, and build or load the state.

    The folder is this process's until ``holding`` is closed. Raises ValueError or OSError, naming the option or the
    path; then nothing has been written.
    """
    check(config)
    if config.resume:
        holding.enter_context(run_folder.held(config.out))
    else:
        run_folder.check_new(config.out)
    try:
        booster = Booster(device=None if config.device == "auto" else config.device, mixed_precision=config.precision)
    except ValueError as error:
        raise ValueError(f"--device: {str(error).removeprefix('device: ')}") from error
    text = _text(config)
    training, held_out = data.split(text)
    rows = _check_size(config, len(training), len(held_out))
    batches = data.batches(training, config.batch_size, config.length, config.seed, booster.device)
    validate = data.batches(held_out, rows, config.length, 0, booster.device)
    validation = [validate(index) for index in range(min(VALIDATION, len(held_out) // (rows * config.length)))]

    model = _model(config)
    schedule = schedules.cosine_warmup(peak=config.lr, total_steps=config.steps, warmup_steps=config.warmup_steps)
    tx = optim.adamw(schedule, weight_decay=config.weight_decay, mask=optim.matrices)
    described = run_folder.describe(config, text)
    if config.resume:
        state = _resume(config, described, booster, model, tx)
    else:
        state = booster.init(model, tx, key=random.key(config.seed))
        run_folder.make(config.out)
        holding.enter_context(run_folder.held(config.out))
        run_folder.check_new(config.out)  # another process may have been faster
        run_folder.write(config.out, described)
    return Run(config, booster, model, tx, state, batches, validation, data.unigram_entropy(text))


def train(run: Run) -> int:
    """Train, and leave metrics, picture, sample and checkpoint in the run's folder; returns the exit status."""
    config, out = run.config, run.config.out
    start = int(run.state.position)
    resumed_at = start if config.resume else None
    step = run.booster.train_step(
        run.model.loss, run.tx, accumulate=config.accumulate, max_norm=config.max_norm, jit=config.jit
    )
    eval_step = run.booster.eval_step(run.model.loss, jit=config.jit)
    hooks: list[Hook] = [
        every(config.log_every, stop_on_nan),
        evaluate(eval_step, run.validation, config.eval_every),
        Checkpoint(lambda path, state: run.booster.save(path, state), out / run_folder.CHECKPOINT, config.save_every),
    ]
    if config.profile:
        hooks.append(Profiler(out / "profile"))
    if config.stop_after is not None:
        hooks.append(every(config.stop_after, stop))
    with contextlib.closing(
        trackers.combine(
            trackers.JsonlTracker(out / run_folder.METRICS, resumed_at),
            trackers.TensorBoardTracker(out / "tensorboard", resumed_at),
            trackers.ProgressTracker(config.steps, start, waiting="compiling the step" if config.jit else "first step"),
        )
    ) as tracker:
        state = fit(
            step,
            run.state,
            run.batches,
            steps=config.steps,
            hooks=hooks,
            tracker=tracker,
            log_every=config.log_every,
            flops_per_token=profile.flops_per_token(run.model, config.length),
            peak_flops=profile.peak_flops(run.booster.device, _DTYPES[config.precision]),
        )
    return _report(run, state, eval_step)


def _report(run: Run, state: Any, eval_step: Callable[[Any, Any], Any]) -> int:
    config, out, n = run.config, run.config.out, int(state.position)
    records = [record for record in trackers.read_jsonl(out / run_folder.METRICS) if "loss" in record]
    if any(record["loss"] is not None for record in records):
        visualize.loss(
            out / run_folder.METRICS, out / "loss.png", references={"unigram entropy": run.entropy}, unit="byte"
        )
    if config.profile and not _trace(run).exists():
        print(
            "--profile: nothing was recorded: it takes the eighth to the tenth step of a session, and there were fewer"
        )
    if n < config.steps:
        print(f"stopped after step {n} of {config.steps}, with a checkpoint in {out / run_folder.CHECKPOINT}")
        print(run_folder.go_on(out))
        return 0 if n == config.stop_after else INTERRUPTED
    loss = records[-1]["loss"]
    validation = float(mean_metrics(eval_step, state, run.validation)["loss"])
    if loss is None or not math.isfinite(validation):
        what = "the loss of the last step" if loss is None else "the validation loss"
        print(f"error: {what} is not finite: the run has diverged", file=sys.stderr)
        return 1
    sample = _sample(run, state)
    (out / "sample.txt").write_text(sample, encoding="utf-8")
    size = sum(leaf.numel() for leaf in tree.leaves(state.params))
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


def _text(config: Train) -> torch.Tensor:
    try:
        return data.bytes_of(data.text_files(config.data, without=config.out))
    except (ValueError, OSError) as error:
        hint = "; the text of the run may have moved: name it with --data" if config.resume else ""
        raise ValueError(f"--data: {error}{hint}") from error


def _check_size(config: Train, training: int, held_out: int) -> int:
    """The rows of a validation batch; raises ValueError where the text (in bytes) is too short."""
    given = config.data or "the standard library"
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
    return min(config.batch_size, held_out // config.length)


def _model(config: Train) -> Any:
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
    out = config.out
    if run_folder.read(out)["text"] != described["text"]:
        raise ValueError(f"--data: the text in {config.data or 'the standard library'} is not what the run began with")
    metrics = out / run_folder.METRICS
    records = trackers.read_jsonl(metrics) if metrics.exists() else []  # broken ones are refused now
    if not (out / run_folder.CHECKPOINT / checkpoint.MANIFEST).exists():
        return booster.init(model, tx, key=random.key(config.seed))
    state = booster.load(out / run_folder.CHECKPOINT, like=booster.abstract(model, tx))
    position = int(state.position)
    if config.stop_after is not None and config.stop_after <= position:
        raise ValueError(f"--stop-after: {config.stop_after}, but the run in {out} is at step {position}")
    if position >= config.steps and not any("loss" in record for record in records):
        raise ValueError(f"--resume: the run in {out} is finished, and its {metrics.name} is gone: nothing to report")
    return state


def _sample(run: Run, state: Any) -> str:
    prompt = torch.tensor([list(PROMPT)], device=run.booster.device)
    key = random.key(run.config.seed)
    tokens = generate(
        run.model, state.params, prompt, key=key, max_new_tokens=run.config.sample, temperature=TEMPERATURE
    )
    text = bytes(tokens[0, len(PROMPT) :].tolist()).decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
