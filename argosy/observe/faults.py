"""The bad steps of a run, as its metrics tell them: which were skipped, and from which it went back."""

from collections.abc import Mapping, Sequence
from typing import Any

from argosy.core.counts import plural


def bad_steps(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The bad steps in the order in which they came, each once: `step`, `action` (skip, rollback), `what`, `batch`; of a rollback also
    `restored`, `first` and `last`.

    A step that was made again, after a kill or a rollback, counts as it was made last.
    """
    faults: list[Mapping[str, Any]] = []
    for line in lines:
        if "header" in line:
            # The run began, or was resumed, at this step: those after it are made again. A rollback stays what it was.
            faults = [fault for fault in faults if fault["step"] <= line["step"] or fault["action"] == "rollback"]
        bad = line.get("bad")
        if not isinstance(bad, Mapping):
            continue
        fault = {"step": line["step"], **bad}
        if fault["action"] == "rollback":
            faults = [old for old in faults if old["step"] <= fault["restored"] or old["action"] == "rollback"]
        # A kill before a rollback was recorded makes it twice.
        identity = fault["step"], fault["action"], fault["batch"]
        faults = [old for old in faults if (old["step"], old["action"], old["batch"]) != identity]
        faults.append(fault)
    return faults


def faults_text(bad: Sequence[Mapping[str, Any]]) -> str:
    """ "2 steps were skipped; 1 rollback left out 7 batches"."""
    skips = [fault for fault in bad if fault["action"] == "skip"]
    rolled = [fault for fault in bad if fault["action"] == "rollback"]
    left_out = {number for fault in rolled for number in range(fault["first"], fault["last"] + 1)}
    words = [f"{plural(len(skips), 'step', 'was', 'were')} skipped"] if skips else []
    batches = f"{len(left_out):,} batch{'' if len(left_out) == 1 else 'es'}"
    words += [f"{plural(len(rolled), 'rollback')} left out {batches}"] if rolled else []
    return "; ".join(words)


def row(fault: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """step, batch, what was found, what followed"""
    then = "skipped"
    if fault["action"] == "rollback":
        then = f"back to step {fault['restored']:,}, without the batches {fault['first']:,} to {fault['last']:,}"
    return f"{fault['step']:,}", f"{fault['batch']:,}", str(fault["what"]), then
