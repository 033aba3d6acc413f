"""Child processes: Python scripts that are run by path or by `-c`, and exchange messages with this process.

They are new interpreters, and never forks, because this process has jax's threads. Each child gets a socket for a `Channel`, whose
descriptor is its last argument. When this process ends, the socket closes, and the child ends too. A child that runs code of users,
which may start processes or keep the interpreter busy, has a guard (`core.process.guard`) instead. The guard watches a second
descriptor, the argument before the last.
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

# The number of seconds that a guard has to end its processes.
GUARD_S = 10.0


class ChildProcess:
    """A child process.

    Args:
        words: the arguments after the interpreter, such as `-P`, the script and its arguments.
        noun: the purpose of the process, for errors.
        environment: the environment variables of the child; None: those of this process.
        guarded: whether the child calls `guard.run_guarded`, so that it ends together with all processes that it has started.
        options: options of `subprocess.Popen`. By default, the child's stdin is empty, and its stdout is this process's stderr.

    Raises:
        ArgosyError: the process does not start.
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
        """Whether the child has ended."""
        return self.process.poll() is not None

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, content: bytes, timeout: float | None = None) -> None:
        """Sends a message, as in `Channel.send`."""
        self.channel.send(content, timeout)

    def arrived(self) -> bytes | None:
        """Returns the next message if it has arrived, as in `Channel.arrived`, else None. Also notices the end of the child if a
        process that it has started keeps its socket open.

        Raises:
            EOFError: the child has ended.
        """
        # The order matters: if the child has ended, all that it sent has arrived by now.
        has_ended = self.is_over
        message = self.channel.arrived()
        if message is None and has_ended:
            raise EOFError("it ended")
        return message

    def receive(self, timeout: float | None = None) -> bytes:
        """Waits for the next message, as in `Channel.receive`."""
        return self.channel.receive(timeout)

    def end(self) -> int:
        """Ends the child, and, if it is guarded, all processes that it has started. Returns its exit code, which is negative if a
        signal ended it."""
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
        """Kills the child with its process group. The child has its own group, and its pid cannot be reused before it was waited
        for."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def forget(self) -> None:
        """Closes the descriptors for the child, without ending it. For a forked process, since the child belongs to its parent."""
        self.close()
        self.process.returncode = 0

    def close(self) -> None:
        """Closes the descriptors that this process has for the child."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        self.socket.close()


def reason_of(code: int) -> str:
    """A phrase that says how a process with this exit code ended: "exit code 3", "SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
