"""Groups while something else happens: what is freed, closed, starts again, or waits for another."""

import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import worker_functions as functions
from launch.test_workers import is_alive

from argosy.core.errors import ArgosyError, BadInput
from argosy.launch.logs import LogFile
from argosy.launch.workers import Group, Workers, open_workers
from argosy.launch.workers.arrays.transfers import TransferSource
from argosy.launch.workers.engines.inline import Inline
from argosy.launch.workers.errors import WorkerLost
from argosy.launch.workers.gang import WorkerGang
from argosy.launch.workers.member import WorkerProcess

TWO = {"one": Group(start=(functions.start, 1)), "two": Group()}


@pytest.fixture
def workers() -> Iterator[Workers]:
    with open_workers(TWO, engine="inline") as workers:
        yield workers


def within(do: Callable[[], Any], seconds: float = 5.0) -> None:
    """Fails where it takes longer."""
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()


def test_what_was_asked_before_it_was_freed_gets_it(workers: Workers, tmp_path: Path):
    group, go = workers["one"], str(tmp_path / "go")
    group.run(functions.meet, str(tmp_path / "here"), go)
    array = group.run(np.full, 3, 2, dtype="int32")
    more, copy, near = group.run(functions.add, array, 1), workers.move(array, to="two"), workers.move(array, to="one")
    array.free()
    for do in (
        lambda: group.run(functions.add, array, 1),
        lambda: workers.move(array, to="two"),
        lambda: workers.move(array, to="one"),
    ):
        with pytest.raises(BadInput, match="was freed"):
            do()
    Path(go).touch()
    assert [list(ref.wait(10).value()) for ref in (more, copy, near)] == [[3] * 3, [2] * 3, [2] * 3]
    with pytest.raises(BadInput, match="was freed"):
        array.value()


def test_a_group_that_is_closed_says_so(tmp_path: Path):
    with open_workers(TWO, engine="inline") as workers:
        group = workers["two"]
        ref = group.run(np.full, 3, 2.0)
        group.run(functions.sleep, 0.3)
        late = group.run(functions.sleep, 0.3)
    with pytest.raises(ArgosyError):
        late.wait(5)

    def refused() -> None:
        for do in (lambda: group.run(functions.rank), group.restart, lambda: workers.move(ref, to="one")):
            with pytest.raises(BadInput, match="is closed"):
                do()
        done.set()

    done = threading.Event()
    within(refused)
    assert done.is_set()


def test_a_group_that_waits_for_another_in_a_move_can_be_ended(workers: Workers, tmp_path: Path):
    for waits, works in (("one", "two"), ("two", "one")):
        ref = workers["one"].run(np.full, 3, 2, dtype="int32").wait()
        go, begun = tmp_path / f"go-{waits}", tmp_path / f"begun-{waits}"
        workers[works].run(functions.meet, str(begun), str(go))
        reference = workers.move(ref, to="two")
        try:
            within(lambda waits=waits: workers[waits].restart())
        finally:
            go.touch()
        with pytest.raises(WorkerLost, match=rf"process 0 of the group `{waits}` was ended by restart"):
            reference.wait(10)
        assert workers[works].run(functions.rank).value() == workers[waits].run(functions.rank).value() == 0


def test_groups_end_at_the_same_time(monkeypatch: pytest.MonkeyPatch):
    def slowly(self: Inline, close: Callable[[Inline], None] = Inline.close) -> None:
        time.sleep(0.4)
        close(self)

    with open_workers({name: Group() for name in "abcd"}, engine="inline"):
        monkeypatch.setattr(Inline, "close", slowly)
        begun = time.monotonic()
    # Each is closed twice.
    assert 0.4 <= time.monotonic() - begun < 1.6


def test_what_start_returned_is_lost_until_it_has_returned_again(workers: Workers, monkeypatch: pytest.MonkeyPatch):
    group, hold, go = workers["one"], threading.Event(), threading.Event()

    def join(self: Inline) -> None:
        hold.set()
        go.wait(10)

    monkeypatch.setattr(Inline, "join", join)
    before = group.started.value()["starts"]
    again = threading.Thread(target=group.restart)
    again.start()
    assert hold.wait(5)
    with pytest.raises(WorkerLost):
        group.started.value()
    sum_of = group.run(functions.add, group.started, 1)
    go.set()
    again.join(10)
    with pytest.raises(WorkerLost):
        sum_of.wait(5)
    assert group.started.value()["starts"] == before + 1


def test_workers_apart_from_where_their_controller_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It has variables of a Slurm job, wrong ones, which a group of one does not read. What a worker prints is there at once,
    and may go nowhere."""
    for name, value in {"STEP_NODELIST": "nowhere", "JOB_ID": "7", "STEP_NUM_TASKS": "2", "PROCID": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    logs = tmp_path / "logs"
    with open_workers({"a": Group()}, logs=logs) as workers:
        pid = workers["a"].run(functions.says, "hello").value()
        until = time.monotonic() + 5
        while (logs / "a-0.log").read_text() != "hello\n" and time.monotonic() < until:
            time.sleep(0.02)
        assert (logs / "a-0.log").read_text() == "hello\n"
        shutil.rmtree(logs)
        for _ in range(3):
            assert workers["a"].run(functions.says, "x" * 100_000).value() == pid
        other = workers["a"].run(functions.starts_another).value()
        assert is_alive(other)
    until = time.monotonic() + 5
    while is_alive(other) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(other)
    assert capsys.readouterr().err.count("a-0.log: no such file or directory; lines are missing there") == 1


def test_a_log_on_a_full_disk(capsys: pytest.CaptureFixture[str]):
    log = LogFile(Path("/dev/full"))
    for _ in range(3):
        log.write(b"line\n")
    assert capsys.readouterr().err == "/dev/full: no space left on device; lines are missing there\n"


class Slow:
    """Processes that answer after a while, calls never. late: how they answer."""

    def __init__(self, late: Sequence[dict[str, Any]]):
        self.late = late

    def __call__(self, name: str, members: Sequence[WorkerProcess]) -> list[Any]:
        return [Slow.Process(member, late, 0.3 + 0.3 * member.rank) for member, late in zip(members, self.late)]

    class Process:
        pid = 0

        def __init__(self, member: WorkerProcess, late: dict[str, Any], after_s: float):
            self.member, self.late, self.after_s = member, late, after_s

        def send(self, data: bytes) -> None:
            number, kind, _ = pickle.loads(data)
            if kind != "call":
                threading.Timer(self.after_s, self.member.heard, [pickle.dumps((number, self.late))]).start()

        def kill(self) -> None:
            if self.member.code is None:
                self.member.ended(-9)

        leave = kill


def test_only_calls_count_as_stuck(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("argosy.launch.workers.gang.ALONE_S", 0.1)
    source = TransferSource("far", 1, b"", [], [])

    def gang(*late: dict[str, Any]) -> WorkerGang:
        return WorkerGang("near", len(late), Slow(late), 0.1, lambda rank, line: None, lambda error: None)

    process_gang = gang({"done": 3}, {"done": 4})
    assert process_gang.pull(1, source, None) == 7
    failed = gang({"failed": {"what": "no", "kind": "input"}}, {"done": 4})
    with pytest.raises(BadInput, match="no"):
        failed.pull(1, source, None)
    assert process_gang.lost is failed.lost is None
    with pytest.raises(WorkerLost, match=r"did not answer within 0 s \(Group\(stuck=0.1\)\)"):
        process_gang.call(1, "mine:f", b"")
