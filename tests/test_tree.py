"""Laws of trees: flatten and unflatten, names, masks, registered nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given
from hypothesis import strategies as st

from functional_booster.kernels import tree


class Pair(NamedTuple):
    count: Any
    mu: Any


@dataclass(frozen=True)
class Node:
    right: Any
    left: Any
    tag: str = "static"


tree.register(Node, ("left", "right"), ("tag",))

KEYS = st.text("abcdefg", min_size=1, max_size=3)


def nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(KEYS, children, max_size=4),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Pair, children, children),
        st.builds(Node, children, children, st.sampled_from(["static", "other"])),
    )


TREES = st.recursive(st.integers() | st.none(), nodes, max_leaves=12)


def reordered(value: Any, reverse: bool) -> Any:
    """The same tree with its dicts' keys inserted in sorted (or reverse) order."""
    if isinstance(value, dict):
        return {key: reordered(value[key], reverse) for key in sorted(value, reverse=reverse)}
    if isinstance(value, Pair):
        return Pair(*(reordered(child, reverse) for child in value))
    if isinstance(value, (list, tuple)):
        return type(value)(reordered(child, reverse) for child in value)
    if isinstance(value, Node):
        return Node(left=reordered(value.left, reverse), right=reordered(value.right, reverse), tag=value.tag)
    return value


def reach(value: Any, name: str) -> Any:
    """The leaf at a dotted name, by plain indexing and attributes."""
    for part in name.split(".") if name else []:
        if isinstance(value, dict):
            value = value[part]
        elif isinstance(value, (Pair, Node)):
            value = getattr(value, part)
        else:
            value = value[int(part)]
    return value


class TestFlatten:
    @given(TREES)
    def test_unflatten_is_the_inverse_of_flatten(self, value: Any) -> None:
        leaves, structure = tree.flatten(value)
        assert tree.unflatten(structure, leaves) == value
        assert tree.leaves(value) == leaves
        assert tree.structure(value) == structure
        assert tree.flatten_up_to(structure, value) == leaves

    @given(TREES)
    def test_map_keeps_identity_and_composition(self, value: Any) -> None:
        def double(x: int) -> int:
            return 2 * x

        def minus_one(x: int) -> int:
            return x - 1

        assert tree.map(lambda x: x, value) == value
        assert tree.map(minus_one, tree.map(double, value)) == tree.map(lambda x: minus_one(double(x)), value)
        assert tree.map(lambda x, y: x - y, value, value) == tree.map(lambda _: 0, value)

    @given(TREES)
    def test_leaves_come_in_the_order_of_torchs_pytrees_with_sorted_dicts(self, value: Any) -> None:
        expected = [leaf for leaf in torch_pytree.tree_leaves(reordered(value, reverse=False)) if leaf is not None]
        assert tree.leaves(value) == expected

    @given(TREES)
    def test_insertion_order_of_dicts_does_not_matter(self, value: Any) -> None:
        forward, backward = reordered(value, reverse=False), reordered(value, reverse=True)
        assert tree.structure(forward) == tree.structure(backward)
        assert tree.named_leaves(forward) == tree.named_leaves(backward)

    def test_map_keeps_the_insertion_order_of_dicts(self) -> None:
        assert list(tree.map(abs, {"w": 1, "b": 2})) == ["w", "b"]

    def test_none_is_an_empty_subtree(self) -> None:
        assert tree.leaves({"a": None, "b": [None, 1]}) == [1]
        assert tree.map(lambda x: x + 1, {"a": None, "b": 1}) == {"a": None, "b": 2}

    def test_is_leaf_stops_the_descent(self) -> None:
        value = {"a": (1, 2), "b": [3]}
        assert tree.leaves(value, is_leaf=lambda x: isinstance(x, tuple)) == [(1, 2), 3]
        assert tree.names(value, is_leaf=lambda x: isinstance(x, tuple)) == ["a", "b.0"]

    def test_all_looks_at_every_leaf(self) -> None:
        assert tree.all(lambda x: x > 0, {"a": 1, "b": [2]})
        assert not tree.all(lambda x: x > 0, {"a": 1, "b": [0]})


class TestNames:
    @given(TREES)
    def test_names_are_unique_in_order_and_lead_to_their_leaves(self, value: Any) -> None:
        names = tree.names(value)
        assert len(set(names)) == len(names)
        assert [reach(value, name) for name in names] == tree.leaves(value)
        assert list(tree.named_leaves(value).items()) == list(zip(names, tree.leaves(value), strict=True))

    @given(TREES)
    def test_map_with_name_gives_each_leaf_its_name(self, value: Any) -> None:
        assert tree.leaves(tree.map_with_name(lambda name, leaf: (name, leaf), value), is_leaf=is_item) == list(
            tree.named_leaves(value).items()
        )

    def test_names_are_paths_joined_by_dots(self) -> None:
        value = {"blocks": [{"attn": Pair(1, {"q": 2})}], "head": Node(left=3, right=4)}
        assert tree.names(value) == ["blocks.0.attn.count", "blocks.0.attn.mu.q", "head.left", "head.right"]

    def test_two_leaves_of_one_name_are_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"two leaves of the tree have the name 'a\.b'"):
            tree.named_leaves({"a": {"b": 1}, "a.b": 2})


def is_item(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


class TestPartition:
    @given(TREES, st.data())
    def test_combine_is_the_inverse_of_partition(self, value: Any, data: st.DataObject) -> None:
        mask = tree.map(lambda _: data.draw(st.booleans()), value)
        chosen, others = tree.partition(value, mask)
        assert tree.combine(chosen, others) == tree.combine(others, chosen) == value

    @given(TREES, st.data())
    def test_each_leaf_goes_to_the_side_its_mask_says(self, value: Any, data: st.DataObject) -> None:
        mask = tree.map(lambda _: data.draw(st.booleans()), value)
        chosen, others = tree.partition(value, mask)
        marks = tree.named_leaves(mask)
        assert tree.named_leaves(chosen) == {name: x for name, x in tree.named_leaves(value).items() if marks[name]}
        assert tree.named_leaves(others) == {name: x for name, x in tree.named_leaves(value).items() if not marks[name]}

    @given(TREES)
    def test_a_prefix_and_a_function_are_masks(self, value: Any) -> None:
        assert tree.as_mask({"x": value, "y": value}, {"x": True, "y": False}) == {
            "x": tree.map(lambda _: True, value),
            "y": tree.map(lambda _: False, value),
        }
        assert tree.as_mask(value, lambda given: tree.map(lambda _: True, given)) == tree.as_mask(value, True)

    def test_by_name_searches_the_dotted_name(self) -> None:
        params = {"ln": {"bias": 1, "weight": 2}, "fc": {"bias": 3, "weight": 4}}
        decayed, _ = tree.partition(params, tree.by_name(r"^fc\.weight$"))
        assert decayed == {"ln": {"bias": None, "weight": None}, "fc": {"bias": None, "weight": 4}}

    def test_tensors_are_told_from_none_not_compared(self) -> None:
        params = {"w": torch.zeros(3), "b": torch.ones(2)}
        back = tree.combine(*tree.partition(params, {"w": True, "b": False}))
        assert back["w"] is params["w"]
        assert back["b"] is params["b"]

    def test_a_mask_leaf_that_is_no_bool_is_named(self) -> None:
        with pytest.raises(TypeError, match=r"mask: the leaf 'b\.c' is int, expected bool"):
            tree.partition({"a": 1, "b": {"c": 2}}, {"a": True, "b": {"c": 1}})

    def test_a_mask_of_another_structure_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"mask\['b'\]"):
            tree.partition({"a": 1, "b": {"c": 2}}, {"a": True, "b": {"d": True}})


class TestErrors:
    @pytest.mark.parametrize(
        ("left", "right", "place"),
        [
            ({"blocks": [{"q": 1}]}, {"blocks": [{"k": 1}]}, r"tree\['blocks'\]\[0\]"),
            ({"a": {"b": [1, 2]}}, {"a": {"b": [1]}}, r"tree\['a'\]\['b'\]"),
            ({"a": Pair(1, [2])}, {"a": Pair(1, (2,))}, r"tree\['a'\]\.mu"),
        ],
    )
    def test_map_and_combine_name_the_place_where_structures_part(self, left: Any, right: Any, place: str) -> None:
        with pytest.raises(ValueError, match=place):
            tree.map(lambda x, y: x, left, right)
        with pytest.raises(ValueError, match=place):
            tree.map_with_name(lambda name, x, y: x, left, right)
        with pytest.raises(ValueError, match=place):
            tree.combine(left, right)
        with pytest.raises(ValueError, match=place):
            tree.flatten_up_to(tree.structure(left), right)

    def test_an_error_of_the_function_is_handed_on(self) -> None:
        def refuse(leaf: int) -> None:
            raise ValueError(f"no {leaf}")

        with pytest.raises(ValueError, match="no 1"):
            tree.map(refuse, {"a": 1})

    @pytest.mark.parametrize(("leaves", "message"), [([1], "Too few leaves"), ([1, 2, 3], "Too many leaves")])
    def test_unflatten_refuses_another_number_of_leaves(self, leaves: list[int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            tree.unflatten(tree.structure([0, 0]), leaves)


class TestRegister:
    def test_static_fields_belong_to_the_structure(self) -> None:
        assert tree.structure(Node(1, 2, "x")) == tree.structure(Node(3, 4, "x"))
        assert tree.structure(Node(1, 2, "x")) != tree.structure(Node(1, 2, "y"))
        assert hash(tree.structure(Node(1, 2, "x"))) == hash(tree.structure(Node(3, 4, "x")))

    def test_children_come_in_the_order_given_not_that_of_the_fields(self) -> None:
        assert tree.named_leaves(Node(left=1, right=2)) == {"left": 1, "right": 2}

    @given(TREES)
    def test_torchs_pytrees_see_the_same_children(self, value: Any) -> None:
        node = Node(left=value, right=7)
        leaves, structure = torch_pytree.tree_flatten(node)
        assert torch_pytree.tree_unflatten(leaves, structure) == node
        assert torch_pytree.tree_map(lambda x: x, node) == tree.map(lambda x: x, node)

    def test_torch_func_takes_a_registered_node(self) -> None:
        node = Node(left=torch.arange(3.0), right=torch.ones(3))
        result = torch.func.vmap(lambda n: Node(left=n.left + n.right, right=n.right, tag=n.tag))(node)
        assert torch.equal(result.left, torch.arange(3.0) + 1)
        assert result.tag == "static"

    def test_a_field_that_is_neither_child_nor_static_is_an_error(self) -> None:
        @dataclass(frozen=True)
        class Forgotten:
            a: int
            b: int

        with pytest.raises(TypeError, match="Forgotten has the fields"):
            tree.register(Forgotten, ("a",))
        with pytest.raises(TypeError, match="Forgotten has the fields"):
            tree.register(Forgotten, ("a", "b"), ("c",))
