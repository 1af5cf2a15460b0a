"""What the Booster's save and load methods do with the handles that ``boost`` returned. safetensors and JSON only.

Models are Hugging Face's form (``hf_checkpoint``); an optimizer's state is the same kind of files, its leaves by name.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist

from functional_booster.kernels import tree
from functional_booster.kernels.flat import Flat

from . import hf_checkpoint, hf_entries, hf_reading, hf_writing, publishing, watchdog
from .boosted_model import BoostedModel
from .boosted_optimizer import BoostedOptimizer
from .checkpoint import Saving, background, leaves
from .checkpoint.folders import Folder, file, folder
from .checkpoint.leaves import Leaf
from .hf_entries import Entry
from .hf_reading import Report
from .imperative import BoostedScheduler
from .imperative_run import Run
from .models.hf import state_names

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
Path_ = str | os.PathLike[str]


def save_model(
    model: BoostedModel,
    checkpoint: Path_,
    shard: bool = False,
    gather_dtensor: bool = True,
    prefix: str | None = None,
    size_per_shard: float = 1024,
    use_async: bool = False,
) -> Saving | None:
    """Write a boosted model's present weights and buffers: to one safetensors file, or, with ``shard``, a directory.

    The directory is as ``hf_checkpoint.save`` writes it; both may be fsspec URLs. With ``use_async`` it returns once
    the weights of this rank's files are in the host's memory, with a handle on the writing (``result()``, ``done()``):
    training may go on; what goes wrong is raised by the next save or load, and exit waits. On processes, each must call
    this. Raises TypeError for what is no boosted model, ValueError for the name of a pickle, OSError where it cannot be
    written.
    """
    run = _run_of(model, BoostedModel, "model")
    entries = _model_entries(run)
    limit, _ = hf_checkpoint.checked(size_per_shard)
    texts: dict[str, str] = {}
    if shard and run.model.config is not None:
        generation = getattr(run.module, "generation_config", None)
        texts = hf_checkpoint.config_texts(run.model.name, run.model.config, generation, entries)
    target = _target(checkpoint, "model", shard, limit, gather_dtensor, prefix, texts=texts)
    return hf_writing.write(target, entries, run.plan.mesh, run.state.step.device, "save_model", use_async=use_async)


def load_model(model: BoostedModel, checkpoint: Path_, strict: bool = True, weights_only: bool = False) -> Report:
    """Load weights into a boosted model, in place, each rank what it stores; returns what did not fit.

    ``checkpoint``: what ``save_model`` wrote, sharded or not, or any of Hugging Face's. On processes, each must call
    this. Raises TypeError for what is no boosted model, FileNotFoundError where there are no weights, ValueError, with
    the whole list and before anything is loaded, for weights that do not fit, if ``strict``, and for pickles, unless
    ``weights_only`` asks for torch's unpickler of that name.
    """
    run = _run_of(model, BoostedModel, "model")
    with run.all_or_none("load_model"):
        background.settle()
        return hf_checkpoint.read_into(
            checkpoint, _model_entries(run), lambda name: False, strict=strict, weights_only=weights_only
        )


def save_optimizer(
    optimizer: BoostedOptimizer,
    checkpoint: Path_,
    shard: bool = False,
    gather_dtensor: bool = True,
    prefix: str | None = None,
    size_per_shard: float = 1024,
    use_async: bool = False,
) -> Saving | None:
    """Write a boosted optimizer's state, whole tensors by name, and its param groups: files as for ``save_model``."""
    run = _run_of(optimizer, BoostedOptimizer, "optimizer")
    limit, _ = hf_checkpoint.checked(size_per_shard)
    state = run.state.opt_state.inner
    places = {path: (name, leaf) for name in sorted(state) for path, leaf in _named(name, state[name]).items()}
    found = {path: _state_leaf(run, *place) for path, place in places.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    plain = [_plain(group, f"param_groups[{place}]") for place, group in enumerate(groups)]
    target = _target(checkpoint, "optimizer", shard, limit, gather_dtensor, prefix, metadata={"param_groups": plain})
    entries, device = hf_entries.of_leaves(found), run.state.step.device
    return hf_writing.write(target, entries, run.plan.mesh, device, "save_optimizer", use_async=use_async)


def load_optimizer(optimizer: BoostedOptimizer, checkpoint: Path_) -> None:
    """Load what ``save_optimizer`` wrote, under whatever plugin, in place, each rank what it stores.

    Raises as ``load_model``, strictly; the param groups are as before then.
    """
    run = _run_of(optimizer, BoostedOptimizer, "optimizer")
    with contextlib.ExitStack() as stack:
        stack.enter_context(optimizer.loading("load_optimizer"))
        background.settle()
        weights = stack.enter_context(hf_reading.open_weights(checkpoint, "optimizer"))
        groups = weights.metadata.get("param_groups")
        groups = json.loads(groups) if isinstance(groups, str) else groups
        if not isinstance(groups, list):
            raise ValueError(f"{checkpoint} holds no optimizer: it has no param_groups")
        now = [dict(group) for group in optimizer.param_groups]
        if len(groups) == len(now):
            groups = [
                {key: _restored(value, mine.get(key)) for key, value in group.items()}
                for group, mine in zip(groups, now, strict=True)
            ]
        state, places = optimizer.fitted({name: shape for name, (shape, _) in weights.tensors.items()}, groups)
        entries = hf_entries.of_leaves({path: _state_leaf(run, *place) for path, place in places.items()})
        report, fits = hf_reading.compare(entries, weights, lambda name: False)
        if report:
            raise ValueError(f"{checkpoint} does not fit the optimizer:\n  {report}")
        hf_reading.fill(fits, weights)
    run.state = run.state.replace(opt_state=state)


def save_lr_scheduler(lr_scheduler: Any, checkpoint: Path_) -> None:
    """Write a scheduler's ``state_dict()`` as JSON; on processes, each must call this, and the first one writes.

    Raises TypeError, naming it, for a value that JSON cannot hold.
    """
    place, name = _file(checkpoint)
    with watchdog.all_or_none("save_lr_scheduler", alone=_is_alone(lr_scheduler)):
        background.settle()
        content = json.dumps(_plain(_scheduler_state(lr_scheduler), "lr_scheduler"), indent=1)
        if _is_alone(lr_scheduler) or not dist.is_initialized() or dist.get_rank() == 0:
            place.make()
            place.put(name, content.encode())


def load_lr_scheduler(lr_scheduler: Any, checkpoint: Path_) -> None:
    """Load what ``save_lr_scheduler`` wrote; raises ValueError for another scheduler's, before anything is loaded."""
    with watchdog.all_or_none("load_lr_scheduler", alone=_is_alone(lr_scheduler)):
        background.settle()
        now = _scheduler_state(lr_scheduler)
        try:
            place, name = file(checkpoint)
            with place.open(name) as stream:
                given = json.loads(stream.read())
        except ValueError as error:
            raise ValueError(f"{checkpoint} is no state of a scheduler: {error}") from error
        if not isinstance(given, dict) or given.keys() != _plain(now, "lr_scheduler").keys():
            raise ValueError(
                f"{checkpoint} is the state of another scheduler: it holds {sorted(given)}, expected {sorted(now)}"
            )
        lr_scheduler.load_state_dict(_restored(given, now))


def _run_of(handle: Any, kind: type, argument: str) -> Run:
    if not isinstance(handle, kind):
        raise TypeError(f"{argument}: {type(handle).__name__}, expected the one that boost returned")
    return handle._run


def _model_entries(run: Run) -> list[Entry]:
    """The tensors of the module's state dict, a tied one once."""
    mesh = run.plan.mesh
    stored = run.laid_out({name: leaf.detach() for name, leaf in run.parameters.items()})
    others = {name: leaf.detach() for name, leaf in run.parameters.items() if name not in run.buckets}
    found = leaves.of_flat(stored, mesh) | hf_entries.plain({**others, **run.state.buffers}, mesh)
    return hf_entries.of_leaves(found, state_names(run.module))


def _state_leaf(run: Run, name: str, tensor: torch.Tensor) -> Leaf:
    """A tensor of the optimizer's state of a parameter: stored as that is, or whole."""
    layout, bucket, mesh = run.state.storage.layout, run.buckets[name], run.plan.mesh
    if run.lies_flat(name, tensor):
        return leaves.of_flat(Flat({**dict.fromkeys(layout.buckets), bucket: tensor}, layout), mesh)[name]
    return Leaf(tuple(run.whole_shape(name, tensor)), tensor, mesh, mesh.virtual)


def _named(name: str, state: Any) -> dict[str, torch.Tensor]:
    return tree.named_leaves({name: state})


def _target(
    checkpoint: Path_,
    stem: str,
    shard: bool,
    limit: int,
    gather_dtensor: bool,
    prefix: str | None,
    **beside: Any,
) -> publishing.Target:
    if gather_dtensor is not True:
        raise ValueError(f"gather_dtensor: {gather_dtensor!r}, expected True: these files hold whole tensors")
    if prefix is not None and (not isinstance(prefix, str) or not prefix or PurePath(prefix).name != prefix):
        raise ValueError(f"prefix: {prefix!r}, expected a part of a file's name, or None")
    if shard:
        return publishing.Target(folder(checkpoint), f"{stem}.{prefix}" if prefix else stem, limit, **beside)
    place, name = _file(checkpoint)
    if (given := folder(checkpoint)).exists() and not given.is_file():
        raise FileExistsError(f"{given} is a directory: expected a file, or shard=True")
    return publishing.Target(place, PurePath(name).stem, suffix=PurePath(name).suffix, **beside)


def _file(checkpoint: Path_) -> tuple[Folder, str]:
    place, name = file(checkpoint)
    if PurePath(name).suffix in _PICKLES:
        raise ValueError(
            f"checkpoint: {name!r} is named as a pickle, which is never written: loading one can run any code. "
            f"Name it {PurePath(name).with_suffix('.safetensors').name!r}, or .json for a scheduler"
        )
    return place, name


def _is_alone(lr_scheduler: Any) -> bool:
    """Whether no other process takes part."""
    if isinstance(lr_scheduler, BoostedScheduler):
        return not lr_scheduler._optimizer._run.plan.mesh.across
    return False


def _scheduler_state(lr_scheduler: Any) -> dict[str, Any]:
    if not callable(getattr(lr_scheduler, "state_dict", None)):
        raise TypeError(f"lr_scheduler: {type(lr_scheduler).__name__}, expected the one that boost returned")
    return lr_scheduler.state_dict()


def _plain(value: Any, where: str) -> Any:
    """A value as JSON holds it, numbers exactly; a dict whose keys are no strings is a list of pairs."""
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        return {"float": str(value)}
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return _plain(value.item(), where)
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        return [[_plain(key, where), _plain(item, f"{where}[{key!r}]")] for key, item in value.items()]
    raise TypeError(f"{where}: {type(value).__name__} cannot be written as JSON")


def _restored(value: Any, like: Any) -> Any:
    """The inverse of ``_plain``, given a value of the same kind."""
    if isinstance(value, dict) and value.keys() == {"float"}:
        return float(value["float"])
    if isinstance(like, torch.Tensor):
        return torch.full_like(like, value)
    if isinstance(like, Mapping) and isinstance(value, list):
        pairs = {_restored(key, None): _restored(item, None) for key, item in value}
        return Counter(pairs) if isinstance(like, Counter) else pairs
    if isinstance(value, dict):
        known = like if isinstance(like, Mapping) else {}
        restored = {key: _restored(item, known.get(key)) for key, item in value.items()}
        return Counter(restored) if isinstance(like, Counter) else restored
    if isinstance(value, list):
        known = like if isinstance(like, (list, tuple)) and len(like) == len(value) else [None] * len(value)
        items = [_restored(item, one) for item, one in zip(value, known, strict=True)]
        return tuple(items) if isinstance(like, tuple) else items
    return value
