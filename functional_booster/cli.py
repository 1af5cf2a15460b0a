"""The command ``functional-booster``: train a language model from a terminal; look into checkpoints, convert them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import sys
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from . import run_folder, training_run, watchdog
from .launch import launch_from_torch
from .rank_failure import RankFailure
from .train_options import Train
from .training_run import INTERRUPTED, processes

if TYPE_CHECKING:
    from .convert import Convert
    from .inspect_checkpoint import Inspect


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for bad input, 1 where the work fails, 130 for Ctrl-C.

    Under torchrun this process is one of many; the first one alone prints.
    """
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # a terminal that cannot show a character must not end the run
    try:
        with contextlib.ExitStack() as holding:
            return _run(list(sys.argv[1:] if argv is None else argv), holding)
    except KeyboardInterrupt:
        return _say("interrupted before the training began", INTERRUPTED)


def _run(args: list[str], holding: contextlib.ExitStack) -> int:
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            launch_from_torch(seed=None, verbose=False)
    except (ValueError, RuntimeError) as error:
        return _say(f"error: {error}", 2)
    if processes()[0] > 0:
        logging.getLogger(__package__).setLevel(logging.ERROR)
    if args == ["--version"]:
        from . import __version__

        if processes()[0] == 0:
            print(f"functional-booster {__version__}")
        return 0
    try:
        with watchdog.all_or_none("reading of the options"):
            config = _parse(args)
        if not isinstance(config, Train):
            with watchdog.all_or_none("work"):
                return _look_after(config) if processes()[0] == 0 else 0
        run = training_run.prepare(config, holding)
    except (ValueError, OSError, RankFailure) as error:
        return _leave(_say(f"error: {error}", 2))
    except SystemExit:  # the parser has spoken
        _leave(2)
        raise
    try:
        return training_run.train(run)
    except OSError as error:  # perhaps of this process alone: the others hear of it, and are not waited for
        return _say(f"error: {error}\n{run_folder.kept(config.out)}", 1)
    except (FloatingPointError, RankFailure) as error:
        lost = isinstance(error, RankFailure) and error.rank == 0  # which may not be able to say so
        return _leave(_say(f"error: {error}\n{run_folder.kept(config.out)}", 1, speaker=1 if lost else 0))
    except KeyboardInterrupt:
        return _say(f"interrupted: {run_folder.kept(config.out)}", INTERRUPTED)


def _look_after(options: Inspect | Convert) -> int:
    """Show or convert a checkpoint: work of one process."""
    from . import convert, inspect_checkpoint

    if isinstance(options, convert.Convert):
        return convert.run(options)
    return inspect_checkpoint.run(options)


def _parse(args: list[str]) -> Train | Inspect | Convert:
    """The settings; of a resumed run its own, which become the defaults so that only what was given can differ.

    Processes are the ranks in place of virtual ones, and so is another plugin laid out anew.
    """
    import tyro

    from .convert import Convert
    from .inspect_checkpoint import Inspect

    with _silent() if processes()[0] > 0 else contextlib.nullcontext():
        config = tyro.extras.subcommand_cli_from_dict(
            {"train": Train, "inspect": Inspect, "convert": Convert},
            prog="functional-booster",
            description="Train language models, the functional way, and look after their checkpoints.",
            args=args,
        )
        if not isinstance(config, Train) or not config.resume:
            return config
        saved = run_folder.resumed(config)
        config = tyro.cli(Train, prog="functional-booster train", args=args[1:], default=saved)
        if saved.virtual_ranks is not None and (config.plugin != saved.plugin or processes()[1] > 1):
            saved = dataclasses.replace(saved, virtual_ranks=None)
            config = tyro.cli(Train, prog="functional-booster train", args=args[1:], default=saved)
    run_folder.check_resumed(config, saved)
    return config


@contextlib.contextmanager
def _silent() -> Generator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _leave(status: int) -> int:
    """The exit status, once all processes have spoken: torchrun ends the others when one has ended in failure."""
    with contextlib.suppress(RankFailure):
        watchdog.agree(None, "exit")
    return status


def _say(what: str, status: int, speaker: int = 0) -> int:
    if processes()[0] == speaker:
        print(what, file=sys.stderr)
    return status
