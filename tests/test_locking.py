"""Locks between processes: one holds at a time, and whoever dies holds nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from functional_booster import locking


def test_a_mark_is_one_holders_at_a_time_and_leaves_nothing(tmp_path: Path) -> None:
    """Threads with handles of their own are to the system as processes are."""
    inside, most, times = 0, 0, [0] * 4
    change = threading.Lock()

    def ask(number: int) -> None:
        nonlocal inside, most
        while times[number] < 50:
            try:
                with locking.marked(tmp_path / "mark"):
                    with change:
                        inside, most = inside + 1, max(most, inside + 1)
                    times[number] += 1
                    with change:
                        inside -= 1
            except BlockingIOError:
                continue

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert times == [50] * 4 and most == 1
    assert list(tmp_path.iterdir()) == []


def test_a_mark_that_was_left_is_taken(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    with locking.marked(tmp_path / "mark") as held:
        assert held
        with pytest.raises(BlockingIOError), locking.marked(tmp_path / "mark"):
            pass
    assert list(tmp_path.iterdir()) == []


def test_some_share_what_one_holds_alone(tmp_path: Path) -> None:
    with locking.shared(tmp_path) as one, locking.shared(tmp_path) as other:
        assert one and other
        with pytest.raises(BlockingIOError), locking.exclusive(tmp_path, wait=False):
            pass
    with locking.exclusive(tmp_path, wait=False) as held:
        assert held
