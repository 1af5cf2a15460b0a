"""What the handles of one ``boost`` share: a TrainState leaf by leaf, and its gradients on their way over the ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from functional_booster import optim, placement, watchdog
from functional_booster.kernels import flat, tree
from functional_booster.precision import MixedPrecision, Policy
from functional_booster.sharding import shards
from functional_booster.sharding.collectives import psum
from functional_booster.sharding.mesh import Replicated, own, spmd

from .models.model import Model
from .plugins import Plan
from .state import TrainState

Tree = tree.Tree


@dataclass
class Run:
    """A module's training: each leaf of ``state.storage`` lies alone, in its own shape or, where ranks share it, flat.

    ``parameters`` are, by name, the module's parameters as this rank stores them: whole, or its part (N,), in the
    state's memory; on a virtual mesh those of all ranks, stacked: the mesh's dims come in front. Parameters that are no
    floating-point numbers are whole, and outside of the state. A ``.grad`` is one that all ranks have summed, or
    averaged.

    The forward computes with ``leaves()``. On one device these are the parameters. Elsewhere they are whole leaves of
    autograd's, gathered when the parameters have changed, which keep what backward adds up until ``synchronize``.

    What processes do together is ``guarded``, and nothing else is: a rank may do alone what needs no other one.
    """

    module: nn.Module
    model: Model
    state: TrainState
    parameters: dict[str, nn.Parameter]
    precision: MixedPrecision
    holding: bool = False  # inside no_sync
    steps: int = 0  # of the optimizer; Python's count, since a device's must be waited for
    _gathered: _Gathered | None = field(default=None, init=False, repr=False)
    _trained: list[bool] | None = field(default=None, init=False, repr=False)  # which, when ranks last found them alike

    @property
    def policy(self) -> Policy:
        """The dtypes. Where the loss is scaled gradients, which are not when they travel, do so in float32 at least."""
        policy = self.precision.policy
        if self.precision.scaling is None or (dtype := policy.reduce or policy.param) is None:
            return policy
        return replace(policy, reduce=torch.promote_types(dtype, torch.float32))

    @property
    def plan(self) -> Plan:
        """The plugin and the mesh."""
        return self.state.plan

    @functools.cached_property
    def is_direct(self) -> bool:
        """Whether the parameters are autograd's own leaves: this process is the only rank, and all is on its device."""
        return _is_alone(self.plan) and not self.state.storage.layout.host

    @functools.cached_property
    def is_split(self) -> bool:
        """Whether ranks share a leaf, so that they make it whole together."""
        mesh = self.plan.mesh
        return any(mesh.extent(axes) > 1 for axes in self.state.storage.layout.axes.values() if axes)

    @property
    def shares_buffers(self) -> bool:
        """Whether a forward in training, and its backward, may be work of all ranks: they agree on what it writes."""
        return bool(self.state.buffers)

    def guarded(self, what: str, together: bool = True) -> contextlib.AbstractContextManager[None]:
        """Around work that processes do ``together``, on the way to the next step: where it fails on one, all raise."""
        return guarded(self.plan, what, self.steps + 1, together)

    def all_or_none(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what each process does by itself, between steps: where it fails on one, all raise."""
        return watchdog.all_or_none(what, self.steps, alone=not self.plan.mesh.across)

    @functools.cached_property
    def buckets(self) -> dict[str, str]:
        """{name: its bucket in the storage}."""
        return {slot.name: slot.bucket for slot in self.state.storage.layout.slots}

    @functools.cached_property
    def _slots(self) -> dict[str, flat.Slot]:
        return {slot.name: slot for slot in self.state.storage.layout.slots}

    def laid_out(self, values: Mapping[str, torch.Tensor]) -> flat.Flat:
        """Values by name, one for each leaf or None, as the storage has them."""
        layout = self.state.storage.layout
        return flat.Flat({bucket: values.get(name) for name, bucket in self.buckets.items()}, layout)

    def leaves(self) -> dict[str, torch.Tensor]:
        """What the forward computes with, by name: whole leaves. On processes that split them, each must call it."""
        if self.is_direct:
            return dict(self.parameters)
        versions = tuple(parameter._version for parameter in self.parameters.values())
        if self._gathered is None or self._gathered.versions != versions:
            with self.guarded("gather", self.is_split):
                gathered = self._gather(versions)
            for name, leaf in {} if self._gathered is None else self._gathered.leaves.items():
                gathered.leaves[name].grad = leaf.grad
            self.release()
            self._gathered = gathered
        leaves = self._gathered.leaves
        for name, leaf in leaves.items():
            leaf.requires_grad_(self.parameters[name].requires_grad)
        return {name: leaves.get(name, parameter) for name, parameter in self.parameters.items()}

    def release(self) -> None:
        """Let go of the gathered leaves. A backward that would still reach them raises RuntimeError."""
        for leaf in [] if self._gathered is None else self._gathered.leaves.values():
            leaf.grad = None
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(_refuse)
        self._gathered = None

    def synchronize(self) -> None:
        """Bring what backward added up since the last time into the parameters' ``.grad``. Each process must call it.

        On processes, where each has a loss of its own, the mean over data ranks, as torch's DDP; a parameter that some
        ranks did not reach has zeros there, one that no rank reached has no gradient. On a virtual mesh, where the loss
        is that of the global batch, the sum. On GPUs the host waits for the device only where this rank did not reach
        each parameter that is trained: what others reached decides then what is summed, and no rank can know it alone.
        """
        mesh, plugin = self.plan.mesh, self.plan.plugin
        if self.is_direct:
            return
        names = self._pending()
        if not names:
            return
        gathered = self._gathered
        assert gathered is not None
        buckets, leaves = self.buckets, gathered.leaves
        cotangents = [torch.zeros_like(leaves[n]) if leaves[n].grad is None else leaves[n].grad for n in names]
        transposed = torch.autograd.grad(
            [gathered.whole[name] for name in names],
            [gathered.prepared[buckets[name]] for name in names],
            cotangents,  # type: ignore[arg-type]
            retain_graph=True,
        )
        grads = self.laid_out(dict(zip(names, transposed, strict=True)))
        with torch.no_grad():
            reduced = spmd(lambda grads: plugin.sync(plugin.reduce(grads, self.policy), self.policy), mesh)(grads)
            reduced = own(reduced) if mesh.virtual else shards.at_home(reduced)
            for name in names:
                parameter, leaves[name].grad = self.parameters[name], None
                grad = reduced.buffers[buckets[name]]
                grad = (grad if mesh.virtual else grad / mesh.extent(plugin.data_axes)).to(parameter.dtype)
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def zero_grad(self, names: Iterable[str], set_to_none: bool) -> None:
        """Forget the gradients of these parameters, or make zeros of those that there are."""
        gathered = {} if self._gathered is None else self._gathered.leaves
        for leaf in [values[name] for name in names for values in (self.parameters, gathered) if name in values]:
            if set_to_none or leaf.grad is None:
                leaf.grad = None
            else:
                leaf.grad = torch.zeros_like(leaf.grad)

    def leaves_of(self, inputs: Any) -> Any:
        """Tensors to differentiate with respect to, with the leaves in place of the parameters."""
        if inputs is None or self._gathered is None:
            return inputs
        leaves = {id(self.parameters[name]): leaf for name, leaf in self._gathered.leaves.items()}
        return [leaves.get(id(tensor), tensor) for tensor in ([inputs] if isinstance(inputs, torch.Tensor) else inputs)]

    def weights(self) -> dict[str, torch.Tensor]:
        """The present parameters, whole, by name. On processes that split them, each must call it."""
        values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {**values, **self.whole({name: values[name] for name in self.buckets})}

    def load(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter or buffer to a whole value."""
        place = self.parameters[name].detach() if name in self.parameters else self.state.buffers[name]
        with torch.no_grad():
            place.copy_(self.part(name, value, like=place) if name in self.buckets else value)

    def whole(self, values: Mapping[str, Tree]) -> dict[str, Tree]:
        """Of each leaf, by name, a tree of tensors: those of one dim, which lie flat as the leaf does, whole."""
        layout = self.state.storage.layout

        def joined(name: str, tensor: torch.Tensor) -> torch.Tensor:
            slot = self._slots[name]
            if slot.offset is None or tensor.dim() != 1:
                return tensor
            stored = shards.on_device(flat.Flat({slot.bucket: tensor}, layout), self.state.step.device)
            buffer = shards.join(stored).buffers[slot.bucket]
            return buffer[: slot.size].view(slot.shape)

        def local(values: Mapping[str, Tree]) -> Replicated:
            return Replicated(
                {name: tree.map(functools.partial(joined, name), value) for name, value in values.items()}
            )

        with torch.no_grad():
            return spmd(local, self.plan.mesh)(dict(values))

    def whole_shape(self, name: str, tensor: torch.Tensor) -> torch.Size:
        """The shape that ``whole`` gives a tensor."""
        if self.lies_flat(name, tensor):
            return torch.Size(self._slots[name].shape)
        return tensor.shape[tensor.dim() - self._dims(tensor) :]

    def lies_flat(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor of a leaf's state lies as the leaf does, in a flat buffer; else each rank has it whole."""
        return self._slots[name].offset is not None and self._dims(tensor) == 1

    def part(self, name: str, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What this rank stores of a whole tensor, as ``like`` is stored: the inverse of ``whole``, without
        communication."""
        slot, layout = self._slots[name], self.state.storage.layout
        is_flat = self.lies_flat(name, like)

        def local(value: torch.Tensor) -> torch.Tensor:
            if not is_flat:
                return value
            buffer = nn.functional.pad(value.reshape(-1), (0, layout.size(slot.bucket) - slot.size))
            return shards.part(flat.Flat({slot.bucket: buffer}, layout)).buffers[slot.bucket]

        with torch.no_grad():
            return spmd(local, self.plan.mesh)(Replicated(value.detach().to(like.device, like.dtype)))

    def _dims(self, tensor: torch.Tensor) -> int:
        """The number of dims that a rank sees."""
        return tensor.dim() - (len(self.plan.mesh.axes) if self.plan.mesh.virtual else 0)

    def _gather(self, versions: tuple[int, ...]) -> _Gathered:
        """Whole leaves, and autograd's tape from the storage to them: its transpose reduces the gradients."""
        plugin, mesh = self.plan.plugin, self.plan.mesh
        policy = replace(self.policy, compute=None)  # what is added up is added in the dtype that is stored
        with torch.inference_mode(False), torch.enable_grad():
            storage = self.laid_out({name: self.parameters[name].detach() for name in self.buckets})
            storage = shards.on_device(storage, self.state.step.device)
            prepared = spmd(functools.partial(plugin.prepare, policy=policy), mesh)(storage)
            prepared = tree.map(lambda buffer: buffer.detach().requires_grad_(), prepared)
            gathered = spmd(functools.partial(plugin.gather, policy=policy), mesh)(prepared)
            named = {name: leaf for name, leaf in flat.unravel(gathered).items() if leaf is not None}
            return _Gathered(prepared.buffers, named, {name: leaf.detach() for name, leaf in named.items()}, versions)

    def _pending(self) -> list[str]:
        """The parameters for which a rank has something to synchronize.

        Raises RuntimeError where one has and another cannot take part: it ran no forward since the last step, or trains
        other parameters.
        """
        leaves = {} if self._gathered is None else self._gathered.leaves
        names, mesh, device = list(self.buckets), self.plan.mesh, self.state.step.device
        reached = [name in leaves and leaves[name].grad is not None for name in names]
        if not mesh.virtual:
            trained = [self.parameters[name].requires_grad for name in names]
            told = torch.tensor([*reached, *trained, not leaves], dtype=torch.int32)
            told = told.to(device, non_blocking=True)  # it is sent at once, where a blocking copy waits for the device
            told = spmd(lambda x: psum(x, self.plan.plugin.data_axes), mesh)(told)
            if device.type != "cpu" and any(reached) and reached == trained == self._trained:
                return [name for name, flag in zip(names, reached, strict=True) if flag]  # no rank can have others
            *flags, absent = told.tolist()
            reached, counts = flags[: len(names)], dict(zip(names, flags[len(names) :], strict=True))
            if any(reached):
                _check_alike(counts, absent, mesh.extent(self.plan.plugin.data_axes))
                self._trained = trained
        return [name for name, flag in zip(names, reached, strict=True) if flag]


@dataclass(frozen=True)
class _Gathered:
    """``prepared`` by bucket, and by name what the plugin gathers of it, on the tape and, in ``leaves``, off it."""

    prepared: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]
    leaves: dict[str, torch.Tensor]
    versions: tuple[int, ...]  # of the parameters


def _is_alone(plan: Plan) -> bool:
    """Whether this process is the only rank."""
    return plan.mesh.size == 1 and not plan.mesh.virtual


def guarded(
    plan: Plan, what: str, step: int | None = None, together: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Around work that the processes of a plan do ``together``: where it fails on one, all raise."""
    return watchdog.guard(what, step) if plan.mesh.across and together else contextlib.nullcontext()


def start(
    module: nn.Module,
    model: Model,
    precision: MixedPrecision,
    plan: Plan,
    init: Callable[[Model, optim.GradientTransformation], TrainState],
) -> Run:
    """A run of the module, ``model`` as a Model, from a state that ``init`` makes, still without an optimizer's.

    Raises ValueError for a layout that waits for a first train_step to be measured.

    Processes start from the weights and buffers of the first one, as with torch's DDP.
    """
    # Frozen parameters may be thawed on the way, so all have their place in the storage.
    every = replace(model, abstract={name: replace(info, trainable=True) for name, info in model.abstract.items()})
    state = init(every, optim.identity()._replace(groups=functools.partial(_alone, plan)))
    if placement.is_provisional(state):
        raise ValueError(
            "placement_policy: 'auto' measures the first call of a train_step, which an imperative loop has not: say "
            "what is where, by placement_policy='static' with its fractions"
        )
    fixed = {}  # no numbers to train: each rank has them whole
    if state.frozen is not None:
        whole = spmd(lambda frozen: Replicated(shards.join(shards.on_device(frozen, state.step.device))), plan.mesh)
        fixed = {name: leaf.clone() for name, leaf in flat.unravel(whole(state.frozen)).items() if leaf is not None}
    state = state.replace(frozen=None)
    stored = {slot.name: state.storage.buffers[slot.bucket] for slot in state.storage.layout.slots}
    parameters = {
        name: nn.Parameter({**fixed, **stored}[name], requires_grad=own.requires_grad)
        for name, own in module.named_parameters()
    }
    return Run(module, model, state, parameters, precision)


def _check_alike(trained: Mapping[str, int], absent: int, ranks: int) -> None:
    """Raise RuntimeError where ``absent`` of the ranks ran no forward, or some train a parameter that others do not."""
    if absent:
        raise RuntimeError(
            f"{absent} of {ranks} ranks ran no forward since the last step, while others have gradients: every rank "
            "must run the same number of batches"
        )
    if differing := [f"{name} ({count} of {ranks} ranks)" for name, count in trained.items() if 0 < count < ranks]:
        raise RuntimeError(f"ranks train different parameters: {', '.join(differing)}")


def _alone(plan: Plan, abstract: Tree) -> Tree:
    """Labels by which each leaf lies alone: its name where the plugin splits it or has it in the host's memory, and
    elsewhere None, so that it keeps its shape."""
    names = tree.map_with_name(lambda name, _: name, abstract)
    layout = plan.plugin.layout(abstract, names, plan.mesh)
    split = {} if _is_alone(plan) else layout.axes
    flats = {slot.name for slot in layout.slots if split.get(slot.bucket) or slot.bucket in layout.host}
    return tree.map(lambda name: name if name in flats else None, names)


def _refuse(leaf: torch.Tensor) -> None:
    raise RuntimeError(
        "backward through a forward of before the last step: the weights that it computed with are gone; run the "
        "forward again"
    )
