"""The safetensors format: the library opens what is written, and what it writes is read, whole and in parts."""

from __future__ import annotations

import io
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_booster.checkpoint import tensor_files
from functional_booster.checkpoint.tensor_files import DTYPES, as_bytes, head, read_head, read_part

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__")
KNOWN = [dtype for dtype in DTYPES if dtype != torch.float8_e8m0fnu]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Some of any dtype and shape, the widest first."""
    found = {}
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from(KNOWN)), draw(SHAPES)
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = draw(st.binary(min_size=count, max_size=count))
        if dtype == torch.bool:
            raw = bytes(byte & 1 for byte in raw)
        found[name] = torch.tensor(list(raw), dtype=torch.uint8).view(dtype).view(shape)
    return dict(sorted(found.items(), key=lambda each: -each[1].itemsize))


def file_of(values: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    before, _ = head({name: (value.dtype, tuple(value.shape)) for name, value in values.items()}, metadata)
    return before + b"".join(map(bytes, map(as_bytes, values.values())))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise, whatever NaNs they hold."""
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)


@given(tensors())
def test_the_library_opens_what_is_written(values: dict[str, torch.Tensor]) -> None:
    opened = safetensors.torch.load(file_of(values, {"format": "pt"}))
    assert opened.keys() == values.keys()
    assert all(same(opened[name], value) for name, value in values.items())


@given(tensors(), st.data())
def test_what_the_library_writes_is_read_in_parts(values: dict[str, torch.Tensor], data: st.DataObject) -> None:
    content = safetensors.torch.save(values, {"a": "b"})
    stream = io.BytesIO(content)
    stored, metadata = read_head(stream, len(content))
    assert metadata == {"a": "b"} and stored.keys() == values.keys()
    for name, value in values.items():
        assert same(read_part(stream, stored[name]), value)
        ends = [sorted(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))) for _ in value.shape[:2]]
        for part in ([(slice(*ends[0]),)] if ends else []) + ([(slice(None), slice(*ends[1]))] if ends[1:] else []):
            with mock.patch.object(tensor_files, "_BLOCK", data.draw(st.integers(1, 99))):
                assert same(read_part(stream, stored[name], part), value[part])


@given(tensors(), st.data())
def test_what_is_damaged_is_refused_or_read_as_the_library_does(
    values: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    """A byte of the header changed, or the file cut: an error, or what the library reads, too."""
    content = bytearray(file_of(values))
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, 7 + int.from_bytes(content[:8], "little")))] = data.draw(st.integers(0, 255))
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    try:
        stored, _ = read_head(io.BytesIO(content), len(content))
    except ValueError:
        return
    opened = safetensors.torch.load(bytes(content))
    assert {name: (each.dtype, each.shape) for name, each in stored.items()} == {
        name: (value.dtype, tuple(value.shape)) for name, value in opened.items()
    }


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "its header would have 0 bytes"),
        (b"{", "its header is none of safetensors"),
        (b"[]", "its header is none of safetensors"),
        (b'{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,4]}}', "dtype 'F4', which is not known"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}', "a has 8 bytes, expected 4"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', r"a has shape \[-1\]"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', "a begins at byte"),
    ],
)
def test_headers_that_make_no_sense(header: bytes, message: str) -> None:
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    with pytest.raises(ValueError, match=message):
        read_head(io.BytesIO(content), len(content))


def test_a_dtype_that_the_format_does_not_have() -> None:
    with pytest.raises(TypeError, match=r"a: torch\.complex128, which safetensors does not have"):
        head({"a": (torch.complex128, (1,))})


def test_a_file_that_ends_too_early(tmp_path: Any) -> None:
    values = {"a": torch.arange(6.0)}
    (tmp_path / "x").write_bytes(file_of(values)[:-4])
    stored, _ = read_head(io.BytesIO(file_of(values)), len(file_of(values)))
    with open(tmp_path / "x", "rb", buffering=0) as stream, pytest.raises(ValueError, match="it ends too early"):
        read_part(stream, stored["a"])
