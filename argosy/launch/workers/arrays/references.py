"""References to values (pytrees) that workers hold, and the names by which workers find functions."""

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
    """One life of a group, from a start to the next: processes (`workers.gang.WorkerGang`), or devices of this process
    (`workers.engines.inline.Inline`).

    lost: the error that ended this life of the group; None while it runs.
    """

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
    """A reference to a value that the workers of a group hold: the result of a function or of a move. The workers keep the value until
    the last reference is garbage collected, or `free` is called.

    `wait` and `value` raise the error of the function. If the group has ended since, they raise WorkerLost.
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
        """Whether the value exists or its computation failed, so that `wait` returns or raises at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> "Ref":
        """Waits until the value exists. Returns the reference itself.

        Raises:
            WorkerError: the function raised.
            WorkerLost: a worker ended meanwhile.
            TimeoutError: the value does not exist after `timeout` seconds.
        """
        self._future.result(timeout)
        return self

    @property
    def bytes_moved(self) -> int:
        """Waits for a move, and returns the number of bytes that it transferred; 0 for the result of a function."""
        return self._future.result()

    def value(self) -> Any:
        """Fetches the value to the controller. Arrays become complete numpy arrays.

        Raises:
            BadInput: the processes of the group have different values, or a leaf is neither an array nor a plain value.
            WorkerError, WorkerLost: as in `wait`.
        """
        return self.wait()._there().value(self.number)

    def values(self) -> list[Any]:
        """Fetches the value of each process of the group. Returns them by rank.

        Raises:
            BadInput: an array is sharded over several processes, or a leaf is neither an array nor a plain value.
            WorkerError, WorkerLost: as in `wait`.
        """
        return self.wait()._there().values(self.number)

    def free(self) -> None:
        """Lets the workers drop the value, after all earlier calls of the group."""
        self.freed = True
        self._end()

    def _check(self) -> None:
        """Raises:
        BadInput: the reference was freed.
        """
        if self.freed:
            raise BadInput(f"{self.what} of the group `{self.group.name}` was freed")

    def _there(self) -> GroupLife:
        """Returns the life of the group that holds the value, for a new request.

        Raises:
            BadInput: the reference was freed. WorkerLost: the group has ended since.
        """
        self._check()
        return self._where()

    def _where(self) -> GroupLife:
        """Returns the life of the group that holds the value. Works for freed references too, because earlier requests may still use
        them.

        Raises:
            WorkerLost: the group has ended since.
        """
        assert self.life is not None
        self.life.check()
        return self.life


def name_of(function: Any) -> str:
    """Returns the name `module:function` by which a worker finds a function.

    Raises:
        BadInput: the argument is no function, or the function cannot be imported.
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
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is not function:
        raise BadInput(f"`{module}:{name}` cannot be imported by that name", hint=hint)
    return f"{module}:{name}"
