"""Signals that ask a run to stop: it saves and ends instead of dying."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from argosy.jobs.machine import Interrupts

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@dataclass
class Stop:
    """Set by a signal and asked once a step. code: the exit code, 128 + the signal's number."""

    code: int = 0

    def __call__(self) -> bool:
        return self.code != 0


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Within it, Ctrl-C, SIGTERM and SIGHUP (a dropped SSH connection) ask for a stop; a second signal raises
    KeyboardInterrupt at once. Signals that are ignored, as SIGHUP is under nohup, stay ignored."""
    stop = Stop(130 if Interrupts.asked else 0)

    def ask(number: int, frame: Any) -> None:
        if stop.code:
            raise KeyboardInterrupt
        stop.code = 128 + number

    before = {}
    try:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, ask)
    except ValueError:  # not the main thread: whoever runs us handles signals
        pass
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
