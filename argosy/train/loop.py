"""The training loop of every kind of training. Pre-training, fine-tuning, preference optimization, RL, distillation and diffusion only
differ in the update and in the batches.

The loop measures time and calls hooks. The metrics of a step are read after the next step was dispatched, so reading them does not wait
for the device, and throughput is measured correctly. Hooks run between steps, after all earlier metrics were read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from argosy.data.batch import Batches
from argosy.observe.goodput import Clock
from argosy.train.guard import Diverged
from argosy.train.state import TrainState

Update = Callable[[TrainState, Any], tuple[TrainState, Mapping[str, Any]]]


# Causes of time that a step takes. Of batches that depend on the model, making them is one of its own.
TRAINING = ("step", "data", "rollouts")


@dataclass(frozen=True)
class Now:
    """The run between two steps, as hooks see it.

    step: the number of updates so far.
    state: the training state.
    batches: the batches of the run.
    last: whether no further step follows.
    """

    # Updates made so far.
    step: int
    state: TrainState
    batches: Batches
    # No step follows: the run is done, or was asked to stop.
    last: bool


@runtime_checkable
class Hook(Protocol):
    """An action between steps, at every step at which `due` is true. Its time is counted under `name`."""

    name: str

    def due(self, step: int, last: bool) -> bool: ...

    def __call__(self, now: Now) -> None: ...


@runtime_checkable
class StepLog(Protocol):
    """Receives the metrics of a logged step, for example a log file or a progress line."""

    def __call__(self, step: int, numbers: dict[str, float]) -> None: ...


@dataclass
class Meter:
    """Logs the metrics of steps. It reads them from the device, checks that they are finite, and adds rates since the last logged step.

    clock: counts the seconds that each part of the loop takes.
    tokens_per_step: the number of tokens in a step. If a step's metrics have `tokens`, the number of tokens since the first step, that
        number is used instead.
    tell: receives the metrics of each logged step.
    every: the number of steps between two logged steps.
    pace: called once, with the seconds that the second step took, unless a step is logged before. The first step takes longer, because
        it compiles programs and touches memory for the first time.
    watch: called with the metrics of every step, logged or not. Returns the metrics to log. If it is given, the meter does not check
        that metrics are finite (`train.guard.Watch` does).
    """

    clock: Clock
    tokens_per_step: int
    tell: StepLog
    every: int = 1
    pace: Callable[[float], None] | None = None
    watch: Callable[[int, Mapping[str, Any]], Mapping[str, Any]] | None = None
    _since: dict[str, float] = field(default_factory=dict)
    _logged_step: int | None = None
    _logged_tokens: float | None = None
    _first_s: float | None = None

    def begin(self, step: int, tokens: float | None = None) -> None:
        self._logged_step, self._since = step, dict(self.clock.seconds)
        self._logged_tokens = tokens

    def read(self, step: int, metrics: Mapping[str, Any], *, last: bool = False, certain: bool = False) -> None:
        """Waits for the metrics of a step and logs them, if the step is to be logged.

        Args:
            last: whether this is the last step, which is always logged.
            certain: whether to wait for the metrics and check them even if the step is not logged.

        Raises:
            Diverged: the loss or the norm of the gradient is not finite, and there is no `watch`.
        """
        if self.watch is not None:
            with self.clock("step"):
                metrics = self.watch(step, metrics)
        telling = last or step % self.every == 0
        # `certain` reads a step that was not waited for.
        if self.pace is not None and not (telling or certain):
            spent = self._spent_s()
            if self._first_s is None:
                self._first_s = spent
            else:
                pace, self.pace = self.pace, None
                pace(spent - self._first_s)
        if not (telling or certain):
            return
        with self.clock("step"):
            numbers = {name: float(np.asarray(value)) for name, value in metrics.items()}
        for name in ("loss", "grad_norm") if self.watch is None else ():
            if np.isfinite(numbers.get(name, 0.0)):
                continue
            raise Diverged(
                f"{name} is {numbers[name]} at step {step}",
                hint="lower optimizer.learning_rate or raise schedule.warmup; checkpoints before this step are good",
            )
        if not telling:
            return
        self.pace = None
        steps = step - (self._logged_step or 0)
        counted = numbers.get("tokens")
        new_tokens = steps * self.tokens_per_step if counted is None else counted - (self._logged_tokens or 0)
        numbers["tokens"] = step * self.tokens_per_step if counted is None else counted
        numbers["tokens_per_s"] = new_tokens / max(self._spent_s(), 1e-9)
        numbers["data_wait_s"] = self._spent_s("data")
        self.tell(step, numbers)
        self.begin(step, counted)

    def _spent_s(self, *causes: str) -> float:
        """Returns the seconds spent on these causes since the last logged step. The default causes are those of training."""
        return sum(self.clock.seconds.get(c, 0.0) - self._since.get(c, 0.0) for c in causes or TRAINING)


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
    """Trains until the state has made `until` updates, the data ends, or the run is interrupted. Returns the last state, which hooks
    have seen too.

    Args:
        state: the initial state, which is donated to the first update.
        batches: the batches. Where batches depend on the model, as rollouts do, `advance` reads the state before each batch.
        update: a compiled step, to which the state is donated.
        until: the total number of updates, including those that the initial state has made.
        hooks: the actions between steps.
        place: moves a batch from the host to the devices.
        meter: reads and logs the metrics of steps.
        interrupted: called once per step; returns whether to stop.
    """
    clock, step = meter.clock, int(state.step)
    meter.begin(step)
    unread: tuple[int, Any] | None = None
    last = False
    while step < until and not last:
        if batches.depends and unread is not None:
            # The next batch waits for this step anyway; read after it, its numbers would be late and their rates those of two batches.
            meter.read(*unread)
            unread = None
        with clock("rollouts" if batches.depends else "data"):
            batches.advance(state)
        with clock("data"):
            batch = next(batches, None)
        if batch is None:
            last = True
        else:
            with clock("data"):
                batch = place(batch)
            with clock("step"):
                state, metrics = update(state, batch)
            if unread is not None:
                # One step is under way and one is queued. Devices take many more, and a signal to stop would wait for all of them.
                with clock("step"):
                    jax.block_until_ready(unread[1])
                meter.read(*unread)
            step += 1
            unread = (step, metrics)
            last = step == until or interrupted()
        due = [hook for hook in hooks if hook.due(step, last)]
        if (due or last) and unread is not None:
            # Nothing is saved after a number that is not finite.
            meter.read(*unread, last=last, certain=True)
            unread = None
        for hook in due:
            with clock(hook.name):
                hook(Now(step, state, batches, last))
    with clock("step"):
        jax.block_until_ready(state)
    return state
