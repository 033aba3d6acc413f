"""How workers end, and that they do: each test starts groups of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import worker_functions as functions
from launch.test_workers import is_alive

from argosy.core.errors import ArgosyError
from argosy.launch.workers import Group, WorkerError, WorkerLost, open_workers
from argosy.launch.workers import gang as worker_gang

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_last_words_exit_code_and_restarts_by_itself(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    with open_workers({"one": Group(restarts=1, start=(functions.start, 3), environment={"A": "b"})}, logs=tmp_path) as workers:
        assert workers["one"].run(os.getenv, "A").value() == "b"
        with pytest.raises(WorkerLost, match="ended with exit code 9") as caught:
            workers["one"].run(functions.ends, 9).wait()
        assert caught.value.code == 9
        assert "[one 0] my last words" in str(caught.value)
        until = time.monotonic() + 30
        while time.monotonic() < until and "was started again (0 restarts left)" not in capfd.readouterr().err:
            time.sleep(0.05)
        assert workers["one"].started is not None
        assert workers["one"].started.value() == {"number": 3, "starts": 1}
        assert workers["one"].lost is None
        with pytest.raises(WorkerLost):
            workers["one"].run(functions.ends, 0).wait()
        time.sleep(0.2)
        with pytest.raises(WorkerLost, match="ended with exit code 0"):
            workers["one"].run(functions.rank).wait()
    assert "my last words" in (tmp_path / "one-0.log").read_text()


@pytest.mark.slow
def test_a_stuck_process_is_ended(capfd: pytest.CaptureFixture[str]):
    """One that sleeps, one that is stopped by a signal, and one that waits in a collective for another that raised."""
    groups = {"pair": Group(processes=2, mesh={"x": 2}, stuck=2)}
    with open_workers(groups) as workers:
        with pytest.raises(WorkerLost, match=r"process 0 of the group `pair` did not answer within 2 s \(Group\(stuck=2\)\)"):
            workers["pair"].run(functions.sleep, 100.0).wait(20)
        workers["pair"].restart()
        pids = workers["pair"].pids
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="process 1 of the group `pair` did not answer within 2 s"):
            workers["pair"].run(functions.rank).wait(20)
        workers["pair"].restart()
        assert not any(is_alive(pid) for pid in pids)
        assert workers["pair"].run(functions.rank).values() == [0, 1]
        pids = workers["pair"].pids
        os.kill(pids[0], signal.SIGSTOP)
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.slow
def test_one_process_raises_while_another_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_gang, "ALONE_S", 2.0)
    with open_workers({"pair": Group(processes=2, mesh={"x": 2})}) as workers:
        ref = workers["pair"].run(functions.fails_alone)
        with pytest.raises(WorkerError, match="ValueError: only here") as caught:
            ref.wait(60)
        if workers["pair"].lost is not None:
            assert "process 0 did not finish the call" in str(caught.value)
            workers["pair"].restart()
        assert workers["pair"].run(functions.rank).values() == [0, 1]


@pytest.mark.slow
def test_a_source_that_dies_in_a_move():
    groups = {"a": Group(), "b": Group(), "c": Group()}
    with open_workers(groups) as workers:
        state, other = (workers["a"].run(functions.spread, (4096, 8192), ()), workers["c"].run(functions.spread, (4,), ()))
        workers.move(state, to="b").wait()
        for wait_s in (0.0, 0.02, 0.05, 0.1):
            reference = workers.move(state, to="b")
            time.sleep(wait_s)
            os.kill(workers["a"].pids[0], signal.SIGKILL)
            try:
                lost = reference.wait(30).group.lost
            except WorkerLost as error:
                lost = error
            # It may have come in time.
            assert lost is None or (lost.group, lost.code) == ("a", -signal.SIGKILL)
            # The target lives on.
            assert workers.move(other, to="b").value().shape == (4,)
            workers["a"].restart()
            state = workers["a"].run(functions.spread, (4096, 8192), ())
        # A target that dies leaves the source as it is.
        reference = workers.move(state, to="b")
        os.kill(workers["b"].pids[0], signal.SIGKILL)
        with pytest.raises(WorkerLost, match="group `b`"):
            reference.wait(30)
        assert workers.move(state, to="c").value().shape == (4096, 8192)


PROGRAM = """
import sys, time
sys.path.append(sys.argv[1])
from argosy.launch.workers import Group, open_workers
from launch import worker_functions as functions
with open_workers({"pair": Group(processes=2), "one": Group()}) as workers:
    print(*workers["pair"].pids, *workers["one"].pids, flush=True)
    workers["one"].run(functions.sleep, 1000.0)
    workers["pair"].run(functions.sleep, 1000.0).wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "SIGTERM", "SIGKILL"])
def test_workers_end_with_their_controller(number: signal.Signals):
    """Also one that is stopped, which cannot see that its controller is gone."""
    program = [sys.executable, "-c", PROGRAM, str(TESTS)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    controller = subprocess.Popen(program, start_new_session=True, **pipes)
    assert controller.stdout is not None
    pids = [int(word) for word in controller.stdout.readline().split()]
    assert len(pids) == 3
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(0.5)
    os.killpg(controller.pid, number)
    _, stderr = controller.communicate(timeout=30)
    until = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
    if number == signal.SIGINT:
        assert stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
def test_a_start_that_fails_ends_all():
    with pytest.raises(WorkerError, match="ValueError: no"), open_workers({"a": Group(), "b": Group(start=functions.fails)}):
        pass
    other = {"a": Group(devices=2, environment={"JAX_NUM_CPU_DEVICES": "1"})}
    with pytest.raises(ArgosyError, match="has 1 devices, not 2"), open_workers(other):
        pass


def listening() -> set[str]:
    """Addresses other than loopback at which this machine listens."""
    addresses = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and address.partition(":")[0] not in ("0100007F", "0000000000000000FFFF00000100007F"):
                addresses.add(address)
    return addresses


@pytest.mark.slow
def test_nothing_listens_beyond_this_machine():
    before = listening()
    with socket.create_server(("0.0.0.0", 0)):
        assert listening() > before
    with open_workers({"pair": Group(processes=2), "one": Group()}):
        assert listening() <= before
