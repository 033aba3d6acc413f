"""Learning-rate factors, by hand."""

import math

import pytest

from argosy.train.schedule import WSD, Constant, Cosine, Linear


def values(schedule, steps, at):
    factor = schedule.build(steps)
    return [float(factor(step)) for step in at]


def test_warmup_rises_to_the_peak():
    assert values(Constant(warmup=4), 100, [0, 1, 3, 4, 99]) == pytest.approx([0.25, 0.5, 1, 1, 1])


def test_a_share_of_all_steps():
    assert values(Constant(warmup=0.04), 100, [0, 3]) == pytest.approx([0.25, 1])


def test_linear():
    assert values(Linear(warmup=0, final=0.2), 101, [0, 50, 100]) == pytest.approx([1, 0.6, 0.2])


def test_cosine():
    assert values(Cosine(warmup=0, final=0.1), 101, [0, 25, 50, 100]) == pytest.approx(
        [1, 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 0.55, 0.1]
    )


def test_wsd_is_flat_then_falls():
    assert values(WSD(warmup=10, decay=20, final=0), 101, [9, 10, 79, 80, 90, 100]) == pytest.approx([1, 1, 1, 1, 0.5, 0], abs=1e-6)
