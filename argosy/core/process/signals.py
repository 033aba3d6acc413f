"""Handles Ctrl-C, SIGTERM and SIGHUP (a dropped SSH connection) in a command.

By default they end the process at once, with exit code 128 + the signal's number. Nothing is lost, because files are written so that
even SIGKILL cannot harm them. Inside `asked_to_stop()`, the first signal only requests a stop, so that a training run can save its
state, and the second signal ends the process. A second SIGHUP does not end it, because the shell and the kernel may each send one when
a terminal closes.

A thread handles signals. The C-level handler wakes it through `signal.set_wakeup_fd`. Python's own handlers would not do: they run in
the main thread between two bytecodes, so not while XLA compiles, and jax discards an exception that is raised inside of its callbacks.
The thread calls `os._exit`, which skips the interpreter's teardown. In the teardown, XLA's threads crash, and it takes 0.8 CPU seconds
after training.

Only the command line calls `take_over()`, which sets this up. A program that imports argosy keeps its own handlers. There,
`asked_to_stop()` sets handlers only as long as its block runs.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
HANG_UP = getattr(signal, "SIGHUP", None)
# Limit for callbacks of `before_leaving`, which may hang on a lock of the interrupted code.
CLEANING_S = 2.0


@dataclass
class Stop:
    """Tells whether a signal has requested a stop.

    message: the text that is printed when this happens.
    code: 128 + the number of the signal; 0: there was no signal yet.
    """

    message: str
    code: int = 0

    def __call__(self) -> bool:
        return self.code != 0


class _State:
    taken_over = False
    writer = -1
    stops: list[Stop] = []  # noqa: RUF012
    leaving: list[Callable[[], object]] = []  # noqa: RUF012
    code: int | None = None


def take_over() -> None:
    """Sets up the handling of signals described above. Called once in the main thread of a command, before anything slow."""
    # Windows has only one signal, and Python's own handler is used for it.
    if os.name == "nt" or _State.taken_over:
        return
    _State.taken_over = True
    # Registered first, so it runs last.
    atexit.register(_skip_teardown)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _State.writer = writer
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in SIGNALS:
        if _is_handled(number):
            signal.signal(number, _no_op)
    # The thread inherits the mask, so that it takes no signal. Otherwise a signal that `hold` keeps pending would be lost in exec.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="signals").start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def end_command(code: int) -> None:
    """Fixes the exit code of a command that has ended, which signals no longer change. Other threads and exit functions still finish.
    The interpreter's teardown is skipped."""
    if _State.taken_over:
        _State.code = code
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def ended_with() -> int | None:
    """The exit code that was passed to `end_command`; None: it was not called yet."""
    return _State.code


def _skip_teardown() -> None:
    if _State.code is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(_State.code)


def is_command() -> bool:
    """Whether this process is the command line itself, and not a program or test that calls it."""
    return _State.taken_over


def hold() -> None:
    """Keeps signals pending until the program that this process will exec calls `take_over`. The mask survives exec. Without it, a
    Ctrl-C while Python starts would print a traceback."""
    if os.name != "nt":
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


@contextmanager
def asked_to_stop(message: str | Stop = "stopping") -> Iterator[Stop]:
    """A context manager inside which the first signal sets the yielded `Stop`, and prints its message on stderr at once. A second
    signal ends the process, unless it is SIGHUP."""
    stop = Stop(message) if isinstance(message, str) else message
    if _State.taken_over:
        _State.stops.append(stop)
        try:
            yield stop
        finally:
            _State.stops.remove(stop)
        return

    def ask(number: int, frame: Any) -> None:
        if stop.code:
            if number == HANG_UP:
                return
            raise KeyboardInterrupt
        stop.code = 128 + number
        _print(stop.message)

    before: dict[int, Any] = {}
    # In other threads, the program that runs this code handles signals.
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, ask) for number in SIGNALS if _is_handled(number)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def raising() -> Iterator[None]:
    """A context manager inside which a signal raises KeyboardInterrupt, or SystemExit with the exit code, in the main thread. It is
    used while readline waits for a line, so that readline can restore the terminal."""
    if not _State.taken_over:
        yield
        return

    done = threading.Event()

    def leave(number: int, frame: Any) -> None:
        if not done.is_set():
            done.set()
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in SIGNALS if _is_handled(number)}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The other thread would end the process at once.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    again = threading.Thread(target=_send_again, args=(reader, done), daemon=True, name="signals at a prompt")
    again.start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(-1)
        os.close(writer)
        # A signal that this thread sends now must not count as another signal.
        again.join()
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(_State.writer, warn_on_full_buffer=False)


def _send_again(reader: int, done: threading.Event) -> None:
    """Sends a signal to the main thread again until it is noticed. Python checks for signals, and then waits for a key. A signal that
    arrives between the two, or in another thread, would be noticed only with the next key."""
    number = os.read(reader, 1)
    while number and not done.wait(0.05):
        signal.pthread_kill(threading.main_thread().ident or 0, number[0])
    os.close(reader)


@contextmanager
def before_leaving(do: Callable[[], object]) -> Iterator[None]:
    """A context manager that calls `do` if a signal ends the process inside, or if Ctrl-C ends the block, for instance to end a child
    process. `do` may run in another thread, and has CLEANING_S seconds."""
    _State.leaving.append(do)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        do()
        raise
    finally:
        _State.leaving.remove(do)


def _is_handled(number: int) -> bool:
    """Whether this signal may end the process. It may not if the signal is ignored, as SIGHUP is under nohup."""
    return number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN


def _no_op(number: int, frame: Any) -> None:
    """Does nothing, because the thread handles the signal. Without a Python handler, the C-level handler would not wake the thread."""


def _watch(reader: int) -> None:
    while True:
        for number in os.read(reader, 64):
            if number not in SIGNALS:
                continue
            if _State.stops and not _State.stops[-1].code:
                stop = _State.stops[-1]
                stop.code = 128 + number
                _print(stop.message)
            elif not (_State.stops and number == HANG_UP):
                _leave(128 + number)


def _leave(code: int) -> None:
    late = threading.Timer(CLEANING_S, os._exit, (code,))
    late.daemon = True
    late.start()
    for do in reversed(_State.leaving):
        try:
            do()
        except Exception as error:
            _print(f"{type(error).__name__} while stopping: {error}")
    os._exit(code)


def _print(text: str) -> None:
    """Writes to stderr without Python's buffer, whose lock the interrupted code may hold."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        # Nobody is reading.
        pass
