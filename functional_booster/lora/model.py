"""LoraModel: a Model whose parameters are those of a base, frozen, and adapters beside them.

``params = {"base": the base's tree, "adapters": {adapter: {name: tensor}}}``; the names are those of peft's files. What
the base computes with are its own leaves, and in the place of each that an adapter changes a LoraWeight.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft.tuners.lora import LoraConfig
from torch import nn

from functional_booster import losses
from functional_booster.functionalize import functionalize
from functional_booster.kernels import random, tree
from functional_booster.models import hf
from functional_booster.models.model import Model
from functional_booster.precision import fp8
from functional_booster.sharding import environment
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.collectives import enter
from functional_booster.weight_mode import WeightMode

from . import tensor_parallel
from .initial import described, streamed
from .plan import BITS, Plan, linear_layers, loftq_of, plan
from .quantized_weight import QuantizedWeight, codec_of
from .weight import Adapter, LoraWeight, is_weight

Tree = tree.Tree
DEFAULT = "default"  # peft's name of an adapter that was given none
_LORA = zlib.crc32(b"lora") >> 1  # folded into keys from which the base draws, too


@dataclass(frozen=True)
class LoraModel(Model):
    """A Model with adapters; ``adapt`` makes it.

    ``base`` is the Model without, which has the config; ``module`` the nn.Module that it was functionalized from.
    ``plans``: {adapter: what its config means for this model}; ``active``: the adapters that are computed with and
    trained. The others are frozen, as the base always is. ``quantized``: {leaf of the base that is a QuantizedWeight:
    whether it is (into, out)}, all by ``codec``. ``loaded``: {adapter: the tensors that it starts from}.
    """

    base: Model = field(kw_only=True)
    module: nn.Module | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    active: tuple[str, ...] = ()
    quantized: Mapping[str, bool] = field(default_factory=dict)
    codec: str | None = None
    loaded: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    def leaves(self, key: torch.Tensor) -> Iterator[tuple[str, Any]]:
        """(name, value) of the leaves of ``init(key)``, each made, and quantized, as soon as its base's have come."""
        for name, value in _streamed(self, self.base.leaves(key), random.fold_in(key, _LORA), self.loaded):
            parts = tree.named_leaves(value) if isinstance(value, QuantizedWeight) else {"": value}
            yield from ((f"{name}.{part}" if part else name, leaf) for part, leaf in parts.items())


def adapt(
    model: Model | nn.Module, config: LoraConfig, name: str = DEFAULT, *, quantize: bool | str = False
) -> LoraModel:
    """``model`` with an adapter of the peft config: an own Model, an nn.Module, or a LoraModel that gets one more.

    Its ``init(key)`` makes the base's parameters and the adapter's; ``lora.init`` makes these beside given ones. The
    new adapter is the active one. Targets are linear layers, GPT-2's Conv1D and embeddings. Dropout draws from the key
    of a call that trains. An nn.Module stays as it is. ``quantize``: the base's linear layers, but for the head, are
    stored in NF4 (True or "nf4": QLoRA) or "int8". Raises TypeError for what is no model or config, ValueError for a
    name that is taken and for what is not supported, naming it.
    """
    if not isinstance(name, str) or not name or "." in name:
        raise ValueError(f"name: {name!r}, expected a name without dots")
    if isinstance(model, LoraModel):
        if quantize:
            raise ValueError("quantize: this model has adapters already: quantize its base with the first of them")
        return with_plan(model, name, plan(model.base, model.module, config))
    module = model if isinstance(model, nn.Module) else None
    base = functionalize(model) if isinstance(model, nn.Module) else model
    if not isinstance(base, Model):
        raise TypeError(f"model: {type(model).__name__}, expected a fb.Model or an nn.Module")
    if module is None and not hf.is_own(base):
        raise TypeError(f"model: {base.name} was functionalized: hand in the nn.Module itself")
    codec, made = codec_of(quantize), plan(base, module, config)
    _check_bits(config, codec)
    quantized = {} if codec is None else linear_layers(base, module)
    return _built(base, module, {name: made}, (name,), quantized, codec, {})


def with_plan(model: LoraModel, name: str, added: Plan) -> LoraModel:
    """The model with one more adapter, the active one. Raises ValueError for a name that is taken."""
    if name in model.plans:
        raise ValueError(f"name: there is an adapter {name!r} already, beside {sorted(model.plans)}")
    _check_bits(added.config, model.codec)
    plans = {**model.plans, name: added}
    return _built(model.base, model.module, plans, (name,), model.quantized, model.codec, model.loaded)


def with_tensors(model: LoraModel, name: str, tensors: Mapping[str, torch.Tensor]) -> LoraModel:
    """The model whose adapter starts from these. Raises ValueError with the whole list of those that do not fit."""
    check(model, name, tensors)
    loaded = {**model.loaded, name: dict(tensors)}
    return _built(model.base, model.module, model.plans, model.active, model.quantized, model.codec, loaded)


def activate(model: LoraModel, names: str | Sequence[str]) -> LoraModel:
    """The model that computes with these adapters, one or several, which add up, and trains them. (peft: set_adapter.)

    Raises ValueError for one that it has not, and for several of which more than one has a tensor of its own in the
    same place.
    """
    chosen = (names,) if isinstance(names, str) else tuple(names)
    if unknown := [name for name in chosen if name not in model.plans]:
        raise ValueError(f"names: {unknown[0]!r} is no adapter of this model, it has {sorted(model.plans)}")
    replaced = [tensor for name in chosen for tensor in model.plans[name].replaced]
    if twice := [tensor for tensor in replaced if replaced.count(tensor) > 1]:
        raise ValueError(f"names: several of {list(chosen)} have a {twice[0]} of their own: activate one of them")
    return _built(model.base, model.module, model.plans, chosen, model.quantized, model.codec, model.loaded)


def init(
    model: LoraModel, base: Tree, key: torch.Tensor, adapters: Mapping[str, Mapping[str, torch.Tensor]] | None = None
) -> Tree:
    """The parameters of ``model``: the given ones of its base, and adapters, which are born by key and name.

    ``adapters`` (by default those that were loaded) are taken as they are. ``init_lora_weights`` says how the others
    begin (``factors``), and whether the base then lacks what they have of it. Raises ValueError with the whole list of
    given tensors that do not fit.
    """
    given = {**model.loaded, **(adapters or {})}
    for name, tensors in given.items():
        check(model, name, tensors)
    found = dict(_streamed(model, tree.named_leaves(base, is_leaf).items(), key, given))
    return {
        "base": tree.map_with_name(lambda name, _: found[f"base.{name}"], base, is_leaf=is_leaf),
        "adapters": {
            name: {tensor: found[f"adapters.{name}.{tensor}"] for tensor in own}
            for name, own in model.abstract["adapters"].items()
        },
    }


def _streamed(
    model: LoraModel,
    base: Iterable[tuple[str, Any]],
    key: torch.Tensor,
    given: Mapping[str, Mapping[str, torch.Tensor]],
) -> Iterator[tuple[str, Any]]:
    keys = {name: random.fold_in(key, zlib.crc32(name.encode()) >> 1) for name in model.plans}
    codecs = {} if model.codec is None else dict.fromkeys(model.quantized, model.codec)
    return streamed(model.plans, base, keys, given, codecs)


def _check_bits(config: LoraConfig, codec: str | None) -> None:
    """Raise ValueError where LoftQ is to make up for another quantization than that of the base."""
    bits = loftq_of(config)["loftq_bits"]
    if config.init_lora_weights == "loftq" and codec not in (None, BITS[bits]):
        raise ValueError(f"lora_config: loftq_bits={bits} is {BITS[bits]}, but the base is stored in {codec}")


def check(model: LoraModel, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError with the whole list of tensors that are missing, unexpected or of another shape."""
    wanted = model.abstract["adapters"][name]
    problems = [f"{tensor}: missing" for tensor in wanted if tensor not in tensors]
    problems += [f"{tensor}: unexpected" for tensor in tensors if tensor not in wanted]
    problems += [
        f"{tensor}: shape {tuple(tensors[tensor].shape)}, expected {info.shape}"
        for tensor, info in wanted.items()
        if tensor in tensors and tuple(tensors[tensor].shape) != info.shape
    ]
    if problems:
        raise ValueError(f"the adapter {name!r} does not fit its config:\n  " + "\n  ".join(problems))


def attached(model: LoraModel, params: Tree, key: torch.Tensor | None = None) -> Tree:
    """The base's tree, with the active adapters' tensors and LoraWeights in their places; a ``key`` drops inputs."""
    tensor_parallel.require_whole_rows()
    values, infos = tree.named_leaves(params["base"], is_leaf), tree.named_leaves(model.base.abstract)
    adapters: dict[str, list[Adapter]] = {}
    forms = {leaf: (into_out, False) for leaf, into_out in model.quantized.items()}
    for name in model.active:
        own, adapter_key = params["adapters"][name], key
        if key is not None:
            adapter_key = random.fold_in(random.fold_in(key, _LORA), zlib.crc32(name.encode()) >> 1)
        for tensor, places in model.plans[name].replaced.items():
            for leaf, source in places:
                values[leaf] = source.read(fp8.plain(own[tensor]))
                if len(places) > 1 and tensor_parallel.split_dim(infos[leaf]) is not None:
                    values[leaf] = tensor_parallel.own_part(values[leaf], infos[leaf])
        for number, site in enumerate(model.plans[name].sites):
            parts = {role: fp8.plain(own[tensor]) for role, tensor in site.names.items()}
            drawn = None if adapter_key is None or site.dropout == 0 else random.fold_in(adapter_key, number)
            for leaf, rows in site.rows.items():
                side = tensor_parallel.split_side(site, infos[leaf])
                cut: dict[str, Any] = {role: part if role == "A" else part[rows] for role, part in parts.items()}
                if side == "out" and len(site.places) > 1:
                    cut = {n: p if n == "A" else tensor_parallel.own_part(p, infos[leaf]) for n, p in cut.items()}
                whole = {"out": ("A",), "into": ("B", "magnitude"), None: ()}[side]
                cut = {n: enter(p, tensor_parallel.AXIS) if n in whole else p for n, p in cut.items()}
                numbers: dict[str, Any] = {"scaling": site.scaling, "dropout": site.dropout, "inputs": site.size[1]}
                adapter = Adapter(**cut, key=drawn, split=side, **numbers)
                adapters.setdefault(leaf, []).append(adapter)
                forms[leaf] = site.is_transposed, site.is_embedding
    for leaf, form in forms.items():
        if isinstance(values[leaf], QuantizedWeight) and tensor_parallel.split_dim(infos[leaf]) is not None:
            raise ValueError(f"quantize: {leaf} is split over {tensor_parallel.AXIS!r}, where weights must be dense")
        if leaf in adapters or isinstance(values[leaf], QuantizedWeight):
            values[leaf] = LoraWeight(values[leaf], tuple(adapters.get(leaf, ())), *form)
    return tree.map_with_name(lambda name, _: values[name], params["base"], is_leaf=is_leaf)


def is_leaf(value: Any) -> bool:
    """Whether this is a leaf of a base: a tensor, or what stands for one."""
    return fp8.is_weight(value) or isinstance(value, QuantizedWeight)


def _built(
    base: Model,
    module: nn.Module | None,
    plans: Mapping[str, Plan],
    active: tuple[str, ...],
    quantized: Mapping[str, bool],
    codec: str | None,
    loaded: Mapping[str, Mapping[str, torch.Tensor]],
) -> LoraModel:
    def still(info: ArrayInfo) -> ArrayInfo:
        return replace(info, trainable=False)

    def stored(name: str, info: ArrayInfo) -> Any:
        return still(info) if codec is None or name not in quantized else QuantizedWeight.described(info, codec)

    infos = tree.named_leaves(base.abstract)
    adapters = {name: described(one, infos) for name, one in plans.items()}
    adapters = {name: own if name in active else tree.map(still, own) for name, own in adapters.items()}

    def model_init(key: torch.Tensor) -> Tree:
        return init(model, base.init(key), random.fold_in(key, _LORA))

    def called(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(params: Tree, *inputs: Any, key: Any = None, train: Any = False, **options: Any) -> Any:
            with _values(model, params, key, bool(train)) as values:
                return fn(values, *inputs, key=key, train=train, **options)

        return call

    def head(params: Tree) -> Any:
        return base.head(attached(model, params))

    def loss(params: Tree, batch: Mapping[str, torch.Tensor], key: Any = None, **options: Any) -> Any:
        with _values(model, params, key, key is not None) as values:
            if module is not None or not is_weight(base.head(values)):
                return base.loss(values, batch, key=key, **options)
            return _loss_of_logits(base, values, batch, key, **options)

    model = LoraModel(
        init=model_init,
        apply=called(base.apply),
        abstract={"base": tree.map_with_name(stored, base.abstract), "adapters": adapters},
        buffers=base.buffers,
        hidden=None if base.hidden is None else called(base.hidden),
        head=None if base.head is None else head,
        loss=None if base.loss is None else loss,
        name=base.name,
        batch_norms=frozenset(f"base.{name}" for name in base.batch_norms),
        base=base,
        module=module,
        plans=dict(plans),
        active=active,
        quantized=dict(quantized),
        codec=codec,
        loaded=dict(loaded),
    )
    return model


@contextlib.contextmanager
def _values(model: LoraModel, params: Tree, key: torch.Tensor | None, train: bool) -> Generator[Tree]:
    """What the base's functions take: LoraWeights; for a module tensors, which stand for them in here."""
    drops = any(site.dropout > 0 for name in model.active for site in model.plans[name].sites)
    drops = drops and train and not environment.current().evaluating
    if drops and key is None:
        raise ValueError("key: missing; adapters with lora_dropout need one when train=True")
    values = attached(model, params, key if drops else None)
    if model.module is None:
        yield values
        return
    with WeightMode(values) as mode:
        yield mode.held


def _loss_of_logits(
    base: Model, values: Tree, batch: Mapping[str, torch.Tensor], key: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``base.loss`` where the head has adapters, so that its product with the hidden state cannot be fused."""
    if "input_ids" not in batch:
        raise KeyError(f"batch: 'input_ids' is missing, it has {sorted(batch)}")
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if labels is None:
        labels = losses.labels_from(batch["input_ids"], mask)
    inputs = {"attention_mask": mask, "position_ids": batch.get("position_ids")}
    logits = base.apply(values, batch["input_ids"], **inputs, key=key, train=key is not None)
    return losses.next_token(logits, labels, **options)
