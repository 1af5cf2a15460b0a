"""The command ``functional-booster``: train a language model from a terminal."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

FREE_ON_RESUME = ("out", "resume", "stop_after", "device", "sample", "profile")
INTERRUPTED = 130  # the shell's exit status for a command that Ctrl-C ended
VALIDATION = 8  # batches
TEMPERATURE = 0.8
PROMPT = b"\n"

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Train:
    """Train a small language model, byte by byte, on text."""

    data: Path | None = None
    """A text file, or a folder of them. Without it: the source of Python's standard library."""
    out: Path = Path("runs/gpt")
    """Folder of the run; it must be new, unless --resume is given."""
    resume: bool = False
    """Go on with the run in --out, with its settings, bit for bit as if it had never stopped."""
    model: Literal["gpt2", "llama"] = "gpt2"
    """Family of the model."""
    n_layer: int = 4
    """Number of blocks."""
    n_embd: int = 128
    """Width of the model."""
    n_head: int = 4
    """Attention heads; they divide --n-embd."""
    length: int = 128
    """Bytes in a window of text, and the longest text that the model reads."""
    batch_size: int = 16
    """Windows in a step."""
    steps: int = 400
    """Steps of the whole run; the learning rate falls until the last."""
    stop_after: int | None = None
    """Stop early, after this many steps of the run; --resume goes on."""
    lr: float = 3e-3
    """Peak learning rate of AdamW: a linear rise, then a cosine."""
    warmup: int = 20
    """Steps of the rise."""
    weight_decay: float = 0.1
    """On matrices; biases and gains have none."""
    max_norm: float | None = 1.0
    """Norm that gradients are clipped to."""
    accumulate: int = 1
    """Parts that a batch is cut into, one after another, to save memory; they divide --batch-size."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the computation; parameters and optimizer stay in 32 bits."""
    plugin: Literal["none"] = "none"
    """How the training is spread over devices; none: one device."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes the GPU where there is one."""
    jit: bool = True
    """Compile the step; without, the same Python runs eagerly."""
    seed: int = 0
    """Of the parameters, the order of the data, and the sample."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    eval_every: int = 100
    """Steps between two validations."""
    save_every: int = 100
    """Steps between two checkpoints; one is also written at the end, and on Ctrl-C."""
    sample: int = 400
    """Bytes of text that the trained model writes at the end."""
    profile: bool = False
    """Record three steps with torch.profiler, into profile/trace.json in --out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for bad input, 1 where training fails, 130 for Ctrl-C."""
    import tyro

    args = list(sys.argv[1:] if argv is None else argv)
    config = tyro.extras.subcommand_cli_from_dict(
        {"train": Train}, prog="functional-booster", description="Train language models, the functional way.", args=args
    )
    try:
        if config.resume:  # the run's own settings become the defaults, so that only what was given can differ
            saved = _saved(config)
            config = tyro.cli(Train, prog="functional-booster train", args=args[1:], default=saved)
            _check_resumed(config, saved)
        run = prepare(config)
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        return train(run)
    except (FloatingPointError, OSError) as error:
        return _fail(f"{error}\n--resume goes on from the last checkpoint in {config.out}", 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _fail(error: object, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


@dataclass(frozen=True)
class Run:
    """What ``prepare`` has checked and built."""

    config: Train
    booster: Any
    model: Any
    tx: Any
    state: Any
    batches: Callable[[int], Any]
    validation: list[Any]
    entropy: float  # nats per byte


def prepare(config: Train) -> Run:
    """Check everything before work starts, make the run's folder, and build or load the state.

    Raises ValueError or OSError, naming the option or the path; then nothing has been written.
    """
    from functional_booster.kernels import random

    from . import data, optim, schedules
    from .booster import Booster

    _check(config)
    booster: Any = Booster(device=None if config.device == "auto" else config.device, mixed_precision=config.precision)
    text = data.bytes_of(data.text_files(config.data))
    training, held_out = data.split(text)
    batches = data.batches(training, config.batch_size, config.length, config.seed, booster.device)
    rows = min(config.batch_size, len(held_out) // config.length)
    if not rows:
        raise ValueError(
            f"--data: {config.data} has {len(text)} bytes, too few: the tenth of them that is held out is shorter "
            f"than --length {config.length}"
        )
    validate = data.batches(held_out, rows, config.length, 0, booster.device)
    validation = [validate(index) for index in range(min(VALIDATION, len(held_out) // (rows * config.length)))]

    model = _model(config)
    schedule = schedules.cosine_warmup(peak=config.lr, total_steps=config.steps, warmup_steps=config.warmup)
    tx = optim.adamw(schedule, weight_decay=config.weight_decay, mask=optim.matrices)
    described = _described(config, text)
    if config.resume:
        state = _resume(config, described, booster, model, tx)
    else:
        state = booster.init(model, tx, key=random.key(config.seed))
        _create(config.out, described)
    return Run(config, booster, model, tx, state, batches, validation, data.unigram_entropy(text))


def train(run: Run) -> int:
    """Train, and leave metrics, picture, sample and checkpoint in the run's folder; returns the exit status."""
    from . import profile, trackers
    from .fit import fit
    from .hooks import Checkpoint, Hook, Profiler, evaluate, every, stop, stop_on_nan

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
        Checkpoint(lambda path, state: run.booster.save(path, state), out / "checkpoint", config.save_every),
    ]
    if config.profile:
        hooks.append(Profiler(out / "profile"))
    if config.stop_after is not None:
        hooks.append(every(config.stop_after, stop))
    with contextlib.closing(
        trackers.combine(
            trackers.JsonlTracker(out / "metrics.jsonl", resumed_at),
            trackers.TensorBoardTracker(out / "tensorboard", resumed_at),
            trackers.ProgressTracker(config.steps, start),
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
    from functional_booster.kernels import tree

    from . import trackers, visualize
    from .hooks import mean_metrics

    config, out, n = run.config, run.config.out, int(state.position)
    records = [record for record in trackers.read_jsonl(out / "metrics.jsonl") if record.get("loss") is not None]
    if records:
        visualize.loss(out / "metrics.jsonl", out / "loss.png", references={"unigram entropy": run.entropy})
    if n < config.steps:
        print(f"stopped after step {n} of {config.steps}, with a checkpoint in {out / 'checkpoint'}")
        print(f"go on with: functional-booster train --resume --out {out}")
        return 0 if n == config.stop_after else INTERRUPTED
    validation = float(mean_metrics(eval_step, state, run.validation)["loss"])
    sample = _sample(run, state)
    (out / "sample.txt").write_text(sample, encoding="utf-8")
    size = sum(leaf.numel() for leaf in tree.leaves(state.params))
    print(f"--- a sample, at temperature {TEMPERATURE} ---\n{sample}\n---")
    print(f"{config.model} with {size:,} parameters, {n} steps of {config.batch_size} x {config.length} bytes")
    print(f"loss             {records[-1]['loss']:.3f} nats per byte")
    print(f"validation loss  {validation:.3f}")
    print(f"unigram entropy  {run.entropy:.3f} (the best without context)")
    print(f"in {out}: checkpoint, metrics.jsonl, loss.png, sample.txt, config.json, tensorboard")
    return 0


def _check(config: Train) -> None:
    for name in (
        "n_layer",
        "n_embd",
        "n_head",
        "batch_size",
        "steps",
        "accumulate",
        "log_every",
        "eval_every",
        "save_every",
    ):
        if getattr(config, name) < 1:
            raise ValueError(f"{_flag(name)}: {getattr(config, name)}, expected at least 1")
    if config.stop_after is not None and config.stop_after < 1:
        raise ValueError(f"--stop-after: {config.stop_after}, expected at least 1")
    if config.sample < 0:
        raise ValueError(f"--sample: {config.sample}, expected a number of bytes")
    if config.length < 2:
        raise ValueError(f"--length: {config.length}, expected at least 2 bytes, one to read and one to predict")
    if config.n_embd % config.n_head:
        raise ValueError(f"--n-head: {config.n_head} does not divide --n-embd {config.n_embd}")
    if config.batch_size % config.accumulate:
        raise ValueError(f"--accumulate: {config.accumulate} does not divide --batch-size {config.batch_size}")
    if not 0 <= config.warmup < config.steps:
        raise ValueError(f"--warmup: {config.warmup}, expected 0 up to --steps {config.steps}, which it must be below")
    for name in ("lr", "max_norm"):
        if (value := getattr(config, name)) is not None and not value > 0:
            raise ValueError(f"{_flag(name)}: {value}, expected a positive number")
    if not config.weight_decay >= 0:
        raise ValueError(f"--weight-decay: {config.weight_decay}, expected a number that is not negative")
    if not config.resume and config.out.is_dir() and any(config.out.iterdir()):
        raise FileExistsError(f"--out: {config.out} exists already; give --resume to go on with it, or another --out")


def _model(config: Train) -> Any:
    from . import data, models

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
    )


def _described(config: Train, text: torch.Tensor) -> dict[str, Any]:
    """config.json: the settings, the text they were used on, and with what."""
    settings = asdict(config) | {"data": None if config.data is None else os.fspath(config.data.resolve())}
    return {
        "config": {name: value for name, value in settings.items() if name not in FREE_ON_RESUME},
        "text": {"bytes": len(text), "sha256": hashlib.sha256(text.numpy().data).hexdigest()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def _create(out: Path, described: dict[str, Any]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        beside = out / "config.json.new"
        beside.write_text(json.dumps(described, indent=2) + "\n")
        beside.replace(out / "config.json")
    except OSError as error:
        raise OSError(f"--out: {out} cannot be written: {error}") from error


def _resume(config: Train, described: dict[str, Any], booster: Any, model: Any, tx: Any) -> Any:
    """The state that the run in ``config.out`` has come to: its checkpoint's, or the first where there is none yet."""
    from functional_booster.kernels import random

    from . import trackers

    out = config.out
    if json.loads((out / "config.json").read_text()).get("text") != described["text"]:
        raise ValueError(f"--data: the text in {config.data or 'the standard library'} is not what the run began with")
    if (out / "metrics.jsonl").exists():
        trackers.read_jsonl(out / "metrics.jsonl")  # a broken one is refused now
    if not (out / "checkpoint").exists():
        return booster.init(model, tx, key=random.key(config.seed))
    state = booster.load(out / "checkpoint", like=booster.abstract(model, tx))
    if config.stop_after is not None and config.stop_after <= int(state.position):
        raise ValueError(f"--stop-after: {config.stop_after}, but the run in {out} is at step {int(state.position)}")
    return state


def _saved(given: Train) -> Train:
    """The settings of the run in ``given.out``, with ``given``'s where a resumed run is free."""
    path = given.out / "config.json"
    if not path.exists():
        raise FileNotFoundError(
            f"--resume: {path} does not exist, expected the folder of a run; without --resume it begins"
        )
    try:
        settings = json.loads(path.read_text())["config"]
        known = {field.name for field in fields(Train)} - set(FREE_ON_RESUME)
        if set(settings) != known:
            raise ValueError(f"settings {sorted(set(settings) ^ known)}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--resume: {path} is not the config of a run that this version can resume: {error}") from None
    settings["data"] = None if settings["data"] is None else Path(settings["data"])
    return Train(**settings, **{name: getattr(given, name) for name in FREE_ON_RESUME})


def _check_resumed(config: Train, saved: Train) -> None:
    for field in fields(Train):
        now, then = getattr(config, field.name), getattr(saved, field.name)
        if isinstance(now, Path) and field.name == "data":
            now = now.resolve()
        if now != then:
            raise ValueError(f"{_flag(field.name)}: {now}, but the run in {config.out} began with {then}; leave it out")


def _sample(run: Run, state: Any) -> str:
    from functional_booster.kernels import random

    from .generate import generate

    prompt = torch.tensor([list(PROMPT)], device=run.booster.device)
    key = random.key(run.config.seed)
    tokens = generate(
        run.model, state.params, prompt, key=key, max_new_tokens=run.config.sample, temperature=TEMPERATURE
    )
    text = bytes(tokens[0, len(PROMPT) :].tolist()).decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
