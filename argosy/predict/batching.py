"""Requests of several clients in one call of a program.

A thread takes what waits when the device becomes free, first come, first served: requests whose arrays can be laid one after another,
up to the most rows of a batch. An axis that a signature names as padding is filled up to the longest of the batch, and each request
gets its own part back. A signature whose rows are not known to be independent computes one request at a time.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from argosy.export.bundle import Bundle
from argosy.export.calls import checked_inputs, named_sizes
from argosy.export.manifest import BundleSignature, TensorSignature
from argosy.predict.settings import BatchingSettings

Arrays = Mapping[str, np.ndarray]
# The shortest length that programs are compiled for, of axes besides that of the batch.
SHORTEST = 16


class QueueFull(Exception):
    """So many rows wait that no more are taken."""


class Unloaded(Exception):
    """The version was unloaded while a request waited."""


@dataclass(eq=False)
class WaitingCall:
    """A request, or a part of one, that waits.

    arrays: the inputs of the program.
    sizes: of the named axes.
    rows: 0 where the signature has no batch.
    group: calls of one group may share a batch.
    """

    signature: str
    arrays: Arrays
    sizes: Mapping[str, int]
    rows: int
    group: Any
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[CallResult]"
    arrived: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class CallResult:
    """Outputs of a call, and where its time went.

    queued: seconds from arrival to its batch. computed: seconds of its batch. rows: of the batch.
    """

    outputs: Mapping[str, Any]
    queued: float
    computed: float
    rows: int


def batch_axis(signature: BundleSignature) -> str | None:
    """The named axis that every input and output has first, and whose rows do not change one another's results, because it may be
    padded; None: there is none."""
    firsts = {spec.shape[0] if spec.shape else None for spec in (*signature.inputs, *signature.outputs)}
    name = next(iter(firsts)) if len(firsts) == 1 else None
    return name if name in signature.padding else None


class Batcher:
    """The queue of a version, and the thread that computes.

    Args:
        seen: called in that thread with each batch: signature, calls, rows, seconds.
    """

    def __init__(
        self, bundle: Bundle, settings: BatchingSettings, seen: Callable[[str, int, int, float], None] = lambda *_: None
    ):
        self.bundle, self.settings, self.seen = bundle, settings, seen
        self.waiting: deque[WaitingCall] = deque()
        self.waiting_rows = 0
        self.running = False
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"batches of {bundle.path.name}", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- a request

    async def call(self, inputs: Mapping[str, Any], signature: str | None = None) -> CallResult:
        """The outputs of a request.

        Raises:
            BadInput: a signature, input, shape or type that the bundle does not have.
            QueueFull: too many rows wait. Unloaded: the version is unloaded.
        """
        name = self.bundle.manifest.default if signature is None else signature
        of = self.bundle.manifest.signature(name)
        # Long texts take a while: other requests go on meanwhile.
        prepared = await asyncio.to_thread(self.bundle.preprocessed, of, inputs) if of.preprocess else inputs
        calls = self._calls(name, of, checked_inputs(of, prepared))
        self._enqueue(calls)
        try:
            found = [await call.done for call in calls]
        except BaseException:
            # The client went away, or a part failed. A call whose batch runs is computed to its end.
            self._withdraw(calls)
            raise
        if len(found) == 1:
            return found[0]
        return CallResult(
            _joined([one.outputs for one in found]),
            max(one.queued for one in found),
            sum(one.computed for one in found),
            max(one.rows for one in found),
        )

    def _calls(self, name: str, of: BundleSignature, arrays: Arrays) -> list[WaitingCall]:
        """A request as one call, or as several where it has more rows than a batch."""
        loop, sizes, axis = asyncio.get_running_loop(), named_sizes(of, arrays), batch_axis(of)
        if axis is None:
            return [WaitingCall(name, arrays, sizes, 0, object(), loop, loop.create_future())]
        group = (name, tuple((at, size) for at, size in sorted(sizes.items()) if at not in of.padding))
        most, calls = self._most_rows(of, axis), []
        for low in range(0, sizes[axis], most):
            rows = min(most, sizes[axis] - low)
            part = {at: a[low : low + rows] for at, a in arrays.items()}
            calls.append(WaitingCall(name, part, {**sizes, axis: rows}, rows, group, loop, loop.create_future()))
        return calls

    def _enqueue(self, calls: Sequence[WaitingCall]) -> None:
        """All of them or none. An idle server takes a request of any size."""
        rows = sum(max(1, call.rows) for call in calls)
        with self._changed:
            if self._closing:
                raise Unloaded
            if self.waiting and self.waiting_rows + rows > self.settings.max_queue_size:
                raise QueueFull
            self.waiting.extend(calls)
            self.waiting_rows += rows
            self._changed.notify()

    def _withdraw(self, calls: Sequence[WaitingCall]) -> None:
        with self._changed:
            for call in calls:
                if not call.done.cancel() and not call.done.cancelled():
                    call.done.exception()  # asyncio warns of one that nobody looked at
                if call in self.waiting:
                    self.waiting.remove(call)
                    self.waiting_rows -= max(1, call.rows)

    def _most_rows(self, of: BundleSignature, axis: str) -> int:
        """The most rows of a batch of a signature."""
        sizes = sorted(program.shapes[axis] for program in of.programs if axis in program.shapes)
        return min([self.settings.max_batch_size, *sizes[-1:], *self.settings.allowed_batch_sizes[-1:]])

    # ---------------------------------------------------------------- the thread

    def close(self, *, drop: bool = False) -> None:
        """Ends the thread after what waits is computed. drop: after the batch that runs; what waits is answered with `Unloaded`."""
        with self._changed:
            self._closing = True
            while drop and self.waiting:
                _tell(self.waiting.popleft(), Unloaded())
            self._changed.notify_all()
        self._thread.join()

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._changed:
            return not self.waiting and not self.running

    def _work(self) -> None:
        while batch := self._next():
            begin = time.perf_counter()
            try:
                outputs = self._computed(batch)
            except BaseException as error:
                for call in batch:
                    _tell(call, error)
            else:
                seconds = time.perf_counter() - begin
                rows = sum(max(1, call.rows) for call in batch)
                self.seen(batch[0].signature, len(batch), rows, seconds)
                for call, own in zip(batch, outputs, strict=True):
                    _tell(call, CallResult(own, begin - call.arrived, seconds, rows))
            with self._changed:
                self.running = False

    def _next(self) -> list[WaitingCall]:
        """The calls of the next batch; empty: the thread ends."""
        with self._changed:
            while True:
                while not self.waiting:
                    if self._closing:
                        return []
                    self._changed.wait()
                first = self.waiting[0]
                left = first.arrived + self.settings.max_queue_delay_ms / 1e3 - time.perf_counter()
                if self._closing or left <= 0 or self._rows_with(first) >= self._most_of(first):
                    self.running = True
                    return self._taken(first)
                self._changed.wait(left)

    def _taken(self, first: WaitingCall) -> list[WaitingCall]:
        """Takes the first call and those that fit beside it from the queue."""
        batch, rows, most = [first], first.rows, self._most_of(first)
        for call in list(self.waiting)[1:]:
            if call.group == first.group and rows + call.rows <= most:
                batch.append(call)
                rows += call.rows
        for call in batch:
            self.waiting.remove(call)
            self.waiting_rows -= max(1, call.rows)
        return batch

    def _rows_with(self, first: WaitingCall) -> int:
        return sum(call.rows for call in self.waiting if call.group == first.group)

    def _most_of(self, call: WaitingCall) -> int:
        of = self.bundle.manifest.signature(call.signature)
        axis = batch_axis(of)
        return 1 if axis is None else self._most_rows(of, axis)

    def _computed(self, batch: Sequence[WaitingCall]) -> list[dict[str, Any]]:
        """The outputs of each call."""
        of = self.bundle.manifest.signature(batch[0].signature)
        axis = batch_axis(of)
        if axis is None:
            return [self.bundle.run_arrays(batch[0].arrays, batch[0].signature)]
        sizes = {at: max(call.sizes[at] for call in batch) for at in batch[0].sizes} | {axis: sum(call.rows for call in batch)}
        sizes = {at: self._filled(of, at, size) for at, size in sizes.items()}
        arrays = {spec.name: _stacked([call.arrays[spec.name] for call in batch], spec, sizes) for spec in of.inputs}
        outputs = self.bundle.run_arrays(arrays, batch[0].signature)
        shapes = {spec.name: spec.shape for spec in of.outputs}
        found, low = [], 0
        for call in batch:
            own = {}
            for name, value in outputs.items():
                part = value[low : low + call.rows]
                if isinstance(part, np.ndarray):
                    # Copied: a view would keep the arrays of the whole batch in memory.
                    sizes = [slice(None), *(slice(call.sizes.get(str(size))) for size in shapes.get(name, [None])[1:])]
                    part = part[tuple(sizes)].copy()
                own[name] = part
            found.append(own)
            low += call.rows
        return found

    def _filled(self, of: BundleSignature, at: str, size: int) -> int:
        """The size that an axis is filled up to, so that few programs are compiled. The bundle pads to programs of fixed sizes."""
        sizes = self._sizes(of, at)
        return min((one for one in sizes if one >= size), default=size)

    def _sizes(self, of: BundleSignature, at: str) -> list[int]:
        """The sizes of an axis that programs are compiled for; none: each as it comes."""
        if at not in of.padding or any(at in program.shapes for program in of.programs):
            return []
        if at == batch_axis(of):
            most = self._most_rows(of, at)
            return list(self.settings.allowed_batch_sizes) or [*(1 << i for i in range(20) if 1 << i < most), most]
        if (limit := of.limits.get(at)) is None:
            return []
        return [*(SHORTEST << i for i in range(20) if SHORTEST << i < limit), limit]

    def warm_up(self) -> int:
        """Compiles the programs of every signature in all sizes. Returns their number."""
        count = 0
        for name, of in self.bundle.manifest.signatures.items():
            axes = {at: sizes for at in of.padding if (sizes := self._sizes(of, at))}
            named = {str(size) for spec in of.inputs for size in spec.shape if isinstance(size, str)}
            fixed = {at for program in of.programs for at in program.shapes}
            if not axes or named - fixed - set(axes):
                count += self.bundle.warm_up(name)
                continue
            for sizes in product(*axes.values()):
                count += self.bundle.warm_up(name, dict(zip(axes, sizes, strict=True)))
        return count


def _stacked(arrays: Sequence[np.ndarray], spec: TensorSignature, sizes: Mapping[str, int]) -> np.ndarray:
    """Arrays one after another, every axis filled up to its size."""
    shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
    out = np.full(shape, spec.pad, arrays[0].dtype)
    low = 0
    for a in arrays:
        out[(slice(low, low + len(a)), *map(slice, a.shape[1:]))] = a
        low += len(a)
    return out


def _joined(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The outputs of parts of a request, one after another."""
    found: dict[str, Any] = {}
    for name, first in outputs[0].items():
        values = [one[name] for one in outputs]
        found[name] = np.concatenate(values) if isinstance(first, np.ndarray) else [text for value in values for text in value]
    return found


def _tell(call: WaitingCall, result: CallResult | BaseException) -> None:
    def tell() -> None:
        if call.done.done():
            return
        if isinstance(result, BaseException):
            call.done.set_exception(result)
        else:
            call.done.set_result(result)

    try:
        call.loop.call_soon_threadsafe(tell)
    except RuntimeError:
        pass  # the loop has ended, and whoever asked with it
