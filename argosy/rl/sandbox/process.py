"""Runs `child.py` once: starts the process, feeds its input, reads its output, and enforces the limits on time, folder size and output
from outside. `rl.sandbox` explains why a run is safe.
"""

import marshal
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, Unsupported
from argosy.core.process.child import ChildProcess, reason_of

# Limit for starting an interpreter on a busy machine.
START_S = 60.0
# The kernel's timer ends code this much after its time, in case this process is stopped or late.
SPARE_S = 10.0
# How often the folder of running code is measured.
LOOK_S = 0.05
CHILD = Path(__file__).with_name("child.py")
# What the interpreter itself needs.
LEAST = {"threads": 0, "memory_mb": 64, "open_files": 16}


@dataclass(frozen=True)
class SandboxLimits:
    """The limits under which code runs.

    cpu_s: the CPU time, in whole seconds.
    wall_s: the time by the clock in seconds, without the start of the interpreter.
    memory_mb: the address space, of which the interpreter takes 40 MB.
    threads: the number of threads beside the main thread.
    file_mb: the size of a file.
    folder_mb: the size of all files together.
    files: the number of files.
    open_files: the number of files that are open at a time.
    output_kb: the size of the output that is kept, for stdout and for stderr each.
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
        for limit in fields(self):
            value, least = getattr(self, limit.name), LEAST.get(limit.name)
            if value < least if least is not None else value <= 0:
                raise BadInput(f"{limit.name} = {value}", hint="above 0" if least is None else f"at least {least}")
            if limit.type is int and value != int(value):
                raise BadInput(f"{limit.name} = {value}", hint="the kernel counts whole numbers of these")


@dataclass(frozen=True)
class SandboxResult:
    """The result of running code.

    stdout, stderr: the output as text, with � for bytes that are no text.
    exit_code: the exit status of the interpreter. It is 1 after an exception, and minus the signal's number if a signal ended the code.
    timed_out: whether the code used up its CPU time or its time by the clock.
    killed_by: the limit that ended the code (`cpu`, `wall`, `folder`), or the name of a signal; None if the code ended by itself.
    seconds: the duration by the clock.
    capped: whether the code wrote more output than was kept.
    """

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    killed_by: str | None
    seconds: float
    capped: bool


class SandboxProcess:
    """One process of `child.py`, from its start to its end."""

    def __init__(self, setup: Mapping[str, Any], folder: str, limits: SandboxLimits):
        self.folder, self.limits, self.started = folder, limits, time.monotonic()
        environment = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        words = ["-P", "-s", "-S", "-X", "utf8", str(CHILD)]
        self.child = ChildProcess(words, "code", environment, cwd="/", bufsize=0, **pipes)
        self.process = self.child.process
        with suppress(OSError):
            self.child.send(marshal.dumps(dict(setup)), START_S)

    def ran(self, stdin: bytes) -> SandboxResult:
        try:
            self._until_ready()
            return self._watched(stdin)
        finally:
            self.child.end()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()

    def _until_ready(self) -> None:
        """Waits until the process has given up its rights.

        Raises:
            Unsupported: the process cannot give up its rights.
            ArgosyError: the process does not start.
        """
        try:
            reply = self.child.receive(START_S)
        except TimeoutError:
            raise ArgosyError(f"the interpreter for code does not start within {START_S:g} s") from None
        except EOFError:
            assert self.process.stderr is not None
            last = self.process.stderr.read().decode(errors="replace").strip().splitlines()
            reason = last[-1] if last else reason_of(self.process.wait())
            raise ArgosyError(f"the interpreter for code does not start: {reason}") from None
        if reply != b"ready":
            raise Unsupported(reply.decode(errors="replace"))

    def _watched(self, stdin: bytes) -> SandboxResult:
        """Feeds the code its input and collects its output, until the code ends or reaches a limit."""
        start, killed = time.monotonic(), None
        # The end of the process, and not of its output, which it may close to go on in silence.
        ended = os.pidfd_open(self.process.pid)
        try:
            with selectors.DefaultSelector() as waiting:
                streams = SandboxStreams(self.process, waiting, stdin, self.limits.output_kb << 10)
                waiting.register(ended, selectors.EVENT_READ)
                looked = start
                while True:
                    ready = {key.fd for key, _ in waiting.select(LOOK_S if killed else self._pause(start))}
                    streams.serve(ready)
                    if ended in ready and not streams.read:
                        break
                    if ended in ready or killed:
                        continue
                    now = time.monotonic()
                    if now - start >= self.limits.wall_s:
                        killed = "wall"
                    elif now - looked >= LOOK_S:
                        looked, killed = now, None if self._within_folder() else "folder"
                    if killed:
                        # Not Popen.kill, which would wait for it and lose what it used.
                        os.kill(self.process.pid, signal.SIGKILL)
        finally:
            os.close(ended)
        _, status, usage = os.wait4(self.process.pid, 0)
        seconds = time.monotonic() - start
        code = self.process.returncode = os.waitstatus_to_exitcode(status)
        if code >= 0:
            killed = None
        elif killed is None:
            killed = self._killed_by(-code, usage.ru_utime + usage.ru_stime)
        return SandboxResult(*streams.texts(), code, killed in ("cpu", "wall"), killed, seconds, streams.capped)

    def _pause(self, start: float) -> float:
        return max(0.0, min(LOOK_S, start + self.limits.wall_s - time.monotonic()))

    def _killed_by(self, number: int, cpu: float) -> str:
        if number == signal.SIGKILL:
            # The kernel ends it by a count of ticks, which is a fifth off on a busy machine.
            if cpu >= 0.6 * self.limits.cpu_s:
                return "cpu"
            if time.monotonic() - self.started >= self.limits.wall_s + SPARE_S:
                return "wall"
        return reason_of(-number)

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


class SandboxStreams:
    """The input and output pipes of a process. Output beyond a limit is read and dropped."""

    def __init__(self, process: subprocess.Popen[bytes], waiting: selectors.BaseSelector, stdin: bytes, most: int):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.waiting, self.most, self.source, self.left = waiting, most, process.stdin, memoryview(stdin)
        self.kept = {pipe.fileno(): bytearray() for pipe in (process.stdout, process.stderr)}
        # Those that are not at their end.
        self.read = set(self.kept)
        self.capped = False
        for pipe in self.kept:
            os.set_blocking(pipe, False)
            waiting.register(pipe, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        waiting.register(process.stdin, selectors.EVENT_WRITE)

    def serve(self, ready: set[int]) -> None:
        """Reads from and writes to the pipes that are ready, without waiting."""
        for pipe in ready & self.read:
            part = os.read(pipe, 1 << 16)
            room = self.most - len(self.kept[pipe])
            self.kept[pipe] += part[:room]
            self.capped |= len(part) > room
            if not part:
                self.waiting.unregister(pipe)
                self.read.remove(pipe)
        if not self.source.closed and self.source.fileno() in ready:
            try:
                self.left = self.left[os.write(self.source.fileno(), self.left[: 1 << 16]) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.left = self.left[:0]
            if not self.left:
                self.waiting.unregister(self.source)
                self.source.close()

    def texts(self) -> tuple[str, str]:
        stdout, stderr = (bytes(output).decode(errors="replace") for output in self.kept.values())
        return stdout, stderr
