"""Learning-rate factors, by hand and beside Optax's schedules."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from argosy.train.schedule import (
    SCHEDULES,
    WSD,
    Constant,
    Cosine,
    InverseSquareRoot,
    LinearDecay,
    Piecewise,
    Polynomial,
    Restarts,
)


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


# {case: (schedule, Optax's over 61 steps)}. Where the final rate is above 0, the last step has it.
BY_OPTAX = {
    "constant": (Constant(warmup=0), optax.constant_schedule(1.0)),
    "linear": (LinearDecay(warmup=0, final=0.2), optax.linear_schedule(1.0, 0.2, 60)),
    "cosine": (Cosine(warmup=0, final=0.1), optax.cosine_decay_schedule(1.0, 60, alpha=0.1)),
    "wsd": (WSD(warmup=0, decay=20, final=0.1), optax.linear_schedule(1.0, 0.1, 20, transition_begin=40)),
    "wsd cosine": (
        WSD(warmup=0, decay=20, final=0.1, shape="cosine"),
        optax.join_schedules([optax.constant_schedule(1.0), optax.cosine_decay_schedule(1.0, 20, alpha=0.1)], [40]),
    ),
    "polynomial": (Polynomial(warmup=0, final=0.1, power=1.5), optax.polynomial_schedule(1.0, 0.1, 1.5, 60)),
    "restarts": (
        Restarts(warmup=0, cycles=3, growth=2, shrink=0.5, final=0.05),
        optax.sgdr_schedule(
            [
                {"init_value": h, "peak_value": h, "decay_steps": n, "warmup_steps": 0, "end_value": 0.05}
                for h, n in ((1.0, 60 / 7), (0.5, 120 / 7), (0.25, 240 / 7))
            ]
        ),
    ),
    "piecewise": (
        Piecewise(warmup=0, points=[{"step": 0.5, "factor": 0.1}, {"step": 50, "factor": 0.01}]),
        optax.piecewise_constant_schedule(1.0, {30: 0.1, 50: 0.1}),
    ),
    "piecewise linear": (
        Piecewise(warmup=0, points=[{"step": 20, "factor": 0.5}, {"step": 50, "factor": 0.01}], between="linear"),
        optax.piecewise_interpolate_schedule("linear", 1.0, {20: 0.5, 50: 0.02}),
    ),
}


@pytest.mark.parametrize("case", [*BY_OPTAX])
def test_a_schedule_is_that_of_optax(case):
    schedule, other = BY_OPTAX[case]
    at = np.arange(61)
    with jax.numpy_dtype_promotion("standard"):
        expected = np.asarray([float(np.asarray(other(jnp.asarray(float(step))))) for step in at])
    assert values(schedule, 61, at) == pytest.approx(expected, abs=2e-6)


def test_every_schedule_is_compared():
    assert {type(schedule) for schedule, _ in BY_OPTAX.values()} | {InverseSquareRoot} == {SCHEDULES[name] for name in SCHEDULES}


@pytest.mark.parametrize("timescale", [None, 30])
def test_the_inverse_square_root_is_that_of_transformers(timescale):
    """transformers 5.23, `get_inverse_sqrt_schedule`: 1 / sqrt((step + shift) / timescale), shift = timescale - warmup."""
    scale = timescale or 8
    expected = [1 / math.sqrt((step + scale - 8) / scale) for step in range(8, 60)]
    assert values(InverseSquareRoot(warmup=8, timescale=timescale), 60, range(8, 60)) == pytest.approx(expected)


def test_the_square_root_of_a_cooldown():
    """arXiv:2405.18392, equation 1: 1 - sqrt((n - N + D) / D)."""
    at = [40, 45, 55, 60]
    expected = [1 - math.sqrt((n - 40) / 20) for n in at]
    assert values(WSD(warmup=0, decay=20, final=1e-9, shape="sqrt"), 61, at) == pytest.approx(expected, abs=1e-6)


def test_points_ascend():
    with pytest.raises(ValueError, match="ascending"):
        Piecewise(points=[{"step": 50, "factor": 0.1}, {"step": 20, "factor": 0.5}])


def test_a_warm_up_longer_than_the_run_is_said():
    assert Constant(warmup=500).unfinished(500) is None
    assert Constant(warmup=0.9).unfinished(10) is None
    assert "ends at 0.2 of optimizer.learning_rate" in (Constant(warmup=500).unfinished(100) or "")
