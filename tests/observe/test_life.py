"""Goodput over restarts: lives with known times, and a run that was killed, measured from outside."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import campaign_kill
import pytest

from argosy.core.storage import Store
from argosy.observe import goodput, life
from argosy.observe.goodput import Clock
from argosy.observe.life import RunLife, account
from argosy.observe.report.page import RunRecord, render_report


def line(start: str, start_time: float, step: int | None, seconds: dict[str, float], **more: Any) -> dict[str, Any]:
    return {"start": start, "began": start_time, "elapsed": sum(seconds.values()), "step": step, "seconds": seconds} | more


# A start of 100 s that saved step 10 after 60 s and was killed after its step 18; 50 s later one that went on from step 10.
TWICE = [
    line("a", 1000.0, 0, {"start": 10.0, "other": 0.0}, **{"from": 0}),
    line("a", 1000.0, 0, {"start": 10.0, "compile": 20.0, "other": 0.0}, **{"from": 0}),
    line("a", 1000.0, 10, {"start": 10.0, "compile": 20.0, "step": 25.0, "data": 4.0, "checkpoint": 1.0, "other": 0.0}, **{"from": 0}),
    line("a", 1000.0, 18, {"start": 10.0, "compile": 20.0, "step": 60.0, "data": 9.0, "checkpoint": 1.0, "other": 0.0}, **{"from": 0}),
    line("b", 1150.0, 10, {"start": 5.0, "other": 0.0}, **{"from": 10}),
    line("b", 1150.0, 30, {"start": 5.0, "compile": 15.0, "step": 80.0, "other": 0.0}, **{"from": 10}),
]


def write_life(folder: Path, lines: list[dict[str, Any]], process: int = 0, rest: str = "") -> Store:
    (folder / "life").mkdir(exist_ok=True)
    (folder / "life" / f"{process}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines) + rest)
    return Store(folder)


def test_a_kill_loses_what_came_after_the_checkpoint_and_the_time_until_the_next_start(tmp_path: Path):
    life = account(write_life(tmp_path, TWICE, rest=json.dumps(TWICE[-1])[:40]))
    assert life is not None
    expected = {"start": 15.0, "compile": 35.0, "step": 105.0, "data": 4.0, "checkpoint": 1.0, "lost": 40.0, "down": 50.0, "other": 0.0}
    assert life.seconds == pytest.approx(expected)
    assert life.wall == 250.0 == 1250.0 - 1000.0
    assert (life.starts, life.lost_steps) == (2, 8)
    assert life.goodput == 105 / 250
    assert life.words() == (
        "goodput 42.0% over 2 starts; 8 steps made again; down 20.0%; lost 16.0%; compile 14.0%; start 6.0%; data 1.6%"
    )


def test_a_later_start_may_lose_more_of_an_earlier_one(tmp_path: Path):
    """The checkpoint of step 10 was damaged: a third start went on from the beginning. What came of the first two is lost."""
    third = line("c", 1300.0, 5, {"start": 5.0, "step": 10.0, "other": 0.0}, **{"from": 0})
    life = account(write_life(tmp_path, [*TWICE, third]))
    assert life is not None
    assert life.seconds["step"] == 10
    assert life.seconds["lost"] == 70 + 95
    assert (life.lost_steps, life.wall) == (18 + 20, 315.0)


def test_a_start_that_never_trained_loses_nothing_and_a_clock_that_was_set_back_is_no_time(tmp_path: Path):
    dead = line("b", 1090.0, None, {"start": 3.0, "other": 0.0})
    life = account(write_life(tmp_path, [*TWICE[:4], dead]))
    assert life is not None
    assert (life.starts, life.wall, life.lost_steps) == (2, 103.0, 0)
    assert "down" not in life.seconds


def test_a_clock_that_was_set_back_an_hour_loses_no_work(tmp_path: Path):
    """The second start goes on from the last step of the first, and by its clock began before it."""
    first = line("a", 5000.0, 100, {"start": 1.0, "step": 50.0, "other": 0.0}, **{"from": 0})
    second = line("b", 1400.0, 150, {"start": 1.0, "step": 25.0, "other": 0.0}, **{"from": 100})
    life = account(write_life(tmp_path, [first, second]))
    assert life is not None
    assert life.seconds == {"start": 2.0, "step": 75.0, "other": 0.0}
    assert (life.lost_steps, life.wall) == (0, 77.0)


def test_what_a_process_waits_for_another_in_a_step_is_told_apart(tmp_path: Path):
    """The first reads its data for 30 s while the other is in its step."""
    slow = line("a", 1000.0, 10, {"step": 50.0, "data": 30.0, "other": 0.0}, **{"from": 0}, gang="a")
    fast = line("b", 1000.0, 10, {"step": 79.0, "data": 1.0, "other": 0.0}, **{"from": 0}, gang="a")
    write_life(tmp_path, [slow])
    life = account(write_life(tmp_path, [fast], process=1))
    assert life is not None
    assert life.by_process == {
        0: {"step": 50.0, "data": 30.0, "other": 0.0, "waiting": 0.0}, 1: {"step": 50.0, "data": 1.0, "other": 0.0, "waiting": 29.0},
    }  # fmt: skip
    assert life.seconds["step"] == 50
    assert "by process" in render_report(RunRecord("two", "done", life=life))


def test_processes_that_came_or_went_between_starts_are_not_waited_for(tmp_path: Path):
    """Two processes make ten steps, one alone makes ninety more, and two make the last ten, in which the first waits for the second."""
    first = [
        line("a", 1000.0, 10, {"step": 10.0, "other": 0.0}, **{"from": 0}, gang="a"),
        line("b", 1020.0, 100, {"step": 90.0, "other": 0.0}, **{"from": 10}, gang="b"),
        line("c", 1200.0, 110, {"step": 12.0, "other": 0.0}, **{"from": 100}, gang="c"),
    ]
    second = [
        line("d", 1000.0, 10, {"step": 13.0, "other": 0.0}, **{"from": 0}, gang="a"),
        line("e", 1200.0, 110, {"step": 10.0, "data": 2.0, "other": 0.0}, **{"from": 100}, gang="c"),
    ]
    write_life(tmp_path, first)
    life = account(write_life(tmp_path, second, process=1))
    assert life is not None
    assert {process: (s["step"], s["waiting"]) for process, s in life.by_process.items()} == {0: (110, 2), 1: (20, 3)}
    # Waiting is no work: of the run, as of its first process.
    assert (life.seconds["step"], life.seconds["waiting"]) == (110, 2)
    assert sum(life.seconds.values()) == pytest.approx(life.wall)


def test_starts_that_tell_no_gang_show_no_waiting(tmp_path: Path):
    write_life(tmp_path, [line("a", 1000.0, 10, {"step": 10.0, "other": 0.0}, **{"from": 0})])
    life = account(write_life(tmp_path, [line("b", 1000.0, 5, {"step": 5.0, "other": 0.0}, **{"from": 0})], process=1))
    assert life is not None
    assert life.by_process == {0: {"step": 10.0, "other": 0.0}, 1: {"step": 5.0, "other": 0.0}}


# 150 steps of a second, of which 100 were saved, back to them, and on to 200; restoring took 3 s, compiling 20 s.
BACK = [
    line("a", 1000.0, 0, {"start": 1.0, "other": 0.0}, **{"from": 0}),
    line("a", 1000.0, 100, {"start": 1.0, "compile": 20.0, "step": 100.0, "data": 10.0, "other": 0.0}, **{"from": 0}),
    line("a", 1000.0, 150, {"start": 1.0, "compile": 20.0, "step": 150.0, "data": 15.0, "other": 0.0}, **{"from": 0}),
    line("a", 1000.0, 100, {"start": 1.0, "compile": 20.0, "step": 150.0, "data": 15.0, "other": 0.0}, **{"from": 0}),
    line("a", 1000.0, 200, {"start": 4.0, "compile": 20.0, "step": 250.0, "data": 25.0, "other": 0.0}, **{"from": 0}),
]


def test_a_rollback_loses_the_steps_since_its_checkpoint(tmp_path: Path):
    life = account(write_life(tmp_path, BACK))
    assert life is not None
    assert life.seconds == {"start": 4.0, "compile": 20.0, "step": 200.0, "data": 20.0, "lost": 55.0, "other": 0.0}
    assert (life.lost_steps, life.wall, life.goodput) == (50, 299.0, 200 / 299)


@pytest.mark.parametrize(("resumed", "kept_steps", "made_again"), [(200, 200, 50), (100, 100, 150), (0, 0, 250)])
def test_a_later_start_loses_more_of_one_that_was_rolled_back(tmp_path: Path, resumed: int, kept_steps: int, made_again: int):
    later = line("b", 1299.0, resumed, {"start": 1.0, "other": 0.0}, **{"from": resumed})
    life = account(write_life(tmp_path, [*BACK, later]))
    assert life is not None
    assert (life.seconds.get("step", 0), life.lost_steps, life.wall) == (kept_steps, made_again, 300.0)


def test_a_rollback_to_before_a_start_loses_steps_of_the_start_before(tmp_path: Path):
    """The second start resumes from 100, compiles, makes 20 steps, and goes back to 50: a checkpoint between is damaged."""
    lines = [
        line("a", 1000.0, 50, {"step": 50.0, "other": 0.0}, **{"from": 0}),
        line("a", 1000.0, 100, {"step": 100.0, "other": 0.0}, **{"from": 0}),
        line("b", 1100.0, 100, {"start": 2.0, "other": 0.0}, **{"from": 100}),
        line("b", 1100.0, 120, {"start": 2.0, "compile": 5.0, "step": 20.0, "other": 0.0}, **{"from": 100}),
        line("b", 1100.0, 50, {"start": 2.0, "compile": 5.0, "step": 20.0, "other": 0.0}, **{"from": 100}),
        line("b", 1100.0, 110, {"start": 4.0, "compile": 5.0, "step": 80.0, "other": 0.0}, **{"from": 100}),
    ]
    life = account(write_life(tmp_path, lines))
    assert life is not None
    assert life.seconds == {"start": 4.0, "compile": 5.0, "step": 110.0, "lost": 70.0, "other": 0.0}
    assert life.lost_steps == 70


def test_no_account_is_none(tmp_path: Path):
    assert account(Store(tmp_path)) is None
    assert account(write_life(tmp_path, [], rest='{"start": "torn')) is None


def test_a_clock_knows_what_is_not_over(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(goodput.time, "perf_counter", lambda: now[0])
    clock = Clock()
    with clock("evaluation"):
        now[0] += 5
        with clock("checkpoint"):
            now[0] += 2
        with clock("checkpoint"):
            now[0] += 1
            assert clock.shares() == {"evaluation": 5, "checkpoint": 3, "other": 0}
    now[0] += 4
    assert clock.shares() == {"evaluation": 5, "checkpoint": 3, "other": 4}


def test_a_start_writes_what_account_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(life, "EVERY_S", 0.0)
    # A command in this process may have been refused before its run began.
    monkeypatch.setattr(life, "_began", [])
    clock = Clock()
    run_life = RunLife(Store(tmp_path), clock)
    with clock("start"):
        run_life.begins(7)
    with clock("step"):
        run_life.steps()
    run_life.saved(8)
    run_life.step = 12
    run_life.went_back(8)
    run_life.sign(ended=True)
    lines = [json.loads(text) for text in (tmp_path / "life" / "0.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry["from"]) for entry in lines] == [(7, 7), (8, 7), (8, 7), (12, 7), (8, 7), (8, 7)]
    totals = account(Store(tmp_path))
    assert totals is not None
    assert totals.lost_steps == 4
    assert totals.wall == sum(totals.seconds.values()) == pytest.approx(clock.elapsed, abs=0.1)


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_has_its_wall_time_by_cause(tmp_path: Path):
    recipe, words = campaign_kill.kind_of("text", tmp_path)
    words, run, pause = [*words, "steps=120", "checkpoint.every=40"], tmp_path / "run", 1.5
    start_time = time.time()
    process = campaign_kill.launch(run, words, recipe)
    try:
        campaign_kill.wait_for(process, lambda: campaign_kill.newest(run) >= 40 and len(campaign_kill.lines_from(run)) > 45, True)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    # Signs of life come with checkpoints, and every few seconds.
    before = account(Store(run))
    assert before is not None
    assert before.seconds["step"] > 0
    time.sleep(pause)
    process = campaign_kill.launch(run, words, recipe)
    assert process.wait(campaign_kill.PATIENCE_S) == 0
    outside = time.time() - start_time
    life = account(Store(run))
    assert life is not None
    assert life.wall == sum(life.seconds.values())
    # From the first start of a process to its last sign, both seen from outside.
    assert 0 <= outside - life.wall < 3
    assert life.starts == 2
    assert life.seconds["down"] > pause
    assert life.seconds["start"] > 0.5
    steps = [step for step, _ in campaign_kill.lines_from(run)]
    assert life.lost_steps <= len(steps) - len(set(steps))
    assert 0 < life.goodput < 1
    assert "Time by cause, 2 starts" in (run / "report.html").read_text()


def test_lines_that_are_not_those_of_a_start_are_left_out(tmp_path: Path):
    strange = "[1]\n" + json.dumps({"start": "a", "began": 1000.0}) + "\n" + '"start"\n'
    assert account(write_life(tmp_path, TWICE, rest=strange)) == account(write_life(tmp_path, TWICE))
