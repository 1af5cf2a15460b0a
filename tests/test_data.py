"""data: text as bytes, and batches as a pure function of (seed, position)."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_booster import data

SEEDS = st.integers(0, 2**31 - 1)


@st.composite
def samplings(draw: st.DrawFn) -> tuple[int, int]:
    """(number of examples, batch size)"""
    size = draw(st.integers(1, 40))
    return size, draw(st.integers(1, size))


@given(samplings(), SEEDS)
def test_every_epoch_visits_every_example_once(sampling: tuple[int, int], seed: int) -> None:
    size, batch_size = sampling
    batches = [data.indices(position, batch_size, size, seed) for position in range(3 * size // batch_size + 1)]
    assert {batch.shape for batch in batches} == {(batch_size,)}
    assert {batch.dtype for batch in batches} == {torch.int64}
    epochs = torch.cat(batches)[: 3 * size].view(3, size)
    assert torch.equal(epochs.sort(dim=1).values, torch.arange(size).expand(3, size))


@given(samplings(), SEEDS, st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_a_batch_depends_on_its_position_alone(sampling: tuple[int, int], seed: int, positions: list[int]) -> None:
    size, batch_size = sampling
    forward = {position: data.indices(position, batch_size, size, seed) for position in positions}
    for position in reversed(positions):
        assert torch.equal(data.indices(position, batch_size, size, seed), forward[position])


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = [data.indices(epoch, 100, 100, seed) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert all(not torch.equal(order, torch.arange(100)) for order in orders)


@given(st.integers(2, 9), st.integers(0, 8), st.integers(1, 6), SEEDS)
def test_an_epoch_of_batches_is_the_text(length: int, rest: int, windows: int, seed: int) -> None:
    text = torch.arange(length * windows + min(rest, length - 1)).to(torch.uint8)
    batch = data.batches(text, 1, length, seed)
    rows = torch.cat([batch(position)["input_ids"] for position in range(windows)])
    assert torch.equal(rows.sort(dim=0).values, torch.arange(length * windows).view(windows, length))
    assert rows.dtype == torch.int64
    assert torch.equal(batch(0)["labels"], batch(0)["input_ids"])


def test_what_does_not_fit_is_refused() -> None:
    text = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(ValueError, match="batch_size: 11, but 100 bytes of text hold 10 windows of length 10"):
        data.batches(text, 11, 10)
    with pytest.raises(ValueError, match="text: 100 bytes are too few for one window of length 101"):
        data.batches(text, 1, 101)
    with pytest.raises(ValueError, match="length: 1"):
        data.batches(text, 1, 1)
    with pytest.raises(ValueError, match="batch_size: 0"):
        data.indices(0, 0, 4, 0)
    with pytest.raises(ValueError, match="position: -1"):
        data.indices(-1, 2, 4, 0)
    with pytest.raises(ValueError, match="fraction: 1"):
        data.split(text, 1.0)


@given(st.integers(10, 500), st.floats(0.01, 0.99))
def test_split_cuts_the_text_in_two(size: int, fraction: float) -> None:
    text = torch.randint(0, 256, (size,), dtype=torch.uint8)
    train, validation = data.split(text, fraction)
    assert torch.equal(torch.cat([train, validation]), text)
    assert len(validation) == math.ceil(size * fraction)


def test_unigram_entropy_by_hand() -> None:
    assert data.unigram_entropy(torch.full((7,), 65, dtype=torch.uint8)) == 0
    assert data.unigram_entropy(torch.arange(256, dtype=torch.uint8)) == pytest.approx(math.log(256), rel=1e-12)
    text = torch.tensor([1, 1, 1, 2], dtype=torch.uint8)
    assert data.unigram_entropy(text) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), rel=1e-12)


def test_a_folder_is_its_text_files_by_relative_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", ".git/config", "a/.hidden", "empty"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty" else name)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\x01")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    files = data.text_files(tmp_path)
    assert [file.relative_to(tmp_path).as_posix() for file in files] == ["a.txt", "a/z.md", "b.txt", "empty"]
    assert bytes(data.bytes_of(files).tolist()) == b"a.txt\na/z.md\nb.txt\n"
    assert data.text_files(tmp_path / "b.txt") == [tmp_path / "b.txt"]


def test_the_folder_that_a_run_writes_to_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "runs/gpt/metrics.jsonl", "runs/gpt2.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    for root in (".", tmp_path):
        for out in ("runs/gpt", tmp_path / "runs" / "gpt"):
            found = [file.resolve() for file in data.text_files(root, without=out)]
            assert found == [tmp_path / "a.txt", tmp_path / "runs" / "gpt2.txt"]


def test_text_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        data.text_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"{tmp_path}: no readable text file"):
        data.text_files(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt: empty, expected text"):
        data.bytes_of(data.text_files(tmp_path / "empty.txt"))
    (tmp_path / "another.txt").touch()
    with pytest.raises(ValueError, match=r"another\.txt, .*empty\.txt: empty, expected text"):
        data.bytes_of(data.text_files(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ValueError, match=f"{path}: a device or a pipe"):
            data.text_files(path)
    (tmp_path / "data.bin").write_bytes(b"a\x00b")
    with pytest.raises(ValueError, match=r"data\.bin: holds NUL bytes"):
        data.text_files(tmp_path / "data.bin")


@contextlib.contextmanager
def not_as_root() -> Generator[None]:
    """Root may read everything: as root, what happens here is done as the user nobody."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_file_without_permission_is_named_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # nobody may not go there from the root
    Path("open.txt").write_text("open")
    Path("gone.txt").symlink_to("nowhere")
    Path("locked.txt").write_text("locked")
    Path("locked.txt").chmod(0)
    with not_as_root():
        assert data.text_files(".") == [Path("open.txt")]
        with pytest.raises(PermissionError, match=r"locked\.txt: no permission to read it"):
            data.text_files("locked.txt")


def test_the_standard_library_is_real_text() -> None:
    files = data.text_files()
    names = [file.relative_to(Path(os.__file__).parent) for file in files]
    assert Path("dataclasses.py") in names
    assert names == sorted(names, key=Path.as_posix)
    assert not any({"site-packages", "test", "__pycache__"} & set(name.parts) for name in names)
    text = data.bytes_of(files)
    assert b"def namedtuple(" in bytes(text.numpy())
    assert len(text) == sum(file.stat().st_size for file in files) + len(files) - 1
