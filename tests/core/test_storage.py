"""A run's files: the same behavior on this machine, in memory and through `file://`; what survives a kill; who holds a run."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from uuid import uuid4

import pytest

from argosy.core import locks, storage
from argosy.core.errors import ArgosyError, BadInput, Busy, Damaged
from argosy.core.storage import Store


@pytest.fixture(params=["local", "memory", "file"])
def store(request, tmp_path) -> Store:
    roots = {"local": tmp_path / "a run", "memory": f"memory://{uuid4().hex}/run", "file": f"file://{tmp_path}/run"}
    return Store(roots[request.param])


# ---- every kind of store


def test_text_comes_back(store):
    store.write_text("a/b.txt", "zwölf\n")
    assert store.read_text("a/b.txt") == "zwölf\n"
    assert store.size("a/b.txt") == 7
    store.write_text("a/b.txt", "")
    assert (store.read_text("a/b.txt"), store.size("a/b.txt")) == ("", 0)


def test_what_there_is(store):
    assert store.list() == []
    assert not store.exists("a")
    for name in ("a/x", "a/y", "b"):
        store.write_text(name, "1")
    assert (store.list(), store.list("a"), store.list("none")) == (["a", "b"], ["x", "y"], [])
    assert store.exists("a")
    assert store.exists("a/x")
    store.remove("a/x")
    assert store.list("a") == ["y"]
    store.remove("a")
    store.remove("a")
    assert store.list() == ["b"]


def test_bytes_through_open(store):
    with store.open("deep/er/x", "wb") as file:
        file.write(b"\0\1\2")
    with store.open("deep/er/x") as file:
        file.seek(1)
        assert file.read() == b"\1\2"


def test_children_are_stores(store):
    child = store.child("checkpoints").child("10")
    child.write_text("x", "1")
    assert store.read_text("checkpoints/10/x") == "1"
    assert child.is_local == store.is_local


def test_lines_are_appended(store):
    store.append_line("m.jsonl", "1")
    store.append_line("m.jsonl", "2")
    assert store.read_text("m.jsonl") == "1\n2\n"
    again = Store(store.root)
    again.append_line("m.jsonl", "3")
    again.flush()
    assert Store(store.root).read_text("m.jsonl") == "1\n2\n3\n"
    assert Store(store.root).size("m.jsonl") == 6


def test_a_torn_line_stays_alone(store):
    store.write_text("m.jsonl", '{"step": 1}\n{"st')
    store.append_line("m.jsonl", '{"step": 2}')
    assert store.read_text("m.jsonl") == '{"step": 1}\n{"st\n{"step": 2}\n'


def test_writing_whole_ends_the_lines_before(store):
    store.append_line("x", "old")
    store.write_text("x", "new\n")
    store.append_line("x", "more")
    store.flush()
    assert Store(store.root).read_text("x") == "new\nmore\n"


def test_missing_and_unreadable_files(store):
    for ask in (store.read_text, store.size, store.open):
        with pytest.raises(BadInput, match="no file `none`"):
            ask("none")
    with store.open("x", "wb") as file:
        file.write(b"ab\xff")
    with pytest.raises(Damaged, match="byte 2"):
        store.read_text("x")


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a\\b", "a\0b", ""])
def test_names_stay_inside(store, name):
    for ask in (store.read_text, store.child, store.remove, lambda n: store.write_text(n, "")):
        with pytest.raises(BadInput, match="not a valid name for a file"):
            ask(name)


def test_one_holder_at_a_time(store, monkeypatch):
    monkeypatch.setattr(locks, "SETTLE_S", 0.0)
    with store.lock():
        with pytest.raises(Busy, match=f"process {os.getpid()} on {socket.gethostname()}"):
            Store(store.root).lock()
        store.child("other").write_text("x", "1")
        store.child("other").lock().release()
    second = Store(store.root).lock()
    second.release()
    second.release()
    store.lock().release()
    assert (store.list(), store.list("other")) == (["other"], ["x"])


# ---- this machine


def test_local_paths(tmp_path, monkeypatch):
    store = Store(tmp_path / "x")
    assert store.is_local
    assert store.local_path() == tmp_path / "x"
    assert store.local_path("a/b") == tmp_path / "x" / "a" / "b"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store("~/runs").local_path() == tmp_path / "runs"
    remote = Store("memory://x")
    assert not remote.is_local
    with pytest.raises(BadInput, match="local path"):
        remote.local_path("a")
    assert Store("memory://").child("a").root == "memory://a"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.write_text("x", "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArgosyError, match="no space left") as error:
        store.write_text("x", "new")
    assert "free some space" in str(error.value)
    assert store.read_text("x") == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_files_and_directory_are_synced_in_order(tmp_path, monkeypatch):
    calls = []
    real_sync, real_replace = os.fsync, type(tmp_path).replace
    monkeypatch.setattr(os, "fsync", lambda d: calls.append(os.path.realpath(f"/proc/self/fd/{d}")) or real_sync(d))
    monkeypatch.setattr(type(tmp_path), "replace", lambda a, b: calls.append("rename") or real_replace(a, b))
    Store(tmp_path).write_text("x", "new")
    assert [call if call in ("rename", str(tmp_path)) else "file" for call in calls] == ["file", "rename", str(tmp_path)]


def test_readers_see_whole_files_and_a_kill_loses_none(tmp_path):
    """A process rewrites a file of 300 KB and appends lines until it is killed; what is there is whole at any moment."""
    script = (
        "import sys\nfrom argosy.core.storage import Store\nstore = Store(sys.argv[1])\nstep = 0\n"
        "while True:\n    store.write_text('x', str(step % 10) * 300_000)\n    store.append_line('lines', str(step))\n    step += 1\n"
    )
    store = Store(tmp_path)
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
        try:
            wait_for(lambda: store.exists("lines") and store.size("lines") > 100)
            for _ in range(50):
                text = store.read_text("x")
                assert len(text) == 300_000
                assert len(set(text)) == 1
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        lines = store.read_text("lines").splitlines()
        assert lines == [str(i) for i in range(len(lines))]
        assert len(set(store.read_text("x"))) == 1
        assert "x" in store.list()
        store.remove("lines")


def wait_for(is_so, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


HOLD = (
    "import os, sys, time\nfrom argosy.core.storage import Store\nlock = Store(sys.argv[1]).lock()\n"
    "child = os.fork() if len(sys.argv) > 2 else None\n"
    "if child != 0: print(child or 'held', flush=True)\n"
    "else: lock.release(); Store(sys.argv[1]).write_text('let go', '')\n"
    "time.sleep(60)\n"
)


def holder(root, *more: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(root), *more], stdout=subprocess.PIPE, text=True)


def test_the_lock_dies_with_its_process(tmp_path):
    process = holder(tmp_path)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(Busy, match=f"process {process.pid} on ") as error:
            Store(tmp_path).lock()
        assert "dir=NEW" in str(error.value)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    Store(tmp_path).lock().release()


def test_the_lock_does_not_live_on_in_a_forked_child(tmp_path):
    process = holder(tmp_path, "fork")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(Busy):
            Store(tmp_path).lock()
        process.kill()
        process.wait()
        wait_for(lambda: Store(tmp_path).exists("let go"))
        os.kill(child, 0)  # it lives
        Store(tmp_path).lock().release()
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_file_system_without_locks_gets_a_lease(tmp_path, monkeypatch):
    import fcntl

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(locks, "SETTLE_S", 0.0)
    with Store(tmp_path).lock():
        assert set(json.loads((tmp_path / ".lock").read_text())) == {"pid", "host", "token", "renewed"}
        with pytest.raises(Busy, match=str(os.getpid())):
            Store(tmp_path).lock()
    Store(tmp_path).lock().release()


# ---- elsewhere


@pytest.fixture
def remote(monkeypatch) -> Store:
    monkeypatch.setattr(locks, "SETTLE_S", 0.0)
    return Store(f"memory://{uuid4().hex}")


def lease(store: Store, **changes: object) -> None:
    holder = {"pid": 1, "host": "elsewhere", "token": "t", "renewed": time.time()}
    store.write_text(".lock", json.dumps(holder | changes))


def test_a_lease_that_ran_out_is_taken(remote):
    lease(remote)
    with pytest.raises(Busy, match="process 1 on elsewhere"):
        remote.lock()
    lease(remote, renewed=time.time() - locks.LEASE_S - 1)
    remote.lock().release()
    assert not remote.exists(".lock")


def test_a_lease_of_a_dead_process_of_this_host_is_taken(remote):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    lease(remote, host=socket.gethostname(), pid=dead.pid)
    remote.lock().release()
    lease(remote, host=socket.gethostname(), pid=os.getppid())
    with pytest.raises(Busy):
        remote.lock()


def test_a_lease_of_an_earlier_process_with_this_ones_number_is_taken(remote, monkeypatch):
    """In a container that was started again, where the program is process 1 each time; but not while it is renewed."""
    monkeypatch.setattr(locks, "LEASE_S", 1.5)
    lease(remote, host=socket.gethostname(), pid=os.getpid(), renewed=time.time() + 60)
    with remote.lock(), pytest.raises(Busy):
        remote.lock()
    lease(remote, host=socket.gethostname(), pid=os.getpid(), renewed=time.time() + 60)
    its = {"host": socket.gethostname(), "pid": os.getpid()}
    monkeypatch.setattr(storage.time, "sleep", lambda _: lease(remote, **its, renewed=time.time() + 61))
    with pytest.raises(Busy):
        remote.lock()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"renewed": "never"}'])
def test_a_lease_that_says_nothing_is_taken(remote, text):
    remote.write_text(".lock", text)
    remote.lock().release()


def test_a_lease_is_renewed_until_released(remote, monkeypatch):
    monkeypatch.setattr(locks, "LEASE_S", 0.08)
    lock = remote.lock()
    first = json.loads(remote.read_text(".lock"))["renewed"]
    wait_for(lambda: json.loads(remote.read_text(".lock"))["renewed"] > first)
    lock.release()
    assert not remote.exists(".lock")


def test_a_lease_lost_to_another_is_not_taken_back(remote, monkeypatch):
    monkeypatch.setattr(locks, "LEASE_S", 0.08)
    lock = remote.lock()
    lease(remote)
    lock._thread.join(5)
    assert not lock._thread.is_alive()
    lock.release()
    assert json.loads(remote.read_text(".lock"))["token"] == "t"


def test_of_two_at_the_same_moment_one_gets_it(remote, monkeypatch):
    """Both find no lease and write one; after a pause each looks whose it is."""
    monkeypatch.setattr(storage.time, "sleep", lambda _: lease(remote))
    with pytest.raises(Busy, match="elsewhere"):
        remote.lock()


def test_lines_are_not_put_at_every_step(remote, monkeypatch):
    puts = []
    real = remote._files.pipe_file
    monkeypatch.setattr(type(remote._files), "pipe_file", lambda self, path, data: puts.append(data) or real(path, data))
    for step in range(100):
        remote.append_line("m", str(step))
    remote.flush()
    remote.flush()
    assert len(puts) == 2
    assert len(remote.read_text("m").splitlines()) == 100


def test_unknown_addresses_are_bad_input():
    with pytest.raises(BadInput, match="nowhere"):
        Store("nowhere://x")


def test_local_stores_import_no_fsspec():
    script = "import sys, argosy.core.storage as s; s.Store('x'); assert 'fsspec' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
