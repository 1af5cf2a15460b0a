"""fp8 weights: a tree says which of its weights are multiplied in fp8, and any model that calls torch obeys."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as torch_pytree

from functional_booster.kernels import fp8, fp8_swiglu, tree

from . import patterns

Tree = tree.Tree
Scaling = fp8.Scaling
require_scaling = fp8.require_scaling

# Embeddings and position tables, norms, heads, the routers of mixtures of experts, and adapters, too narrow for fp8 to
# be faster: by the names that models use.
EXCLUDED: tuple[str, ...] = (
    *("*embed*", "wte", "wpe", "shared", "relative_attention_bias"),
    *("*norm*", "ln", "ln_*"),
    *("head", "heads", "*_head", "head_*", "classifier", "score", "qa_outputs", "predictions"),
    *("*router*", "gate", "*_expert_gate"),
    "lora_*",
)


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """A weight, in high precision, that is multiplied in fp8; a node of the tree whose leaf is the plain ``value``.

    ``F.linear`` with it as the weight, ``x @ w`` and ``torch.addmm(bias, x, w)`` of it as the (in, out) right factor
    are ``kernels.fp8.linear``; its transpose and the concatenation of such weights along dim 0 are such weights again.
    Every other torch function, attribute and operator sees the plain tensor. What asks for a ``torch.Tensor`` itself,
    such as an autograd.Function, must be given the ``value``.
    """

    value: torch.Tensor
    scaling: fp8.Scaling = "tensor"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(*args, **(kwargs or {}))
        if result is NotImplemented:
            args, kwargs = torch_pytree.tree_map(plain, (args, kwargs or {}), is_leaf=is_weight)
            return func(*args, **kwargs)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("value", "scaling"):  # protocols are not the value's: copying, pickling
            raise AttributeError(name)
        return getattr(self.value, name)

    @property
    def T(self) -> Fp8Weight:
        return self.t()

    @property
    def mT(self) -> Fp8Weight:
        return self.t()

    def t(self) -> Fp8Weight:
        """The transposed weight."""
        return Fp8Weight(self.value.t(), self.scaling)

    def transpose(self, dim0: int, dim1: int) -> Fp8Weight:
        """The weight with these dims exchanged."""
        return Fp8Weight(self.value.transpose(dim0, dim1), self.scaling)


tree.register(Fp8Weight, children=("value",), static=("scaling",))


def mark(params: Tree, exclude: Collection[str] = EXCLUDED, scaling: fp8.Scaling = "tensor") -> Tree:
    """The tree with every floating-point matrix (2-d leaf) as an Fp8Weight, but for those whose name is excluded.

    Patterns are those of ``precision.patterns`` and take the place of ``EXCLUDED``; to add some:
    ``(*EXCLUDED, "h.0")``. Raises TypeError for a string in place of several, ValueError for a pattern, outside of
    ``EXCLUDED``, that matches no leaf, and for an unknown scaling.
    """
    fp8.require_scaling(scaling)
    given = patterns.checked("exclude", exclude)
    names = tree.names(params, is_leaf=is_weight)
    patterns.require_matches("exclude", [pattern for pattern in given if pattern not in EXCLUDED], names)

    def marked(name: str, leaf: Any) -> Any:
        is_matrix = isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and leaf.is_floating_point()
        return Fp8Weight(leaf, scaling) if is_matrix and not patterns.matches(name, given) else leaf

    return tree.map_with_name(marked, params, is_leaf=is_weight)


def fuses(*weights: Any) -> bool:
    """Whether these are weights of one ``swiglu_mlp``: all multiplied in fp8, with one scale a tensor."""
    return all(is_weight(weight) and weight.scaling == "tensor" for weight in weights)


def swiglu_mlp(x: torch.Tensor, gate: Fp8Weight, up: Fp8Weight, down: Fp8Weight) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)), (..., D) -> (..., E), with what lies between quantised where it is made."""
    return fp8_swiglu.mlp(x, torch.cat([gate.value, up.value]), down.value)


def plain(value: Any) -> Any:
    """The tensor of an Fp8Weight; anything else as it is."""
    return value.value if isinstance(value, Fp8Weight) else value


def is_weight(value: Any) -> bool:
    """Whether this is an Fp8Weight."""
    return isinstance(value, Fp8Weight)


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not is_weight(weight):
        return NotImplemented
    return fp8.linear(plain(input), weight.value, plain(bias), scaling=weight.scaling)


def _matmul(input: Any, other: Any) -> Any:
    return _linear(input, other.t()) if is_weight(other) else NotImplemented


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """The (in, out) layer with a bias that is one row; beta and alpha other than 1 are no layer."""
    is_layer = is_weight(mat2) and input.dim() == 1 and (beta, alpha) == (1, 1) and len(input) == mat2.shape[1]
    return _linear(mat1, mat2.t(), input) if is_layer else NotImplemented


def _cat(tensors: Any, dim: int = 0) -> Any:
    if not all(map(is_weight, tensors)) or dim not in (0, -2) or len({weight.scaling for weight in tensors}) > 1:
        return NotImplemented
    return Fp8Weight(torch.cat([weight.value for weight in tensors]), tensors[0].scaling)


def _transposed(input: Any, *dims: int) -> Any:
    return input.transpose(*dims) if dims else input.t()


_Tensor = torch.Tensor
_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, _Tensor.matmul, _Tensor.mm, _Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.addmm, _Tensor.addmm), _addmm),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
    **dict.fromkeys((torch.t, torch.transpose), _transposed),
}


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Fp8Weight, *args: Any) -> Any:
        return getattr(self.value, name)(*map(plain, args))

    return apply


# Python looks operators up on the class, past __getattr__.
for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul neg pos abs "
    "eq ne lt le gt ge len getitem iter bool float int contains"
).split():
    setattr(Fp8Weight, f"__{_name}__", _operator(f"__{_name}__"))
