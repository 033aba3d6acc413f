"""A lock for those who make what caches keep, and the bound of what they keep."""

import os
import threading
from pathlib import Path

from argosy.core.caches import bound_cache, clear_cache, file_lock, most_bytes


def test_a_process_that_must_wait_says_so_and_then_goes_on(tmp_path: Path):
    lock, messages, entered = tmp_path / "folder" / ".lock", list[str](), threading.Event()

    def other() -> None:
        with file_lock(lock, messages.append):
            entered.set()

    with file_lock(lock, messages.append):
        waiting = threading.Thread(target=other)
        waiting.start()
        assert not entered.wait(0.2)
    waiting.join(10)
    assert entered.is_set()
    assert messages == [f"waiting for another process that writes in {lock.parent}"]


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    for number, name in enumerate("abcd"):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 + number, 1000 + number))
    os.utime(tmp_path / "a", (5000, 1000))
    assert bound_cache(tmp_path, 250) == 200
    assert {path.name for path in tmp_path.iterdir()} == {"a", "d", ".bounded"}
    (tmp_path / "e").write_bytes(bytes(500))
    # Not again on the same day.
    assert bound_cache(tmp_path, 250) == 0
    assert bound_cache(tmp_path, 250, every_s=0.0) > 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 250


def test_a_cache_is_cleared_and_its_bound_is_a_variable(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "program").write_bytes(bytes(7))
    assert clear_cache(tmp_path) == (1, 7)
    assert clear_cache(tmp_path / "gone") == (0, 0)
    monkeypatch.setenv("ARGOSY_CACHE_GB", "1.5")
    assert most_bytes() == 1_500_000_000
    monkeypatch.setenv("ARGOSY_CACHE_GB", "x")
    assert most_bytes() == 20_000_000_000
