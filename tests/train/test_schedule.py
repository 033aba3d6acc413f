"""Learning-rate factors, by hand."""

import math

import pytest

from argosy.train.schedule import SCHEDULES, WSD, Constant, Cosine, LinearDecay


def values(schedule, steps, at):
    factor = schedule.build(steps)
    return [float(factor(step)) for step in at]


def test_warmup_rises_to_the_peak():
    assert values(Constant(warmup=4), 100, [0, 1, 3, 4, 99]) == pytest.approx([0.25, 0.5, 1, 1, 1])


def test_a_share_of_all_steps():
    assert values(Constant(warmup=0.04), 100, [0, 3]) == pytest.approx([0.25, 1])


def test_linear():
    assert values(LinearDecay(warmup=0, final=0.2), 101, [0, 50, 100]) == pytest.approx([1, 0.6, 0.2])


def test_cosine():
    assert values(Cosine(warmup=0, final=0.1), 101, [0, 25, 50, 100]) == pytest.approx(
        [1, 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 0.55, 0.1]
    )


def test_wsd_is_flat_then_falls():
    at = [9, 10, 79, 80, 90, 100]
    assert values(WSD(warmup=10, decay=20, final=0.1), 101, at) == pytest.approx([1, 1, 1, 1, 0.55, 0.1], abs=1e-6)
    at = [9, 10, 80, 81, 91, 100]
    assert values(WSD(warmup=10, decay=20, final=0), 101, at) == pytest.approx([1, 1, 1, 1, 0.5, 0.05], abs=1e-6)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
def test_every_step_changes_something(kind, steps):
    schedule = SCHEDULES[kind]
    for settings in ({}, {"final": 0.0}) if "final" in schedule.model_fields else ({},):
        assert min(values(schedule(**settings), steps, range(steps))) > 0


@pytest.mark.parametrize("warmup", [0, 3])
def test_linear_to_zero_is_that_of_transformers(warmup):
    """transformers 5.23, `get_linear_schedule_with_warmup`: after warm-up max(0, (n - step) / (n - warmup))."""
    n = 12
    expected = [(n - step) / (n - warmup) for step in range(warmup, n)]
    assert values(LinearDecay(warmup=warmup), n, range(warmup, n)) == pytest.approx(expected)
