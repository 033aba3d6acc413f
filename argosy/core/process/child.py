"""Child processes: Python scripts that are run by path or by `-c`, and exchange messages with this process.

They are new interpreters, never forks, because this process has jax's threads. Each gets a socket, whose descriptor is its last
argument, as a `Channel`. It ends with this process by the end of that socket; where it runs code of users, which may start processes
and keep the interpreter busy, by a guard (`core.process.guard`) and a second descriptor, the argument before.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from argosy.core.errors import ArgosyError
from argosy.core.process.channel import Channel

# For a guard to end what it guards.
GUARD_S = 10.0


class ChildProcess:
    """A child process.

    Args:
        words: its arguments behind the interpreter, such as `-P`, the script and its arguments.
        noun: what it is called in errors.
        environment: its environment variables; None: those of this process.
        guarded: it calls `guard.run_guarded`, and ends with all that it has started.
        options: of `subprocess.Popen`. Without any, it reads nothing and prints to this process's stderr.

    Raises:
        ArgosyError: it does not start.
    """

    def __init__(
        self,
        words: Sequence[str],
        noun: str,
        environment: Mapping[str, str] | None = None,
        guarded: bool = False,
        **options: Any,
    ):
        self.socket, theirs = socket.socketpair()
        descriptors, self._lifeline = [theirs.fileno()], -1
        if guarded:
            alive, self._lifeline = os.pipe()
            descriptors.insert(0, alive)
        self._owner = os.getpid()
        numbers = [str(descriptor) for descriptor in descriptors]
        options = {"stdin": subprocess.DEVNULL, "stdout": 2, "start_new_session": True, "pass_fds": descriptors} | options
        try:
            process: Any = subprocess.Popen([sys.executable, *words, *numbers], env=environment, **options)
        except OSError as error:
            self.close()
            raise ArgosyError(f"a process for {noun} does not start: {error.strerror or error}") from None
        finally:
            theirs.close()
            if guarded:
                os.close(descriptors[0])
        self.process: subprocess.Popen[bytes] = process
        self.channel = Channel(self.socket.fileno())

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, content: bytes, timeout: float | None = None) -> None:
        """`Channel.send`."""
        self.channel.send(content, timeout)

    def arrived(self) -> bytes | None:
        """`Channel.arrived`, and EOFError also where a process that it has started holds its socket open.

        Raises:
            EOFError: it has ended.
        """
        # In this order: what it sent before its end has arrived by now.
        has_ended = self.is_over
        message = self.channel.arrived()
        if message is None and has_ended:
            raise EOFError("it ended")
        return message

    def receive(self, timeout: float | None = None) -> bytes:
        """`Channel.receive`."""
        return self.channel.receive(timeout)

    def end(self) -> int:
        """Ends it, and, where it is guarded, all that it has started. Returns its exit code, negative where a signal ended it."""
        if os.getpid() != self._owner:
            self.forget()
            return 0
        if self._lifeline >= 0 and sys.platform == "linux":
            self.close()
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(GUARD_S)
        self.kill()
        self.close()
        return self.process.wait()

    def kill(self) -> None:
        """Kills it with its group. It has one of its own, and its number is nobody else's before it was waited for."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def forget(self) -> None:
        """Closes what this process has of it. For a forked process, which has the descriptors and not the child."""
        self.close()
        self.process.returncode = 0

    def close(self) -> None:
        """Closes what this process has of it."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        self.socket.close()


def reason_of(code: int) -> str:
    """How a process with this exit code ended, in words: "exit code 3", "SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
