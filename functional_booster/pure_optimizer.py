"""PureOptimizer: a torch optimizer that runs a pure transform on each parameter by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_booster.kernels import tree

from . import optim
from .optim.inject import hyperparameter
from .optim.validate import check_length
from .optimizer_families import Family, Group


class PureOptimizer(torch.optim.Optimizer):
    """A torch optimizer that is defined by the pure transform of its ``family``.

    Each param group is tried when it is added: raises TypeError or ValueError, naming the argument, for a bad value.
    """

    family: ClassVar[Family]
    set_grad_none = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            for name, parameter in inspect.signature(type(self)).parameters.items():
                if isinstance(parameter.default, tuple):
                    check_length(name, self.param_groups[-1][name], len(parameter.default))
            group = self.param_groups[-1]
            self.family.build({**self.family.fixed(group), **self.family.numbers(group)})
            self.family.across(self)
        except (TypeError, ValueError) as error:
            del self.param_groups[-1]
            raise type(error)(f"{type(self).__name__}: {error}") from error

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update the parameters that have a gradient; ``closure`` computes them first, and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(p, group) for p, group in _members(self.param_groups) if p.grad is not None]
        grads = [p.grad for p, _ in pairs]
        if (across := self.family.across(self)) is not None:
            grads, _ = across.update(grads, across.init(grads))
        for grad, (p, group) in zip(grads, pairs, strict=True):
            update, state = self._transform(group, p.device).update(grad, self._state_of(p, group), p.detach())
            p.copy_(optim.apply_updates(p, update))
            self.state[p] = tree.named_leaves(state)  # tensors by name, which torch's state_dict can hold
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients, or make zeros of them; None: as ``set_grad_none`` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but to the bit: torch would bring counts and averages to the dtype of the parameter.

        Raises ValueError, with the whole list, for a state that is not this optimizer's.
        """
        given = state_dict["state"]
        pairs = zip(_members(state_dict["param_groups"]), _members(self.param_groups), strict=False)
        places = {place: (p, group) for (place, group), (p, _) in pairs if given.get(place)}
        problems = []
        for place, (p, group) in places.items():
            expected = {
                name: tuple(leaf.shape)
                for name, leaf in tree.named_leaves(self._like(p, {**self.defaults, **group})).items()
            }
            found = {name: tuple(getattr(value, "shape", ())) for name, value in given[place].items()}
            if found != expected:
                problems.append(f"parameter {place}: {found}, expected {expected}")
        if problems:
            raise ValueError("state_dict: not a state of this optimizer:\n  " + "\n  ".join(problems))
        super().load_state_dict(state_dict)
        for place, (p, _) in places.items():
            self.state[p] = {name: value.to(p.device, copy=True) for name, value in given[place].items()}

    def _transform(self, group: Group, device: torch.device) -> optim.GradientTransformation:
        """The transform of a param group, whose state has one structure whatever its numbers are."""
        numbers = {name: hyperparameter(value, device) for name, value in self.family.numbers(group).items()}
        return self.family.build({**self.family.fixed(group), **numbers})

    def _like(self, p: torch.Tensor, group: Group) -> Any:
        """What the transform's state of a parameter looks like: nothing is computed."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.empty(p.shape, dtype=p.dtype)
            return self._transform(group, fake.device).init(fake)

    def _state_of(self, p: torch.Tensor, group: Group) -> Any:
        """The transform's state of a parameter, from ``self.state``."""
        if not self.state[p]:
            return self._transform(group, p.device).init(p.detach())
        return tree.map_with_name(lambda name, _: self.state[p][name], self._like(p, group))


def _members(groups: list[Group]) -> Iterator[tuple[Any, Group]]:
    """(parameter, its group), or (number of a parameter, its group) in a state_dict."""
    return ((member, group) for group in groups for member in group["params"])
