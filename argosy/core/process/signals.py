"""What Ctrl-C, SIGTERM and SIGHUP (a dropped SSH connection) do to a command.

By default they end the process at once, with exit code 128 + the signal's number. Nothing is lost by that: files are written
so that even SIGKILL cannot harm them. Inside `asked_to_stop()` the first signal only asks, so that a training run can save
its state; the second ends the process. A second SIGHUP does not: when a terminal closes, its shell and the kernel may each
send one.

A thread does it, woken by the C-level handler through `signal.set_wakeup_fd`. Python runs its own handlers in the main thread
between two bytecodes: not while XLA compiles, and an exception raised from one inside a callback of jax is discarded. Leaving
by `os._exit` also skips the interpreter's teardown, in which XLA's threads crash, and which takes 0.8 CPU seconds after training.

The process is taken over by `take_over()`, which only the command line calls. A program that imports argosy keeps its own
handlers; there `asked_to_stop()` sets handlers for as long as it lasts.
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
# A callback may hang on a lock of the interrupted code; the process must end all the same.
CLEANING_S = 2.0


@dataclass
class Stop:
    """Whether a signal has asked for a stop.

    code: 128 + its number, 0 while none has.
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
    """Makes signals of this process work as described above. For the main thread of a command, once, before anything slow."""
    # Windows has one signal, and Python's own handler for it.
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
    # The thread inherits the mask: a signal that it took while `hold` keeps them waiting would be lost to exec.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="signals").start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def end_command(code: int) -> None:
    """Fixes the exit code of a command that has ended; signals no longer change it. Other threads and exit functions are still waited
    for; the interpreter's teardown is skipped."""
    if _State.taken_over:
        _State.code = code
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def ended_with() -> int | None:
    """The exit code that was passed to `end_command`; None before."""
    return _State.code


def _skip_teardown() -> None:
    if _State.code is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(_State.code)


def is_command() -> bool:
    """Whether this process is the command line's own: not a program, or a test, that calls it."""
    return _State.taken_over


def hold() -> None:
    """Keeps signals waiting until `take_over` in the program that this process is about to become: the mask outlives exec, and
    a Ctrl-C while Python starts would end in a traceback."""
    if os.name != "nt":
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


@contextmanager
def asked_to_stop(message: str | Stop = "stopping") -> Iterator[Stop]:
    """In here the first signal sets the `Stop` and prints its message on stderr at once; a second one ends the process, unless it
    is SIGHUP."""
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
    # Elsewhere, whoever runs us handles signals.
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, ask) for number in SIGNALS if _is_handled(number)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def raising() -> Iterator[None]:
    """In here a signal raises in the main thread, where readline waits for a line and must give the terminal back as it was:
    KeyboardInterrupt, or SystemExit with the code."""
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
        # A signal that it sends now must not count as another one.
        again.join()
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(_State.writer, warn_on_full_buffer=False)


def _send_again(reader: int, done: threading.Event) -> None:
    """Sends a signal to the main thread again until it is seen. Python looks for signals, then waits for a key; one that comes
    between the two, or to another thread, would be seen with the next key."""
    number = os.read(reader, 1)
    while number and not done.wait(0.05):
        signal.pthread_kill(threading.main_thread().ident or 0, number[0])
    os.close(reader)


@contextmanager
def before_leaving(do: Callable[[], object]) -> Iterator[None]:
    """Calls `do` if a signal ends the process in here, or Ctrl-C the block: to say what is left undone, to end a child process.
    It may run in another thread, and has two seconds."""
    _State.leaving.append(do)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        do()
        raise
    finally:
        _State.leaving.remove(do)


def _is_handled(number: int) -> bool:
    """Whether the signal may end this process. nohup ignores SIGHUP, and a command under nohup must keep running."""
    return number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN


def _no_op(number: int, frame: Any) -> None:
    """Does nothing; the thread acts. Without a Python handler the C-level one would not write to the wake-up descriptor."""


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
    """Writes past Python's buffer, whose lock the interrupted code may hold."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        # Nobody is reading.
        pass
