"""Skeleton: a module's structure, lent to calls that bring the values."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import nn

Values = Mapping[str, torch.Tensor]


class Skeleton:
    """A module as a place for tensors, each under the first of its names; what a call leaves behind is taken away.

    ``owners`` are the module and its submodules, in the order of ``named_modules``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.owners = list(module.modules())
        self._names: dict[int, str] = {}
        self._places: dict[str, tuple[nn.Module, str, str]] = {}
        for prefix, owner in module.named_modules():
            for kind in ("_parameters", "_buffers"):
                for local, value in vars(owner)[kind].items():
                    if value is not None and id(value) not in self._names:
                        name = f"{prefix}.{local}" if prefix else local
                        self._names[id(value)] = name
                        self._places[name] = (owner, kind, local)
        # Besides _parameters and _buffers, modules may keep the same tensors in attributes and lists: those follow.
        self._holders = [
            (owner, attribute, value)
            for owner in self.owners
            for attribute, value in vars(owner).items()
            if attribute in ("_parameters", "_buffers") or self._holds(value)
        ]

    def read(self) -> dict[str, torch.Tensor]:
        """The present parameters and buffers, by name."""
        return {name: vars(owner)[kind][local] for name, (owner, kind, local) in self._places.items()}

    def buffers(self) -> list[str]:
        """The names of the buffers."""
        return [name for name, (_, kind, _) in self._places.items() if kind == "_buffers"]

    @contextlib.contextmanager
    def holding(self, values: Values) -> Generator[nn.Module]:
        """The module with these values; then it is as before, its attributes and what its lists and dicts hold, too."""
        before = [(owner, vars(owner).copy()) for owner in self.owners]
        contents = [
            (container, container.copy())
            for _, attributes in before
            for container in attributes.values()
            if type(container) in (dict, OrderedDict, list, set)
        ]
        try:
            for owner, attribute, value in self._holders:
                vars(owner)[attribute] = self._fill(value, values)
            yield self.module
        finally:
            for owner, attributes in before:
                vars(owner).clear()
                vars(owner).update(attributes)
            for container, content in contents:
                if container or content:
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(content)

    def _holds(self, value: Any) -> bool:
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, (list, tuple)):
            value = (value,)
        return any(id(item) in self._names for item in value)

    def _fill(self, value: Any, values: Values) -> Any:
        if isinstance(value, dict):
            return {key: self._fill(item, values) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._fill(item, values) for item in value)
        name = self._names.get(id(value))
        return value if name is None else values[name]
