"""A group of worker processes, as the controller uses it. Calls are ordered, and return references to their results.

Every group has a thread in the controller, which runs its calls, moves, restarts and frees one after another. So calls to one group are
ordered, and calls to different groups run at the same time.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from argosy.core.errors import BadInput, complaint
from argosy.core.progress import Say
from argosy.launch.workers.arrays.references import GroupLife, Ref, name_of
from argosy.launch.workers.arrays.transfers import PeerGone
from argosy.launch.workers.arrays.trees import pack_arguments
from argosy.launch.workers.errors import WorkerLost

# How long the death of a process that closed a connection is waited for.
NOTICE_S = 5.0
# How often a group that waits for another looks whether it is there itself.
LOOK_S = 0.1


class WorkerGroup:
    """A group of `Workers`.

    started: the reference to the result of the group's `start` function. While the group restarts, it is the reference from before the
        restart, which raises WorkerLost.

    Args:
        begin: starts the processes of the group. Its argument is a function to call when the group is lost.
        start: the function that is called first after every start, with its arguments.
        restarts: the number of automatic restarts.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[Callable[[WorkerLost], None]], GroupLife],
        start: tuple[Any, tuple[Any, ...]] | None,
        restarts: int,
        say: Say,
    ):
        self.name = name
        self.started: Ref | None = None
        self._begin, self._start, self._left, self._say = begin, start, restarts, say
        self._life: GroupLife | None = None
        self._numbers, self._counting, self._closing, self._closed = 0, threading.Lock(), threading.Lock(), False
        # It may be filled while the garbage collector runs: a SimpleQueue is made for that.
        self._queue: queue.SimpleQueue[Callable[[], None] | int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"workers {name}", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- for users

    def run(self, function: Any, /, *arguments: Any, **kwargs: Any) -> Ref:
        """Calls a function in every process of the group, after all earlier calls. Returns a reference to the result at once.

        Args:
            function: `module:function`, or a function that can be imported.
            arguments: pytrees of arrays (which arrive as numpy arrays), plain values, and references to values of this group.

        Raises:
            BadInput: a worker cannot import the function, an argument has another type or was freed, or the group is closed.
        """
        name = name_of(function)
        refs: list[Ref] = []

        def number(ref: Ref) -> int:
            if ref.group is not self:
                problem = f"{ref!r} is an argument in the group `{self.name}`"
                raise BadInput(problem, hint=f'workers.move(ref, to="{self.name}") brings it there')
            ref._check()
            refs.append(ref)
            return ref.number

        data = pack_arguments((arguments, kwargs), number, Ref)

        def call(life: GroupLife, new: int) -> int:
            for ref in refs:
                ref.wait()._where()
            life.call(new, name, data)
            return 0

        return self.enqueue(Ref(self, name), call)

    def restart(self) -> None:
        """Ends the processes of the group, starts them again, and calls `start`. The values that they held are lost.

        Raises:
            BadInput: the group is closed. ArgosyError: the group cannot be started, or `start` raised.
        """
        self._check_open()
        if self._life is not None:
            self._life.lose(WorkerLost("was ended by restart()", self.name, 0, meant=True))
        again: Future[None] = Future()
        self._put(lambda: self._again(again))
        again.result()

    @property
    def pids(self) -> list[int]:
        """The process ids by rank, as on the machines of the processes."""
        return self._life.pids if self._life is not None else []

    @property
    def lost(self) -> WorkerLost | None:
        """The error because of which the group is lost; None while it runs."""
        return self._life.lost if self._life is not None else None

    # ---------------------------------------------------------------- its thread

    def next_number(self) -> int:
        with self._counting:
            self._numbers += 1
            return self._numbers

    def _check_open(self) -> None:
        if self._closed:
            raise BadInput(f"the group `{self.name}` is closed")

    def _put(self, do: Callable[[], None]) -> None:
        """Raises:
        BadInput: the group is closed, so that its thread would not do it.
        """
        with self._closing:
            self._check_open()
            self._queue.put(do)

    def forget(self, number: int) -> None:
        self._queue.put(number)

    def enqueue(
        self, ref: Ref, do: Callable[[GroupLife, int], int], after: Callable[[BaseException | None], None] = lambda _: None
    ) -> Ref:
        """Lets the thread of the group make the value of a reference. Returns the reference at once.

        Args:
            ref: the new reference.
            do: (life of the group, number of the value) -> the number of bytes that were moved.
            after: called in any case, with the error; None if there was none.
        """
        future, number, weak_ref, description = ref._future, ref.number, weakref.ref(ref), ref.what

        def work() -> None:
            try:
                self._check_open()
                assert self._life is not None
                self._life.check()
                if (alive := weak_ref()) is not None:
                    alive.life = self._life
                del alive
                done = do(self._life, number)
            except BaseException as error:
                if weak_ref() is None and not isinstance(error, WorkerLost):
                    self._say(f"{description} failed in the group `{self.name}`, and nothing waits for it: {error}")
                future.set_exception(error)
                after(error)
            else:
                future.set_result(done)
                after(None)

        self._put(work)
        return ref

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            if callable(entry):
                entry()
            elif self._life is not None and self._life.lost is None:
                self._life.free([entry])
            del entry

    def open(self) -> Future[None]:
        """Starts the group. The returned future is done when the group has started, and raises if it has not."""
        opened: Future[None] = Future()
        self._queue.put(lambda: self._again(opened))
        return opened

    def _again(self, future: Future[None]) -> None:
        try:
            if self._life is not None:
                self._life.close()
            self._check_open()
            self._life = life = self._begin(self._died)
            if self._closed:
                life.close()
            life.join()
            if self._start is not None:
                self._start_in(life, *self._start)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _start_in(self, life: GroupLife, function: Any, arguments: tuple[Any, ...]) -> None:
        new = Ref(self, name_of(function))
        new.life = life
        try:
            life.call(new.number, new.what, pack_arguments((arguments, {}), lambda _: 0, Ref))
        except Exception as error:
            life.lose(WorkerLost(f"was ended because `start` failed: {complaint(error)}", self.name, 0, meant=True))
            raise
        new._future.set_result(0)
        self.started = new

    def _died(self, error: WorkerLost) -> None:
        if self._closed or error.meant:
            return
        self._say(error.what)
        if self._left > 0:
            self._left -= 1
            again: Future[None] = Future()
            again.add_done_callback(self._say_how)
            self._queue.put(lambda: self._again(again))

    def _say_how(self, again: Future[None]) -> None:
        error = again.exception()
        if error is None:
            self._say(f"the group `{self.name}` was started again ({self._left} restarts left)")
        else:
            self._say(f"the group `{self.name}` could not be started again: {error}")

    def shut(self) -> None:
        """Refuses further calls."""
        with self._closing:
            self._closed = True

    def close(self) -> None:
        """Ends the group. Pending calls raise."""
        self.shut()
        if self._life is not None:
            self._life.close()
        self._queue.put(None)
        self._thread.join(10)
        if self._life is not None:
            self._life.close()
        # A thread that did not end in time leaves calls behind: whoever waits for one is told.
        with suppress(queue.Empty):
            while True:
                if callable(task := self._queue.get_nowait()):
                    task()


def close_all(groups: Iterable[WorkerGroup]) -> None:
    """Ends groups, all at the same time, so that a group that is slow to end does not delay the others."""
    groups = list(groups)
    for group in groups:
        group.shut()
    threads = [threading.Thread(target=group.close, name=f"closes {group.name}", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def move_value(ref: Ref, group: WorkerGroup, sharding: Any, lock: threading.Lock) -> Ref:
    """Moves a value to another group. Returns a reference at once. Both groups run no other calls meanwhile, because a later call may
    reuse the memory of the value.

    Args:
        sharding: as in `Workers.move`.
        lock: admits one move at a time.
    """
    new, here, over = Ref(group, f"a copy of {ref.what}"), Future(), threading.Event()

    def give(life: GroupLife, _: int) -> int:
        here.set_result(ref.wait()._where().source(ref.number))
        while not over.wait(LOOK_S):
            life.check()
        return 0

    def source_failed(error: BaseException | None) -> None:
        if not here.done() and error is not None:
            here.set_exception(error)

    def take(life: GroupLife, number: int) -> int:
        while not here.done():
            life.check()
            wait((here,), LOOK_S)
        source = here.result()
        ref._where()
        try:
            return life.pull(number, source, sharding)
        except PeerGone:
            # Its death is noticed a moment after its connections end.
            until = time.monotonic() + NOTICE_S
            while time.monotonic() < until:
                ref._where()
                time.sleep(0.05)
            raise

    ref._check()
    if ref.group is group:
        return group.enqueue(new, lambda life, number: life.pull(number, ref.wait()._where().source(ref.number), sharding))
    # In the same order for all moves, or two groups could wait for each other.
    with lock:
        ref.group.enqueue(Ref(ref.group, f"moving {ref.what}"), give, source_failed)
        try:
            return group.enqueue(new, take, lambda _: over.set())
        except BaseException:
            over.set()
            raise
