"""Starts the process of a worker, and reports its messages, its output and its end. The controller uses this module for processes on
its machine, and Ray's actors use it for theirs.
"""

import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.core.process.child import ChildProcess

# How long what an ended process said and printed last is waited for.
LAST_S = 2.0
# A new interpreter: this one has jax's threads. Its own packages come before those of the controller.
PROGRAM = """
import json, sys
sys.path += [one for one in json.loads(sys.argv[1]) if one not in sys.path]
from argosy.launch.workers.engines.child import main
main(int(sys.argv[2]))
"""
# The kernel ends a process with the thread that forked it, so that is one that stays.
_starter = ThreadPoolExecutor(1, thread_name_prefix="starts workers")


class Process:
    """The process of a worker.

    Args:
        hello: the first message to the process, to which the id of its parent is added.
        paths: the controller's import paths, which are appended to those of the process.
        heard: called, from a thread, with each message of the process.
        printed: called, from a thread, with each line of its output.
        ended: called once, from a thread, with its exit code, which is negative if a signal ended the process.
    """

    def __init__(
        self,
        hello: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: str,
        paths: list[str],
        heard: Callable[[bytes], None],
        printed: Callable[[str], None],
        ended: Callable[[int], None],
    ):
        self._heard, self._printed, self._ended = heard, printed, ended
        self._killing, self._over = threading.Lock(), False
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": folder if Path(folder).is_dir() else None}
        words = ["-c", PROGRAM, json.dumps(paths)]
        self.child = _starter.submit(ChildProcess, words, "workers", dict(environment), **options).result()
        self.process, self.pid = self.child.process, self.child.pid
        self.send(pickle.dumps({**hello, "parent": os.getpid()}))
        self._threads = [threading.Thread(target=do, daemon=True) for do in (self._read, self._follow)]
        for thread in (*self._threads, *(threading.Thread(target=do, daemon=True) for do in (self._write, self._watch))):
            thread.start()

    def send(self, data: bytes) -> None:
        """Sends a message to the process. A thread writes it, so that a stopped process does not delay the caller."""
        self._out.put(data)

    def kill(self) -> None:
        """Kills the process and all processes that its functions have started, which are in the same session. This works even after the
        process itself has ended."""
        with self._killing, suppress(OSError):
            if not self._over:
                os.killpg(self.child.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Asks the process to end, by closing its socket."""
        with suppress(OSError):
            self.child.socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        while (data := self._out.get()) is not None:
            with suppress(OSError):
                self.child.send(data)

    def _read(self) -> None:
        with suppress(EOFError):
            while True:
                self._heard(self.child.receive())
        # Without its socket it is of no use.
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_S)
        self.kill()

    def _follow(self) -> None:
        stream: Any = self.process.stdout
        with stream:
            for line in stream:
                self._printed(line.decode("utf-8", "replace").rstrip("\n"))

    def _watch(self) -> None:
        code = self.process.wait()
        self.kill()
        with self._killing:
            # The number may be another's from now on.
            self._over = True
        for thread in self._threads:
            thread.join(LAST_S)
        self._out.put(None)
        self.leave()
        self.child.close()
        self._ended(code)
