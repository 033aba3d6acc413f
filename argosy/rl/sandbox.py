"""Runs Python code that nobody has read, such as a model's, with limits that the kernel keeps.

    ran = run_code("print(input())", stdin="3")        # ran.stdout == "3\n", ran.exit_code == 0

The code runs in a new interpreter with the standard library alone, in a folder of its own that is removed afterwards. What it may do:

    files       read the standard library and read and write its folder, nothing else (Landlock); names, sizes and times of other
                files can be seen, their contents not; modes, owners and times of files cannot be changed
    network     no sockets but pairs of its own (seccomp)
    processes   none, and no other program; `threads` of its own (seccomp, RLIMIT_NPROC)
    others      no signals to them, no look into them: environment, memory, descriptors (Landlock, seccomp)
    time        seconds of CPU and of the clock; the kernel's own timer kills it, also if this process has gone by then
    memory      its address space; the size of a file and the number of open ones; what its folder holds is looked at 20 times a second
    output      a part of what it writes is kept; `Ran.capped` says that there was more

This takes no rights: Landlock (Linux 5.13), seccomp, limits of resources, and for threads a user of its own (as root), a user
namespace, or a count of what the user has running. `available` tries all of it; where something is missing code is not run, with an
error, never with less. Nobody should take it for a wall against an attacker who has a hole in the kernel: for that, put the whole
run into a virtual machine.
"""

import json
import marshal
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from threading import Lock

from argosy.core.errors import ArgosyError, BadInput, Unsupported
from argosy.rl.sandbox_filter import TABLES

# Limit for starting an interpreter on a busy machine.
START_S = 60.0
# How often the folder of running code is measured.
LOOK_S = 0.05
# How the kernel is made to count threads apart (`sandbox_child.count_apart`), the better way first.
WAYS = ("uid", "namespace", "count")
CHILD = Path(__file__).with_name("sandbox_child.py")
# What the interpreter itself needs.
LEAST = {"threads": 0, "memory_mb": 64, "open_files": 16}


@dataclass(frozen=True)
class Limits:
    """What code may use.

    cpu_s: seconds of CPU, whole. wall_s: seconds by the clock, its interpreter's start aside. memory_mb: address space, of which the
    interpreter takes 40 MB. threads: beside the first. file_mb: the largest file. folder_mb, files: all files together.
    open_files: at a time. output_kb: kept of stdout, and of stderr.
    """

    cpu_s: int = 5
    wall_s: int | float = 10
    memory_mb: int = 512
    threads: int = 16
    file_mb: int | float = 16
    folder_mb: int | float = 64
    files: int = 1000
    open_files: int = 64
    output_kb: int = 64

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), LEAST.get(one.name)
            if value < least if least is not None else value <= 0:
                raise BadInput(f"{one.name} = {value}", hint="above 0" if least is None else f"at least {least}")
            if one.type is int and value != int(value):
                raise BadInput(f"{one.name} = {value}", hint="the kernel counts whole numbers of these")


@dataclass(frozen=True)
class Ran:
    """How code ended.

    stdout, stderr: text, with � for bytes that are none. exit_code: that of the interpreter, 1 after an exception, minus the
    signal's number where one ended it. timed_out: it used up its CPU seconds or its time. killed_by: which limit ended it (`cpu`,
    `wall`, `folder`), or the name of a signal; None where it ended by itself. seconds: by the clock. capped: it wrote more than was
    kept.
    """

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    killed_by: str | None
    seconds: float
    capped: bool


DEFAULT = Limits()


def run_code(code: str, stdin: str = "", limits: Limits = DEFAULT) -> Ran:
    """Runs Python code as `main.py` in an empty folder, to its end or to that of its limits.

    Raises:
        Unsupported: this machine cannot keep it from files, the network or other processes (`available` says why).
    """
    if reasons := available():
        what = f"untrusted code cannot be run here: {'; '.join(reasons)}"
        raise Unsupported(what, hint="it needs Linux 5.13 or later with Landlock and seccomp")
    return _run(code, stdin, limits)


def available() -> list[str]:
    """Why code cannot be run here; nothing if it can. It is tried once, which takes 0.3 seconds."""
    with _LOCK:
        return list(_reasons())


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
def writes_elsewhere(): open("/tmp/.argosy-probe", "w")
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
def _reasons() -> tuple[str, ...]:
    if sys.platform != "linux":
        return (f"the system is {sys.platform}, not Linux",)
    machine = os.uname().machine
    if machine not in TABLES or sys.byteorder != "little" or sys.maxsize < 2**32:
        return (f"the numbers of system calls on {machine} are not known",)
    try:
        ran = _run(PROBE, "", Limits(threads=4))
    except ArgosyError as error:
        return (error.what,)
    if ran.stdout.splitlines() == ["done"]:
        return ()
    lines = [line for line in ran.stdout.splitlines() if line != "done"]
    return tuple(lines or [f"the trial run failed: {(ran.stderr.strip().splitlines() or [ran.killed_by or ran.exit_code])[-1]}"])


def _run(code: str, stdin: str, limits: Limits) -> Ran:
    reads, lists, everybody = _library()
    folder = tempfile.mkdtemp(prefix="argosy-code-")
    try:
        Path(folder, "main.py").write_text(code, encoding="utf-8", errors="surrogatepass")
        keep_fsuid = not (everybody and _everybody_reaches(folder))
        how = {
            "folder": folder, "reads": reads, "lists": lists, "limits": asdict(limits), "ways": list(WAYS), "keep_fsuid": keep_fsuid,
            "parent": os.getpid(),
        }  # fmt: skip
        return _Running(how, folder, limits).ran(stdin.encode("utf-8", "replace"))
    finally:
        _removed(folder)


class _Running:
    """One process of `sandbox_child`, from its start to its end."""

    def __init__(self, how: dict[str, object], folder: str, limits: Limits):
        self.folder, self.limits, self.started = folder, limits, time.monotonic()
        asked, asking = os.pipe()
        self.told, telling = os.pipe()
        words = [sys.executable, "-P", "-s", "-S", "-X", "utf8", str(CHILD), str(asked), str(telling)]
        env = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            self.process = subprocess.Popen(
                words, **pipes, pass_fds=[asked, telling], env=env, cwd="/", bufsize=0, start_new_session=True
            )
        except OSError as error:
            os.close(asking)
            os.close(self.told)
            raise ArgosyError(f"no process for code: {error.strerror or error}") from None
        finally:
            os.close(asked)
            os.close(telling)
        with suppress(BrokenPipeError), os.fdopen(asking, "wb") as file:
            marshal.dump(how, file)

    def ran(self, stdin: bytes) -> Ran:
        try:
            self._until_ready()
            return self._watched(stdin)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.told)
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()

    def _until_ready(self) -> None:
        """Waits until the process has given up its rights.

        Raises:
            Unsupported: it cannot give them up.
            ArgosyError: it does not start.
        """
        said, until = b"", time.monotonic() + START_S
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.told, selectors.EVENT_READ)
            while said != b"ready":
                if not waiting.select(max(0.0, until - time.monotonic())):
                    raise ArgosyError(f"the interpreter for code does not start within {START_S:g} s")
                part = os.read(self.told, 1 << 12)
                if not part:
                    break
                said += part
        if said == b"ready":
            return
        if said:
            raise Unsupported(said.decode(errors="replace"))
        assert self.process.stderr is not None
        last = self.process.stderr.read().decode(errors="replace").strip().splitlines()
        raise ArgosyError(f"the interpreter for code does not start: {last[-1] if last else f'exit code {self.process.wait()}'}")

    def _watched(self, stdin: bytes) -> Ran:
        """Feeds the code, and keeps what it writes, to its end."""
        began, most = time.monotonic(), self.limits.output_kb << 10
        source, out, err = self.process.stdin, self.process.stdout, self.process.stderr
        assert source is not None
        assert out is not None
        assert err is not None
        kept: dict[int, bytearray] = {out.fileno(): bytearray(), err.fileno(): bytearray()}
        left, capped, killed = memoryview(stdin), False, None
        # The kernel's timer is the limit; this clock is for a kernel that is late.
        until, looked = began + self.limits.wall_s + 0.5, began
        with selectors.DefaultSelector() as waiting:
            for pipe in kept:
                os.set_blocking(pipe, False)
                waiting.register(pipe, selectors.EVENT_READ)
            if stdin:
                os.set_blocking(source.fileno(), False)
                waiting.register(source.fileno(), selectors.EVENT_WRITE)
            else:
                source.close()
            open_pipes = 2
            while open_pipes:
                for key, _ in waiting.select(LOOK_S):
                    if key.fd in kept:
                        part = os.read(key.fd, 1 << 16)
                        room = most - len(kept[key.fd])
                        kept[key.fd] += part[:room]
                        capped |= len(part) > room
                        if not part:
                            waiting.unregister(key.fd)
                            open_pipes -= 1
                        continue
                    with suppress(BlockingIOError):
                        try:
                            left = left[os.write(key.fd, left[: 1 << 16]) :]
                        except BrokenPipeError:
                            left = left[:0]
                        if not left:
                            waiting.unregister(key.fd)
                            source.close()
                now = time.monotonic()
                if now - looked >= LOOK_S and killed is None:
                    looked = now
                    if now > until:
                        killed = "wall"
                    elif not self._within_folder():
                        killed = "folder"
                    if killed:
                        self.process.kill()
        _, status, usage = os.wait4(self.process.pid, 0)
        seconds = time.monotonic() - began
        code = self.process.returncode = os.waitstatus_to_exitcode(status)
        if killed is None and code < 0:
            killed = self._killed_by(-code, usage.ru_utime + usage.ru_stime)
        stdout, stderr = (bytes(kept[pipe.fileno()]).decode(errors="replace") for pipe in (out, err))
        return Ran(stdout, stderr, code, killed in ("cpu", "wall"), killed, seconds, capped)

    def _killed_by(self, number: int, cpu: float) -> str:
        if number == signal.SIGKILL:
            # The kernel ends it by a count of ticks, which is a fifth off on a busy machine.
            if cpu >= 0.6 * self.limits.cpu_s:
                return "cpu"
            if time.monotonic() - self.started >= self.limits.wall_s:
                return "wall"
        return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"

    def _within_folder(self) -> bool:
        size, count, folders = 0, 0, [self.folder]
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        about = entry.stat(follow_symlinks=False)
                        size, count = size + about.st_blocks * 512, count + 1
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        if size > self.limits.folder_mb * 2**20 or count > self.limits.files:
                            return False
            except FileNotFoundError:
                continue
            except OSError:
                return False  # a path too long, or one it made unreadable
        return True


# ---- folders


@cache
def _library() -> tuple[list[str], list[str], bool]:
    """The files and folders of the standard library, without packages installed beside it, and the shared objects that it loads; the
    folders to be listed for imports; and whether everybody may read them."""
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", OBJECTS], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}
    )
    try:
        about = json.loads(found.stdout)
    except ValueError:
        raise ArgosyError("the files of the standard library cannot be found", hint=f"{sys.executable} does not run") from None
    folders = [path for path in about["path"] if os.path.isdir(path)]
    reads = [
        entry.path for path in folders for entry in os.scandir(path) if entry.name not in ("site-packages", "dist-packages")
    ]
    reads += [path for path in about["path"] if os.path.isfile(path)]
    reads += [path for path in about["objects"] if not any(path.startswith(f"{one}/") for one in reads)]
    reads += ["/etc/ld.so.cache", "/dev/urandom"]
    return reads, folders, all(map(_everybody_reaches, [*folders, *about["objects"]]))


# Imports every extension module, then tells which shared objects that took.
OBJECTS = """
import importlib.machinery as m, json, os, sys
for folder in list(sys.path):
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        module = name.partition(".")[0]
        if name.endswith(tuple(m.EXTENSION_SUFFIXES)) and not module.startswith(("_test", "xx", "_tkinter", "_ctypes_test")):
            try: __import__(module)
            except ImportError: pass
paths = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(json.dumps({"path": sys.path, "objects": sorted(p for p in paths if ".so" in p)}))
"""


def _everybody_reaches(path: str) -> bool:
    """Whether a user who owns nothing can get there and read it."""
    real = Path(os.path.realpath(path))
    return all(parent.stat().st_mode & 0o001 for parent in real.parents) and bool(real.stat().st_mode & 0o004)


def _removed(folder: str) -> None:
    """Removes the folder of code that has ended. It may be deeper than any path is long, so what is deep is moved up first."""
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.rename(inner.path, os.path.join(folder, secrets.token_hex()))
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
    os.rmdir(folder)
