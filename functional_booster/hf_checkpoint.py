"""Checkpoints in Hugging Face's form: whole tensors under its names, which ``from_pretrained`` opens, and the inverse.

They hold weights alone; ``checkpoint`` has the form that loses nothing.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from functional_booster.kernels import tree

from . import hf_entries, hf_reading, hf_writing, publishing, watchdog
from .checkpoint import background, leaves
from .checkpoint.folders import folder
from .donation import refuse_consumed
from .hf_entries import Entry
from .hf_reading import Report
from .models import hf
from .models.model import Model
from .state import TrainState

Tree = tree.Tree
MEBIBYTE = 2**20

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def save(
    path: str | os.PathLike[str],
    state: TrainState,
    model: Model,
    *,
    size_per_shard: float = 1024,
    dtype: torch.dtype | None = None,
    config: Any = None,
    generation_config: Any = None,
) -> None:
    """Write the weights to the directory (or fsspec URL) ``path``, as ``from_pretrained`` opens it, in place of those
    that are there.

    Files of at most ``size_per_shard`` MB (2**20 bytes), or one tensor: ``model.safetensors``, or several and an index.
    On processes, each must call it: each writes some of them, and holds one tensor and one leaf of it at a time in the
    host's memory. ``dtype``: of the floating-point weights in the files, None: as they are stored. ``config.json`` is
    the model's ``config``, unless another one is given, and ``generation_config.json`` what is given.

    Raises TypeError for what is no state or Model, ValueError for a size or dtype that makes no sense, for one in which
    finite weights would be infinite (naming them), or a model of another state, OSError where it cannot be written:
    what was there before is whole then.
    """
    _check(state, model)
    limit, dtype = checked(size_per_shard, dtype)
    entries = _entries(model, state, dtype)
    texts = config_texts(model.name, model.config if config is None else config, generation_config, entries)
    target = publishing.Target(folder(path), "model", limit, texts)
    hf_writing.write(target, entries, state.plan.mesh, state.step.device, "save_pretrained")


def load(
    path: str | os.PathLike[str], like: TrainState, model: Model, *, strict: bool = True, weights_only: bool = False
) -> tuple[TrainState, Report]:
    """``like`` with the weights of ``path``, in fresh storage of its layout and dtypes, and what did not fit.

    ``path``: a directory of Hugging Face's, a safetensors file, or an index, or the fsspec URL of one. Each rank reads
    what it stores, one slice of a tensor at a time; nothing travels. Pickles (``.bin``) are refused, unless
    ``weights_only`` asks for torch's unpickler of that name. Raises FileNotFoundError where there are no weights, and
    ValueError, with the whole list, for weights that are missing, unexpected, of another shape or kind of dtype, or
    with finite numbers that would be infinite in the dtype of ``like``; those stay as they are if not ``strict``.
    """
    _check(like, model)
    mesh = like.plan.mesh
    with watchdog.all_or_none("load_pretrained", alone=not mesh.across):
        background.settle()
        parts = {name: tree.map(_copied, getattr(like, name)) for name in ("storage", "frozen", "buffers")}
        fresh = like.replace(**parts)
        entries = _entries(model, fresh, None)
        report = read_into(path, entries, ignored(model), strict=strict, weights_only=weights_only)
    return fresh, report


def read_into(
    path: str | os.PathLike[str],
    entries: list[Entry],
    ignored: Callable[[str], bool],
    *,
    strict: bool,
    weights_only: bool = False,
) -> Report:
    """Fill the entries' leaves from ``path``, in place, once what is there is known to fit. Raises as ``load``."""
    with hf_reading.open_weights(path, weights_only=weights_only) as weights:
        report, fits = hf_reading.compare(entries, weights, ignored)
        if strict and report:
            raise ValueError(f"{path} does not fit the model:\n  {report}")
        hf_reading.fill(fits, weights)
    return report


def config_texts(architecture: str, config: Any, generation_config: Any, entries: list[Entry]) -> dict[str, str]:
    """{file name: content} of what stands beside the weights. ``config``: ours, transformers', a dict, or None."""
    dtypes = {entry.dtype for entry in entries if entry.dtype.is_floating_point}
    dtype = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None
    texts = {}
    if callable(getattr(config, "to_json_string", None)):
        theirs = copy.deepcopy(config)
        theirs.architectures, theirs.dtype = [architecture], dtype
        texts["config.json"] = theirs.to_json_string()
    elif config is not None:
        content = dict(config) if isinstance(config, Mapping) else config.to_hf_config()
        texts["config.json"] = json.dumps(content | ({} if dtype is None else {"dtype": dtype}), indent=2) + "\n"
    if generation_config is not None:
        given = generation_config
        is_theirs = callable(getattr(given, "to_json_string", None))
        texts["generation_config.json"] = given.to_json_string() if is_theirs else json.dumps(dict(given), indent=2)
    return texts


def checked(size_per_shard: Any, dtype: Any = None) -> tuple[int, torch.dtype | None]:
    """The size in bytes and the dtype, or the error that says what is wrong with them."""
    is_number = isinstance(size_per_shard, (int, float)) and not isinstance(size_per_shard, bool)
    if not is_number or not 0 < size_per_shard < math.inf:
        raise ValueError(f"size_per_shard: {size_per_shard!r}, expected a positive number of MB")
    if dtype not in (None, *_DTYPES):
        raise ValueError(f"dtype: {dtype!r}, expected one of {', '.join(map(str, _DTYPES))}, or None")
    return int(size_per_shard * MEBIBYTE), dtype


def ignored(model: Model) -> Callable[[str], bool]:
    """Which tensors of a file are no weights of the model's, and yet no error."""
    return (lambda name: hf.is_constant(model, name)) if hf.is_own(model) else (lambda name: False)


def _entries(model: Model, state: TrainState, dtype: torch.dtype | None) -> list[Entry]:
    mesh = state.plan.mesh
    found = leaves.of_flat(state.storage, mesh)
    found |= {} if state.frozen is None else leaves.of_flat(state.frozen, mesh)
    if hf.is_own(model):
        return hf_entries.of_model(model, found, dtype)
    found |= hf_entries.plain(tree.named_leaves(state.buffers), mesh)
    return hf_entries.of_leaves(found, model.state_names, dtype)


def _copied(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.clone().pin_memory() if leaf.device.type == "cpu" and leaf.is_pinned() else leaf.clone()


def _check(state: Any, model: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(f"state: {type(state).__name__}, expected a TrainState")
    if not isinstance(model, Model):
        raise TypeError(f"model: {type(model).__name__}, expected the fb.Model that the state was made of")
    if hasattr(model, "plans"):  # a LoraModel, whose class only peft can import
        raise ValueError("model: it has adapters: save them by lora.save, or the base's weights after lora.merge")
    if not all(isinstance(leaf, torch.Tensor) for leaf in tree.leaves((state.storage, state.frozen))):
        raise ValueError("state: it is abstract, expected one with values, as booster.init makes it")
    refuse_consumed(tree.names(state.storage), tree.leaves(state.storage))
    given, wanted = state.abstract.tree, model.abstract
    if tree.structure(given) != tree.structure(wanted) or any(
        tuple(one.shape) != tuple(other.shape)
        for one, other in zip(tree.leaves(given), tree.leaves(wanted), strict=True)
    ):
        raise ValueError(f"model: {model.name} has other parameters than the state")
