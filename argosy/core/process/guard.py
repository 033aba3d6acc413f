"""What a process has started, and its end. It needs the standard library alone: scripts that are run by path import it as a file beside
them.

A process that calls `setsid` leaves its group, so that ending the group does not end it. On Linux a guard does: a process between the
trainer and one that runs code of users. It is their subreaper: what loses its parent below it becomes its child, wherever its group is.
It runs no code of users, so none can keep it busy.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
# What is killed may have started another one meanwhile, and takes a moment to end.
MOST_KILLS, BETWEEN_KILLS_S = 1000, 0.001


def run_guarded(lifeline: int, *closed: int) -> None:
    """Goes on in a forked process, on Linux; in its place stays a guard. However the forked process ends, and when the other end of the
    pipe `lifeline` closes, the guard ends all that was started below it, and then itself with the forked one's exit code or signal.

    Elsewhere than on Linux this process goes on, and a thread ends it with its group when the pipe closes.

    closed: descriptors that the guard closes, so that whoever has their other ends is told at once when the forked process ends.
    """
    os.set_inheritable(lifeline, False)
    if LIBC is None:
        threading.Thread(target=_end_with_pipe, args=(lifeline,), daemon=True, name="ends with its parent").start()
        return
    collect_orphans()
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with(guard)
        # A signal of a user's to its own group does not reach the guard.
        os.setpgid(0, 0)
        return
    status = 1
    try:
        status = _guard(lifeline, pid, closed)
    finally:
        _exit(status)


def _end_with_pipe(lifeline: int) -> None:
    """Waits until the other end of a pipe closes, to which nothing is ever written, and ends this process and its group."""
    # `select` takes no descriptors above 1,023.
    waiting = select.poll()
    waiting.register(lifeline, select.POLLIN)
    waiting.poll()
    os.killpg(0, signal.SIGKILL)


def _guard(lifeline: int, pid: int, closed: tuple[int, ...]) -> int:
    """Waits for the end of a child or of the lifeline's other side, and ends the rest. Returns the child's status."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # A signal to every process of a job ends the child, and by that the guard.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for descriptor in closed:
        os.close(descriptor)
    # `select` takes no descriptors above 1,023, and these are numbered as the trainer's are.
    waiting = select.poll()
    waiting.register(lifeline, select.POLLIN)
    waiting.register(woken, select.POLLIN)
    status, ready = reap_children(pid), set[int]()
    while status is None and lifeline not in ready:
        ready = {descriptor for descriptor, _ in waiting.poll()}
        if woken in ready:
            os.read(woken, 1 << 12)
        status = reap_children(pid)
    kill_started(os.getpid())
    return next((code for code in (status, reap_children(pid)) if code is not None), int(signal.SIGKILL))


def _exit(status: int) -> None:
    """Ends this process as a process of this wait status has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        # The child has left its core already.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)


def reap_children(pid: int) -> int | None:
    """Collects all children that have ended, also orphans that came to this process. Returns the wait status of one, None if it
    lives."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            status = child[1] if child[0] == pid else status
    return status


def end_with(parent: int) -> None:
    """Ends this process with its parent, on Linux."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def collect_orphans() -> None:
    """Makes this process, on Linux, the parent of what loses its own below it."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_started(pid: int) -> None:
    """Kills, on Linux, what a process has started and what those have, until nothing of it is left."""
    for _ in range(MOST_KILLS):
        descendants = started_by(pid)
        for descendant in descendants:
            with contextlib.suppress(OSError):
                os.kill(descendant, signal.SIGKILL)
        if not descendants:
            return
        time.sleep(BETWEEN_KILLS_S)


def started_by(pid: int) -> list[int]:
    """The descendants of a process that have not ended; none outside Linux."""
    if sys.platform != "linux":
        return []
    children = children_of if os.path.exists(f"/proc/{pid}/task/{pid}/children") else all_children().get
    pids = [pid]
    for parent in pids:
        pids += children(parent) or ()
    return [child for child in pids[1:] if stat(child)[0] not in b"ZX"]


def children_of(pid: int) -> list[int]:
    """The children of a process, as the kernel lists them (where it is built with CONFIG_PROC_CHILDREN)."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def all_children() -> dict[int, list[int]]:
    """The children of every process."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        children.setdefault(stat(name)[1], []).append(int(name))
    return children


def stat(pid: int | str) -> tuple[bytes, int]:
    """The state of a process and its parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            return state, int(parent)
    except OSError:
        return b"X", 0
