"""Worker processes that run reward functions (`child.py`). A process is started once and reused. A process that exceeds its time limit
is ended and replaced.

Workers are new interpreters, never forks, because this process may have jax's threads. Neither a function that never returns nor one
that crashes the interpreter can harm the run. This module knows nothing of rewards: a call is the number of a function with its
arguments, and a reply is whatever the worker sent back.
"""

import json
import os
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, complaint
from argosy.core.process.child import ChildProcess, reason_of
from argosy.core.process.poll import ready_to_read

CHILD = Path(__file__).with_name("child.py")
# Limit for importing what functions need: torch takes ten seconds on a busy machine.
LOADING_S = 300.0
# How often a process is looked at whose socket a child of its own may hold open.
LOOK_S = 0.5


@dataclass(frozen=True)
class RewardCall:
    """One call of one function.

    function: the index of the function.
    count: the number of completions.
    arguments: makes the arguments once a process is free, so that few of them are in memory at once.
    timeout: the time limit of the call in seconds.
    """

    function: int
    count: int
    arguments: Callable[[], Mapping[str, Any]]
    timeout: float


Answer = dict[str, Any]  # one of: values, wrong, raised, timed_out, died


@dataclass
class _Worker:
    process: ChildProcess
    until: float
    # The number of the call it works on; None while it loads, -1 while it is free.
    call: int | None = None

    def send(self, document: Mapping[str, Any]) -> None:
        try:
            self.process.send(pickle.dumps(document, protocol=5))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise BadInput(f"a batch cannot be sent to another process: {complaint(error)}") from None

    def end(self) -> str:
        """Ends the process and the processes that it has started. Returns the reason of its death, if it had died before."""
        reason = reason_of(self.process.end())
        return f"{reason}{': out of memory?' if reason == 'SIGKILL' else ''}"


class RewardPool:
    """Worker processes, each of which has loaded all functions."""

    def __init__(self, functions: Sequence[Mapping[str, Any]], workers: int):
        self._functions = [dict(source) for source in functions]
        self._path = [os.getcwd(), *(entry for entry in sys.path if entry)]
        self._workers = workers
        self._lock = Lock()
        self._processes: list[_Worker] = []
        # What the first process says of each function.
        self.about: list[dict[str, Any]] = []
        self._end = weakref.finalize(self, _end_all, self._processes, os.getpid())
        self._start()
        self.run([])

    def run(self, calls: Sequence[RewardCall], done: Callable[[int, Answer], None] = lambda *_: None) -> list[Answer]:
        """Runs calls on the workers. Returns the replies in the order of the calls.

        Args:
            done: called with the index and the reply of each call as it arrives.

        Raises:
            ArgosyError: a process cannot be started, or cannot load its functions again.
        """
        answers: list[Answer] = [{}] * len(calls)
        waiting = deque(range(len(calls)))
        with self._lock:
            self._start()
            try:
                while waiting or any(worker.call != -1 for worker in self._processes):
                    self._hand_out(calls, waiting)
                    for number, answer in self._arrived():
                        answers[number] = answer
                        done(number, answer)
                    # Before work starts all are needed; later, one that loads may do so beside what follows.
                    if calls and not waiting and all(worker.call in (None, -1) for worker in self._processes):
                        break
            except BaseException:
                _end_all(self._processes, os.getpid())
                raise
        return answers

    def close(self) -> None:
        """Ends the worker processes."""
        self._end()

    def _start(self) -> None:
        while len(self._processes) < self._workers:
            self._processes.append(_started(self._functions, self._path))

    def _hand_out(self, calls: Sequence[RewardCall], waiting: deque[int]) -> None:
        for place, worker in enumerate(self._processes):
            if worker.call != -1 or not waiting:
                continue
            call = calls[waiting[0]]
            try:
                worker.send({"function": call.function, "count": call.count, "given": call.arguments()})
            except BrokenPipeError:
                # It died while it had nothing to do, so the call has not begun.
                self._replace(place)
                continue
            worker.call, worker.until = waiting.popleft(), time.monotonic() + call.timeout

    def _arrived(self) -> list[tuple[int, Answer]]:
        """Waits until a worker replies, dies or exceeds its time limit. Returns the index and the reply of each call that is over."""
        busy = {worker.process.fileno(): place for place, worker in enumerate(self._processes) if worker.call != -1}
        if not busy:
            return []
        remaining = min(self._processes[place].until for place in busy.values()) - time.monotonic()
        ready = ready_to_read(list(busy), min(remaining, LOOK_S))
        answers: list[tuple[int, Answer]] = []
        for number, place in busy.items():
            worker, answer = self._processes[place], None
            try:
                if number in ready or worker.process.is_over:
                    answer = None if (message := worker.process.arrived()) is None else json.loads(message)
            except EOFError:
                answer = self._ended(place)
            else:
                if answer is None and time.monotonic() > worker.until:
                    answer = self._late(place)
            if answer is None:
                continue
            if "functions" in answer:
                self._loaded(answer["functions"])
                worker.call = -1
                continue
            answers.append((worker.call if worker.call is not None else -1, answer))
            worker.call = -1
        return answers

    def _loaded(self, about: list[dict[str, Any]]) -> None:
        self.about = self.about or about
        if about != self.about:
            number = next(i for i, (a, b) in enumerate(zip(about, self.about, strict=True)) if a != b)
            why = about[number].get("wrong", {}).get("what", "its parameters changed")
            raise ArgosyError(f"`{self._functions[number]['of']}` cannot be loaded any more: {why}")

    def _ended(self, place: int) -> Answer:
        loading = self._processes[place].call is None
        cause = self._replace(place, start=not loading)
        if loading:
            names = ", ".join(f"`{source['of']}`" for source in self._functions)
            problem = f"a process ended while it loaded {names}: {cause}"
            raise ArgosyError(problem, hint="it was killed, or a module ends the interpreter")
        return {"died": cause}

    def _late(self, place: int) -> Answer:
        loading = self._processes[place].call is None
        self._replace(place, start=not loading)
        if loading:
            names = ", ".join(f"`{source['of']}`" for source in self._functions)
            raise ArgosyError(f"loading {names} takes more than {LOADING_S:g} s")
        return {"timed_out": True}

    def _replace(self, place: int, start: bool = True) -> str:
        cause = self._processes[place].end()
        if start:
            self._processes[place] = _started(self._functions, self._path)
        else:
            del self._processes[place]
        return cause


def _started(functions: Sequence[Mapping[str, Any]], path: Sequence[str]) -> _Worker:
    """Starts a worker, which begins to load the functions.

    Args:
        path: the `sys.path` of the worker.
    """
    # Sets are walked in the same order in every process, and no process takes an accelerator from the trainer.
    environment = os.environ | {"PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
    process = ChildProcess(["-P", "-X", "utf8", str(CHILD)], "reward functions", environment, guarded=True)
    worker = _Worker(process, time.monotonic() + LOADING_S)
    with suppress(BrokenPipeError):
        worker.send({"functions": list(functions), "path": list(path)})
    return worker


def _end_all(processes: list[_Worker], owner: int) -> None:
    # A forked process has the list, but not the processes.
    while processes and os.getpid() == owner:
        processes.pop().end()
