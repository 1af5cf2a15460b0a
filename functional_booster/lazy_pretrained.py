"""``from_pretrained`` inside a LazyInitContext: the module is recorded, and in which files its tensors are.

They are read when the module gets its values, slice by slice.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import hf_reading
from .checkpoint.leaves import Leaf
from .hf_entries import Entry
from .hf_reading import Weights
from .lazy_tape import Recorder, recording
from .models.hf import Source, state_names

_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
_IGNORED = ("low_cpu_mem_usage", "_fast_init", "mirror", "offload_state_dict", "use_safetensors", "weights_only")
_IGNORED += ("trust_remote_code", "adapter_kwargs", "adapter_name", "disable_mmap", "tqdm_class", "offload_buffers")
_IGNORED += ("_from_auto", "_from_pipeline", "_commit_hash")
_ELSEWHERE = ("device_map", "quantization_config", "state_dict", "gguf_file", "variant", "from_tf", "from_flax")
_ELSEWHERE += ("max_memory", "offload_folder", "tp_plan", "tp_size", "device_mesh", "key_mapping", "fusion_config")
_ELSEWHERE += ("distributed_config", "output_loading_info", "use_kernels", "kernel_config")


class Files:
    """The weights of a path, opened when the first of them is read, and closed with the last module that reads them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._weights: Weights | None = None

    @property
    def weights(self) -> Weights:
        """The weights, open."""
        if self._weights is None:
            stack = contextlib.ExitStack()
            self._weights = stack.enter_context(hf_reading.open_weights(self.path))
            weakref.finalize(self, stack.close)
        return self._weights


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file, by name, and the shape and dtype that a module has it in."""

    files: Files
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """All of it."""
        return self.files.weights.read(self.name, ()).to(self.dtype)

    def write(self, leaf: Leaf) -> None:
        """Write to a leaf the pieces that this process has, one at a time; no others are read."""
        weights = self.files.weights
        cast = replace(weights, read=lambda name, slices: weights.read(name, slices).to(self.dtype))
        entry = Entry((self.name,), self.shape, self.dtype, ((Source(self.name), leaf),))
        hf_reading.fill([(entry, self.name)], cast)


@contextlib.contextmanager
def patched() -> Generator[None]:
    """A context in which ``from_pretrained`` of transformers records, where this thread does; nothing without it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    owner: Any = modeling.PreTrainedModel
    original = vars(owner)["from_pretrained"]

    def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = recording()
        if recorder is None:
            return original.__get__(None, cls)(path, *args, **kwargs)
        return _recorded(recorder, cls, path, args, kwargs)

    owner.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        owner.from_pretrained = original


def _recorded(recorder: Recorder, cls: Any, path: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if refused := sorted(name for name in _ELSEWHERE if kwargs.get(name)):
        raise ValueError(f"from_pretrained in a LazyInitContext: {', '.join(refused)} not supported there")
    for name in (*_IGNORED, *(name for name in _ELSEWHERE if name in kwargs)):
        kwargs.pop(name, None)
    hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
    dtype, old = kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None)
    dtype = old if dtype is None else dtype
    mismatched = kwargs.pop("ignore_mismatched_sizes", False)
    given, generation = kwargs.pop("config", None), kwargs.pop("generation_config", None)
    config = given
    if given is None or isinstance(given, (str, os.PathLike)):
        source = path if given is None else given
        config, kwargs = cls.config_class.from_pretrained(source, return_unused_kwargs=True, **hub, **kwargs)
    files = Files(_folder(path, hub))
    config.name_or_path = str(path)
    wanted = _dtype(dtype, config, files.weights)
    if args:
        raise TypeError("from_pretrained in a LazyInitContext: expected the model's own arguments by name")
    model = cls._from_config(config, dtype=wanted, **kwargs)
    _attach(recorder, model, files, mismatched)
    if generation is not None:
        model.generation_config = generation
    elif model.can_generate():
        with contextlib.suppress(OSError):
            model.generation_config = type(model.generation_config).from_pretrained(path, **hub)
    return model.eval()


def _folder(path: Any, hub: dict[str, Any]) -> Path:
    """Where the safetensors are: the directory, or that into which the hub's files were brought."""
    place = Path(path, hub.get("subfolder", ""))
    if place.is_dir():
        return place
    from transformers.utils import hub as hubs

    missing: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if (one := hubs.cached_file(path, "model.safetensors", **hub, **missing)) is not None:
        return Path(one).parent
    index = hubs.cached_file(path, "model.safetensors.index.json", **hub, **missing)
    if index is None:
        raise FileNotFoundError(f"{path} has no safetensors, which from_pretrained in a LazyInitContext reads")
    files: Any = hubs.get_checkpoint_shard_files(path, index, **hub)[0]
    return Path(files[0]).parent


def _dtype(given: Any, config: Any, weights: Weights) -> torch.dtype:
    """As transformers has it: the config's or, where it says none, that of the first weights."""
    if isinstance(given, str) and given != "auto":
        given = getattr(torch, given)
    if isinstance(given, torch.dtype):
        return given
    if given not in (None, "auto"):
        raise TypeError(f"dtype: {given!r}, expected a torch.dtype, its name or 'auto'")
    stored = (dtype for _, dtype in weights.tensors.values() if dtype.is_floating_point)
    return config.dtype if config.dtype is not None else next(stored, torch.get_default_dtype())


def _attach(recorder: Recorder, model: Any, files: Files, mismatched: bool) -> None:
    """Record that what the files have is read; warn of what they do not have, which is as the config initializes it."""
    found, places = files.weights.tensors, state_names(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    read: dict[str, StoredTensor] = {}
    faults, used = [], set()
    alike = _names(model.base_model_prefix)
    for name, first in places.items():
        stored = next((other for other in alike(name) if other in found), None)
        if stored is None:
            continue
        used.add(stored)
        tensor, (shape, dtype) = tensors[first], found[stored]
        if shape != tuple(tensor.shape) or dtype.is_floating_point != tensor.is_floating_point():
            faults.append(f"{stored}: shape {shape} {dtype}, expected {tuple(tensor.shape)} {tensor.dtype}")
        elif first not in read:
            read[first] = StoredTensor(files, stored, shape, tensor.dtype)
    if faults and not mismatched:
        raise ValueError(f"{files.path} does not fit {type(model).__name__}:\n  " + "\n  ".join(faults))
    for first, stored in read.items():
        recorder.fill(tensors[first], lambda tensor, stored=stored: tensor.copy_(stored.read()), stored=stored)
    missing = sorted(set(places.values()) - read.keys())
    if missing:
        warnings.warn(
            f"{files.path} has no weights for {', '.join(missing)} of {type(model).__name__}: they are initialized; "
            f"not used: {', '.join(sorted(found.keys() - used)) or 'none'}",
            stacklevel=4,
        )


def _names(prefix: str) -> Callable[[str], list[str]]:
    """The names that a tensor of a model may have in files: those of its base model have no prefix."""

    def names(name: str) -> list[str]:
        return [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]

    return names
