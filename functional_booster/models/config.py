"""From Hugging Face's config fields to a frozen config of ours, with every mistake named."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

C = TypeVar("C")


def build(cls: type[C], given: Mapping[str, Any], only: Mapping[str, Any]) -> C:
    """A ``cls`` from its fields; ``only`` maps fields that are not implemented to the value that is.

    Raises TypeError for an unknown field, naming the nearest, and ValueError for one that is not implemented.
    """
    model_type = cls.model_type  # type: ignore[attr-defined]
    names = _names(cls)
    for name, value in given.items():
        if name in only and value != only[name]:
            raise ValueError(f"{model_type}: {name}={value!r} is not implemented, only {only[name]!r} is")
        if name not in names and name not in only:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(names)}"
            raise TypeError(f"{model_type}: unknown keyword {name!r}; {hint}")
    fields = {name: value for name, value in given.items() if name in names}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def fields_of(cls: type, config: Any, others: Collection[str]) -> dict[str, Any]:
    """The fields that a config holds: a ``cls``, a Hugging Face config object or dict, a dict of fields, or None.

    A dict with ``model_type`` is Hugging Face's: what it holds beyond the fields and ``others`` is metadata, left out.
    Raises TypeError for a config of another type, ValueError for another model_type.
    """
    if config is None:
        return {}
    if isinstance(config, cls):
        return {name: getattr(config, name) for name in _names(cls)}
    if isinstance(config, Mapping):
        values = dict(config)
    elif callable(getattr(config, "to_dict", None)):
        values = config.to_dict()
    else:
        raise TypeError(
            f"config: {type(config).__name__}, expected {cls.__name__}, a Hugging Face config, or a dict of its fields"
        )
    if "model_type" not in values:
        return values
    model_type = cls.model_type  # type: ignore[attr-defined]
    if values["model_type"] != model_type:
        raise ValueError(f"config: model_type is {values['model_type']!r}, expected {model_type!r}")
    return {name: value for name, value in values.items() if name in _names(cls) or name in others}


def to_hf(config: Any, architecture: str) -> dict[str, Any]:
    """The content of Hugging Face's ``config.json``: the fields, and what they are the fields of."""
    fields = {name: getattr(config, name) for name in _names(type(config))}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    return {"architectures": [architecture], "model_type": config.model_type, **plain}


def require_positive(config: Any, *names: str) -> None:
    """Raise TypeError unless each field is an int, ValueError unless it is positive."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{config.model_type}: {name}={value!r}, expected an int")
        if value <= 0:
            raise ValueError(f"{config.model_type}: {name}={value}, expected a positive number")


def require_probability(config: Any, *names: str) -> None:
    """Raise ValueError unless each field is a dropout probability: a number in [0, 1)."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise ValueError(f"{config.model_type}: {name}={value!r}, expected a number in [0, 1)")


def require_choice(config: Any, name: str, choices: Mapping[str, Any]) -> None:
    """Raise ValueError unless the field is one of the keys."""
    value = getattr(config, name)
    if value not in choices:
        raise ValueError(f"{config.model_type}: {name}={value!r} is not implemented, expected one of {sorted(choices)}")


def require_multiple(config: Any, name: str, divisor: str) -> None:
    """Raise ValueError unless one field is a multiple of the other."""
    value, by = getattr(config, name), getattr(config, divisor)
    if value % by:
        raise ValueError(f"{config.model_type}: {name}={value} is not a multiple of {divisor}={by}")


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
