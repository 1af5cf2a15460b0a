"""The second half of a save: every process writes its share, and the first one publishes them all in one moment."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

import torch

from functional_booster import watchdog
from functional_booster.donation import refuse_consumed
from functional_booster.state import TrainState

from . import background, data_files, manifest, snapshots
from .background import Saving
from .folders import Folder, folder
from .manifest import CHUNK, CLAIM, FORMAT, MANIFEST
from .meetings import Meetings
from .snapshots import Snapshot, snapshot

Together = Callable[[], contextlib.AbstractContextManager[None]]


def save(path: str | os.PathLike[str], state: TrainState, *, metrics: Mapping[str, float] | None = None) -> None:
    """Write ``state`` to the directory (or fsspec URL) ``path``, in place of the checkpoint that may be there.

    A state that is laid out over processes is saved by all of them, each of which writes its share; what the layout has
    every one of several ranks hold is taken from any of them. All return once everything is on the disk. What is on a
    GPU passes through the host's memory a chunk at a time. Threads that save to one path take turns; the last one's
    state stays. ``metrics`` are kept beside, for people and ``Retention``. Raises TypeError for no state, DonatedError
    for one that was donated, FileExistsError where ``path`` holds something else or where another job is saving to it
    (which is known where files have locks: at no URL), OSError (with the path) where it cannot be written; the old
    checkpoint is whole in each case. Where a process fails, the others raise RankFailure. An earlier save's error that
    nobody has heard is raised first.
    """
    together = _together(state)
    with together():
        background.settle()
        taken = replace(snapshot(state), metrics=_numbers(metrics))
    write(path, taken, together)


def save_async(
    path: str | os.PathLike[str], state: TrainState, *, metrics: Mapping[str, float] | None = None
) -> Saving:
    """``save``, which returns once the state is copied to the host's memory, and writes it in the background.

    The state may be donated right away. The memory is kept for the next save, pinned where the state is on a GPU. Where
    cores are scarce the writing gives way to the training (on Linux). A save waits for the one before it. What goes
    wrong in the background is raised by ``result()`` of what this returns, or else by the next save or load, whatever
    its path, or is printed at exit, which waits for the writing.
    """
    together = _together(state)
    with together():
        background.settle()
        taken = replace(snapshots.copies.snapshot(state), metrics=_numbers(metrics))
    if not state.plan.mesh.across:
        return background.start(os.fspath(path), lambda: write(path, taken))
    meetings = Meetings("save", taken.step)

    def work() -> None:
        with contextlib.closing(meetings):
            write(path, taken, meetings)

    return background.start(os.fspath(path), work)


def write(path: str | os.PathLike[str], taken: Snapshot, together: Together = contextlib.nullcontext) -> None:
    """Publish a snapshot at ``path``; raises as ``save``.

    Every process of the snapshot must call it. They meet three times, each time in a context ``together()``, which
    raises on all where one has failed inside (``watchdog.all_or_none``); there is no other communication.
    """
    with contextlib.ExitStack() as work:
        with together():
            place = folder(path)
            token = work.enter_context(_claimed(place, taken.ranks)) if taken.rank == 0 else ""
        with together(), _told(place):
            share = data_files.write(place, _data(token := token or _read_claim(place), taken.rank), taken)
            if taken.rank > 0:
                place.put(_index(token, taken.rank), json.dumps(share).encode())
        with together(), _told(place):
            if taken.rank == 0:
                _publish(place, token, taken, share)
            work.close()


def _together(state: TrainState) -> Together:
    """How the main threads of the processes that hold the state meet; refuses what is no state."""
    if not isinstance(state, TrainState):
        raise TypeError(f"state: {type(state).__name__}, expected a TrainState")
    refuse_consumed(["step"], [state.step])
    if not isinstance(state.step, torch.Tensor):
        raise TypeError("state: it is abstract, expected one with values (booster.init makes it)")
    step, alone = int(state.step), not state.plan.mesh.across
    return lambda: watchdog.all_or_none("save", step, alone=alone)


def _numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (metrics or {}).items()}


@contextlib.contextmanager
def _claimed(place: Folder, ranks: int) -> Generator[str]:
    """Hold the folder while its processes save; yields the token of their files' names.

    At the end no file is left of what is not published, or replaced.
    """
    with contextlib.ExitStack() as held:
        with _told(place):
            _refuse_others(place)
            made = place.make()
            alone = held.enter_context(place.exclusive())
            if made:
                held.callback(place.discard)  # where nothing is in it
            replaced = manifest.named_files(place)
            token = secrets.token_hex(8)
            if ranks > 1:
                place.put(CLAIM, token.encode())
        try:
            yield token
        except BaseException:
            with contextlib.suppress(OSError, ValueError):
                _clean(place, lambda name: f"-{token}-" in name or name == CLAIM)
            raise
        with contextlib.suppress(OSError, ValueError):  # it is published: what stays now goes with the next save
            # Without a lock, other leftovers may be the files of another saver at work.
            _clean(place, lambda name: alone or f"-{token}-" in name or name in replaced or name == CLAIM)


def _publish(place: Folder, token: str, taken: Snapshot, share: dict[str, Any]) -> None:
    """Put the manifest of everything that the processes wrote in the old one's place."""
    from functional_booster import __version__

    leaves: dict[str, Any] = {name: {**leaf, "pieces": []} for name, leaf in taken.leaves.items()}
    files = []
    for number in range(taken.ranks):
        if number > 0:
            share = json.loads(_read(place, _index(token, number)))
        files.append(share["file"])
        for name, pieces in share["pieces"].items():
            leaves[name]["pieces"] += ({"file": number, **piece} for piece in pieces)
    content = {
        "format": FORMAT,
        "step": taken.step,
        "position": taken.position,
        "versions": {"functional_booster": __version__, "torch": torch.__version__},
        "layout": taken.layout,
        **({"metrics": taken.metrics} if taken.metrics else {}),
        "chunk": CHUNK,
        "files": files,
        "leaves": leaves,
    }
    for name, leaf in leaves.items():
        leaf["pieces"].sort(key=lambda piece: piece["range"])
        _require_whole(name, leaf)
    place.put(MANIFEST, manifest.written(content))


def _require_whole(name: str, leaf: dict[str, Any]) -> None:
    """Raise RuntimeError where the pieces do not hold every element once: a layout told the ranks other things."""
    ends = [0, *(piece["range"][1] for piece in leaf["pieces"])]
    if [piece["range"][0] for piece in leaf["pieces"]] != ends[:-1] or ends[-1] != math.prod(leaf["shape"]):
        raise RuntimeError(f"{name}: its pieces do not make up the leaf: {[each['range'] for each in leaf['pieces']]}")


def _clean(place: Folder, unwanted: Callable[[str], bool]) -> None:
    """Remove the files of saves that are ``unwanted``, but those that the manifest names."""
    kept = manifest.named_files(place)
    place.remove(name for name in place.names() if manifest.is_ours(name) and name not in kept and unwanted(name))


def _refuse_others(place: Folder) -> None:
    """Raise FileExistsError where ``place`` holds something, and that is neither a checkpoint nor left of one."""
    if place.is_file():
        raise FileExistsError(f"{place} is a file, expected a directory for the checkpoint")
    names = place.names()
    if MANIFEST in names:
        try:
            manifest.read(place)
        except ValueError as error:
            raise FileExistsError(f"{error}; it is left as it is") from error
    elif other := next((name for name in names if not manifest.is_ours(name)), None):
        raise FileExistsError(f"{place} holds other files ({other}) and no checkpoint, and is left as it is")


@contextlib.contextmanager
def _told(place: Folder) -> Generator[None]:
    """Errors of the disk with the path, and with what they mean for the checkpoint that was there."""
    try:
        yield
    except FileExistsError:  # something else is there
        raise
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"the checkpoint {place} could not be written ({error}); what was there before is whole"
        ) from error


def _read_claim(place: Folder) -> str:
    try:
        return _read(place, CLAIM).decode()
    except FileNotFoundError as error:
        raise FileNotFoundError("it is not seen by all processes: expected a path that they share") from error


def _read(place: Folder, name: str) -> bytes:
    with place.open(name) as stream:
        return stream.read()


def _data(token: str, rank: int) -> str:
    return f"state-{token}-{rank:05d}.safetensors"


def _index(token: str, rank: int) -> str:
    return f"state-{token}-{rank:05d}.json"
