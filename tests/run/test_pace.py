"""What one process measures of itself."""

import time
from types import SimpleNamespace

import jax
import pytest

from argosy.observe.goodput import Clock
from argosy.observe.stragglers import DATA, HOST, STALLS
from argosy.parallel.probe import Probe
from argosy.run.hooks.pace import PaceMeter, measured_pace
from argosy.train.straggler_settings import StragglerSettings


def test_devices_are_timed_each():
    probe = Probe(jax.local_devices()[:3])
    seconds = probe()
    probe.close()
    assert len(seconds) == 3
    assert all(0 < s <= probe.took_s * 20 for s in seconds)


def test_one_process_on_a_cpu_compares_nothing():
    def update(state, batch):
        return state, batch

    for settings in (StragglerSettings(), StragglerSettings(every=0)):
        with measured_pace(settings, jax.local_devices(), Clock(), lambda: 0, print, print) as measured:
            assert measured(update) is update


def test_the_host_counts_where_devices_waited():
    clock, ready = Clock(), [True]
    # Rollouts add numbers of the host.
    metrics = {"answers/cut": 0.25, "loss": SimpleNamespace(is_ready=lambda: ready[0])}
    pace = PaceMeter(StragglerSettings(), jax.local_devices(), clock, lambda: 0, print, print)
    assert len(pace.probe.devices) == 1, "CPU devices share their processors"
    try:
        step = pace(lambda state, batch: (state, metrics))

        def run_host(data: float, python: float) -> None:
            with clock("data"):
                time.sleep(data)
            time.sleep(python)
            with clock("step"):
                step(None, None)

        run_host(0.2, 0.2)
        # What came before the first step is no step's.
        assert pace.seconds[DATA] == pace.seconds[HOST] == 0
        run_host(0.03, 0.01)
        assert 0.03 <= pace.seconds[DATA] < 0.2
        assert 0.01 <= pace.seconds[HOST] < 0.2
        assert pace.exposed == pace.seconds | {STALLS: pace.exposed[STALLS]}
        before = pace.exposed[DATA]
        ready[0] = False
        run_host(0.03, 0.01)
        assert pace.exposed[DATA] == before
        assert pace.seconds[DATA] >= 0.06
        assert pace.steps == 3
    finally:
        pace.close()


@pytest.mark.parametrize(("before", "probe_s", "step_s", "spacing"), [
    (None, 0.006, 1.0, 4),      # 0.3 % of 2 steps, of windows of 4
    (None, 0.006, 0.1, 20),
    (None, 0.006, 0.01, 200),
    (200, 0.006, 0.011, 200),   # 184 would do
    (200, 0.006, 0.1, 20),
    (200, 0.006, 1.0, 4),
    (4, 0.006, 0.1, 20),
    (None, 0.006, None, None),
])  # fmt: skip
def test_devices_are_timed_seldom_enough(before: int | None, probe_s: float, step_s: float | None, spacing: int | None):
    pace = PaceMeter(StragglerSettings(), jax.local_devices(), Clock(), lambda: 0, print, print)
    pace.close()
    pace.spacing, pace.probe_s, pace.compare.step_s = before, probe_s, step_s
    assert pace.spaced() == spacing
