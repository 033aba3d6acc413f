"""What the loop's meter reports, and when."""

from contextlib import nullcontext
from typing import Any

import pytest

from argosy.observe.goodput import Clock
from argosy.train.loop import Meter


class Ticking(Clock):
    """A clock that is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = {"step": 0.0, "data": 0.0}

    def __call__(self, cause: str) -> Any:
        return nullcontext()


def measure(every: int, begin: int, steps: int, certain: bool = False) -> tuple[list[float], list[tuple[int, float]]]:
    """The paces and the rates that a meter reports of steps of 3 s (2 of the step, 1 of data) and 6 tokens."""
    clock, paces, rates = Ticking(), [], []
    meter = Meter(clock, 6, lambda step, numbers: rates.append((step, numbers["tokens_per_s"])), every, paces.append)
    meter.begin(begin)
    for step in range(begin + 1, begin + steps + 1):
        clock.seconds = {"step": clock.seconds["step"] + 2.0, "data": clock.seconds["data"] + 1.0}
        meter.read(step, {"loss": 1.0}, certain=certain and step == begin + 1)
    return paces, rates


def test_one_step_is_timed_once():
    paces, rates = measure(every=4, begin=0, steps=9)
    assert paces == [3.0]
    assert rates == [(4, pytest.approx(2.0)), (8, pytest.approx(2.0))]


def test_a_first_step_that_compiles_does_not_count_in_the_pace():
    clock, paces = Ticking(), []
    meter = Meter(clock, 6, lambda step, numbers: None, 10, paces.append)
    meter.begin(0)
    for step, seconds in enumerate((60.0, 63.0, 70.0), 1):
        clock.seconds = {"step": seconds}
        meter.read(step, {"loss": 1.0})
    assert paces == [3.0]


def test_time_of_rollouts_counts_as_training_and_not_as_data():
    clock, reports = Ticking(), []
    meter = Meter(clock, 6, lambda step, numbers: reports.append(numbers))
    meter.begin(0)
    clock.seconds = {"step": 2.0, "data": 1.0, "rollouts": 3.0, "evaluation": 5.0}
    meter.read(1, {"loss": 1.0})
    assert (reports[0]["tokens_per_s"], reports[0]["data_wait_s"]) == (pytest.approx(1.0), 1.0)


def test_a_first_step_that_is_logged_has_no_pace_of_its_own():
    assert measure(every=1, begin=0, steps=3)[0] == []
    assert measure(every=4, begin=3, steps=3)[0] == []


def test_a_step_that_was_not_waited_for_is_not_timed():
    """A hook reads it as soon as it is dispatched. The first two are timed together, so the third is the first that is timed alone."""
    assert measure(every=9, begin=0, steps=2, certain=True)[0] == []
    assert measure(every=9, begin=0, steps=3, certain=True)[0] == [3.0]
