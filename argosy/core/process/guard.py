"""Ends a process together with all processes that it has started. This file needs only the standard library, because scripts that are
run by path import it directly.

A process that calls `setsid` leaves its process group, so killing the group does not end it. On Linux, a guard ends it: a process
between the trainer and the process that runs code of users. The guard is a subreaper: processes below it that lose their parent become
its children, whatever their group. It runs no code of users, so that it cannot be kept busy.
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
# Killing is repeated, because a process may start another one before it is killed, and takes a moment to end.
MOST_KILLS, BETWEEN_KILLS_S = 1000, 0.001


def run_guarded(lifeline: int, *closed: int) -> None:
    """Forks on Linux: this function returns in the child, and this process becomes its guard. When the child ends in any way, or the
    other end of the pipe `lifeline` closes, the guard ends all processes below it. Then it ends itself, with the exit code or signal of
    the child.

    On other systems, this process continues, and a thread ends it with its group when the pipe closes.

    Args:
        lifeline: the descriptor of the reading end of a pipe.
        closed: descriptors that the guard closes, so that the processes at their other ends notice at once when the child ends.
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
        # A signal that user code sends to its own group must not reach the guard.
        os.setpgid(0, 0)
        return
    status = 1
    try:
        status = _guard(lifeline, pid, closed)
    finally:
        _exit(status)


def _end_with_pipe(lifeline: int) -> None:
    """Waits until the other end of a pipe closes, and kills this process and its group. Nothing is ever written to the pipe."""
    # `select` takes no descriptors above 1,023.
    waiting = select.poll()
    waiting.register(lifeline, select.POLLIN)
    waiting.poll()
    os.killpg(0, signal.SIGKILL)


def _guard(lifeline: int, pid: int, closed: tuple[int, ...]) -> int:
    """Waits until the child ends or the other end of the lifeline closes, and kills all descendants. Returns the child's wait
    status."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # The guard ignores these signals. If they are sent to all processes of a job, they end the child, and then the guard ends too.
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
    """Ends this process in the way that a wait status describes: with the same signal or exit code."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        # The child has already dumped its core.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)


def reap_children(pid: int) -> int | None:
    """Reaps all children that have ended, including adopted orphans. Returns the wait status of the child `pid`; None: it lives."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            status = child[1] if child[0] == pid else status
    return status


def end_with(parent: int) -> None:
    """Makes this process end when its parent ends, on Linux. `parent` is the pid of the parent."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def collect_orphans() -> None:
    """Makes this process a subreaper on Linux: descendants that lose their parent become its children."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_started(pid: int) -> None:
    """Kills all descendants of a process on Linux, until none is left."""
    for _ in range(MOST_KILLS):
        descendants = started_by(pid)
        for descendant in descendants:
            with contextlib.suppress(OSError):
                os.kill(descendant, signal.SIGKILL)
        if not descendants:
            return
        time.sleep(BETWEEN_KILLS_S)


def started_by(pid: int) -> list[int]:
    """The pids of the descendants of a process that have not ended; empty on other systems than Linux."""
    if sys.platform != "linux":
        return []
    children = children_of if os.path.exists(f"/proc/{pid}/task/{pid}/children") else all_children().get
    pids = [pid]
    for parent in pids:
        pids += children(parent) or ()
    return [child for child in pids[1:] if stat(child)[0] not in b"ZX"]


def children_of(pid: int) -> list[int]:
    """The pids of the children of a process, from a list that kernels with CONFIG_PROC_CHILDREN have."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def all_children() -> dict[int, list[int]]:
    """The pids of the children of every process, by the pid of the parent."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        children.setdefault(stat(name)[1], []).append(int(name))
    return children


def stat(pid: int | str) -> tuple[bytes, int]:
    """The state letter of a process, and the pid of its parent. A process that does not exist has the state X."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            return state, int(parent)
    except OSError:
        return b"X", 0
