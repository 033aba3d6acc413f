"""Messages between processes, and the processes."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from argosy.core.errors import ArgosyError
from argosy.core.process import child as room
from argosy.core.process.channel import LENGTH, Channel
from argosy.core.process.child import ChildProcess, reason_of

ECHO = """
import sys
from argosy.core.process.channel import Channel
parent = Channel(int(sys.argv[-1]))
while True:
    parent.send(parent.receive()[::-1])
"""
LAST_WORDS = """
import os, sys
from argosy.core.process.channel import Channel
parent = Channel(int(sys.argv[-1]))
parent.send(b"x" * 3_000_000)
os._exit(3)
"""


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket, Channel]]:
    """A channel, the socket at its other end, and the channel over that."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours.fileno()), theirs, Channel(theirs.fileno())


def test_a_message_arrives_whole_however_it_is_cut(ends):
    channel, other, _ = ends
    data = LENGTH.pack(5) + b"first" + LENGTH.pack(0) + LENGTH.pack(6) + b"second"
    messages = []
    for byte in data:
        other.send(bytes([byte]))
        if (message := channel.arrived()) is not None:
            messages.append(message)
    assert messages == [b"first", b"", b"second"]


def test_messages_that_arrive_together_are_told_apart(ends):
    channel, other, _ = ends
    other.send(LENGTH.pack(3) + b"one" + LENGTH.pack(3) + b"two" + LENGTH.pack(5) + b"th")
    assert channel.receive(1) == b"one"
    assert channel.receive(1) == b"two"
    with pytest.raises(TimeoutError):
        channel.receive(0.05)
    other.send(b"ree")
    assert channel.receive(1) == b"three"


def test_more_than_the_pipe_holds(ends):
    channel, _, other = ends
    content = os.urandom(5_000_000)
    thread = threading.Thread(target=channel.send, args=(content,))
    thread.start()
    assert other.receive(30) == content
    thread.join()


def test_a_message_that_nobody_takes_times_out(ends):
    channel, *_ = ends
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.send(bytes(5_000_000), 0.1)
    assert time.monotonic() - start < 5


def test_the_end_of_the_other_side(ends):
    channel, other, _ = ends
    other.send(LENGTH.pack(4) + b"last")
    other.close()
    assert channel.arrived() == b"last"
    with pytest.raises(EOFError):
        channel.arrived()
    with pytest.raises(OSError):
        channel.send(b"more")


def test_a_process_answers_and_ends():
    process = ChildProcess(["-c", ECHO], "echoes")
    process.send(b"abc", 30)
    assert process.receive(30) == b"cba"
    assert process.arrived() is None
    assert process.end() == -9
    assert process.end() == -9


def test_what_a_process_sent_before_its_end_arrives():
    process = ChildProcess(["-c", LAST_WORDS], "words")
    until = time.monotonic() + 30
    while (message := process.arrived()) is None and time.monotonic() < until:
        time.sleep(0.001)
    assert message == b"x" * 3_000_000
    process.process.wait(30)
    with pytest.raises(EOFError):
        process.arrived()
    assert process.end() == 3


def test_the_end_of_a_process_is_seen_though_another_one_holds_its_socket():
    code = "import os, sys, time\nif os.fork() == 0: time.sleep(60)"
    process = ChildProcess(["-c", code], "forks")
    process.process.wait(30)
    with pytest.raises(EOFError):
        process.arrived()
    process.end()


def test_a_process_that_does_not_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else set()
    with pytest.raises(ArgosyError, match="a process for nobody does not start: No such file"):
        ChildProcess([], "nobody", guarded=True)
    after = set(os.listdir("/proc/self/fd")) if before else before
    assert len(after) == len(before)


FORKS = f"""
import os
from argosy.core.process.child import ChildProcess
process = ChildProcess(["-c", {ECHO!r}], "echoes")
if (pid := os.fork()) == 0:
    os._exit(process.end())
assert os.waitpid(pid, 0)[1] == 0
process.send(b"still here", 30)
print(process.receive(30))
process.end()
"""


def test_a_forked_process_forgets_its_parents_child():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True)
    assert done.stdout == "b'ereh llits'\n", done.stderr


def test_the_script_side_needs_the_standard_library_alone():
    """They are imported by path, into processes that have no package."""
    for name in ("channel", "guard"):
        folder = os.path.dirname(room.__file__)
        code = f"import sys; sys.path.insert(0, {folder!r}); import {name}; print('argosy' in sys.modules, 'subprocess' in sys.modules)"
        done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
        assert done.stdout == "False False\n", done.stderr


@pytest.mark.parametrize(("code", "expected"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-70, "signal 70")])
def test_reasons(code: int, expected: str):
    assert reason_of(code) == expected
