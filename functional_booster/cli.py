"""The command ``functional-booster``: train a language model from a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from . import run_folder, training_run
from .train_options import Train
from .training_run import INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for bad input, 1 where training fails, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # a terminal that cannot show a character must not end the run
    try:
        with contextlib.ExitStack() as holding:
            return _run(list(sys.argv[1:] if argv is None else argv), holding)
    except KeyboardInterrupt:
        return _say("interrupted before the training began", INTERRUPTED)


def _run(args: list[str], holding: contextlib.ExitStack) -> int:
    if args == ["--version"]:
        from . import __version__

        print(f"functional-booster {__version__}")
        return 0
    try:
        config = _parse(args)
        run = training_run.prepare(config, holding)
    except (ValueError, OSError) as error:
        return _say(f"error: {error}", 2)
    try:
        return training_run.train(run)
    except (FloatingPointError, OSError) as error:
        return _say(f"error: {error}\n{run_folder.kept(config.out)}", 1)
    except KeyboardInterrupt:
        return _say(f"interrupted: {run_folder.kept(config.out)}", INTERRUPTED)


def _parse(args: list[str]) -> Train:
    """The settings; of a resumed run its own, which become the defaults so that only what was given can differ."""
    import tyro

    config = tyro.extras.subcommand_cli_from_dict(
        {"train": Train}, prog="functional-booster", description="Train language models, the functional way.", args=args
    )
    if not config.resume:
        return config
    saved = run_folder.resumed(config)
    config = tyro.cli(Train, prog="functional-booster train", args=args[1:], default=saved)
    run_folder.check_resumed(config, saved)
    return config


def _say(what: str, status: int) -> int:
    print(what, file=sys.stderr)
    return status
