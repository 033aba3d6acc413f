"""The bad steps of a run, as its metrics tell them: which were skipped, and from which it went back."""

from collections.abc import Mapping, Sequence
from typing import Any

from argosy.core.counts import plural


def bad_steps(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The bad steps in the order in which they came, each once: `step`, `action` (skip, rollback), `what`, `batch`; of a rollback also
    `restored`, `first` and `last`.

    A step that was made again, after a kill or a rollback, counts as it was made last.
    """
    found: list[Mapping[str, Any]] = []
    for line in lines:
        if "header" in line:
            # The run began, or was resumed, at this step: those after it are made again. A rollback stays what it was.
            found = [one for one in found if one["step"] <= line["step"] or one["action"] == "rollback"]
        bad = line.get("bad")
        if not isinstance(bad, Mapping):
            continue
        one = {"step": line["step"], **bad}
        if one["action"] == "rollback":
            found = [old for old in found if old["step"] <= one["restored"] or old["action"] == "rollback"]
        # A kill before a rollback was recorded makes it twice.
        found = [old for old in found if (old["step"], old["action"], old["batch"]) != (one["step"], one["action"], one["batch"])]
        found.append(one)
    return found


def faults_text(bad: Sequence[Mapping[str, Any]]) -> str:
    """ "2 steps were skipped; 1 rollback left out 7 batches"."""
    skips = [one for one in bad if one["action"] == "skip"]
    rolled = [one for one in bad if one["action"] == "rollback"]
    left_out = {number for one in rolled for number in range(one["first"], one["last"] + 1)}
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
