"""Curves in text, against dots decoded from the braille and means by NumPy."""

import math

import numpy as np
import pytest

from argosy.observe.readable import (
    ago,
    columns,
    count_text,
    flops_text,
    format_bytes,
    format_duration,
    harmless,
    one_line,
)
from argosy.observe.terminal import curve

BITS = [(0x01, 0, 0), (0x02, 0, 1), (0x04, 0, 2), (0x40, 0, 3), (0x08, 1, 0), (0x10, 1, 1), (0x20, 1, 2), (0x80, 1, 3)]


def dots(plot: curve.Plot) -> set[tuple[int, int]]:
    """(column, row) of every dot, by the Unicode standard's numbering of braille."""
    return {
        (2 * i + x, 4 * j + y)
        for j, row in enumerate(plot.rows)
        for i, letter in enumerate(row)
        if 0x2800 <= ord(letter) <= 0x28FF
        for bit, x, y in BITS
        if ord(letter) - 0x2800 & bit
    }


def test_a_straight_line_is_drawn_straight():
    plot = curve.plot([(x, 31.0 - x) for x in range(32)], [], width=16, height=8)
    assert dots(plot) == {(i, i) for i in range(32)}


def test_a_jump_is_drawn_without_gaps():
    pixels = dots(curve.plot([(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0)], [], width=2, height=5))
    assert {row for _, row in pixels} == set(range(20))
    assert {(0, 19), (1, 19), (2, 0), (3, 0)} <= pixels


def test_a_logarithmic_axis_makes_a_logarithm_straight():
    points = [(float(x), -math.log(x)) for x in range(1, 2000)]
    bent, straight = (dots(curve.plot(points, [], width=40, height=10, log_x=log)) for log in (False, True))
    line = {(x, round(x / 79 * 39)) for x in range(80)}

    def off(pixels: set[tuple[int, int]]) -> int:
        return max(min(abs(y - b) for a, b in line if a == x) for x, y in pixels)

    assert off(straight) <= 1
    assert off(bent) > 10


def test_there_are_always_two_labels_to_read_by():
    for low, high in ((1.01, 1.9), (0.26, 0.44), (99.9, 100.4), (-3.0, 0.9)):
        plot = curve.plot([(0, low), (1, high)], [], width=20, height=8)
        assert sum("┤" in label for label in plot.labels) >= 2


def test_marks_stand_at_their_values():
    plot = curve.plot([(0, 1.0), (100, 0.0)], [(100, 1.0), (0, 0.0)], width=20, height=4)
    assert plot.rows[0][-1] == curve.MARK
    assert plot.rows[-1][0] == curve.MARK


@pytest.mark.parametrize("points", [[(5, 2.0)], [(5, 2.0), (10, 2.0)], [(1, -1e-9), (2, 1e12)], [(1, 0.0), (2, 0.0)]])
@pytest.mark.parametrize("log_x", [False, True])
def test_any_values_fill_the_frame(points, log_x):
    plot = curve.plot(points, [], width=30, height=6, log_x=log_x)
    assert [len(row) for row in plot.rows] == [30] * 6
    assert len({len(label) for label in plot.labels}) == 1
    assert len(plot.axis) == len(plot.labels[0]) + 30
    assert len(plot.below) <= len(plot.axis)
    assert dots(plot)


def test_columns_are_means():
    random = np.random.default_rng(0)
    xs, ys = np.arange(1, 501), random.normal(size=500)
    binned = dict(curve.bin_points(zip(xs.tolist(), ys.tolist()), 40, 1, 500, False))
    columns = np.rint((xs - 1) / 499 * 39).astype(int)
    assert binned == pytest.approx({c: ys[columns == c].mean() for c in range(40)})


def test_halving_keeps_the_mean_and_an_odd_end():
    points = [(float(i), float(i * i)) for i in range(9)]
    half = curve.halve_points(points)
    assert len(half) == 5
    assert half[-1] == points[-1]
    assert np.mean(half[:4]) == pytest.approx(np.mean(points[:8]))


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (1.94, 5.2, 4, [2, 3, 4, 5]),
        (0, 0.003, 3, [0, 0.001, 0.002, 0.003]),
        (7, 7, 3, [7]),
    ],
)
def test_ticks_are_round(low, high, about, expected):
    assert curve.ticks(low, high, about) == expected


def test_log_ticks():
    assert curve.log_ticks(1, 5000) == [1, 10, 100, 1000]
    assert curve.log_ticks(5, 300) == [5, 10, 20, 50, 100, 200]


def test_numbers_as_people_read_them():
    assert [count_text(n) for n in (0, 999, 1000, 999_950, 134_515_008, 8_030_261_248, 405_853_388_800)] == [
        "0", "999", "1.00k", "1.00M", "135M", "8.03B", "406B"
    ]  # fmt: skip
    assert [format_bytes(n) for n in (0, 999, 1024, 1_310_720, 1 << 40)] == [
        "0 B",
        "999 B",
        "1.00 KiB",
        "1.25 MiB",
        "1.00 TiB",
    ]
    assert [format_duration(s) for s in (0.04, 9.96, 59.6, 185, 3599.7, 7389, 86399, 4 * 86400 + 3 * 3600)] == [
        "0.0 s", "10 s", "1 min 00 s", "3 min 05 s", "1 h 00 min", "2 h 03 min", "1 d 00 h", "4 d 03 h"
    ]  # fmt: skip
    assert format_duration(math.inf) == "?"
    assert [ago(s) for s in (-3, 59, 60, 7200, 200_000)] == ["0 s ago", "59 s ago", "1 min ago", "2 h ago", "2 d ago"]
    assert [flops_text(n) for n in (123, 2.4e10, 3e24)] == ["123 FLOP", "24.0 GFLOP", "3000 ZFLOP"]
    assert columns(("a", "n"), [("x", "1"), ("yy", "10")], figures=(1,)) == "a    n\nx    1\nyy  10"


def test_no_control_character_survives():
    every = "".join(map(chr, range(0x2100)))
    text = harmless(every)
    assert {c for c in text if not c.isprintable()} == {"\n"}
    assert "é" in text
    assert harmless("a\tb\x1b[31m\u202e") == "a    b·[31m·"
    assert one_line("a\nb\x85") == "a\\nb·"
