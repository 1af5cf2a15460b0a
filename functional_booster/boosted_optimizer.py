"""BoostedOptimizer: the handle on the optimizer of an imperative loop, a torch optimizer's pure twin."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch

from functional_booster import optim, step
from functional_booster.kernels import flat, tree
from functional_booster.sharding import shards
from functional_booster.sharding.mesh import Replicated, own, spmd

from .imperative_run import Run
from .plugins import Plan, SingleDevice, max_norm_under
from .state import TrainState, on_ranks
from .torch_optim import FromTorch, FromTorchState

Tree = tree.Tree


class BoostedOptimizer:
    """A torch optimizer's handle on the pure transform, for the parameters in its ``param_groups``."""

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, converted: FromTorch) -> None:
        self._run = run
        self._converted = converted
        self._norm: torch.Tensor | None = None
        names = {own: name for name, own in run.module.named_parameters()}
        members = [names[own] for group in optimizer.param_groups for own in group["params"]]
        self._parameters = {name: run.parameters[name] for name in members}  # as in torch, other ones are left alone
        self.optimizer = optimizer
        self.skipped: torch.Tensor | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the torch optimizer; what is written there holds from the next step on."""
        return self.optimizer.param_groups

    @property
    def loss_scale(self) -> torch.Tensor:
        """What the loss is multiplied by on the way through the model (0-d); 1 where the precision does not scale."""
        return self._run.state.loss_scale.factor

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Add the gradients of ``loss`` (0-d) to those of ``parameters()``, unless in ``no_sync`` over all ranks.

        What a ``loss.backward()`` added up is synchronized by the next method of this optimizer that needs it.
        """
        run = self._run
        with run.guarded("backward", not run.holding or run.shares_buffers):
            if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
                given = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise TypeError(f"loss: {given}, expected a 0-d tensor")
            self._norm = None
            loss.backward(inputs=run.leaves_of(inputs), retain_graph=retain_graph)
            if not run.holding:
                run.synchronize()

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Apply the gradients; where they are not finite nothing changes and ``skipped`` (0-d, 1 or 0) says so.

        Parameters without a gradient (None) stay as they are, as does their state. A ``max_norm`` of the plugin's clips
        what ``clip_grad_by_norm`` did not. ``closure``, if given, computes loss and gradients first; its loss is
        returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._run.guarded("optimizer step"):
            gradients = self._gradients()
            if gradients:
                self._update(gradients)
            else:
                self.skipped = torch.zeros(())
        self._run.steps += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look whether a step was made
        return loss

    def _update(self, gradients: dict[str, torch.Tensor]) -> None:
        """The pure update of the part of the state that has gradients. They are sums already: it has no data axes."""
        run = self._run
        values, before = {name: run.parameters[name].detach() for name in gradients}, self._state_for(gradients)
        max_norm = max_norm_under(run.plan.plugin, None) if self._norm is None else None
        recipe = step.Recipe(_no_loss, self._converted.tx, run.precision, max_norm=max_norm)

        def local(state: TrainState, gradients: flat.Flat) -> tuple[TrainState, Replicated]:
            one, gradients = torch.ones_like(state.loss_scale.factor), shards.on_device(gradients, state.step.device)
            new, metrics = step.update(recipe, state, step.Sums(gradients, one, one, {}, state.buffers))
            return on_ranks(new), Replicated(metrics["skipped"])

        chosen = run.state.replace(
            storage=run.laid_out(values),
            frozen=None,
            opt_state=before._replace(inner={name: before.inner[name] for name in gradients}),
            plan=Plan(SingleDevice(), run.plan.mesh),
        )
        with torch.no_grad():
            new, self.skipped = spmd(local, run.plan.mesh)(on_ranks(chosen), run.laid_out(gradients))
            for name, value in values.items():
                value.copy_(new.storage.buffers[run.buckets[name]])
        inner = {**before.inner, **new.opt_state.inner}
        run.state = run.state.replace(
            step=new.step,
            position=new.position,  # what a step draws is fresh, also without a forward in training in between
            loss_scale=new.loss_scale,
            opt_state=new.opt_state._replace(inner=inner),
        )
        run.release()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._run.zero_grad(self._parameters, set_to_none)
        self._norm = None

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients down to a global norm of at most ``max_norm``; returns the norm before (0-d).

        Raises ValueError for another norm than the 2-norm, RuntimeError for a norm that is not finite, if asked to.
        """
        if norm_type != 2.0:
            raise ValueError(f"norm_type: {norm_type}, expected 2.0")
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
            raise ValueError(f"max_norm: {max_norm}, expected a positive number")
        with self._run.guarded("clip_grad_by_norm"):
            gradients = self._gradients()
            norm = self._norm_of(gradients)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the gradients' norm is {norm.item()}")
        factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
        for gradient in gradients.values():
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
        self._norm = norm
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp each gradient element to [-clip_value, clip_value]."""
        if not clip_value > 0:
            raise ValueError(f"clip_value: {clip_value}, expected a positive number")
        with self._run.guarded("clip_grad_by_value"):
            gradients = self._gradients()
        for gradient in gradients.values():
            overflow = torch.where(gradient.isfinite(), 0.0, torch.nan).to(gradient.dtype)
            gradient.clamp_(-clip_value, clip_value).add_(overflow)  # the next step is to see it, and to be skipped

    def get_grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The global 2-norm of the gradients (0-d), that of before if ``clip_grad_by_norm`` clipped them."""
        if norm_type != 2.0:
            raise ValueError(f"norm_type: {norm_type}, expected 2.0")
        if self._norm is not None:
            return self._norm
        with self._run.guarded("get_grad_norm"):
            return self._norm_of(self._gradients())

    def state_dict(self) -> dict[str, Any]:
        """Copies of the optimizer's state: whole tensors by name, and the hyperparameters of each param group."""
        run = self._run
        groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in self.param_groups]
        with run.guarded("optimizer state_dict", run.is_split):
            state = tree.named_leaves(run.whole(run.state.opt_state.inner))
        return {"state": {name: value.clone() for name, value in state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave, under whatever plugin, as copies; on a mesh each rank takes its part.

        Raises ValueError, with the whole list, where it does not fit; on processes, where not on one, all raise.
        """
        run = self._run
        with self.loading("optimizer load_state_dict"):
            if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
                raise ValueError(
                    "state_dict: expected what state_dict() of a boosted optimizer gave: state, param_groups"
                )
            given = state_dict["state"]
            state, places = self.fitted({path: v.shape for path, v in given.items()}, state_dict["param_groups"])
            loaded = [own(run.part(name, given[path], like=now)) for path, (name, now) in places.items()]
            state = state._replace(inner=tree.unflatten(tree.structure(state.inner), loaded))
        run.state = run.state.replace(opt_state=state)

    def unwrap(self) -> torch.optim.Optimizer:
        """The torch optimizer that was handed to ``boost``; its own state is that of before."""
        return self.optimizer

    @contextlib.contextmanager
    def loading(self, what: str) -> Generator[None]:
        """Around a load: where it fails, on one process or on all, the param groups are as before, and all raise."""
        before = [dict(group) for group in self.param_groups]
        try:
            with self._run.all_or_none(what):
                yield
        except Exception:
            for group, values in zip(self.param_groups, before, strict=True):
                group.update(values)
            raise

    def fitted(
        self, shapes: Mapping[str, Sequence[int]], groups: Sequence[Mapping[str, Any]]
    ) -> tuple[FromTorchState, dict[str, tuple[str, torch.Tensor]]]:
        """The state that these leaves are to fill, the param groups then being ``groups``; and where each leaf lies.

        That is {path: (the parameter's name, its present value)}, in the order of the state's leaves. Raises
        ValueError, with the whole list, where ``shapes`` ({path: whole shape}) or ``groups`` do not fit.
        """
        run = self._run
        state = self._state_for([name for name, leaf in self._parameters.items() if leaf.requires_grad])
        places = {
            path: (name, now)
            for name in sorted(state.inner)
            for path, now in tree.named_leaves({name: state.inner[name]}).items()
        }
        expected = {path: run.whole_shape(*place) for path, place in places.items()}
        problems = [f"{path}: missing" for path in expected if path not in shapes]
        problems += [f"{path}: unexpected" for path in shapes if path not in expected]
        problems += [
            f"{path}: shape {tuple(shapes[path])}, expected {tuple(expected[path])}"
            for path in expected.keys() & shapes.keys()
            if tuple(shapes[path]) != tuple(expected[path])
        ]
        if len(groups) != len(self.param_groups):
            problems.append(f"param_groups: {len(groups)}, expected {len(self.param_groups)}")
        if problems:
            raise ValueError("the optimizer's state does not fit:\n  " + "\n  ".join(sorted(problems)))
        for group, values in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy(dict(values)))
        return self._refreshed(state), places

    def _gradients(self) -> dict[str, torch.Tensor]:
        """{name: gradient} of the optimizer's parameters that have one, synchronized."""
        self._run.synchronize()
        return {name: leaf.grad for name, leaf in self._parameters.items() if leaf.grad is not None}

    def _norm_of(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        run = self._run
        stored = shards.on_device(run.laid_out(gradients), run.state.step.device)
        with torch.no_grad():
            return spmd(lambda stored: Replicated(optim.global_norm(stored)), run.plan.mesh)(stored)

    def _refreshed(self, state: FromTorchState) -> FromTorchState:
        """The state with the hyperparameters that the param groups hold now."""
        return spmd(self._converted.refresh, self._run.plan.mesh)(state)

    def _state_for(self, names: Iterable[str]) -> FromTorchState:
        """The state before a step of these parameters: with a new one for each that was frozen until now."""
        state = self._refreshed(self._run.state.opt_state)
        thawed = {name: self._parameters[name].detach() for name in names if name not in state.inner}
        if not thawed:
            return state
        new = own(spmd(self._converted.tx.init, self._run.plan.mesh)(self._run.laid_out(thawed)))
        return state._replace(inner={**state.inner, **new.inner})


def optimizer_state(run: Run, optimizer: torch.optim.Optimizer, converted: FromTorch) -> FromTorchState:
    """The state of the parameters that are trained, with the moments that the torch optimizer brings along."""
    trained = {name: leaf.detach() for name, leaf in run.parameters.items() if leaf.requires_grad}
    state = own(spmd(converted.tx.init, run.plan.mesh)(run.laid_out(trained)))
    if not optimizer.state:
        return state
    inner = {}
    for name, new in state.inner.items():
        like = trained[name].new_zeros(run.whole_shape(name, trained[name]))
        carried = converted.carry_over(converted.tx.init({name: like})).inner[name]
        inner[name] = own(tree.map(lambda value, now, name=name: run.part(name, value, like=now), carried, new))
    return state._replace(inner=inner)


def _no_loss(params: Tree, batch: Tree) -> torch.Tensor:
    raise AssertionError("the loss of an imperative step is the user's")
