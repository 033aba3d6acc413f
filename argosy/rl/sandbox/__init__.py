"""Runs Python code that nobody has read, such as a model's, with limits that the kernel keeps.

    ran = run_code("print(input())", stdin="3")        # ran.stdout == "3\n", ran.exit_code == 0

The code runs in a new interpreter with the standard library alone, in a folder of its own that is removed afterwards. What it may do:

    files       read the standard library and read and write its folder, nothing else (Landlock); names, sizes and times of other
                files can be seen, their contents not; modes, owners and times of files cannot be changed
    network     no sockets but pairs of its own (seccomp)
    processes   none, and no other program; `threads` of its own (seccomp, RLIMIT_NPROC)
    others      no signals to them, no look into them: environment, memory, descriptors (Landlock, seccomp)
    time        seconds of CPU (RLIMIT_CPU) and of the clock; it ends with this process (PR_SET_PDEATHSIG), and at the latest by a timer
    memory      its address space; the size of a file and the number of open ones; what its folder holds is looked at 20 times a second
    output      a part of what it writes is kept; `SandboxResult.capped` says that there was more

This takes no rights: Landlock (Linux 5.13), seccomp, limits of resources, and for threads a user of its own (as root), a user
namespace, or a count of what the user has running. `available` tries all of it; where something is missing code is not run, with an
error, never with less. Nobody should take it for a wall against an attacker who has a hole in the kernel: for that, put the whole
run into a virtual machine.
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
        Unsupported: this machine cannot keep the code from files, the network or other processes (`available` says why).
    """
    if reasons := available():
        problem = f"untrusted code cannot be run here: {'; '.join(reasons)}"
        raise Unsupported(problem, hint="it needs Linux 5.13 or later with Landlock and seccomp")
    return _run(code, stdin, limits)


def available() -> list[str]:
    """The reasons why code cannot be run here; empty if it can. Code is tried until it succeeds once, which takes 0.2 seconds."""
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
    """Runs code that tries what must fail.

    Raises:
        Unsupported: some of it did not fail, or this system is not known.
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
