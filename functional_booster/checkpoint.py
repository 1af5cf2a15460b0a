"""Checkpoints: a directory with safetensors and a JSON manifest, published in one moment.

The data file is written under a new name and synced; then the manifest that names it takes the old one's place
(``os.replace``). A crash at any point leaves the old checkpoint whole or the new one. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from functional_booster.kernels import flat, tree
from functional_booster.precision import ConstantScaling
from functional_booster.sharding import shards
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.mesh import Replicated, own, spmd

from . import locking, watchdog
from .donation import refuse_consumed
from .state import TrainState, disassemble, on_ranks

Tree = tree.Tree
MANIFEST = "manifest.json"
FORMAT = "functional_booster/1"
_DATA = re.compile(r"state-[0-9a-f]{16}\.safetensors")
_LEFTOVER = re.compile(rf"{_DATA.pattern}|{re.escape(MANIFEST)}\.[0-9a-f]{{8}}")  # a save that died leaves such files
_FITS: dict[str, Callable[[Any], bool]] = {  # what a manifest holds
    "data": lambda value: isinstance(value, str) and _DATA.fullmatch(value) is not None,
    "sha256": lambda value: isinstance(value, str),
    "step": lambda value: type(value) is int,
    "position": lambda value: type(value) is int,
    "leaves": lambda value: isinstance(value, dict) and all(map(_is_description, value.values())),
}


def save(path: str | os.PathLike[str], state: TrainState) -> None:
    """Write ``state`` to the directory ``path``, in place of the checkpoint that may be there.

    A state that is laid out over processes is saved by all of them: the first one writes, and all return once it has.
    Others that save to one path take turns; the last one's state stays. Raises TypeError for no state, DonatedError for
    one that was donated, FileExistsError where ``path`` holds something else, OSError (with the path) where it cannot
    be written; the old checkpoint is whole in each case. The processes that do not write raise RankFailure.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state: {type(state).__name__}, expected a TrainState")
    named = named_tensors(state)
    refuse_consumed(list(named), list(named.values()))
    counters = {"step": int(state.step), "position": int(state.position)}
    with watchdog.all_or_none("save", counters["step"], alone=not state.plan.mesh.across):
        if not any(state.plan.mesh.place):
            _write(Path(path), named, counters)


def _write(directory: Path, named: dict[str, torch.Tensor], counters: dict[str, int]) -> None:
    _refuse_others(directory)
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locking.exclusive(directory, wait=True) as alone:
            _publish(directory, _on_host(named), counters, alone)
    except BaseException as error:
        if made:
            with contextlib.suppress(OSError):  # it is not empty, or was never made
                directory.rmdir()
        if isinstance(error, (OSError, RuntimeError, SafetensorError)):
            raise OSError(
                f"the checkpoint {directory} could not be written ({error}); what was there before is whole"
            ) from error
        raise


def load(path: str | os.PathLike[str], like: TrainState, device: Any) -> TrainState:
    """The saved state with the structure and layout of ``like`` (leaves: ArrayInfo or tensors), on ``device``.

    Raises FileNotFoundError for a path that is no checkpoint; ValueError where the data is damaged, or, with the whole
    list, where leaves are missing, unexpected, or of another shape or dtype. On processes, each must call it, and where
    it fails on one of them, the others raise RankFailure.
    """
    with watchdog.all_or_none("load", alone=not like.plan.mesh.across):
        return _restore(like, _read(path, like, device))


def _read(path: str | os.PathLike[str], like: TrainState, device: Any) -> dict[str, torch.Tensor]:
    """The whole tensors that ``like`` needs, by name."""
    manifest = read_manifest(path)
    data = Path(path) / manifest["data"]
    if not data.is_file():
        raise ValueError(f"{path}: {data.name} is missing")
    if _sha256(data) != manifest["sha256"]:
        raise ValueError(f"{path}: {data.name} is damaged: its checksum does not match")
    wanted = named_tensors(like)
    saved = manifest["leaves"]
    fresh: dict[str, torch.Tensor] = {}
    if "loss_scale" in saved:  # written before the scale had counters, when no run scaled its loss
        fresh = tree.named_leaves({"loss_scale": ConstantScaling().init(device)})
        saved = {name: leaf for name, leaf in saved.items() if name != "loss_scale"}
        saved |= {name: _described(leaf) for name, leaf in fresh.items()}
    problems = [f"{name}: not in the checkpoint" for name in wanted if name not in saved]
    problems += [f"{name}: not in the model and optimizer" for name in saved if name not in wanted]
    for name in wanted.keys() & saved.keys():
        given, expected = saved[name], _described(wanted[name])
        if given != expected:
            problems.append(
                f"{name}: {given['dtype']}{given['shape']}, expected {expected['dtype']}{expected['shape']}"
            )
    if problems:
        raise ValueError(f"{path} does not fit:\n  " + "\n  ".join(sorted(problems)))
    try:
        with safe_open(data, framework="pt", device=str(device)) as file:
            tensors = fresh | {name: file.get_tensor(name) for name in wanted if name not in fresh}
    except SafetensorError as error:
        raise ValueError(f"{path}: {data.name} is damaged: {error}") from error
    if wrong := next((name for name, leaf in tensors.items() if _described(leaf) != saved[name]), None):
        raise ValueError(f"{path}: {data.name} is damaged: {wrong} is not what {MANIFEST} says")
    return tensors


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a checkpoint; raises FileNotFoundError or ValueError for a path that is none."""
    file = Path(path) / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path} is no checkpoint: it has no {MANIFEST}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no manifest of a checkpoint: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{file} has another format than {FORMAT!r}")
    if wrong := next((key for key, fits in _FITS.items() if not fits(manifest.get(key))), None):
        raise ValueError(f"{file} is damaged: {wrong!r} is missing, or not what it should be")
    return manifest


def named_tensors(state: TrainState) -> dict[str, Any]:
    """{name: leaf} of a state, as the model names them, whatever the layout: params.*, opt_state.*, step, ...

    Whole tensors: on processes, each must call it.
    """
    mesh = state.plan.mesh
    if any(isinstance(leaf, ArrayInfo) for leaf in tree.leaves(state)):
        return tree.named_leaves(_described_plainly(state))
    return tree.named_leaves(spmd(lambda state: Replicated(_plain(state)), mesh)(on_ranks(state)))


def _publish(directory: Path, tensors: dict[str, torch.Tensor], counters: dict[str, int], alone: bool) -> None:
    """Write the tensors, then the manifest that names them; only then remove what no manifest names any more.

    ``alone``: no other process can be at work here, so that every leftover is a dead one.
    """
    replaced = _current(directory)
    data = directory / f"state-{secrets.token_hex(8)}.safetensors"
    fresh = directory / f"{MANIFEST}.{secrets.token_hex(4)}"
    try:
        save_file(tensors, data)
        manifest = {
            "format": FORMAT,
            "data": data.name,
            "sha256": _sha256(data),
            **counters,
            "torch": torch.__version__,
            "leaves": {name: _described(leaf) for name, leaf in tensors.items()},
        }
        fresh.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        data.chmod(stat.S_IMODE(fresh.stat().st_mode))  # as the umask says; safetensors writes for the owner alone
        _sync(data)
        _sync(fresh)
        os.replace(fresh, directory / MANIFEST)
        _sync(directory)
    except BaseException:
        _remove(directory, {data.name, fresh.name} - {_current(directory)})
        raise
    _remove(directory, ({file.name for file in directory.iterdir()} if alone else {replaced}) - {data.name})


def _remove(directory: Path, names: Iterable[str | None]) -> None:
    """Remove those of the files that only a save can have made."""
    for name in names:
        if name is not None and _LEFTOVER.fullmatch(name):
            (directory / name).unlink(missing_ok=True)


def _refuse_others(directory: Path) -> None:
    """Raise FileExistsError where ``directory`` holds something, and that is neither a checkpoint nor left of one."""
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file, expected a directory for the checkpoint")
    if (directory / MANIFEST).exists():
        try:
            read_manifest(directory)
        except ValueError as error:
            raise FileExistsError(f"{error}; it is left as it is") from error
    elif directory.exists() and (
        other := next((file.name for file in directory.iterdir() if not _LEFTOVER.fullmatch(file.name)), None)
    ):
        raise FileExistsError(f"{directory} holds other files ({other}) and no checkpoint, and is left as it is")


def _on_host(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in the host's memory: a copy from a device, on the CPU views of the state itself where possible.

    safetensors refuses memory that two of them share: of those that overlap, the later ones are copied.
    """
    hosted = {name: leaf.detach().cpu().contiguous() for name, leaf in named.items()}
    reach = 0
    for name, leaf in sorted(hosted.items(), key=lambda item: item[1].data_ptr()):
        if leaf.data_ptr() < reach:
            hosted[name] = leaf.clone()
        reach = max(reach, leaf.data_ptr() + leaf.numel() * leaf.element_size())
    return hosted


def _plain(state: TrainState) -> dict[str, Tree]:
    """The parts of a state as trees of whole leaves; runs on every rank."""
    names = ("step", "position", "opt_state", "buffers", "key", "loss_scale", "storage", "frozen")
    parts = {name: getattr(state, name) for name in names}
    device = getattr(state.step, "device", None)  # an ArrayInfo has none, nor anything to move
    plain = tree.map(lambda node: _expand(node, device) if _is_flat(node) else node, parts, is_leaf=_is_flat)
    trained, frozen = plain.pop("storage"), plain.pop("frozen")
    return {**plain, "params": trained if frozen is None else tree.combine(trained, frozen)}


def _expand(node: flat.Flat, device: Any) -> Tree:
    """The tree of a Flat: whole leaves on ``device``, or their ArrayInfo where it holds ArrayInfo; None where None."""
    held = [leaf for leaf in node.buffers.values() if leaf is not None]
    if all(isinstance(leaf, torch.Tensor) for leaf in held):
        return flat.unravel(shards.join(shards.on_device(node, device)))
    slots = [
        None if (info := node.buffers[slot.bucket]) is None else ArrayInfo(slot.shape, info.dtype)
        for slot in node.layout.slots
    ]
    return tree.unflatten(node.layout.structure, slots)


def _described_plainly(like: TrainState) -> dict[str, Tree]:
    """``_plain`` of a state's ArrayInfo, as one rank has them."""
    mesh = like.plan.mesh
    lead = len(mesh.axes) if mesh.virtual else 0

    def of_one_rank(node: Any) -> Any:
        return node if _is_flat(node) else replace(ArrayInfo.of(node), shape=tuple(node.shape)[lead:])

    infos = tree.map(ArrayInfo.of, like)
    return _plain(infos.replace(opt_state=tree.map(of_one_rank, infos.opt_state, is_leaf=_is_flat)))


def _restore(like: TrainState, tensors: dict[str, torch.Tensor]) -> TrainState:
    mesh = like.plan.mesh
    plain = _described_plainly(like)
    filled = tree.unflatten(tree.structure(plain), [tensors[name] for name in tree.names(plain)])
    others = {name: getattr(like, name) for name in filled if name != "params"}
    nodes, structure = tree.flatten(others, is_leaf=_is_flat)

    def local(values: dict[str, Tree]) -> TrainState:
        storage, frozen = disassemble(values.pop("params"), *like.layouts)
        parts = [
            shards.part(flat.ravel(value, node.layout)) if _is_flat(node) else value
            for node, value in zip(nodes, tree.flatten_up_to(structure, values), strict=True)
        ]
        still = None if frozen is None else shards.part(frozen)
        return on_ranks(like.replace(**tree.unflatten(structure, parts), storage=shards.part(storage), frozen=still))

    restored = own(spmd(local, mesh)(Replicated(filled)))
    return tree.map(lambda node: shards.at_home(node) if _is_flat(node) else node, restored, is_leaf=_is_flat)


def _is_flat(node: Any) -> bool:
    return isinstance(node, flat.Flat)


def _described(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}


def _is_description(leaf: Any) -> bool:
    return (
        isinstance(leaf, dict)
        and leaf.keys() == {"shape", "dtype"}
        and isinstance(leaf["shape"], list)
        and isinstance(leaf["dtype"], str)
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have the file's, or the directory's, content on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _current(directory: Path) -> str | None:
    """The data file that the manifest names, None without a manifest."""
    try:
        return read_manifest(directory)["data"]
    except FileNotFoundError:
        return None
