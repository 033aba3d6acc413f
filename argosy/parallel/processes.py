"""Communication between the processes of a run, each of which has its own devices.

Usually there is one process, and everything here returns at once. Several processes run the same program with the same settings. What
only one of them can know (a file, a signal, a failure) they exchange through the coordination service of `jax.distributed`. Its calls
use no device, so threads may make them while a step runs. All processes make the same calls in the same order. Rank 0 is the leader:
only it writes the files of a run.

If a process dies, the service notices that within its heartbeat time-out and ends the others (`launch.cluster.HEARTBEAT_S`).
"""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from argosy.core.errors import ArgosyError, BadInput, FailedElsewhere, UserError

T = TypeVar("T")

# The time-out of one call to the service, which is then repeated, and the interval at which an optional key is looked for.
WAIT_MS = 60_000
LOOK_S = 0.25

_calls: Counter[str] = Counter()
# The number of the leader's last call of each name whose value was removed.
_dropped: Counter[str] = Counter()
_failed_together = threading.Event()
# A value is removed this many calls of the same name later. Every process has read it by then.
READ_BY_ALL = 2
# The part of the key under which each process stores the number of the last call that it has read.
READ = "read"


def process_count() -> int:
    # jax's own count would start the devices, whose errors are reported elsewhere.
    return jax.process_count() if jax.distributed.is_initialized() else 1


def rank() -> int:
    return jax.process_index() if jax.distributed.is_initialized() else 0


def leads() -> bool:
    """Whether this process writes the files of the run."""
    return rank() == 0


def fail_together() -> None:
    """Records that all processes know of the failure of one of them, and that this process ends now."""
    _failed_together.set()


def failed_together() -> bool:
    """Whether all processes know of the failure of one of them, and end. They then end as after a success, and wait for each other: if
    one left at once, the service would take it for dead and abort the others."""
    return _failed_together.is_set()


def broadcast(name: str, make: Callable[[], T]) -> T:
    """Returns, in every process, a value that the leader makes.

    Args:
        name: the name of the call, the same in all processes.
        make: makes the value, which must be JSON. Called only in the leader.

    Raises:
        FailedElsewhere: `make` failed in the leader. Raised in the other processes; the leader raises the error itself.
    """
    if process_count() == 1:
        return make()
    key = _next(name)
    if not leads():
        message = json.loads(_wait_for(key))
        _set(f"argosy/{name}/{READ}/{rank()}", str(_calls[name]))
        if "failed" in message:
            _ends()
            raise FailedElsewhere(message["what"], message["failed"])
        return message["value"]
    _drop_read(name)
    try:
        value = make()
    except Exception as error:
        _set(key, json.dumps(_failure(error)))
        _ends()
        raise
    _set(key, json.dumps({"value": value}))
    return value


def run_together(name: str, work: Callable[[], T]) -> T:
    """Does work in every process and returns its result. If it fails in one process, it fails in all. The process that failed raises
    its error; if several failed, the one of the lowest rank does.

    Raises:
        FailedElsewhere: the work failed in another process.
    """
    if process_count() == 1:
        return work()
    key, mine, done, error = _next(name), {}, None, None
    try:
        done = work()
    except Exception as failure:
        error, mine = failure, _failure(failure)
    _drop(name)
    _set(f"{key}/{rank()}", json.dumps(mine))
    for other in range(process_count()):
        status = json.loads(_wait_for(f"{key}/{other}")) if other != rank() else mine
        if not status:
            continue
        _ends()
        if other == rank() and error is not None:
            raise error
        raise FailedElsewhere(f"{status['what']} (in process {other})", status["failed"])
    return done  # pyright: ignore[reportReturnType]


def leader_first(name: str, work: Callable[[], T]) -> T:
    """Does work as `run_together` does, but the leader finishes before the others begin, so that they find its results in a cache."""
    if process_count() == 1:
        return work()
    results: list[T] = []
    broadcast(name, lambda: results.append(work()))
    return run_together(name, lambda: results[0] if leads() else work())


def all_gather(name: str, value: Any) -> list[Any]:
    """Returns, in every process, the values of all processes by rank. Values must be JSON."""
    if process_count() == 1:
        return [value]
    key = _next(name)
    _drop(name)
    _set(f"{key}/{rank()}", json.dumps(value))
    return [value if other == rank() else json.loads(_wait_for(f"{key}/{other}")) for other in range(process_count())]


def check_same_facts(facts: dict[str, str], hints: dict[str, str]) -> None:
    """Checks that all processes have the same facts, such as the version and the settings.

    Args:
        facts: the facts of this process, by name.
        hints: the hint for the user if a fact differs, by name.

    Raises:
        BadInput: the facts of this process differ from those of rank 0, and it has the lowest such rank.
        FailedElsewhere: the facts of another process differ.
    """
    every = all_gather("alike", facts)
    differ = [(other, name) for other, their_facts in enumerate(every) for name in facts if their_facts.get(name) != every[0].get(name)]
    if not differ:
        return
    other, name = differ[0]
    _failed_together.set()
    if other != rank():
        raise FailedElsewhere(f"process {other} has another {name}", UserError.exit_code)
    raise BadInput(f"process {other} has another {name} than process 0", hint=hints.get(name))


def process_address() -> str:
    """Returns the address at which the other processes reach this one. For the leader that is the host name by which they found it, for
    others the local address of the route to the leader.
    """
    if process_count() == 1:
        return "127.0.0.1"
    from jax._src import distributed

    host = str(distributed.global_state.coordinator_address).rpartition(":")[0].strip("[]")
    if leads():
        return host
    # No packet is sent. The system only looks up the route.
    (family, kind, _, _, target), *_ = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


class Stopping:
    """Stops all processes after the same step, once one of them was asked to stop.

    Each process calls this object once per step; the result says whether to stop. The process that was asked announces that. Each
    process then reports the step that it may have begun, and all stop after the latest of these. As long as none was asked, no process
    waits for another.

    Args:
        asked: () -> whether this process was asked to stop.
        code: () -> the exit code of this process if it was asked.
        follow: called in the other processes with that exit code.
    """

    def __init__(self, asked: Callable[[], bool], code: Callable[[], int], follow: Callable[[int], None]):
        self.asked, self.code, self.follow = asked, code, follow
        self.calls, self.until, self.named, self.said = 0, None, False, False
        self._key, self._lock, self._over = _next("stop"), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop together", daemon=True)
        self._thread.start()

    def __call__(self) -> bool:
        with self._lock:
            self.calls += 1
            named = self.named
        if not named and self.asked() and not self.said:
            self.said = True
            _set(f"{self._key}/asked", str(self.code()))
        if named and self.until is None:
            self.until = max(int(_wait_for(f"{self._key}/at/{other}")) for other in range(process_count()))
        return self.until is not None and self.calls >= self.until

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            if (exit_code := _look_for(f"{self._key}/asked")) is None:
                continue
            self.follow(int(exit_code))
            with self._lock:
                # The next call counts as this one, whether its step has begun or not.
                _set(f"{self._key}/at/{rank()}", str(self.calls + 1))
                self.named = True
            return


class Board:
    """Exchanges the latest message of each process. The leader reads the messages of all processes, and all read the message of the
    leader. No process waits for another, so a thread may use it even after other processes ended."""

    def __init__(self, name: str):
        self._key = _next(name)

    def say(self, value: Any) -> None:
        """Sets the message of this process, which must be JSON. It replaces the earlier one."""
        _set(f"{self._key}/{rank()}", json.dumps(value))

    def all(self) -> dict[int, Any]:
        """Returns the messages of all processes that have set one, by rank."""
        try:
            entries = _client().key_value_dir_get(f"{self._key}/")
        except jax.errors.JaxRuntimeError:
            return {}
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in entries}

    def leaders(self) -> Any:
        """Returns the message of the leader; None if it has not set one yet."""
        message = _look_for(f"{self._key}/0")
        return None if message is None else json.loads(message)


# ---------------------------------------------------------------- the coordination service


def _client() -> Any:
    from jax._src import distributed  # the key-value store has no public name; Orbax reads it here too

    client = distributed.global_state.client
    if client is None:
        raise ArgosyError("the processes of this run have not joined")
    return client


def _next(name: str) -> str:
    """Returns a key that no earlier call used. It is the same in all processes, because they make the same calls."""
    _calls[name] += 1
    return f"argosy/{name}/{_calls[name]}"


def _ends() -> None:
    # A failure in another thread, such as that of a save on a full disk, does not end the process by itself.
    if threading.current_thread() is threading.main_thread():
        fail_together()


def _drop(name: str) -> None:
    """Removes the value of this process in an earlier call. All processes have read it, because they answered the call after it."""
    if (earlier := _calls[name] - READ_BY_ALL) > 0:
        _client().key_value_delete(f"argosy/{name}/{earlier}/{rank()}")


def _drop_read(name: str) -> None:
    """Removes the leader's values of earlier calls that all others have read. The others do not answer these calls. Instead each stores
    the number of the last call that it has read, under one key that it overwrites."""
    calls_read = {key.rpartition("/")[2]: int(value) for key, value in _client().key_value_dir_get(f"argosy/{name}/{READ}/")}
    done = min(calls_read.values()) if len(calls_read) == process_count() - 1 else 0
    for call in range(_dropped[name] + 1, done + 1):
        _client().key_value_delete(f"argosy/{name}/{call}")
        _dropped[name] = call


def _failure(error: BaseException) -> dict[str, Any]:
    problem = error.what if isinstance(error, ArgosyError) else f"{type(error).__name__}: {error}"
    return {"failed": error.exit_code if isinstance(error, ArgosyError) else 1, "what": problem.splitlines()[0] if problem else ""}


def _set(key: str, value: str) -> None:
    # Two processes may be asked to stop at once. Either value is right.
    _client().key_value_set(key, value, allow_overwrite=True)


def _wait_for(key: str) -> str:
    """Waits for a key as long as all processes live."""
    while True:
        try:
            return _client().blocking_key_value_get(key, WAIT_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            time.sleep(0)


def _look_for(key: str) -> str | None:
    try:
        return _client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError:
        return None
