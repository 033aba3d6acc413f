"""Batches requests of several clients into one call of a program.

When the device becomes free, a thread takes waiting requests whose arrays can be concatenated, up to the largest number of rows of a
batch. Within a priority, requests are served in the order of arrival. Axes that a signature names as padding are padded to a compiled
size, and each request gets its own rows back. If the rows of a signature may depend on each other, one request is computed at a time.
With several instances, several threads compute at once.
"""

import asyncio
import math
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.process.cores import core_count
from argosy.core.progress import Say
from argosy.export.bundle import Bundle
from argosy.export.calls import checked_inputs, filled_inputs, named_sizes
from argosy.export.manifest import BundleSignature
from argosy.ops.programs.store import ProgramStore
from argosy.predict.padding import Arrays, BatchPlan, join_outputs, split_outputs, stack_inputs
from argosy.predict.settings import BatchingSettings

# The most characters of a request that the event loop tokenizes itself. Passing them to a thread would take as long.
SHORT_TEXT = 4096
# The most programs that are compiled before a signature is ready, and the most tokens of those that are also called once.
MOST_PROGRAMS, CALLED_TOKENS = 72, 512


class QueueFull(Exception):
    """The queue has no room for a request, or a request of a higher priority took its place."""


class Unloaded(Exception):
    """The version was unloaded while a request waited."""


@dataclass(eq=False)
class WaitingCall:
    """A waiting request, or a part of one.

    signature: the name of the signature.
    arrays: the inputs of the program.
    sizes: the sizes of the named axes.
    rows: the number of rows, 0 for a signature without a batch axis.
    group: a key; calls with equal keys may share a batch.
    loop: the event loop of the request.
    done: the future of the result.
    priority: the priority. Calls with lower numbers go first.
    arrived: the time of arrival, by `time.perf_counter`.
    """

    signature: str
    arrays: Arrays
    sizes: Mapping[str, int]
    rows: int
    group: Any
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[CallResult]"
    priority: int = 0
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def places(self) -> int:
        """The number of rows that the call takes in the queue."""
        return max(1, self.rows)

    def __lt__(self, other: "WaitingCall") -> bool:
        return self.priority < other.priority


@dataclass(frozen=True)
class CallResult:
    """The outputs of a call, and its timing.

    outputs: the outputs by name.
    queued: the seconds from the arrival to the start of the batch.
    computed: the seconds of the batch.
    rows: the number of rows of the batch.
    """

    outputs: Mapping[str, Any]
    queued: float
    computed: float
    rows: int


class Batcher:
    """The queue of a version, and the threads that compute its batches.

    Args:
        bundle: the bundle of the version.
        settings: the batching settings.
        seen: called in a computing thread after each batch with (signature, number of calls, rows, seconds).
    """

    def __init__(
        self, bundle: Bundle, settings: BatchingSettings, seen: Callable[[str, int, int, float], None] = lambda *_: None
    ):
        self.bundle, self.settings, self.seen = bundle, settings, seen
        self.waiting: list[WaitingCall] = []
        self.waiting_rows = 0
        self.running = 0
        self._changed = threading.Condition()
        self._closing = False
        self._plans: dict[str, BatchPlan] = {}
        # Seconds of a batch, by its signature and padded sizes: the mean of the latest ones. None after the first one, which may have
        # waited for the compiler: a size that seems slow is not chosen, and so never measured again.
        self._seconds: dict[tuple[str, tuple[tuple[str, int], ...]], float | None] = {}
        names = [f"batches of {bundle.path.name} {i}" for i in range(settings.instances)]
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def plan(self, signature: str) -> BatchPlan:
        """Returns the batching plan of a signature."""
        if signature not in self._plans:
            self._plans[signature] = BatchPlan.of(self.bundle.manifest.signature(signature), self.settings)
        return self._plans[signature]

    # ---------------------------------------------------------------- a request

    async def call(self, inputs: Mapping[str, Any], signature: str | None = None, priority: int = 0) -> CallResult:
        """Queues a request and waits for its result.

        Args:
            inputs: the inputs by name.
            signature: the name of the signature. None stands for the default one.
            priority: the priority level, from 1, the highest, on. 0 stands for `default_priority_level`. Without levels only 0 is
                valid.

        Raises:
            BadInput: a signature, an input or the priority is unknown, or a shape or type is wrong.
            QueueFull: too many rows wait.
            Unloaded: the version was unloaded.
        """
        name = self.bundle.manifest.default if signature is None else signature
        of = self.bundle.manifest.signature(name)
        level = self._level(priority)
        prepared = inputs
        if of.preprocess:
            # Long texts take a while, so a thread tokenizes them and other requests go on.
            long = text_length(inputs.get(name) for step in of.preprocess for name in step.texts) > SHORT_TEXT
            prepared = await asyncio.to_thread(self.bundle.preprocessed, of, inputs) if long else self.bundle.preprocessed(of, inputs)
        calls = self._calls(name, of, checked_inputs(of, prepared), level)
        self._enqueue(calls)
        try:
            # The first part that fails ends the request: the others leave the queue.
            results = [await calls[0].done] if len(calls) == 1 else await asyncio.gather(*(call.done for call in calls))
        except BaseException:
            # The client went away, or a part failed. A call whose batch runs is computed to its end.
            self._withdraw(calls)
            raise
        if len(results) == 1:
            return results[0]
        return CallResult(
            join_outputs([result.outputs for result in results]),
            max(result.queued for result in results),
            sum(result.computed for result in results),
            max(result.rows for result in results),
        )

    def _level(self, priority: int) -> int:
        """Returns the priority level of a request.

        Raises:
            BadInput: there is no such level.
        """
        levels = self.settings.priority_levels
        if not 0 <= priority <= levels:
            hint = f"1, the first, to {levels}; or 0 for the default" if levels else "batching.priority_levels is not set"
            raise BadInput(f"priority is {priority}", hint=hint)
        return (priority or self.settings.default_priority_level or levels) if levels else 0

    def _calls(self, name: str, of: BundleSignature, arrays: Arrays, level: int) -> list[WaitingCall]:
        """Converts a request to one call, or to several if it has more rows than a batch may have."""
        loop, sizes, plan = asyncio.get_running_loop(), named_sizes(of, arrays), self.plan(name)
        if (axis := plan.axis) is None:
            return [WaitingCall(name, arrays, sizes, 0, object(), loop, loop.create_future(), level)]
        group = (name, tuple((at, size) for at, size in sorted(sizes.items()) if at not in of.padding))
        calls, most = [], plan.rows_at(sizes)
        for low in range(0, sizes[axis], most):
            rows = min(most, sizes[axis] - low)
            part = {at: a[low : low + rows] for at, a in arrays.items()}
            calls.append(WaitingCall(name, part, {**sizes, axis: rows}, rows, group, loop, loop.create_future(), level))
        return calls

    def _enqueue(self, calls: Sequence[WaitingCall]) -> None:
        """Queues all of the calls or none. An idle server accepts a request of any size."""
        rows = sum(call.places for call in calls)
        with self._changed:
            if self._closing:
                raise Unloaded
            if self.waiting and (more := self.waiting_rows + rows - self.settings.max_queue_size) > 0:
                self._evict(calls[0], more)
            for call in calls:
                insort(self.waiting, call)
            self.waiting_rows += rows
            self._changed.notify()

    def _evict(self, first: WaitingCall, rows: int) -> None:
        """Removes calls of lower priority from the queue, until they had this many rows. The latest calls of the lowest priority go
        first.

        Raises:
            QueueFull: such calls have fewer rows. Nothing is changed then.
        """
        evicted: list[WaitingCall] = []
        for call in reversed(self.waiting):
            if rows <= 0 or not first < call:
                break
            evicted.append(call)
            rows -= call.places
        if rows > 0:
            raise QueueFull
        self._remove(evicted)
        _tell((call, QueueFull()) for call in evicted)

    def _remove(self, calls: Sequence[WaitingCall]) -> None:
        """Removes calls from the queue."""
        ids = set(map(id, calls))
        self.waiting = [call for call in self.waiting if id(call) not in ids]
        self.waiting_rows = sum(call.places for call in self.waiting)

    def _withdraw(self, calls: Sequence[WaitingCall]) -> None:
        with self._changed:
            for call in calls:
                if not call.done.cancel() and not call.done.cancelled():
                    call.done.exception()  # asyncio warns of one that nobody looked at
            self._remove(calls)

    # ---------------------------------------------------------------- the threads

    def close(self, *, drop: bool = False) -> None:
        """Ends the threads.

        Args:
            drop: whether waiting calls fail with `Unloaded`. Otherwise they are computed first.
        """
        with self._changed:
            self._closing = True
            if drop:
                _tell((call, Unloaded()) for call in self.waiting)
                self._remove(self.waiting)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def idle(self) -> bool:
        """Whether no call waits or runs."""
        with self._changed:
            return not self.waiting and not self.running

    def _work(self) -> None:
        while batch := self._next():
            begin = time.perf_counter()
            try:
                outputs = self._computed(batch)
            except BaseException as error:
                failure = error
                _tell((call, failure) for call in batch)
            else:
                seconds = time.perf_counter() - begin
                rows = sum(call.places for call in batch)
                self.seen(batch[0].signature, len(batch), rows, seconds)
                answers = zip(batch, outputs, strict=True)
                _tell((call, CallResult(call_outputs, begin - call.arrived, seconds, rows)) for call, call_outputs in answers)
            with self._changed:
                self.running -= 1

    def _next(self) -> list[WaitingCall]:
        """Waits for calls and returns those of the next batch; empty when the thread must end."""
        with self._changed:
            while True:
                while not self.waiting:
                    if self._closing:
                        return []
                    self._changed.wait()
                first = self.waiting[0]
                remaining = first.arrived + self.settings.max_queue_delay_ms / 1e3 - time.perf_counter()
                if self._closing or remaining <= 0 or self._rows_with(first) >= self.plan(first.signature).rows_at(first.sizes):
                    self.running += 1
                    return self._take(first)
                self._changed.wait(remaining)

    def _take(self, first: WaitingCall) -> list[WaitingCall]:
        """Takes the first call from the queue, with other calls that fit into its batch."""
        batch, rows, plan, sizes = [first], first.rows, self.plan(first.signature), dict(first.sizes)
        for call in self.waiting[1:]:
            if call.group != first.group or rows + call.rows > plan.most_rows:
                continue
            longest = {at: max(size, call.sizes[at]) for at, size in sizes.items()}
            if rows + call.rows <= plan.rows_at(longest):
                batch.append(call)
                rows, sizes = rows + call.rows, longest
        if self.settings.batch_padding_policy != "pad_up" and len(batch) > 1:
            batch = self._cheaper(batch)
        self._remove(batch)
        if self.waiting:
            self._changed.notify()
        return batch

    def _cheaper(self, batch: list[WaitingCall]) -> list[WaitingCall]:
        """Returns the batch, or only its first calls that fit a smaller size, if padding the whole batch would cost more per row."""
        plan = self.plan(batch[0].signature)
        whole, rows = plan.padded([call.sizes for call in batch]), sum(call.rows for call in batch)
        if plan.axis is None or rows == whole[plan.axis]:
            return batch
        below = max((size for size in plan.sizes[plan.axis] if size < rows), default=0)
        if batch[0].rows > below:
            # Otherwise smaller calls could overtake the first call for ever.
            return batch
        fitting, fewer = [], 0
        for call in batch:
            if fewer + call.rows <= below:
                fitting.append(call)
                fewer += call.rows
        if self.settings.batch_padding_policy == "batch_down":
            return fitting
        part = plan.padded([call.sizes for call in fitting])
        seconds, less = (self._seconds.get(_batch_key(batch[0].signature, sizes)) for sizes in (whole, part))
        return fitting if seconds is not None and less is not None and less / fewer < seconds / rows else batch

    def _rows_with(self, first: WaitingCall) -> int:
        return sum(call.rows for call in self.waiting if call.group == first.group)

    def _computed(self, batch: Sequence[WaitingCall]) -> list[dict[str, Any]]:
        """Computes a batch. Returns the outputs of each call."""
        plan, signature = self.plan(batch[0].signature), batch[0].signature
        if plan.axis is None:
            return [self.bundle.run_arrays(batch[0].arrays, signature)]
        sizes, begin = plan.padded([call.sizes for call in batch]), time.perf_counter()
        outputs = self.bundle.run_arrays(stack_inputs(plan, [call.arrays for call in batch], sizes), signature)
        self._remember(_batch_key(signature, sizes), time.perf_counter() - begin)
        return split_outputs(plan, outputs, [call.sizes for call in batch])

    def _remember(self, key: Any, seconds: float) -> None:
        if key not in self._seconds:
            self._seconds[key] = None
            return
        before = self._seconds[key]
        self._seconds[key] = seconds if before is None else before + 0.1 * (seconds - before)

    def warm_up(self, store: ProgramStore | None = None, say: Say | None = None) -> int:
        """Compiles the programs of every signature, at most `MOST_PROGRAMS` each, and calls those of one row. Returns the number of
        programs."""
        warm_sizes: dict[str, list[dict[str, int]]] = {}
        for name in self.bundle.manifest.signatures:
            sizes = self.plan(name).combinations()
            if sizes is None:
                self.bundle.warm_up(name)
                continue
            warm_sizes[name] = sizes[:MOST_PROGRAMS]
            if say is not None and len(sizes) > MOST_PROGRAMS:
                fewer = "export with batch= and length=, or serve with batching.allowed_batch_sizes=, for fewer"
                later = "compiled now, longer ones when they are first asked for"
                say(f"`{name}` has {len(sizes)} sizes; {MOST_PROGRAMS} are {later} ({fewer})")
        count = self.bundle.compile(warm_sizes, store, say)
        with ThreadPoolExecutor(core_count(), "warm up") as pool:
            for name, sizes in warm_sizes.items():
                of, axis = self.bundle.manifest.signature(name), self.plan(name).axis
                # XLA links a program when it is first called, 40 ms for a small encoder. A lone request does not wait for that; a batch
                # may, once, since calling all sizes would take seconds.
                alone = [some for some in sizes if axis is None or some.get(axis, 1) == sizes[0].get(axis, 1)]
                alone = [some for some in alone if math.prod(some.values()) <= CALLED_TOKENS] or sizes[:1]
                for done in [pool.submit(self.bundle.run_arrays, filled_inputs(of, some), name) for some in alone]:
                    done.result()
                self.bundle.preprocessed(of, of.example)  # reads the tokenizer
        return count


def text_length(values: Iterable[Any]) -> int:
    """Returns the number of characters, or of bytes of files, in nested lists."""
    return sum(len(text) for text in _texts_in(values))


def _texts_in(value: Any) -> Iterator[str | bytes]:
    if isinstance(value, str | bytes):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, np.ndarray):
        for element in value:
            yield from _texts_in(element)


def _batch_key(signature: str, sizes: Mapping[str, int]) -> Any:
    return signature, tuple(sorted(sizes.items()))


def _tell(results: Iterable[tuple[WaitingCall, CallResult | BaseException]]) -> None:
    """Sets the results of calls, with one callback for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[WaitingCall, CallResult | BaseException]]] = {}
    for call, result in results:
        by_loop.setdefault(call.loop, []).append((call, result))

    def tell(answers: list[tuple[WaitingCall, CallResult | BaseException]]) -> None:
        for call, result in answers:
            if call.done.done():
                continue
            if isinstance(result, BaseException):
                call.done.set_exception(result)
            else:
                call.done.set_result(result)

    for loop, answers in by_loop.items():
        try:
            loop.call_soon_threadsafe(tell, answers)
        except RuntimeError:
            pass  # the loop has ended, and whoever asked with it
