"""The prediction of a step: its memory by kind, its time, its collectives, and what bounds it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# The kinds of memory, in the order in which they are shown.
KINDS = ("parameters", "optimizer", "gradients", "activations", "gathered_weights", "temporaries")


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind along the same mesh axes in one step.

    kind: the kind, such as "all-gather".
    axis: the mesh axes, such as "fsdp".
    bytes: the total bytes of the results on a device.
    count: the number of collectives.
    seconds: the total time in seconds.
    exposed_seconds: the part of the time that does not overlap with other work, in seconds.
    asynchronous: the share of the bytes that is transferred while other work runs.
    """

    kind: str
    axis: str
    bytes: int
    count: int
    seconds: float
    exposed_seconds: float
    asynchronous: float = 0.0

    def document(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "axis": self.axis, "bytes": self.bytes, "count": self.count, "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds, "asynchronous": round(self.asynchronous, 4),
        }  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """A large array on a device.

    name: the parameter or the operation.
    type: the type and shape.
    bytes: the size in bytes.
    """

    name: str
    type: str
    bytes: int


@dataclass(frozen=True)
class Figures:
    """The prediction of a step.

    verdict_by: the source of the prediction: the analytic model (`model`) or the compiler.
    memory: the bytes by kind, on one device, or on the machine if its devices share memory.
    limit: the available bytes; None if unknown.
    fits: whether the memory suffices. The compiler may refuse a step although the sum of kinds is below the limit.
    compute_seconds: the time of all work but collectives, in seconds; None if times are not predicted.
    traffic: the collectives.
    buffers: the largest arrays.
    by_kind: the seconds of work, by kind.
    error: the relative error of the time, as measured against runs or published times.
    uncounted: the kernels whose work is unknown. Their time is that of moving their bytes.
    unknown_loops: the number of loops whose length depends on data. Such a loop is counted as one iteration.
    """

    verdict_by: Literal["model", "compiler"]
    memory: Mapping[str, int]
    limit: int | None
    fits: bool
    compute_seconds: float | None = None
    traffic: Sequence[Traffic] = ()
    buffers: Sequence[Buffer] = ()
    by_kind: Mapping[str, float] = field(default_factory=dict)
    error: float = 0.25
    uncounted: Sequence[str] = ()
    unknown_loops: int = 0

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def exposed_seconds(self) -> float:
        return sum(transfer.exposed_seconds for transfer in self.traffic)

    @property
    def step_seconds(self) -> float | None:
        """The time of a step in seconds; None if it is not predicted."""
        return None if self.compute_seconds is None else self.compute_seconds + self.exposed_seconds

    @property
    def bound_by(self) -> str:
        """A phrase that says what bounds a step, such as memory or communication."""
        if not self.fits:
            return "memory: it does not fit"
        step = self.step_seconds
        if not step:
            return "unknown: no speed is known for this device"
        if self.exposed_seconds > 0.5 * step:
            most = max(self.traffic, key=lambda transfer: transfer.exposed_seconds)
            return f"communication: {most.kind} along {most.axis} takes {most.exposed_seconds / step:.0%} of a step alone"
        parts = {kind: seconds / step for kind, seconds in self.by_kind.items()}
        largest = max(parts, key=lambda kind: parts[kind], default="products")
        waits = f"; {self.exposed_seconds / step:.0%} waits for communication" if self.exposed_seconds > 0.05 * step else ""
        words = {"products": "matrix products", "memory": "the bandwidth of the memory", "attention": "attention"}
        share = f" ({parts[largest]:.0%} of a step)" if parts else ""
        return f"{words.get(largest, largest)}{share}{waits}"
