"""Calling a loss function: what it may be given and return, and clear errors for everything else."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from functional_booster.kernels import tree
from functional_booster.sharding import environment
from functional_booster.sharding.rows import StandIn, rows_of

Tree = tree.Tree
LossFn = Callable[..., Any]
RESERVED = frozenset({"loss", "grad_norm", "lr", "tokens", "skipped", "loss_scale"})  # names of metrics


def evaluate(
    loss_fn: LossFn,
    params: Tree,
    batch: Tree,
    key: torch.Tensor | None,
    buffers: Tree,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], Tree]:
    """Call a loss function in any of its forms: (loss sum, weight, aux scalars, new buffers).

    Where ``counts`` (0-d bool) is False they are 0, as their gradients are, and the buffers are those of before.
    """
    try:
        with environment.bind(stands_in=counts is not None):
            result = _call(loss_fn, params, batch, key, buffers)
    except KeyError as error:
        name = error.args[0] if error.args else None
        if isinstance(batch, Mapping) and isinstance(name, str) and name not in batch and name.isidentifier():
            raise KeyError(_missing(name, batch, params)) from error
        raise
    form = "expected a 0-d mean, (sum, weight) or (sum, weight, aux)"
    parts = result if isinstance(result, tuple) else (result,)
    loss = parts[0] if len(parts) in (1, 2, 3) else None
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        raise TypeError(f"loss_fn returned {_describe(result)}, {form}")
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # sums are beyond half precision
    weight = parts[1] if len(parts) > 1 else float(rows_of(batch))
    if not isinstance(weight, int | float | torch.Tensor):
        raise TypeError(f"loss_fn returned a weight of type {type(weight).__name__}, {form}")
    weight = torch.as_tensor(weight, dtype=torch.float64, device=loss.device)
    if weight.dim() != 0:
        raise TypeError(f"loss_fn returned a weight of shape {tuple(weight.shape)}, expected a number or a 0-d tensor")
    aux = parts[2] if len(parts) == 3 else {}
    if not isinstance(aux, dict):
        raise TypeError(f"loss_fn returned aux of type {type(aux).__name__}, expected a dict of scalars")
    scalars = {name: _scalar(name, value, loss) for name, value in aux.items() if name != "buffers"}
    if taken := RESERVED & scalars.keys():
        raise ValueError(
            f"loss_fn returned aux[{sorted(taken)[0]!r}], but that is the name of a metric: choose another"
        )
    loss = loss * weight.to(loss.dtype) if len(parts) == 1 else loss
    new = _new_buffers(aux.get("buffers", buffers), buffers)
    if counts is None:
        return loss, weight, scalars, new
    loss, weight, scalars = tree.map(lambda value: torch.where(counts, value, 0), (loss, weight, scalars))
    if new is buffers:
        return loss, weight, scalars, buffers
    return loss, weight, scalars, tree.map(lambda after, before: torch.where(counts, after, before), new, buffers)


def check_batch(batch: Tree, device: torch.device) -> None:
    """Raise, naming the leaf, for a batch that is no tree of tensors with one dim 0 on the state's device."""
    batch = batch.batch if isinstance(batch, StandIn) else batch
    leaves = tree.leaves(batch)
    if leaves and all(isinstance(leaf, torch.Tensor) and leaf.device == device and leaf.dim() for leaf in leaves):
        sizes = {leaf.shape[0] for leaf in leaves}
        if len(sizes) == 1 and 0 not in sizes:
            return  # as it should be; names cost time
    named = tree.named_leaves(batch)
    if not named:
        raise ValueError("batch: no tensors in it")
    rows: dict[int, str] = {}
    for name, leaf in named.items():
        where = f"batch.{name}" if name else "batch"
        if not isinstance(leaf, torch.Tensor):
            hint = f"; convert it with dict({where})" if isinstance(leaf, Mapping) else ""
            raise TypeError(f"{where}: {type(leaf).__name__}, expected a torch.Tensor{hint}")
        if leaf.device != device:
            raise ValueError(f"{where} is on {leaf.device}, the state on {device}: move the batch there")
        if leaf.dim():
            rows.setdefault(leaf.shape[0], where)
    if len(rows) > 1:
        (first, one), (second, other) = list(rows.items())[:2]
        raise ValueError(f"{one} has {first} rows and {other} has {second}: dim 0 of each leaf is the batch's rows")
    if not rows or 0 in rows:
        raise ValueError(
            "batch: no rows in it (dim 0 of each leaf is the batch's rows); a process whose share of a global batch is "
            "empty hands in a StandIn, which prepare_dataloader makes"
        )


def _missing(name: str, batch: Mapping[Any, Any], params: Tree) -> str:
    """What is wrong where a loss looked for a name that the batch does not have: perhaps it meant another model."""
    lacking = f"loss_fn looked for {name!r}, which is not in the batch: it has {sorted(batch)}"
    if not isinstance(params, Mapping) or name in params:
        return lacking
    return f"{lacking}; nor is it in params: they have {reprlib.repr(sorted(params))}"


def _scalar(name: str, value: Any, loss: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, int | float | torch.Tensor) or (isinstance(value, torch.Tensor) and value.dim() != 0):
        what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
        raise TypeError(f"loss_fn returned aux[{name!r}] of {what}, expected a scalar")
    return torch.as_tensor(value, device=loss.device).to(loss.dtype)


def _call(loss_fn: LossFn, params: Tree, batch: Tree, key: torch.Tensor | None, buffers: Tree) -> Any:
    """``loss_fn`` with what its signature asks for: the key as a third argument or by name, the buffers by name."""
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        return loss_fn(params, batch, key)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {"buffers": buffers} if "buffers" in names else {}
    third = next((p for p in parameters if positional[2:] and p.name == positional[2]), None)
    if "key" in names or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return loss_fn(params, batch, key=key, **keywords)
    if third is not None and third.name != "buffers" and third.default is third.empty:
        return loss_fn(params, batch, key, **keywords)
    return loss_fn(params, batch, **keywords)


def _new_buffers(new: Tree, old: Tree) -> Tree:
    """The buffers that a loss hands back; raises ValueError, naming the leaf, where they are not the state's."""
    if new is old:
        return old
    given, expected = tree.named_leaves(new), tree.named_leaves(old)
    for name in given.keys() | expected.keys():
        if name not in given or name not in expected:
            what = "is missing" if name not in given else "is not among the state's"
            raise ValueError(f"loss_fn returned aux['buffers']: {name} {what}")
        if (given[name].shape, given[name].dtype) != (expected[name].shape, expected[name].dtype):
            raise ValueError(
                f"loss_fn returned aux['buffers']: {name} is {given[name].dtype}{list(given[name].shape)}, expected "
                f"{expected[name].dtype}{list(expected[name].shape)}"
            )
    return new


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
