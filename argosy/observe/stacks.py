"""Writes the stacks of all threads when a process is stuck. A thread outside of Python writes them, also while Python waits in XLA.

jax does not notice a peer that is alive but stuck (jax-ml/jax#38503), because its heartbeats go on. So each process of a run sets a
timer at every step. When the timer expires, the stacks are written to a file and the process ends.
"""

import faulthandler
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


# The least seconds between two settings of the timer, because each setting starts a thread.
EVERY_S = 1.0
# A step counts as stuck after at least this many seconds, and this many times the slowest step before.
LEAST_S, TIMES = 30.0, 10


def write_when_asked(file: IO[Any]) -> None:
    """Lets the process write the stacks of all threads to a file when it receives SIGUSR1, which a supervisor sends."""
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


class Watchdog:
    """Writes the stacks of all threads and ends the process if it does not call `alive` in time.

    The limit of a step is ten times the slowest step before, at least 30 s and at most `limit_s`. The first step, which is compiled,
    and functions that run `patiently` (evaluations, checkpoints) may take `limit_s`.

    Args:
        limit_s: the longest limit, in seconds.
        stacks: the file for the stacks. The default is stderr.
        later_s: the seconds that are added to every limit.
    """

    def __init__(self, limit_s: float, stacks: Path | None = None, later_s: float = 0.0):
        self.limit_s, self.later_s = limit_s, later_s
        self.file: IO[Any] = stacks.open("a") if stacks is not None else sys.stderr
        self._slowest: float | None = None
        self._last = self._armed = time.monotonic()
        write_when_asked(self.file)
        self._arm(limit_s)

    def alive(self) -> None:
        """Restarts the timer. Called after every step."""
        now = time.monotonic()
        took, self._last = now - self._last, now
        if self._slowest is None:
            # The first step included a compilation.
            self._slowest = 0.0
        else:
            self._slowest = max(self._slowest, took)
        if now - self._armed > EVERY_S:
            self._arm(self._step_s())

    def patiently(self, do: Callable[[T], R]) -> Callable[[T], R]:
        """Returns the same function, which may take up to `limit_s` and does not count as part of a step."""

        def done(argument: T) -> R:
            self._arm(self.limit_s)
            try:
                return do(argument)
            finally:
                self._last = time.monotonic()
                # Set at once. Otherwise the leader, whose next step begins, might end before this process has written its stacks.
                self._arm(self._step_s())

        return done

    def _step_s(self) -> float:
        """Returns the seconds that a step may take."""
        return self.limit_s if self._slowest is None else min(self.limit_s, max(LEAST_S, TIMES * self._slowest))

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _arm(self, seconds: float) -> None:
        self._armed = time.monotonic()
        faulthandler.dump_traceback_later(seconds + self.later_s, exit=True, file=self.file)


_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+( \[[^\]]*\])? \(most recent call first\):$")


def fold_stacks(texts: Mapping[int, str]) -> str:
    """Joins the stacks of several processes to one text, in which equal stacks appear once. `texts`: the output of `faulthandler`, by
    rank."""
    seen: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        stacks = Counter(_stacks(text))
        for stack, n in stacks.items():
            seen.setdefault(stack, []).extend([rank] * min(n, 1))
    lines = []
    for stack, ranks in sorted(seen.items(), key=lambda item: (-len(item[1]), item[1])):
        lines += [f"process{'es' if len(ranks) > 1 else ''} {_ranges(ranks)}:", stack, ""]
    return "\n".join(lines).rstrip()


def _stacks(text: str) -> list[str]:
    """Returns the stack of each thread, without the number of the thread."""
    out: list[list[str]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            out.append([])
        elif line.startswith("  File ") and out:
            out[-1].append(line)
        elif not line.startswith("  "):
            # Text after the stacks, such as the list of extension modules.
            out.append([])
    return ["\n".join(stack) for stack in out if stack and not _is_idle(stack)]


# The file and the function of the last frame of a thread that waits for work.
_WAITS = re.compile(r'(threading\.py|queue\.py|selectors\.py|concurrent/futures/thread\.py)", line \d+ in (wait|get|select|_worker)$')


def _is_idle(stack: list[str]) -> bool:
    """Whether a thread other than the main one waits for work, which does not explain why the process is stuck."""
    return stack[-1].endswith(" in _bootstrap") and _WAITS.search(stack[0]) is not None


def _ranges(ranks: list[int]) -> str:
    """Formats ranks as ranges: 0-3, 7."""
    out: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if out and out[-1][-1] == rank - 1:
            out[-1].append(rank)
        else:
            out.append([rank])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in out)
