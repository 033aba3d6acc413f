"""Slow processes, told from numbers made by hand and from noise."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from argosy.observe.report.page import RunRecord, render_report
from argosy.observe.stragglers import (
    DATA,
    DEVICE,
    HOST,
    KEY,
    STALLS,
    Comparison,
    ProcessTimes,
    StragglerVerdict,
    median_of_others,
    stragglers,
)
from argosy.train.straggler_settings import StragglerSettings


class Gang:
    """Processes whose numbers grow by hand."""

    def __init__(self, count: int, devices: int = 1, **options):
        self.compare = Comparison(**({"every": 5, "ratio": 1.5, "windows": 3} | options))
        zero = {DATA: 0.0, HOST: 0.0, STALLS: 0.0}
        self.told = {p: ProcessTimes(0, 0.0, zero, zero, f"host-{p}", 0, [0.0] * devices) for p in range(count)}
        self.compare(self.told)

    def window(self, seconds=(), exposed=None, devices=None, steps=5, step_s=1.0) -> list[StragglerVerdict]:
        """One window: {(process, cause): seconds a step}, the same exposed unless said otherwise; seconds of each device's timing."""
        spent, seen = dict(seconds), dict(seconds if exposed is None else exposed)
        for p, times in self.told.items():
            both = ((times.seconds, spent), (times.exposed, seen))
            grown = [{c: was + steps * more.get((p, c), 0.0) for c, was in old.items()} for old, more in both]
            timed = (
                [was + now for was, now in zip(times.devices, devices[p], strict=True)] if devices else times.devices
            )
            self.told[p] = replace(
                times, steps=times.steps + steps, wall=times.wall + steps * step_s, seconds=grown[0], exposed=grown[1],
                probes=times.probes + bool(devices), devices=timed,
            )  # fmt: skip
        return self.compare(self.told)


SLOW = {(0, DATA): 0.2, (1, DATA): 0.3, (2, DATA): 0.8, (3, DATA): 0.1}


def test_slow_data_is_named_after_three_windows_and_said_again_when_over():
    gang = Gang(4)
    assert gang.window(SLOW) == gang.window(SLOW) == []
    (verdict,) = gang.window(SLOW)
    # The median of 0.2, 0.3 and 0.1 is 0.2.
    assert (verdict.process, verdict.host, verdict.cause, verdict.device, verdict.is_recovered) == (2, "host-2", DATA, None, False)
    assert (verdict.times, verdict.seconds) == (pytest.approx(4.0), pytest.approx(0.6))
    assert verdict.words() == "process 2 on host host-2 is slow: its data takes 4.0 times the others', 0.6 s a step more"
    assert gang.window(SLOW) == []
    fine = {(p, DATA): 0.2 for p in range(4)}
    # One good window between bad ones is no recovery.
    assert gang.window(fine) == gang.window(fine) == gang.window(SLOW) == gang.window(fine) == gang.window(fine) == []
    (over,) = gang.window(fine)
    assert over.is_recovered
    assert over.words() == "process 2 on host host-2 is as fast as the others again"
    # And the next time.
    assert [len(gang.window(SLOW)) for _ in range(3)] == [0, 0, 1]


def test_windows_in_a_row_only():
    gang = Gang(4)
    fine = {(p, DATA): 0.2 for p in range(4)}
    assert not any(gang.window(SLOW if i % 3 else fine) for i in range(30))


@pytest.mark.parametrize(
    ("seconds", "exposed"),
    [
        # As slow as the ratio, not slower.
        ({(0, DATA): 0.3, (1, DATA): 0.2}, None),
        # Ten times, but 9 ms of a step of a second.
        ({(0, DATA): 0.01, (1, DATA): 0.001}, None),
        # While the devices computed.
        ({(0, DATA): 0.8, (1, DATA): 0.1}, {}),
        ({(0, DATA): 0.8, (1, DATA): 0.1}, {(0, DATA): 0.05}),
        # All the same, and none at all.
        ({(0, DATA): 0.8, (1, DATA): 0.8}, None),
        ({}, None),
    ],
)
def test_what_is_no_straggler(seconds: dict, exposed: dict | None):
    gang = Gang(2)
    assert not any(gang.window(seconds, exposed) for _ in range(9))


def test_times_of_zero_and_numbers_that_are_none():
    gang = Gang(3)
    verdicts = [gang.window({(1, HOST): 0.5}) for _ in range(3)]
    assert verdicts[2] == [StragglerVerdict(1, "host-1", HOST, None, pytest.approx(0.5))]
    assert (
        verdicts[2][0].words() == "process 1 on host host-1 is slow: its Python between steps takes 0.5 s a step, and the others' none"
    )
    gang = Gang(3)
    for bad in (math.nan, math.inf, -1.0):
        # What one tells badly hides no other.
        again = Gang(3)
        verdicts = [again.window({(0, DATA): bad, (1, DATA): 0.9, (2, DATA): 0.2}, {(1, DATA): 0.9}) for _ in range(3)]
        assert [verdict.process for verdict in verdicts[2]] == [1]
        assert not any(gang.window({(0, DATA): bad, (1, DATA): 0.2, (2, DATA): 0.2}) for _ in range(3))


def test_the_cause_that_costs_most_is_said_and_one_at_a_time():
    gang = Gang(2)
    both = {(1, DATA): 0.3, (1, STALLS): 0.5}
    verdicts = [gang.window(both) for _ in range(6)]
    assert [len(verdicts_of_window) for verdicts_of_window in verdicts] == [0, 0, 1, 0, 0, 0]
    assert verdicts[2][0].cause == STALLS
    assert verdicts[2][0].words() == "process 1 on host host-1 is slow: it stands still for 0.5 s of each step, longer than the others"
    # The rest is left: it is said once the first is over.
    verdicts = [gang.window({(1, DATA): 0.3}) for _ in range(4)]
    assert [(verdict.cause, verdict.is_recovered) for new in verdicts for verdict in new] == [(STALLS, True), (DATA, False)]


def test_devices_are_compared_where_all_were_timed():
    gang = Gang(2, devices=2)
    slow = {0: [0.002, 0.002], 1: [0.0021, 0.0032]}
    # Between timings nothing is known, so nothing changes.
    verdicts = [new for _ in range(3) for new in (gang.window(devices=slow), gang.window())]
    ((verdict,),) = [new for new in verdicts if new]
    assert (verdict.process, verdict.cause, verdict.device) == (1, DEVICE, 1)
    # Of 2, 2 and 2.1 ms.
    assert verdict.times == pytest.approx(1.6)
    assert (
        verdict.words() == "process 1 on host host-1 (its device 1) is slow: the same program takes it 1.6 times as long as the others"
    )
    fine = {0: [0.002, 0.002], 1: [0.002, 0.002]}
    assert [len(gang.window(devices=fine)) for _ in range(3)] == [0, 0, 1]
    one_device = Gang(2)
    verdicts = [one_device.window(devices={0: [0.002], 1: [0.004]}) for _ in range(3)]
    assert verdicts[2][0].device is None
    assert one_device.window(devices={0: [0.0], 1: [math.nan]}) == []


def test_a_window_is_closed_when_all_are_there_and_a_second_has_passed():
    gang = Gang(2, windows=1)
    slow = {(1, DATA): 0.09}
    assert [len(gang.window(slow, step_s=0.1)) for _ in range(2)] == [0, 1]
    gang = Gang(2, windows=1, every=7)
    assert [len(gang.window(SLOW | {(1, DATA): 5.0})) for _ in range(2)] == [0, 1]
    gang = Gang(2, windows=1)
    late = gang.told[0]
    gang.window({(1, DATA): 0.9})
    gang = Gang(2, windows=1)
    gang.told[0] = replace(late, steps=-3, wall=-3.0)
    assert gang.compare(gang.told) == []


def noise(count: int, seed: int, **options) -> tuple[Gang, list[StragglerVerdict]]:
    """Eight processes, steps of a second: data 100 ms and Python 20 ms with a spread of 30 %, devices 3 %; one number in fifty is ten
    times (of devices three times) as much, and in one window of fifty a process stands still for half a second."""
    draw, gang, verdicts = np.random.default_rng(seed), Gang(8, **options), []
    for _ in range(count):
        seconds = {}
        for p in range(8):
            for cause, mean in ((DATA, 0.1), (HOST, 0.02)):
                seconds[p, cause] = mean * draw.lognormal(0, 0.3) * (10 if draw.random() < 0.02 else 1)
            seconds[p, STALLS] = 0.5 if draw.random() < 0.02 else 0.0
        devices = {p: [0.002 * draw.lognormal(0, 0.03) * (3 if draw.random() < 0.02 else 1)] for p in range(8)}
        verdicts += gang.window(seconds, devices=devices)
    return gang, verdicts


def test_a_thousand_windows_of_noise_raise_no_alarm():
    settings = StragglerSettings()
    gang, verdicts = noise(1000, seed=0, every=settings.every, ratio=settings.ratio, windows=settings.windows)
    assert verdicts == []
    # The noise has what one window alone would take for a straggler.
    assert len(noise(1000, seed=0, windows=1)[1]) > 50
    # And one that is slow is found after it: where it begins in a window, within 20 steps.
    draw, slow_verdicts = np.random.default_rng(1), []
    for _ in range(settings.windows):
        seconds = {(p, DATA): draw.lognormal(0, 0.3) * (0.5 if p == 5 else 0.1) for p in range(8)}
        slow_verdicts += gang.window(seconds, steps=settings.every)
    assert [verdict.process for verdict in slow_verdicts] == [5]
    assert settings.every * (settings.windows + 1) <= 20


def test_the_report_pairs_beginnings_with_ends():
    def line(step: int, process: int, over: bool = False) -> dict:
        verdict = StragglerVerdict(process, f"host-{process}", DATA, 4.0, 0.6, is_recovered=over)
        return {"step": step, KEY: verdict.document()}

    lines = [{"step": 0, "header": {}}, line(20, 1), {"step": 30, "loss": 2.0}, line(40, 1, over=True), line(50, 2)]
    problem = "its data takes 4.0 times the others', 0.6 s a step more"
    assert stragglers([*lines, {"step": 48, "header": {}}, line(90, 1)]) == [
        ("20 to 40", "1 on host-1", problem), ("50 to 50", "2 on host-2", problem), ("90 to the end", "1 on host-1", problem),
    ]  # fmt: skip
    assert stragglers([{"step": 1, "loss": 2.0}]) == []
    page = render_report(RunRecord("name", "done", [*lines, line(90, 1)]))
    assert "Slow processes" in page
    assert "20 to 40" in page
    assert "Slow processes" not in render_report(RunRecord("name", "done", [{"step": 1, "loss": 2.0}]))


def test_each_is_compared_with_the_median_of_all_others():
    rng = np.random.default_rng(0)
    for count in range(1, 9):
        for _ in range(20):
            # Equal ones too.
            numbers = dict(enumerate(rng.integers(0, 5, count) / 4))
            medians = median_of_others(numbers)
            for process, its in numbers.items():
                others = [number for other, number in numbers.items() if other != process]
                assert medians[process] == (statistics.median(others) if others else its)
