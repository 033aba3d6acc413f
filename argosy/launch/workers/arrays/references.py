"""References to what workers have, and the names of functions."""

import re
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from argosy.core.errors import BadInput
from argosy.launch.workers.errors import WorkerLost

if TYPE_CHECKING:
    from argosy.launch.workers.group import WorkerGroup


class GroupLife(Protocol):
    """A group from one start to the next: processes (`workers.gang.WorkerGang`), or devices of this process
    (`workers.inline.Inline`)."""

    lost: WorkerLost | None

    @property
    def pids(self) -> list[int]: ...
    def join(self) -> None: ...
    def check(self) -> None: ...
    def lose(self, error: WorkerLost) -> None: ...
    def call(self, number: int, function: str, arguments: bytes) -> None: ...
    def source(self, number: int) -> Any: ...
    def pull(self, number: int, source: Any, sharding: Any) -> int: ...
    def value(self, number: int) -> Any: ...
    def values(self, number: int) -> list[Any]: ...
    def free(self, numbers: Sequence[int]) -> None: ...
    def close(self) -> None: ...


class Ref:
    """What a function returned, or a move brought: it stays in the workers of a group until the last reference is gone, or `free`.

    `wait` and `value` raise what went wrong; a reference to something of a group that ended since raises WorkerLost.
    """

    def __init__(self, group: "WorkerGroup", what: str):
        self.group, self.what = group, what
        self.number = group.next_number()
        self.life: GroupLife | None = None
        self.freed = False
        self._future: Future[int] = Future()
        self._end = weakref.finalize(self, group.forget, self.number)
        self._end.atexit = False

    def __repr__(self) -> str:
        state = "freed" if self.freed else "there" if self._future.done() else "pending"
        return f"<Ref of {self.what} in `{self.group.name}`, {state}>"

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> "Ref":
        """Waits until it is there; returns itself.

        Raises:
            WorkerError: the function raised. WorkerLost: a worker ended meanwhile. TimeoutError: it takes longer.
        """
        self._future.result(timeout)
        return self

    @property
    def bytes_moved(self) -> int:
        """How many bytes a move brought to the workers of its target, once it is there; 0 of what a function returned."""
        return self._future.result()

    def value(self) -> Any:
        """The value, brought here: arrays as numpy arrays, those of all processes of the group whole.

        Raises:
            BadInput: the processes of the group have different values, or it holds something else than arrays and plain values.
            WorkerError, WorkerLost: as `wait`.
        """
        return self.wait()._there().value(self.number)

    def values(self) -> list[Any]:
        """The results of the processes of the group, by rank.

        Raises:
            BadInput: an array is one of all processes, or it holds something else than arrays and plain values.
            WorkerError, WorkerLost: as `wait`.
        """
        return self.wait()._there().values(self.number)

    def free(self) -> None:
        """Lets the workers forget it, after what was asked of the group so far."""
        self.freed = True
        self._end()

    def _check(self) -> None:
        """Raises:
        BadInput: it was freed.
        """
        if self.freed:
            raise BadInput(f"{self.what} of the group `{self.group.name}` was freed")

    def _there(self) -> GroupLife:
        """Where it is, for what is asked now.

        Raises:
            BadInput: it was freed. WorkerLost: its group ended since.
        """
        self._check()
        return self._where()

    def _where(self) -> GroupLife:
        """Where it is, or was before it was freed: what was asked before may still use it.

        Raises:
            WorkerLost: its group ended since.
        """
        assert self.life is not None
        self.life.check()
        return self.life


def name_of(function: Any) -> str:
    """`module:function`, by which a worker finds it.

    Raises:
        BadInput: it is none, or a function that cannot be imported.
    """
    if isinstance(function, str):
        if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", function):
            raise BadInput(f"`{function}` names no function", hint="module:function")
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or module is None or name is None:
        raise BadInput(f"{function!r} is no function with a name", hint="module:function")
    hint = "workers import functions by name: put it into a module, at the top"
    if module == "__main__":
        raise BadInput(f"`{name}` is in the program itself, which workers do not run", hint=hint)
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise BadInput(f"`{module}:{name}` cannot be imported by that name", hint=hint)
    return f"{module}:{name}"
