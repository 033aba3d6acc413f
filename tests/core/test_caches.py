"""A lock for those who make what caches keep."""

import threading
from pathlib import Path

from argosy.core.caches import one_at_a_time


def test_a_process_that_must_wait_says_so_and_then_goes_on(tmp_path: Path):
    lock, said, entered = tmp_path / "folder" / ".lock", list[str](), threading.Event()

    def other() -> None:
        with one_at_a_time(lock, said.append):
            entered.set()

    with one_at_a_time(lock, said.append):
        waiting = threading.Thread(target=other)
        waiting.start()
        assert not entered.wait(0.2)
    waiting.join(10)
    assert entered.is_set()
    assert said == [f"waiting for another process that writes in {lock.parent}"]
