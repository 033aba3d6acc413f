"""Handles the bad steps of a run, which `train.guard` detects in the compiled step.

    stop       The state before the bad step is saved, with its position in the data, and the run ends.
    skip       The bad step changed nothing. It is logged, and the run continues.
    rollback   The newest good checkpoint is restored. The batches after it, up to that of the bad step, are never trained on.

A rollback is written to the file `rollbacks.json` of the run before the run continues. That file decides the batch of each step, so a
killed run resumes with the same steps, even with another number of processes.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError
from argosy.data.numbered import Numbered
from argosy.observe.metrics import Metrics
from argosy.parallel import processes
from argosy.run.hooks.replay import SUMS, Corrupted, Replay
from argosy.run.hooks.saver import Saver
from argosy.train.guard import SPIKE, Bad, Diverged, Halted, Watch, clear_halt
from argosy.train.loop import Now

if TYPE_CHECKING:
    from argosy.run.training import Training

GO_ON = "guard.nonfinite=skip or rollback goes on without the batch; init.state=RUN dir=NEW starts from here at another learning rate"
START_LOWER = "start again in dir=NEW with a lower optimizer.learning_rate or a longer schedule.warmup"


class Guarded:
    """Handles the bad steps of a run. The run's meter calls `watch` with the metrics of each step.

    went_back: called, after a rollback, with the step of the restored checkpoint.
    """

    def __init__(self, training: "Training", saver: Saver, metrics: Metrics, went_back: Callable[[int], None] = lambda step: None):
        self.went_back = went_back
        self.training, self.saver, self.metrics, self.how = training, saver, metrics, training.settings.guard
        self.directory, self.view = training.directory, training.view
        self.rolled: list[dict[str, Any]] = processes.broadcast("rollbacks", self.directory.rollbacks)
        saver.rollbacks = self.rolled
        self.batches = Numbered(training.assembly.batches, [(rollback["first"], rollback["last"]) for rollback in self.rolled])
        a = training.assembly
        replay = Replay(self.how.replay, a.places, a.shapes, a.mesh, a.adapters.base) if self.how.replay else None
        self.replay: Any = replay or (lambda update, state, batch, step: update(state, batch))
        self.check: Any = replay and replay.check
        self._watch = Watch(self.skipped)
        # The newest state: the loop gives up its own where it is interrupted.
        self.state: Any = None

    def fit(
        self,
        state: Any,
        update: Callable[[Any, Any], Any],
        fit: Callable[[Any, Any, Callable[[Any, Any], Any]], Any],
        patiently: Callable[[Any], Any] = lambda do: do,
    ) -> Any:
        """Runs the training loop to its end, and starts it again after each rollback.

        Args:
            state: the training state to begin with.
            update: the compiled step.
            fit: (state, batches, update) -> state, the training loop.
            patiently: wraps functions that take long between two steps.

        Raises:
            Diverged: a bad step stopped the run.
        """

        def update_and_keep(state: Any, batch: Any) -> Any:
            self.state, metrics = self.replay(update, state, batch, self.batches.steps)
            return self.state, metrics

        saved = lambda: bool(self.directory.checkpoints.steps())  # noqa: E731
        if "rollback" in self.how.actions and not processes.broadcast("any checkpoint", saved):
            # There must be something to go back to.
            with self.training.clock("checkpoint"):
                self.saver(Now(int(state.step), state, self.batches, False))
        after = patiently(self.after)
        while True:
            self.batches.begin(int(state.step))
            bad: Bad | None = None
            try:
                return fit(state, self.batches, update_and_keep)
            except Halted as halted:
                bad = halted.bad
            finally:
                del state
            # The exception held the frame of the loop, and that the state.
            with self.training.clock("start"):
                state = after(bad)

    def watch(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Checks the metrics of a step, and returns those to log.

        Raises:
            Halted: the step was bad, and the state halted.
            Corrupted: a device computed the step wrong.
        """
        numbers = dict(metrics)
        if (sums := numbers.pop(SUMS, None)) is not None:
            try:
                self.check(step, sums)
            except Corrupted as error:
                processes.run_together("corrupted", lambda error=error: raise_error(error))
        return self._watch(step, numbers)

    def skipped(self, bad: Bad) -> None:
        """Reports a step that was skipped."""
        number, _ = self.batches.of_step(bad.step)
        self._write(bad, "skip", batch=number)
        self.view.say(f"step {bad.step} is skipped: {bad.cause} ({bad.other}, batch {number})")

    def after(self, bad: Bad) -> Any:
        """Reacts to a bad step at which all processes halted. Returns the state to continue with.

        Raises:
            Diverged: the run ends.
        """
        seen = processes.all_gather("bad step", [bad.step, bad.kind])
        if any(entry != seen[0] for entry in seen):
            raise ArgosyError(f"processes disagree on which step was bad: {', '.join(map(str, seen))}")
        action = self.how.spike if bad.kind == SPIKE else self.how.nonfinite
        if action == "skip":
            return self.stop(bad, f"more than guard.in_row = {plural(self.how.in_row, 'step')} in a row were to be skipped")
        return self.stop(bad) if action == "stop" else self.roll_back(bad)

    def stop(self, bad: Bad, why: str = "") -> Any:
        """Saves the state of the last good step, and ends the run.

        Raises:
            Diverged: always.
        """
        number, before = self.batches.of_step(bad.step)
        step, checkpoints = bad.step - 1, self.directory.checkpoints
        if before is not None:
            self.saver(Now(step, clear_halt(self.state), before, True))
            checkpoints.wait()
        newest = processes.broadcast("newest", lambda: max(checkpoints.steps(), default=None))
        newest_text = "no checkpoint is saved" if newest is None else f"checkpoint {newest} is good"
        seen = f"loss {bad.numbers['loss']:.6g}, grad_norm {bad.numbers['grad_norm']:.6g}, batch {number}"
        place = "" if before is None else f" at {before.position()}"

        def fail() -> None:
            problem = f"{bad.cause} at step {bad.step}" + (f": {why}" if why else "")
            raise Diverged(problem, where=f"{seen}{place}; {newest_text}", hint=START_LOWER if why else GO_ON)

        return processes.run_together("bad step", fail)

    def roll_back(self, bad: Bad) -> Any:
        """Restores the newest good checkpoint, and leaves out the batches from there up to that of the bad step. Returns the restored
        state."""
        number, _ = self.batches.of_step(bad.step)
        if any(rollback["step"] == bad.step for rollback in self.rolled):
            return self.stop(bad, "a rollback from there did not help, so it is not the data")
        if len(self.rolled) >= self.how.rollbacks:
            return self.stop(bad, f"the run was rolled back {plural(len(self.rolled), 'time')}, guard.rollbacks at most")
        checkpoints = self.directory.checkpoints
        checkpoints.settle(bad.step)
        good = checkpoints.go_back()
        if good is None or good >= bad.step:
            return self.stop(bad, "no checkpoint before it can be restored")
        # No step changes the base, or gives up its arrays.
        base = {address: self.state.rest[address] for address in self.training.assembly.adapters.base}
        self.state = None
        self.batches.begin(good)
        first, last = self.batches.number + 1, number + self.how.beyond
        self.rolled.append({"step": bad.step, "restored": good, "first": first, "last": last, "what": bad.cause})
        processes.run_together("rollback", lambda: self.directory.write_rollbacks(self.rolled))
        self.batches.leave_out(first, last)
        self._write(bad, "rollback", batch=number, restored=good, first=first, last=last)
        self.view.say(
            f"{bad.cause} at step {bad.step} ({bad.other}, batch {number}): going back to step {good}, "
            f"without the batches {first} to {last}"
        )
        self.saver.newest.clear()
        self.went_back(good)
        return self.training.restored(good, base)

    def _write(self, bad: Bad, action: str, **more: int) -> None:
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in bad.numbers.items()}
        self.metrics.write({"step": bad.step, "bad": {"action": action, "what": bad.cause} | numbers | more})


def raise_error(error: Exception) -> None:
    """Raises an error, for use in expressions."""
    raise error
