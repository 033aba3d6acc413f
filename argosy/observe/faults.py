"""Finds the bad steps of a run in its metrics: skipped steps and rollbacks."""

from collections.abc import Mapping, Sequence
from typing import Any

from argosy.core.counts import plural


def bad_steps(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the bad steps in their order, each once. An entry has `step`, `action` (skip, rollback), `what` and `batch`; that of a
    rollback also has `restored` (the restored step), `first` and `last` (the batches that were left out).

    If a step was repeated after a kill or a rollback, only its last execution counts.
    """
    faults: list[Mapping[str, Any]] = []
    for line in lines:
        if "header" in line:
            # The run began or resumed at this step, so later steps are repeated. Rollbacks stay listed.
            faults = [fault for fault in faults if fault["step"] <= line["step"] or fault["action"] == "rollback"]
        bad = line.get("bad")
        if not isinstance(bad, Mapping):
            continue
        fault = {"step": line["step"], **bad}
        if fault["action"] == "rollback":
            faults = [old for old in faults if old["step"] <= fault["restored"] or old["action"] == "rollback"]
        # If the process was killed before a rollback was recorded, the rollback is listed twice.
        identity = fault["step"], fault["action"], fault["batch"]
        faults = [old for old in faults if (old["step"], old["action"], old["batch"]) != identity]
        faults.append(fault)
    return faults


def faults_text(bad: Sequence[Mapping[str, Any]]) -> str:
    """Returns a sentence about bad steps, such as "2 steps were skipped; 1 rollback left out 7 batches"."""
    skips = [fault for fault in bad if fault["action"] == "skip"]
    rolled = [fault for fault in bad if fault["action"] == "rollback"]
    left_out = {number for fault in rolled for number in range(fault["first"], fault["last"] + 1)}
    words = [f"{plural(len(skips), 'step', 'was', 'were')} skipped"] if skips else []
    batches = f"{len(left_out):,} batch{'' if len(left_out) == 1 else 'es'}"
    words += [f"{plural(len(rolled), 'rollback')} left out {batches}"] if rolled else []
    return "; ".join(words)


def row(fault: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Returns a bad step as the cells of a table: step, batch, what was found, what was done."""
    then = "skipped"
    if fault["action"] == "rollback":
        then = f"back to step {fault['restored']:,}, without the batches {fault['first']:,} to {fault['last']:,}"
    return f"{fault['step']:,}", f"{fault['batch']:,}", str(fault["what"]), then
