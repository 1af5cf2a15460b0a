"""``functional-booster convert``: from our own form of checkpoints to Hugging Face's and back, or to another dtype.

One process does it, with the parameters (to our own form: everything that is saved) in the host's memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import tyro

from functional_booster.kernels import tree
from functional_booster.sharding.mesh import Mesh

from . import (
    checkpoint,
    checkpoint_paths,
    hf_checkpoint,
    hf_entries,
    hf_reading,
    hf_writing,
    publishing,
    run_folder,
    training_run,
)
from .checkpoint import conversions
from .checkpoint.folders import file, folder
from .checkpoint.manifest import described
from .hf_entries import Entry
from .models import hf
from .models.model import Model
from .state import check_params
from .train_options import Train

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PARAMS = "params."
_ALONE = Mesh(())


@dataclass(frozen=True)
class Convert:
    """Convert a checkpoint: to Hugging Face's form, from it, or to one file in another dtype.

    Hugging Face's form has the weights alone, and opens with from_pretrained; what is made of it is a checkpoint of
    parameters alone, at step 0. Models are gpt2 and llama.
    """

    src: tyro.conf.Positional[str]
    """A checkpoint (or its URL), a run's folder, one of numbered checkpoints, of which the newest is taken, or weights
    in Hugging Face's form."""
    dst: tyro.conf.Positional[str]
    """The folder to write; a checkpoint that is there in this form is replaced."""
    to: Literal["native", "hf"] | None = None
    """The form to write; by default the other one."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Of the floating-point parameters; by default as they are saved. Optimizer state stays as it is."""
    size_per_shard: float = 1024
    """MB (2**20 bytes) in a file of Hugging Face's form, or one tensor."""
    config: str | None = None
    """The model's config.json, of Hugging Face's; by default the run's own, or what stands beside the weights."""


def run(options: Convert) -> int:
    """Convert; the exit status. Raises ValueError or OSError, naming what is wrong, before anything is written."""
    source = checkpoint_paths.native(options.src)
    form = options.to or ("native" if source is None else "hf")
    dtype = None if options.dtype is None else _DTYPES[options.dtype]
    if form == "hf":
        _refuse_ours(options.dst)
        model, params = _from_hf(options) if source is None else _from_native(options, source)
        _write_hf(options, model, params, dtype)
    elif source is None:
        model, params = _from_hf(options)
        _write_native(options.dst, {_PARAMS + name: leaf for name, leaf in params.items()}, dtype)
    else:
        _write_native(options.dst, checkpoint.read_tensors(source), dtype, checkpoint.read_manifest(source))
    print(f"{options.src} -> {options.dst} ({form})")
    return 0


def _from_native(options: Convert, source: str) -> tuple[Model, dict[str, torch.Tensor]]:
    """The model, and its parameters by name."""
    model = _model_of(options, source)
    names = [name for name in checkpoint.read_manifest(source)["leaves"] if name.startswith(_PARAMS)]
    found = checkpoint.read_tensors(source, names)
    params = {name.removeprefix(_PARAMS): leaf for name, leaf in found.items()}
    try:
        check_params(params, model.abstract)
    except ValueError as error:
        raise ValueError(f"{source} is of another model: {error}") from error
    return model, params


def _from_hf(options: Convert) -> tuple[Model, dict[str, torch.Tensor]]:
    """The model, and its parameters by name, in the dtypes of the files."""
    with hf_reading.open_weights(options.src) as weights:
        kinds = {name: dtype for name, (_, dtype) in weights.tensors.items()}
    model = _model_from(options.config or f"{weights.beside}/config.json")
    stored = hf.stored_tensors(model)
    homes = {
        leaf: next((kinds[name] for name in one.names if name in kinds), torch.float32)
        for one in stored
        for leaf, _ in one.parts
    }
    params = {
        name: torch.empty(info.shape, dtype=homes[name]) for name, info in tree.named_leaves(model.abstract).items()
    }
    hf_checkpoint.read_into(options.src, _entries(model, params), hf_checkpoint.ignored(model), strict=True)
    return model, params


def _write_hf(options: Convert, model: Model, params: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    limit, dtype = hf_checkpoint.checked(options.size_per_shard, dtype)
    entries = _entries(model, params, dtype)
    texts = hf_checkpoint.config_texts(model.name, model.config, None, entries)
    target = publishing.Target(folder(options.dst), "model", limit, texts)
    hf_writing.write(target, entries, _ALONE, torch.device("cpu"), "convert")


def _write_native(
    path: str,
    values: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    manifest: Mapping[str, Any] | None = None,
) -> None:
    """Write leaves by name, with the counters of the manifest that they come with."""
    counters = {"step": 0, "position": 0} | {key: (manifest or {}).get(key, 0) for key in ("step", "position")}

    lossy = []

    def cast(name: str, leaf: torch.Tensor) -> torch.Tensor:
        if dtype is None or not (name.startswith(_PARAMS) and leaf.is_floating_point()):
            return leaf
        if conversions.overflow(leaf, dtype):
            lossy.append(f"{name}: {conversions.beyond(dtype)}")
        return leaf.to(dtype)

    cast_values = {name: cast(name, leaf) for name, leaf in sorted(values.items())}
    if lossy:
        raise ValueError("--dtype: some parameters do not fit:\n  " + "\n  ".join(lossy))
    taken = checkpoint.Snapshot(
        pieces=tuple(checkpoint.Piece(name, 0, leaf.reshape(-1)) for name, leaf in cast_values.items() if leaf.numel()),
        leaves={name: described(leaf.shape, leaf.dtype) for name, leaf in cast_values.items()},
        layout={"plugin": "SingleDevice()", "mesh": {}, "virtual": False},
        rank=0,
        ranks=1,
        metrics=dict((manifest or {}).get("metrics", {})),
        **counters,
    )
    checkpoint.write(path, taken)


def _entries(model: Model, params: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> list[Entry]:
    """The tensors of Hugging Face's form, over the parameters by name."""
    return hf_entries.of_model(model, hf_entries.plain(params, _ALONE), dtype)


def _model_of(options: Convert, source: str) -> Model:
    """The model of a native checkpoint: that of ``--config``, or of its run."""
    if options.config is not None:
        return _model_from(options.config)
    folder_of_run = checkpoint_paths.run_of(source)
    if folder_of_run is None:
        raise ValueError(f"--config: missing; {source} is of no run whose config would say what model it is of")
    try:
        settings = run_folder.read(folder_of_run)["config"]
    except ValueError as error:
        raise ValueError(f"src: {str(error).removeprefix('--resume: ')}; --config can say what model it is") from error
    return training_run.model_of(Train(**settings))


def _model_from(path: str) -> Model:
    """The model that a config.json of Hugging Face's describes."""
    place, name = file(path)
    try:
        with place.open(name) as stream:
            config = json.loads(stream.read())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--config: {path} does not exist, expected the model's config") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--config: {path} is no config: {error}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in hf.FAMILIES:
        raise ValueError(f"--config: {path} has model_type {kind!r}, expected one of {sorted(hf.FAMILIES)}")
    return hf.FAMILIES[kind].factory(config)


def _refuse_ours(path: str) -> None:
    """Raise ValueError for a folder with files of ours that Hugging Face's form would replace, or stand beside."""
    place = folder(path)
    if place.size(checkpoint.MANIFEST) is not None:
        raise ValueError(f"dst: {path} holds a native checkpoint, expected another folder")
    if place.size(run_folder.CONFIG) is not None and place.size(run_folder.LOCK) is not None:
        raise ValueError(f"dst: {path} is the folder of a run, expected another one")
