"""BoostedModel: the handle on the model of an imperative loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import nn

from functional_booster import step
from functional_booster.kernels import random, tree
from functional_booster.sharding.collectives import axis_index
from functional_booster.sharding.mesh import Replicated

from . import forward_precision, global_batch, lazy
from .imperative_run import Run

Tree = tree.Tree


class BoostedModel(nn.Module):
    """A module whose forward is the pure model over the run's parameters and buffers, which keep their own names.

    It takes and returns this process's batch, on a virtual mesh the global one (cut along dim 0 over the ranks, whose
    outputs are joined; of 0-d ones there is the mean). ``module`` is the module that was handed to ``boost``: the
    forward runs in its submodules' modes (``train``, ``eval``); its weights play no part, and ``unwrap()`` writes the
    present ones into it. On a real mesh, each process must call what reads weights, where the plugin splits them, and
    what runs the forward, but in eval mode on weights that are whole.

    ``parameters()`` are the weights as this rank stores them, whole or its part; on a virtual mesh those of all ranks,
    stacked. Gradients are ordinary autograd's; ``optimizer.backward`` brings their mean over ranks into ``.grad``.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self.module = run.module
        self.training = run.module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        args, kwargs = _moved((args, kwargs), run.state.step.device)
        modes = {name: part.training for name, part in run.module.named_modules()}
        training, axes = any(modes.values()), run.plan.plugin.data_axes

        def local(values: Tree, arguments: Any) -> tuple[Any, Tree]:
            params, before, key = values
            args, kwargs = forward_precision.inputs(run.precision, run.state, arguments)
            with step.computing(run.precision, run.state):
                outputs, buffers = run.model.apply(
                    forward_precision.weights(run.precision, run.state, params),
                    *args,
                    key=random.fold_in(key, axis_index(axes) if axes else 0),
                    train=modes,
                    buffers=before,
                    mutable=True,
                    kwargs=kwargs,
                )
            written = {name: new for name, new in buffers.items() if training and new is not before[name]}
            with torch.no_grad():
                agreed = step.agreed(written, {name: before[name] for name in written}, axes)
            return forward_precision.outputs(run.precision, run.state, outputs), Replicated(agreed)

        leaves = {name: leaf if name in run.buckets else Replicated(leaf) for name, leaf in run.leaves().items()}
        alike = Replicated(run.state.buffers), Replicated(random.fold_in(run.state.key, run.state.position))
        with run.guarded("forward", training and run.shares_buffers):
            outputs, written = global_batch.on_ranks(local, run.plan)((leaves, *alike), (args, kwargs))
        if training:
            buffers = {**run.state.buffers, **tree.map(torch.Tensor.detach, written)}
            run.state = run.state.replace(buffers=buffers, position=run.state.position + 1)
        return outputs

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are trained, and the frozen ones, by the module's own names, as this rank stores them."""
        for name, parameter in self._run.parameters.items():
            yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The present buffers by the module's own names."""
        for name, buffer in self._run.state.buffers.items():
            yield f"{prefix}.{name}" if prefix else name, buffer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those that are not synchronized yet, too."""
        self._run.zero_grad(self._run.parameters, set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own state dict: copies of the present weights, whole, in the dtypes that they are stored in."""
        kwargs["keep_vars"] = True  # the tensors themselves, to know them by
        values = self._values("state_dict")
        own: dict[str, Any] = self._write(values).state_dict(*args, **kwargs)
        present = {id(tensor): values[name] for name, tensor in self._tensors().items()}
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor):
                own[name] = present.get(id(tensor), tensor).detach().clone()
        return own

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole weights by the module's own names; on a mesh each rank takes its part.

        Raises RuntimeError, with the whole list, where they do not fit; on processes, where not on one, all raise.
        """
        run, module = self._run, self._write(self._values("load_state_dict"))
        with run.all_or_none("load_state_dict"):
            result = module.load_state_dict(state_dict, strict=strict)
        names = {id(tensor): name for name, tensor in self._tensors().items()}
        for key, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) in names:
                run.load(names[id(tensor)], state_dict.get(key, tensor))  # may be wider than the module's own tensor
        return result

    def unwrap(self) -> nn.Module:
        """The module that was handed to ``boost``, with the present weights and buffers, whole, written into it."""
        return self._write(self._values("unwrap"))

    def _values(self, what: str) -> dict[str, torch.Tensor]:
        with self._run.guarded(what, self._run.is_split):
            return {**self._run.weights(), **self._run.state.buffers}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The module's own tensors by the names of the run's."""
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def _write(self, values: Mapping[str, torch.Tensor]) -> nn.Module:
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                if tensor.is_meta:
                    lazy.set_value(tensor, values[name].clone())
                else:
                    tensor.copy_(values[name])
        return self.module

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> BoostedModel:
        """What ``to``, ``cuda``, ``half``... do: refused, unless everything is there already."""
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            moved = fn(value.detach())
            if (moved.device, moved.dtype) != (value.device, value.dtype):
                raise RuntimeError(
                    f"{name}: {value.dtype} on {value.device} cannot become {moved.dtype} on {moved.device}: the "
                    "Booster's device and mixed_precision say where a boosted model lives; convert before boost"
                )
        return self


def _moved(values: Any, device: torch.device) -> Any:
    """The tensors of a call's arguments on the device."""
    return torch_pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, values)
