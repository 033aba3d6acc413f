"""The prediction of a step: memory by kind, time, collectives, and what bounds it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# The kinds of memory, in the order in which they are shown.
KINDS = ("parameters", "optimizer", "gradients", "activations", "gathered_weights", "temporaries")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along the same axes of the mesh, in one step.

    kind: such as "all-gather"; axis: such as "fsdp".
    bytes: bytes of their results on a device, all together; count: how many there are.
    seconds, exposed_seconds: their time, and the part of it beside which nothing else runs.
    asynchronous: the share of the bytes that moves beside other work.
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
    """A large array of a device: what it is, its type and its bytes."""

    name: str
    type: str
    bytes: int


@dataclass(frozen=True)
class Figures:
    """The prediction of a step.

    verdict_by: who predicts: the analytic model, or the compiler.
    memory: bytes by kind; of a device, or of the machine where devices share its memory.
    limit: bytes there are; None if unknown.
    fits: whether the memory suffices; the compiler may refuse what the sum of kinds would allow.
    compute_seconds: all work but collectives.
    traffic: the collectives.
    error: the share by which the time may be off, measured against runs or published times.
    uncounted: kernels whose work is unknown; their time is that of their bytes.
    unknown_loops: loops whose length depends on the data, which count once.
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
        """Seconds of a step; None if they are not predicted."""
        return None if self.compute_seconds is None else self.compute_seconds + self.exposed_seconds

    @property
    def bound_by(self) -> str:
        """What bounds a step, in a sentence."""
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
