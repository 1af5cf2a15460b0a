"""Laws of flat trees: ravel and unravel are inverses, and whatever works element by element may work on either."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_booster.kernels import flat, transforms, tree

KEYS = st.text("abcdefg", min_size=1, max_size=3)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def tensor(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Values from 1 to 2, none of them zero, so that padding is told from contents; integers in int64."""
    values = 1 + torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values if dtype.is_floating_point else 100 * values).to(dtype)


def trees(dtypes: list[torch.dtype]) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.sampled_from([0, 1, 2, 5, 13]), max_size=2)
    leaves = st.builds(
        lambda shape, dtype, seed: tensor(*shape, dtype=dtype, seed=seed),
        shapes,
        st.sampled_from(dtypes),
        st.integers(0, 99),
    )
    return st.recursive(
        leaves,
        lambda children: (
            st.dictionaries(KEYS, children, min_size=1, max_size=5) | st.lists(children, min_size=1, max_size=3)
        ),
        max_leaves=8,
    )


@st.composite
def planned(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> tuple[Any, flat.Layout]:
    """A tree of tensors, and a layout of it by labels drawn a leaf each."""
    values = draw(trees(dtypes))
    labels = st.sampled_from([None, 0, "decay", ("a", 1)])
    leaves, structure = tree.flatten(values)
    return values, flat.plan(values, tree.unflatten(structure, [draw(labels) for _ in leaves]))


def one_label(values: Any) -> flat.Layout:
    return flat.plan(values, tree.map(lambda _: 0, values))


def assert_equal(actual: Any, expected: Any) -> None:
    """Same structure, dtypes and bits."""
    assert tree.structure(actual) == tree.structure(expected)
    for name, left, right in zip(tree.names(actual), tree.leaves(actual), tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), name


class TestInverse:
    @given(planned())
    def test_unravel_is_the_inverse_of_ravel(self, case: tuple[Any, flat.Layout]) -> None:
        values, layout = case
        raveled = flat.ravel(values, layout)
        assert_equal(flat.unravel(raveled), values)
        assert_equal(flat.ravel(flat.unravel(raveled), layout), raveled)

    @given(planned(), st.integers(1, 3))
    def test_leading_dims_of_all_buffers_are_leading_dims_of_all_leaves(
        self, case: tuple[Any, flat.Layout], members: int
    ) -> None:
        values, layout = case
        stacked = tree.map(lambda leaf: torch.stack([leaf + member for member in range(members)]), values)
        raveled = transforms.vmap(lambda member: flat.ravel(member, layout))(stacked)
        assert all(buffer.shape[0] == members for buffer in raveled.buffers.values())
        assert_equal(flat.unravel(raveled), stacked)

    def test_ravel_copies_and_unravel_gives_views(self) -> None:
        values = {"a": tensor(3), "b": tensor(2, 2), "kept": tensor(3)}
        raveled = flat.ravel(values, flat.plan(values, {"a": 0, "b": None, "kept": None}))
        before = tree.map(torch.clone, values)
        tree.map(lambda buffer: buffer.add_(1), raveled)
        assert_equal(values, before)
        back = flat.unravel(raveled)
        assert_equal(back, tree.map(lambda leaf: leaf + 1, before))
        storages = {buffer.untyped_storage().data_ptr() for buffer in raveled.buffers.values()}
        assert {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(back)} == storages


class TestLayout:
    @given(planned())
    def test_slots_are_aligned_disjoint_and_within_their_bucket(self, case: tuple[Any, flat.Layout]) -> None:
        values, layout = case
        raveled = flat.ravel(values, layout)
        assert raveled.buffers.keys() == layout.buckets.keys()
        for bucket, slots in layout.buckets.items():
            buffer, end = raveled.buffers[bucket], 0
            assert buffer.numel() == layout.size(bucket)
            assert {slot.dtype for slot in slots} == {buffer.dtype}
            if slots[0].offset is None:
                assert len(slots) == 1
                assert buffer.shape == slots[0].shape
                continue
            for slot in slots:
                assert slot.offset is not None
                assert slot.offset % flat.ALIGNMENT == 0
                assert slot.offset >= end
                end = slot.offset + slot.size
            assert end <= layout.size(bucket)

    @given(planned())
    def test_padding_is_zero_and_every_element_is_there_once(self, case: tuple[Any, flat.Layout]) -> None:
        values, layout = case
        raveled = flat.ravel(values, layout)
        for bucket, slots in layout.buckets.items():
            members = {slot.name for slot in slots}
            contents = [leaf.flatten() for name, leaf in tree.named_leaves(values).items() if name in members]
            buffer = raveled.buffers[bucket].flatten()
            assert torch.equal(buffer[buffer != 0], torch.cat(contents))

    @given(planned())
    def test_leaves_share_a_bucket_when_label_and_dtype_are_equal(self, case: tuple[Any, flat.Layout]) -> None:
        values, _ = case
        labels = tree.map_with_name(lambda name, _: len(name) % 2, values)
        layout = flat.plan(values, labels)
        keys = {slot.name: slot.bucket for slot in layout.slots}
        kinds = tree.named_leaves(tree.map(lambda leaf, label: (label, leaf.dtype), values, labels), is_leaf=is_kind)
        for left, kind in kinds.items():
            for right, other in kinds.items():
                assert (keys[left] == keys[right]) == (kind == other)

    def test_a_layout_is_a_value(self) -> None:
        values = {"a": tensor(3), "b": tensor(2, 2)}
        assert one_label(values) == one_label(tree.map(torch.zeros_like, values))
        assert hash(one_label(values)) == hash(one_label(values))
        assert one_label(values) != flat.plan(values, {"a": 0, "b": 1})
        assert one_label(values) != one_label({"a": tensor(3), "b": tensor(4)})
        raveled = flat.ravel(values, one_label(values))
        assert tree.structure(raveled) == tree.structure(tree.map(torch.zeros_like, raveled))

    def test_two_leaves_of_one_name_are_refused(self) -> None:
        values = {"a": {"b": tensor(2)}, "a.b": tensor(2)}
        with pytest.raises(ValueError, match=r"the name 'a\.b'"):
            one_label(values)

    def test_labels_of_another_structure_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"tree\['a'\]"):
            flat.plan({"a": {"b": tensor(2)}}, {"a": {"c": 0}})


def is_kind(value: Any) -> bool:
    return isinstance(value, tuple)


class TestTransforms:
    @given(planned([torch.float64]))
    def test_gradient_of_unravel_is_ravel(self, case: tuple[Any, flat.Layout]) -> None:
        values, layout = case

        def fn(params: Any) -> torch.Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for place, leaf in enumerate(tree.leaves(params)):
                total = total + (place + 1) * (leaf**3).sum()
            return total

        by_leaf = transforms.grad(fn)(values)
        by_buffer = transforms.grad(lambda raveled: fn(flat.unravel(raveled)))(flat.ravel(values, layout))
        assert_equal(by_buffer, flat.ravel(by_leaf, layout))

    def test_a_leaf_that_is_not_used_gets_zeros(self) -> None:
        values = {"a": tensor(3), "b": tensor(70)}
        layout = one_label(values)
        grads = transforms.grad(lambda raveled: flat.unravel(raveled)["b"].sum())(flat.ravel(values, layout))
        assert_equal(flat.unravel(grads), {"a": torch.zeros_like(values["a"]), "b": torch.ones_like(values["b"])})

    @given(planned([torch.float64, torch.float32]))
    def test_work_by_element_is_the_same_on_either_side(self, case: tuple[Any, flat.Layout]) -> None:
        values, layout = case

        def decay(leaf: torch.Tensor) -> torch.Tensor:
            return leaf * 0.9 - 0.1 * leaf * leaf

        assert_equal(flat.unravel(tree.map(decay, flat.ravel(values, layout))), tree.map(decay, values))

    def test_a_leaf_of_another_shape_is_named(self) -> None:
        layout = one_label({"fc": {"w": tensor(2, 3)}})
        with pytest.raises(ValueError, match=r"fc\.w: shape \(3, 2\), expected \(2, 3\)"):
            flat.ravel({"fc": {"w": tensor(3, 2)}}, layout)

    def test_a_tree_of_another_structure_is_refused_with_the_place(self) -> None:
        layout = one_label({"fc": {"w": tensor(2, 3)}})
        with pytest.raises(ValueError, match=r"tree\['fc'\]"):
            flat.ravel({"fc": {"b": tensor(2, 3)}}, layout)


class TestSpread:
    def test_a_plain_tree_keeps_its_values(self) -> None:
        values = {"a": 1, "b": 2}
        assert flat.spread(values, {"a": tensor(2), "b": tensor(3)}) is values

    @given(planned())
    def test_one_value_a_bucket_reaches_every_leaf(self, case: tuple[Any, flat.Layout]) -> None:
        values, layout = case
        raveled = flat.ravel(values, layout)
        buckets = {slot.name: slot.bucket for slot in layout.slots}
        spread = flat.spread(tree.map_with_name(lambda name, _: buckets[name], values), raveled)
        assert spread.buffers == {bucket: bucket for bucket in layout.buckets}
        assert tree.structure(spread) == tree.structure(raveled)

    def test_leaves_of_one_bucket_must_agree(self) -> None:
        values = {"a": tensor(3), "b": tensor(2)}
        raveled = flat.ravel(values, one_label(values))
        with pytest.raises(ValueError, match=r"b has 0\.1 and a has 0\.0, but both lie in bucket 'float64:0'"):
            flat.spread({"a": 0.0, "b": 0.1}, raveled)

    def test_kept_leaves_need_not_agree(self) -> None:
        values = {"a": tensor(3), "b": tensor(2)}
        raveled = flat.ravel(values, flat.plan(values, {"a": None, "b": None}))
        assert flat.spread({"a": 0.0, "b": 0.1}, raveled).buffers == {"leaf:a": 0.0, "leaf:b": 0.1}

    def test_masks_are_written_for_the_tree_that_a_flat_stands_for(self) -> None:
        values = {"fc": {"weight": tensor(2, 3), "bias": tensor(3, dtype=torch.float32)}}
        raveled = flat.ravel(values, one_label(values))
        slots = flat.stands_for(raveled)
        assert tree.names(slots) == tree.names(values)
        assert tree.map(lambda slot: (slot.shape, slot.dtype), slots) == tree.map(
            lambda leaf: (tuple(leaf.shape), leaf.dtype), values
        )
        assert flat.stands_for(values) is values
