"""Runs untrusted Python code, such as code that a model wrote, under limits that the kernel enforces.

    ran = run_code("print(input())", stdin="3")        # ran.stdout == "3\n", ran.exit_code == 0

The code runs in a new interpreter with the standard library alone, in a separate folder that is removed afterwards. Its limits are:

    files       It can read the standard library, and read and write its folder (Landlock). It can see names, sizes and times of
                other files, but not contents. It cannot change modes, owners and times of files.
    network     It can make no sockets but socket pairs (seccomp).
    processes   It can start no process and no program. It can start at most `threads` threads (seccomp, RLIMIT_NPROC).
    others      It can send no signals to other processes, and cannot read their environment, memory or descriptors (Landlock, seccomp).
    time        Its CPU time is limited (RLIMIT_CPU), and so is its time by the clock. It ends with this process (PR_SET_PDEATHSIG), and
                at the latest by a timer.
    memory      Its address space, the size of a file and the number of open files are limited. The size of its folder is checked 20
                times a second.
    output      Only the first part of its output is kept. `SandboxResult.capped` says whether there was more.

No privileges are needed. The sandbox uses Landlock (Linux 5.13), seccomp and resource limits. To limit threads it uses a separate user
(if run as root), a user namespace, or a count of the threads that the user already runs. `available` tries all of these. If one is
missing, code is refused with an error; it never runs with fewer protections. The sandbox does not stop an attacker who knows a hole in
the kernel: for that, put the whole run into a virtual machine.
"""

import os
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from threading import Lock

from argosy.core.errors import ArgosyError, Unsupported
from argosy.rl.sandbox.folder import everybody_reaches, library, remove
from argosy.rl.sandbox.process import SPARE_S, SandboxLimits, SandboxProcess, SandboxResult
from argosy.rl.sandbox.system_calls import TABLES

# How the kernel is made to count threads apart (`child.count_apart`), the better way first.
WAYS = ("uid", "namespace", "count")


DEFAULT = SandboxLimits()


def run_code(code: str, stdin: str = "", limits: SandboxLimits = DEFAULT) -> SandboxResult:
    """Runs Python code as `main.py` in an empty folder, until it ends or reaches a limit.

    Raises:
        Unsupported: this machine cannot keep the code from files, the network or other processes. `available` returns the reasons.
    """
    if reasons := available():
        problem = f"untrusted code cannot be run here: {'; '.join(reasons)}"
        raise Unsupported(problem, hint="it needs Linux 5.13 or later with Landlock and seccomp")
    return _run(code, stdin, limits)


def available() -> list[str]:
    """Returns the reasons why code cannot be run here; none if it can. Each call runs trial code for 0.2 seconds, until the trial has
    succeeded once."""
    with _LOCK:
        try:
            _try()
        except ArgosyError as error:
            return [error.what]
    return []


_LOCK = Lock()

# What must fail, and how many threads there may be. A thread that has ended may still be counted.
PROBE = """
import os, socket, threading, time
def tried(what):
    try: what()
    except OSError: return
    print("not refused:", what.__name__)
def opens_files(): open("/etc/passwd")
def lists_folders(): os.listdir("/")
def writes_elsewhere(): open("../argosy-probe", "w")
def makes_sockets(): socket.socket()
def forks(): os.fork() or os._exit(0)
def runs_programs(): os.execv("/bin/true", ["true"])
def signals_others(): os.kill(os.getppid(), 0)
for what in (opens_files, lists_folders, writes_elsewhere, makes_sockets, forks, runs_programs, signals_others): tried(what)
def threads():
    end, count = threading.Event(), 0
    try:
        while count < 100:
            threading.Thread(target=end.wait, daemon=True).start()
            count += 1
    except RuntimeError: pass
    end.set()
    return count
found = threads()
if not 1 <= found <= 4: print(found, "threads start where 4 may")
open("own", "w").write("x")
print("done")
"""


@cache
def _try() -> None:
    """Runs trial code that attempts forbidden operations.

    Raises:
        Unsupported: one of the operations succeeded, or this system is not known.
        ArgosyError: the trial did not run.
    """
    if sys.platform != "linux":
        raise Unsupported(f"the system is {sys.platform}, not Linux")
    machine = os.uname().machine
    if machine not in TABLES or sys.byteorder != "little" or sys.maxsize < 2**32:
        raise Unsupported(f"the numbers of system calls on {machine} are not known")
    outcome = _run(PROBE, "", SandboxLimits(threads=4))
    lines = outcome.stdout.splitlines()
    if lines != ["done"]:
        why = [line for line in lines if line != "done"] or outcome.stderr.strip().splitlines()[-1:]
        why = why or [f"it ended by {outcome.killed_by}"]
        raise Unsupported(f"a trial run failed: {'; '.join(why)}")


def _run(code: str, stdin: str, limits: SandboxLimits) -> SandboxResult:
    reads, lists, everybody = library()
    folder = tempfile.mkdtemp(prefix="argosy-code-")
    try:
        Path(folder, "main.py").write_text(code, encoding="utf-8", errors="surrogatepass")
        keep_fsuid = not (everybody and everybody_reaches(folder))
        setup = {
            "folder": folder, "reads": reads, "lists": lists, "limits": asdict(limits), "ways": list(WAYS), "keep_fsuid": keep_fsuid,
            "parent": os.getpid(), "last_s": float(limits.wall_s + SPARE_S),
        }  # fmt: skip
        return SandboxProcess(setup, folder, limits).ran(stdin.encode("utf-8", "replace"))
    finally:
        remove(folder)
