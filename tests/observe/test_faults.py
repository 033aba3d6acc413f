"""The bad steps of a run, told from its metrics."""

from typing import Any

from argosy.observe.faults import bad_steps, faults_text


def line(step: int, action: str, batch: int, **more: int) -> dict[str, Any]:
    return {"step": step, "bad": {"action": action, "what": "loss is nan", "batch": batch} | more}


def test_what_was_made_again_counts_once():
    lines = [{"step": 0, "header": {}}, line(3, "skip", 3), line(6, "skip", 6), {"step": 4, "header": {}}, line(6, "skip", 6)]
    assert [line["step"] for line in bad_steps(lines)] == [3, 6]
    assert faults_text(bad_steps(lines)) == "2 steps were skipped"


def test_a_rollback_takes_back_the_skips_after_its_checkpoint():
    back = line(9, "rollback", 9, restored=4, first=5, last=9)
    lines = [line(3, "skip", 3), line(6, "skip", 6), back, {"step": 4, "header": {}}, back, line(5, "skip", 10)]
    assert [(line["step"], line["action"]) for line in bad_steps(lines)] == [(3, "skip"), (9, "rollback"), (5, "skip")]
    assert faults_text(bad_steps(lines)) == "2 steps were skipped; 1 rollback left out 5 batches"
    wider = line(8, "rollback", 12, restored=4, first=5, last=12)
    assert faults_text(bad_steps([*lines, wider])) == "1 step was skipped; 2 rollbacks left out 8 batches"


def test_nothing_bad():
    assert faults_text(bad_steps([{"step": 1, "loss": 2.0}])) == ""
