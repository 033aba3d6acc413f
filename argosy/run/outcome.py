"""The outcome of a run, and the lines that report it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from argosy.observe.readable import decimals, format_duration


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    dir: the run directory: a local folder, or the address of a remote one (`gs://bucket/run`).
    step: the number of updates so far.
    steps: the number of steps of the run.
    exit_code: 0 if the run is done, otherwise 128 + the number of the signal that stopped it.
    last: the metrics of the last logged step.
    seconds: the wall time by cause, in seconds; empty if there was nothing left to do.
    saved: the step of the newest checkpoint; None if there is none.
    """

    dir: Path | str
    step: int
    steps: int
    exit_code: int
    last: Mapping[str, float]
    seconds: Mapping[str, float]
    saved: int | None = None

    @property
    def done(self) -> bool:
        return self.step >= self.steps


def ending(outcome: Outcome) -> str:
    """Describes the outcome of a run in one line for its log."""
    loss = f", loss {decimals(outcome.last['loss'])}" if "loss" in outcome.last else ""
    end = f"stopped by signal {outcome.exit_code - 128}" if outcome.exit_code else "ended"
    words = f"{end} at step {outcome.step} of {outcome.steps} after {format_duration(sum(outcome.seconds.values()))}{loss}"
    return f"{words}; {saved_words(outcome)}"


def saved_words(outcome: Outcome) -> str:
    """Returns a phrase that names the newest checkpoint. A run that is stopped before its first step saves checkpoint 0."""
    return "no checkpoint is saved" if outcome.saved is None else f"checkpoint {outcome.saved} is saved"


def next_start(outcome: Outcome) -> str:
    """Returns a phrase that says how the next start of a stopped run begins."""
    return "starts anew" if outcome.saved is None else f"resumes from step {outcome.saved}"
