"""A state's beginning: how it lies, and storage that is filled leaf by leaf, so that no rank holds more than its part
and one leaf."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from functional_booster.kernels import flat, graph, transforms, tree
from functional_booster.precision import ConstantScaling, MixedPrecision, cast, patterns
from functional_booster.sharding import shards
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.mesh import Replicated, own, spmd

from . import optim, watchdog
from .checkpoint import leaves
from .models.model import Model
from .plugins import Plan
from .state import Abstract, TrainState, disassemble
from .train_step import off_the_tape

Tree = tree.Tree


@torch.inference_mode(mode=False)  # its tensors must be trainable wherever it is made
def state(
    model: Model,
    tx: optim.GradientTransformation,
    values: Iterator[tuple[str, Any]] | None,
    key: torch.Tensor,
    precision: MixedPrecision,
    plan: Plan,
    device: torch.device,
) -> TrainState:
    """A TrainState with these values, of all leaves by name; None: with zeros.

    Raises ValueError for patterns that match nothing and, naming them, for leaves without a value; TypeError for a
    complex leaf that is to be trained: optimizers would take its square for that of its magnitude.
    """
    mesh = plan.mesh
    typed = tree.map(lambda info: torch.empty(info.shape, dtype=info.dtype, device="meta"), model.abstract)
    kept = _kept(precision, model, typed)
    if precision.fp8 is not None:
        precision.fp8.mark(typed)  # raises for a pattern that matches nothing
    stored = tree.map_with_name(lambda n, leaf: leaf if n in kept else cast(leaf, precision.policy.param), typed)
    described = tree.map(
        lambda leaf, info: ArrayInfo(
            info.shape,
            leaf.dtype,
            info.spec,
            None,
            info.trainable and transforms.is_differentiable(leaf),
            info.grain,
            info.uneven,
        ),
        stored,
        model.abstract,
    )
    trained, frozen = tree.partition(described, tree.map(lambda info: info.trainable, described))
    for name, info in tree.named_leaves(trained).items():
        if info.dtype.is_complex:
            raise TypeError(
                f"{name}: a parameter of {info.dtype}, expected a floating-point one to train, which "
                "torch.view_as_complex takes in the forward; or freeze it"
            )
    layout = _layout(plan, trained, optim.leaf_labels(tx, trained), kept)
    alike = [()] * len(tree.leaves(frozen))  # no optimizer tells frozen leaves apart
    layouts = layout, _layout(plan, frozen, alike, kept) if alike else None
    buffers = tree.map(lambda leaf: leaf.to(device), model.buffers())
    if values is not None and graph.transforms():  # which see no writes in place
        given, infos = dict(values), tree.named_leaves(model.abstract)
        placed = tree.map_with_name(
            lambda n, info: given[n].detach().to(device, infos[n].dtype).to(info.dtype), described
        )
        storage, still = laid_out(placed, layouts, plan)
    else:
        storage = zeros(layout, plan, device)
        still = None if layouts[1] is None else zeros(layouts[1], plan, device)
        if values is not None:
            with watchdog.guard("init") if mesh.across else contextlib.nullcontext():
                # Processes may have built the module, or drawn the key, each for itself.
                buffers, key = shards.of_the_first((buffers, key.to(device)), mesh)
                fill((storage, still), values, tree.named_leaves(model.abstract), plan, device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return TrainState(
        step=zero,
        position=zero.clone(),
        storage=storage,
        frozen=still,
        opt_state=optimizer_state(tx, storage, plan),
        buffers=tree.map(lambda leaf: leaf.detach().to(device, copy=True), buffers),
        key=key.to(device, copy=True),
        loss_scale=(precision.scaling or ConstantScaling()).init(device),
        abstract=Abstract.of(described),
        plan=plan,
        precision=precision,
    )


def zeros(layout: flat.Layout, plan: Plan, device: torch.device) -> flat.Flat:
    """Storage of this layout, where it is between steps: each buffer this rank's part, or, on a virtual mesh, the parts
    of all ranks."""
    mesh, buffers = plan.mesh, {}
    for bucket, slots in layout.buckets.items():
        whole = slots[0].offset is None
        shape = slots[0].shape if whole else (layout.size(bucket) // mesh.extent(layout.axes[bucket]),)
        away = bucket in layout.host and device.type != "cpu"
        pin = away and not graph.is_tracing()  # a fake tensor cannot be pinned
        place: dict[str, Any] = {"device": "cpu", "pin_memory": pin} if away else {"device": device}
        lead = mesh.shape if mesh.virtual else ()
        buffers[bucket] = torch.zeros((*lead, *shape), dtype=slots[0].dtype, **place)
    return flat.Flat(buffers, layout)


def fill(
    storage: Iterable[flat.Flat | None],
    given: Iterable[tuple[str, Any]],
    infos: Mapping[str, ArrayInfo],
    plan: Plan,
    to: torch.device,
) -> None:
    """Write (name, value) one by one, in the dtype of its ArrayInfo, into the parts of it that this process has.

    On processes each must give the same names in the same order, and the first one's values hold; what lies in a file
    each reads by itself. ``to`` is the device to work on. Raises ValueError, naming them, for leaves without a value
    and values without a leaf or of another shape.
    """
    flats = [one for one in storage if one is not None]
    places = {name: leaf for one in flats for name, leaf in leaves.of_flat(one, plan.mesh).items()}
    for name, value in given:
        if name not in infos or tuple(value.shape) != infos[name].shape:
            raise ValueError(f"params do not fit the model: {name}: unexpected, or of shape {tuple(value.shape)}")
        leaf = places.pop(name)
        if not isinstance(value, torch.Tensor):
            value.write(leaf)
            continue
        here = shards.of_the_first(value.detach().to(to), plan.mesh).to(infos[name].dtype)
        for piece in leaves.held(leaf):
            leaves.write(leaf, piece, here.reshape(-1).narrow(0, piece.start, piece.stop - piece.start))
        del value, here
    if places:
        raise ValueError(f"params do not fit the model: {', '.join(sorted(places))}: never initialized")


def optimizer_state(tx: Any, storage: flat.Flat, plan: Plan) -> Tree:
    """The optimizer's first state, each tensor in memory of its own."""
    made = spmd(tx.init, plan.mesh)(storage)
    if graph.transforms():
        return own(made)
    taken = {buffer.untyped_storage()._cdata for buffer in storage.buffers.values()}

    def alone(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        memory = leaf.untyped_storage()
        if memory._cdata in taken or memory.nbytes() != leaf.nbytes or not leaf.is_contiguous():
            leaf = own(leaf)
            memory = leaf.untyped_storage()
        taken.add(memory._cdata)
        return leaf

    return tree.map(alone, made)


def _kept(precision: MixedPrecision, model: Model, params: Tree) -> frozenset[str]:
    """The names of the leaves that keep their own dtype. Raises ValueError for a pattern that matches none."""
    names = tree.names(params)
    patterns.require_matches("keep", precision.keep, names)
    kept = {name for name in names if patterns.matches(name, precision.keep)}
    return frozenset(kept | model.batch_norms if precision.keep_batch_norm else kept)


def _layout(plan: Plan, abstract: Tree, labels: Sequence[Any], kept: frozenset[str]) -> flat.Layout:
    """The plugin's layout, in which what keeps its dtype shares no bucket with what does not."""
    pairs = zip(tree.names(abstract), labels, strict=True)
    apart = [label if label is None or name not in kept else ("kept", label) for name, label in pairs]
    layout = plan.plugin.layout(abstract, tree.unflatten(tree.structure(abstract), apart), plan.mesh)
    return replace(layout, kept=tuple(name for name, slots in layout.buckets.items() if slots[0].name in kept))


def laid_out(
    params: Tree, layouts: tuple[flat.Layout, flat.Layout | None], plan: Plan
) -> tuple[flat.Flat, flat.Flat | None]:
    """The storage of these parameters, trained and frozen, in fresh memory. No communication."""

    def local(whole: Tree) -> tuple[flat.Flat | None, ...]:
        return tuple(None if flats is None else shards.part(flats) for flats in disassemble(whole, *layouts))

    with off_the_tape():
        storage, frozen = own(spmd(local, plan.mesh)(Replicated(params)))
        return shards.at_home(storage, pin=True), None if frozen is None else shards.at_home(frozen, pin=True)
