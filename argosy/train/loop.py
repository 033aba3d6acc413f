"""The one loop: pre-training, fine-tuning, preference, RL, distillation, diffusion differ in the update and the batches.

It owns the clock and calls hooks. Numbers of a step are read after the next one has been dispatched, so reading them costs
nothing and throughput is true. Hooks run between steps, when all numbers before them are read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from argosy.core.errors import ArgosyError
from argosy.data.batch import Batches
from argosy.observe.goodput import Clock
from argosy.train.state import TrainState

Update = Callable[[TrainState, Any], tuple[TrainState, Mapping[str, Any]]]


@dataclass(frozen=True)
class Now:
    """The run between two steps, as hooks see it."""

    step: int  # updates made
    state: TrainState
    batches: Batches
    last: bool  # no step follows: done, or asked to stop


@runtime_checkable
class Hook(Protocol):
    """Something done every so many steps. `name` is the cause its time is booked under."""

    name: str

    def due(self, step: int, last: bool) -> bool: ...

    def __call__(self, now: Now) -> None: ...


@runtime_checkable
class Told(Protocol):
    """Takes the numbers of a step: a log, a progress line."""

    def __call__(self, step: int, numbers: dict[str, float]) -> None: ...


class Diverged(ArgosyError):
    """The loss is no longer a number."""


@dataclass
class Meter:
    """Turns a step's metrics into the numbers that are told: read, checked, with rates since the last telling."""

    clock: Clock
    tokens_per_step: int
    tell: Told
    every: int = 1
    _since: dict[str, float] = field(default_factory=dict)
    _told_step: int | None = None

    def begin(self, step: int) -> None:
        self._told_step, self._since = step, dict(self.clock.seconds)

    def read(self, step: int, metrics: Mapping[str, Any], *, last: bool = False, certain: bool = False) -> None:
        """Waits for the metrics of `step` where it is one to tell; `certain`: also where it is not, to be sure of it.

        Raises:
            Diverged: the loss, or the gradient that the weights moved by, is not finite.
        """
        telling = last or step % self.every == 0
        if not (telling or certain):
            return
        with self.clock("step"):
            numbers = {name: float(np.asarray(value)) for name, value in metrics.items()}
        for name in ("loss", "grad_norm"):
            if np.isfinite(numbers.get(name, 0.0)):
                continue
            raise Diverged(
                f"{name} is {numbers[name]} at step {step}",
                hint="lower optimizer.learning_rate or raise schedule.warmup; checkpoints before this step are good",
            )
        if not telling:
            return
        spent = {k: v - self._since.get(k, 0.0) for k, v in self.clock.seconds.items()}
        steps = step - (self._told_step or 0)
        seconds = spent.get("step", 0.0) + spent.get("data", 0.0)
        numbers["tokens"] = step * self.tokens_per_step
        numbers["tokens_per_s"] = steps * self.tokens_per_step / max(seconds, 1e-9)
        numbers["data_wait_s"] = spent.get("data", 0.0)
        self.tell(step, numbers)
        self.begin(step)


def fit(
    state: TrainState,
    batches: Batches,
    update: Update,
    until: int,
    hooks: Sequence[Hook] = (),
    *,
    place: Callable[[Any], Any] = lambda batch: batch,
    meter: Meter,
    interrupted: Callable[[], bool] = lambda: False,
) -> TrainState:
    """Updates until the state has made `until` of them, the data ends, or an interruption; hooks see the last state.

    Args:
        batches: where the next batch depends on the model (rollouts), `advance` reads the state before each batch.
        update: a compiled step; the state is donated to it.
        place: a host batch onto the devices.
        interrupted: asked once a step.
    """
    clock, step = meter.clock, int(state.step)
    meter.begin(step)
    unread: tuple[int, Any] | None = None
    last = False
    while step < until and not last:
        with clock("data"):
            batches.advance(state)
            batch = next(batches, None)
        if batch is None:
            last = True
        else:
            with clock("data"):
                batch = place(batch)
            with clock("step"):
                state, metrics = update(state, batch)
            if unread is not None:
                meter.read(*unread)
            step += 1
            unread = (step, metrics)
            last = step == until or interrupted()
        due = [hook for hook in hooks if hook.due(step, last)]
        if (due or last) and unread is not None:
            meter.read(*unread, last=last, certain=True)  # nothing is saved that is not a number
            unread = None
        for hook in due:
            with clock(hook.name):
                hook(Now(step, state, batches, last))
    with clock("step"):
        jax.block_until_ready(state)
    return state
