"""Pytrees: optree under this project's namespace, and the names of leaves.

Every tree in the project is flattened here and nowhere else, so that one rule holds for the order of leaves (dict keys
sorted) and for their names: the path of a leaf joined by dots, ``blocks.0.attn.q``, as checkpoints and errors show it.
"""

from __future__ import annotations

import builtins
import dataclasses
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import optree
import torch.utils._pytree as torch_pytree

NAMESPACE = "functional_booster"

Tree: TypeAlias = Any
Structure: TypeAlias = optree.PyTreeSpec
Mask: TypeAlias = Tree | Callable[[Tree], Tree]
T = TypeVar("T")


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """Apply ``fn`` to each leaf of ``tree`` and the leaves at the same places of ``rest``; None is an empty subtree.

    Raises ValueError, naming the place, where a tree of ``rest`` has another structure.
    """
    try:
        return optree.tree_map(fn, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)
    except ValueError:
        _raise_mismatch("tree", tree, *rest, is_leaf=is_leaf)
        raise


def map_with_name(
    fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> Tree:
    """``map`` whose ``fn`` gets the leaf's dotted name first."""
    named = iter(names(tree, is_leaf))
    return map(lambda *leaves: fn(next(named), *leaves), tree, *rest, is_leaf=is_leaf)


def flatten(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """The leaves in order, and the structure that puts them back."""
    return optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Tree:
    """The tree of ``structure`` with these leaves; raises ValueError when their number differs."""
    return optree.tree_unflatten(structure, leaves)


def flatten_up_to(structure: Structure, tree: Tree) -> list[Any]:
    """What stands in ``tree`` at the places of ``structure``'s leaves: leaves, or whole subtrees.

    Raises ValueError, naming the place, where ``tree`` has another structure there.
    """
    try:
        return structure.flatten_up_to(tree)
    except ValueError:
        _raise_mismatch("tree", unflatten(structure, range(structure.num_leaves)), tree)
        raise


def leaves(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves in order."""
    return optree.tree_leaves(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def structure(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Structure:
    """The structure without the leaves; two trees of one shape have equal structures."""
    return optree.tree_structure(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def names(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The dotted name of each leaf, in the order of ``leaves``."""
    return [_join(path) for path in optree.tree_accessors(tree, is_leaf=is_leaf, namespace=NAMESPACE)]


def named_leaves(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """{dotted name: leaf}, in order; raises ValueError when two leaves would get one name."""
    keys, values = names(tree, is_leaf), leaves(tree, is_leaf)
    named = dict(zip(keys, values, strict=True))
    if len(named) < len(keys):
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(
            f"two leaves of the tree have the name {twice!r}: a key with a dot in it hides a nested key, or keys "
            "differ in their type alone"
        )
    return named


def all(predicate: Callable[[Any], bool], tree: Tree) -> bool:
    """Whether ``predicate`` holds for every leaf."""
    return builtins.all(predicate(leaf) for leaf in leaves(tree))


def partition(tree: Tree, mask: Mask) -> tuple[Tree, Tree]:
    """Split by a mask: (the leaves where it is True, the leaves where it is False), None in the other's places.

    ``combine`` is the inverse. Raises as ``as_mask``. (equinox: ``partition``.)
    """
    chosen = as_mask(tree, mask)
    return (
        map(lambda leaf, keep: leaf if keep else None, tree, chosen),
        map(lambda leaf, keep: None if keep else leaf, tree, chosen),
    )


def combine(*trees: Tree) -> Tree:
    """Put partitions back together: at each place the first leaf that is not None.

    Raises ValueError, naming the place, where the trees have different structures.
    """

    def is_none(leaf: Any) -> bool:
        return leaf is None

    def first(*candidates: Any) -> Any:
        return next((leaf for leaf in candidates if leaf is not None), None)

    try:
        return optree.tree_map(first, *trees, is_leaf=is_none, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError:
        _raise_mismatch("tree", *trees, is_leaf=is_none)
        raise


def as_mask(tree: Tree, mask: Mask) -> Tree:
    """A tree of bools with ``tree``'s structure, from a tree of bools, a prefix of one, or a function ``tree -> mask``.

    Raises TypeError for a mask leaf that is no bool, ValueError for a mask of another structure.
    """
    given = mask(tree) if callable(mask) else mask
    for name, leaf in named_leaves(given).items():
        if not isinstance(leaf, bool):
            raise TypeError(f"mask: the leaf {name!r} is {type(leaf).__name__}, expected bool")
    try:
        return optree.tree_broadcast_prefix(given, tree, namespace=NAMESPACE)
    except ValueError:
        _raise_mismatch("mask", given, tree)
        raise


def by_name(pattern: str) -> Callable[[Tree], Tree]:
    """The mask function that is True where the regular expression is found in the leaf's dotted name."""
    expression = re.compile(pattern)
    return lambda tree: map_with_name(lambda name, _: expression.search(name) is not None, tree)


def register(cls: type[T], children: tuple[str, ...], static: tuple[str, ...] = ()) -> type[T]:
    """Make a frozen dataclass a node, for optree and for torch's own pytrees; ``static`` fields go with the structure.

    Static fields must be hashable and comparable, since they are part of what a jitted function is keyed on. Raises
    TypeError where children and static together are not exactly the fields of the class.
    """
    node_class: Any = cls
    fields = [field.name for field in dataclasses.fields(node_class)]
    if sorted((*children, *static)) != sorted(fields):
        raise TypeError(
            f"register: {cls.__name__} has the fields {fields}, got children {children} and static {static}"
        )

    get_children, get_static = _getter(children), _getter(static)
    names = (*children, *static)
    slotted = "__slots__" in vars(node_class)

    def to_children(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        return get_children(node), get_static(node), children

    def from_children(meta: Any, values: Iterable[Any]) -> Any:
        node = object.__new__(cls)
        if slotted:
            for name, value in zip(names, (*values, *meta), strict=True):
                object.__setattr__(node, name, value)
        else:
            vars(node).update(zip(names, (*values, *meta), strict=True))
        return node

    optree.register_pytree_node(node_class, to_children, from_children, namespace=NAMESPACE)
    torch_pytree.register_pytree_node(
        cls,
        lambda node: (list(to_children(node)[0]), to_children(node)[1]),
        lambda values, meta: from_children(meta, values),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    return cls


def hash_once(cls: type[T]) -> type[T]:
    """A class decorator for big static values: the hash of a frozen dataclass is computed once an object.

    Equality looks at identity first. Static fields of nodes are hashed at each call of a jitted function.
    """
    plain_hash: Any = cls.__hash__
    plain_eq: Any = cls.__eq__

    def hash_(self: Any) -> int:
        try:
            return self.__dict__["_hash"]
        except KeyError:
            return self.__dict__.setdefault("_hash", plain_hash(self))

    def eq(self: Any, other: object) -> bool:
        return self is other or (
            type(self) is type(other) and hash(self) == hash(other) and bool(plain_eq(self, other))
        )

    def getstate(self: Any) -> dict[str, Any]:  # a hash is this process's own
        return {name: value for name, value in self.__dict__.items() if name in cls.__dataclass_fields__}  # type: ignore[attr-defined]

    for name, method in (("__hash__", hash_), ("__eq__", eq), ("__getstate__", getstate)):
        setattr(cls, name, method)
    return cls


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """The function from an object to these attributes of it; operator.attrgetter, but a tuple for one name, too."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda node: tuple(getattr(node, name) for name in names)


def _join(path: Iterable[Any]) -> str:
    return ".".join(str(entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.entry) for entry in path)


def _raise_mismatch(argument: str, tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None) -> None:
    """Raise ValueError with the path of the first place where ``tree`` is no prefix of one of ``rest``."""
    for other in rest:
        for error in optree.prefix_errors(tree, other, is_leaf=is_leaf, namespace=NAMESPACE):
            raise error(argument) from None
