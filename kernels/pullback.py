"""Derivatives of a backward: a primitive that is one is differentiated by its reference, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def of_reference(reference: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """The ``backward`` of a primitive that keeps its inputs: the pullback of its reference, for second derivatives."""

    def backward(inputs: tuple[Any, ...], *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        places = [place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)]

        def of_tensors(*tensors: torch.Tensor) -> Any:
            filled = list(inputs)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            return reference(*filled)

        _, pull = torch.func.vjp(of_tensors, *(inputs[place] for place in places))[:2]
        grads: list[torch.Tensor | None] = [None] * len(inputs)
        for place, grad in zip(places, pull(cotangents if len(cotangents) > 1 else cotangents[0]), strict=True):
            grads[place] = grad
        return tuple(grads)

    return backward
