"""Checkpoints: a directory with safetensors and a JSON manifest, published in one moment.

The data file is written under a new name and synced; then the manifest that names it takes the old one's place
(``os.replace``). A crash at any point leaves the old checkpoint whole or the new one. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from functional_booster.kernels import flat, tree
from functional_booster.sharding.abstract import ArrayInfo

from .state import TrainState, disassemble

Tree = tree.Tree
MANIFEST = "manifest.json"
FORMAT = "functional_booster/1"


def save(path: str | os.PathLike[str], state: TrainState) -> None:
    """Write ``state`` to the directory ``path``, in place of the checkpoint that may be there.

    Raises TypeError for no state, FileExistsError where ``path`` holds something else, OSError (with the path) where it
    cannot be written; the old checkpoint is whole in each case.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state: {type(state).__name__}, expected a TrainState")
    directory = Path(path)
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file, expected a directory for the checkpoint")
    if (
        directory.is_dir()
        and not (directory / MANIFEST).exists()
        and any(p.name[:6] != "state-" for p in directory.iterdir())
    ):
        raise FileExistsError(f"{directory} holds other files and no checkpoint, and is left as it is")
    tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in named_tensors(state).items()}
    data = directory / f"state-{secrets.token_hex(8)}.safetensors"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, data)
        _sync(data)
        manifest = {
            "format": FORMAT,
            "data": data.name,
            "sha256": _sha256(data),
            "step": int(state.step),
            "position": int(state.position),
            "torch": torch.__version__,
            "leaves": {name: {"shape": list(leaf.shape), "dtype": _dtype(leaf)} for name, leaf in tensors.items()},
        }
        fresh = directory / f"{MANIFEST}.{secrets.token_hex(4)}"
        fresh.write_text(json.dumps(manifest, indent=1))
        _sync(fresh)
        os.replace(fresh, directory / MANIFEST)
        _sync(directory)
    except BaseException as error:
        _clean(directory, keep=_current(directory))
        if isinstance(error, (OSError, RuntimeError)) or type(error).__name__ == "SafetensorError":
            raise OSError(
                f"the checkpoint {directory} could not be written ({error}); what was there before is whole"
            ) from error
        raise
    _clean(directory, keep=data.name)


def load(path: str | os.PathLike[str], like: TrainState, device: Any) -> TrainState:
    """The saved state with the structure and layout of ``like`` (leaves: ArrayInfo or tensors), on ``device``.

    Raises FileNotFoundError for a path that is no checkpoint; ValueError where the data is damaged, or, with the whole
    list, where leaves are missing, unexpected, or of another shape or dtype.
    """
    manifest = read_manifest(path)
    data = Path(path) / manifest["data"]
    if not data.exists() or _sha256(data) != manifest["sha256"]:
        raise ValueError(
            f"{path}: {manifest['data']} is {'damaged' if data.exists() else 'missing'}: its checksum does not match"
        )
    wanted = named_tensors(like)
    saved = manifest["leaves"]
    problems = [f"{name}: not in the checkpoint" for name in wanted if name not in saved]
    problems += [f"{name}: not in the model and optimizer" for name in saved if name not in wanted]
    for name in wanted.keys() & saved.keys():
        given, expected = saved[name], {"shape": list(wanted[name].shape), "dtype": _dtype(wanted[name])}
        if given != expected:
            problems.append(
                f"{name}: {given['dtype']}{given['shape']}, expected {expected['dtype']}{expected['shape']}"
            )
    if problems:
        raise ValueError(f"{path} does not fit:\n  " + "\n  ".join(sorted(problems)))
    with safe_open(data, framework="pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in wanted}
    return _restore(like, tensors)


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a checkpoint; raises FileNotFoundError or ValueError for a path that is none."""
    file = Path(path) / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path} is no checkpoint: it has no {MANIFEST}") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no manifest of a checkpoint: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{file} has another format than {FORMAT!r}")
    return manifest


def named_tensors(state: TrainState) -> dict[str, Any]:
    """{name: leaf} of a state, as the model names them, whatever the layout: params.*, opt_state.*, step, ..."""
    return tree.named_leaves(_plain(state))


def _plain(state: TrainState) -> dict[str, Tree]:
    parts = {name: getattr(state, name) for name in ("step", "position", "opt_state", "buffers", "key", "loss_scale")}
    plain = tree.map(lambda node: _expand(node) if _is_flat(node) else node, parts, is_leaf=_is_flat)
    return {**plain, "params": tree.combine(_expand(state.storage), state.frozen)}


def _expand(node: flat.Flat) -> Tree:
    """The tree of a Flat: views of its buffers, or slots with their dtype where it holds ArrayInfo; None where None."""
    held = [leaf for leaf in node.buffers.values() if leaf is not None]
    if all(isinstance(leaf, torch.Tensor) for leaf in held):
        return flat.unravel(node)
    slots = [
        None if (info := node.buffers[slot.bucket]) is None else ArrayInfo(slot.shape, info.dtype)
        for slot in node.layout.slots
    ]
    return tree.unflatten(node.layout.structure, slots)


def _restore(like: TrainState, tensors: dict[str, torch.Tensor]) -> TrainState:
    plain = _plain(like)
    filled = tree.unflatten(tree.structure(plain), [tensors[name] for name in tree.names(plain)])
    storage, frozen = disassemble(filled.pop("params"), like.storage.layout)
    nodes, structure = tree.flatten({name: getattr(like, name) for name in filled}, is_leaf=_is_flat)
    parts = [
        flat.ravel(value, node.layout) if _is_flat(node) else value
        for node, value in zip(nodes, structure.flatten_up_to(filled), strict=True)
    ]
    return like.replace(storage=storage, frozen=frozen, **tree.unflatten(structure, parts))


def _is_flat(node: Any) -> bool:
    return isinstance(node, flat.Flat)


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype).removeprefix("torch.")


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
    try:
        return read_manifest(directory)["data"]
    except (OSError, ValueError):
        return None


def _clean(directory: Path, keep: str | None) -> None:
    """Remove data and manifests that no manifest names: what a crash, or the checkpoint before, has left."""
    if not directory.is_dir():
        return
    for file in [*directory.glob("state-*.safetensors"), *directory.glob(f"{MANIFEST}.*")]:
        if file.name != keep:
            file.unlink(missing_ok=True)
