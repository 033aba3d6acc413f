"""Draws plots as text, and finds round numbers for axes, for the terminal and for the report's charts.

A braille character has two columns and four rows of dots, so 60 characters show 120 positions in x. Points in the same column are
averaged, which also smooths a noisy loss. This module knows nothing of losses or steps.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

# The empty braille character, and the bits of its eight dots by [column][row].
BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
MARK = "●"


@dataclass(frozen=True)
class Plot:
    """A plot as text.

    labels: the labels of the y axis, one left of each row.
    rows: the lines of the plot, all of the same width.
    axis, below: the x axis and its labels, the two lines below the rows.
    """

    labels: list[str]
    rows: list[str]
    axis: str
    below: str


def plot(points: Sequence[Point], marks: Sequence[Point], width: int, height: int, *, log_x: bool = False) -> Plot:
    """Draws a line through `points` and `MARK` at each of `marks`.

    Args:
        points: the points (x, y), sorted by x. There must be at least one, and all must be finite.
        marks: the marked points (x, y).
        width, height: the size of the plot in characters.
        log_x: whether the x axis is logarithmic, which needs x > 0.
    """
    low_x, high_x = points[0][0], max([points[-1][0], *(x for x, _ in marks)])
    line = bin_points(points, 2 * width, low_x, high_x, log_x)
    low_y, high_y = value_range([y for _, y in line] + [y for _, y in marks])
    grid = [[0] * width for _ in range(height)]

    def dot(column: int, row: int) -> None:
        grid[row // 4][column // 2] |= DOTS[column % 2][row % 4]

    def row_of(y: float) -> int:
        return round((high_y - y) / (high_y - low_y) * (4 * height - 1))

    before: tuple[int, int] | None = None
    for column, y in line:
        for x, row in _dots_between(before, (column, row_of(y))):
            dot(x, row)
        before = column, row_of(y)
    rows = [[chr(BRAILLE + bits) if bits else " " for bits in row] for row in grid]
    for x, y in marks:
        rows[row_of(y) // 4][column_of(x, width, low_x, high_x, log_x)] = MARK
    finer = (ticks(low_y, high_y, about) for about in (max(2, height // 2), height, 2 * height))
    labeled = {row_of(y) // 4: short_number(y) for y in next((candidate for candidate in finer if len(candidate) > 1), [])}
    label_width = max(map(len, labeled.values()), default=0)
    labels = [f"{labeled.get(i, ''):>{label_width}} {'┤' if i in labeled else '│'}" for i in range(height)]
    at = {column_of(x, width, low_x, high_x, log_x): short_number(x) for x in _x_ticks(low_x, high_x, width, log_x)}
    axis = " " * label_width + " └" + "".join("┬" if i in at else "─" for i in range(width))
    return Plot(labels, ["".join(row) for row in rows], axis, " " * (label_width + 2) + _place_labels(at, width))


def bin_points(points: Iterable[Point], columns: int, low: float, high: float, log_x: bool) -> list[tuple[int, float]]:
    """Returns (column, mean of y) for each column that has points."""
    sums: dict[int, list[float]] = {}
    for x, y in points:
        sums.setdefault(column_of(x, columns, low, high, log_x), []).append(y)
    return [(column, math.fsum(ys) / len(ys)) for column, ys in sorted(sums.items())]


def column_of(x: float, columns: int, low: float, high: float, log_x: bool) -> int:
    """Returns the index of the column of x, among `columns` columns between low and high."""
    if log_x:
        x, low, high = math.log(x), math.log(low), math.log(high)
    share = (x - low) / (high - low) if high > low else 0.0
    return min(columns - 1, max(0, round(share * (columns - 1))))


def halve_points(points: Sequence[Point]) -> list[Point]:
    """Halves the number of points by averaging pairs of neighbors, which keeps the history of a long run small."""
    pairs = [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in zip(points[::2], points[1::2])]
    return pairs + list(points[len(pairs) * 2 :])


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """Returns the smallest and the largest value, moved apart a little if they are equal."""
    low, high = min(values), max(values)
    if high > low:
        return low, high
    margin = abs(low) * 0.05 or 0.5
    return low - margin, high + margin


def ticks(low: float, high: float, about: int) -> list[float]:
    """Returns about `about` round numbers (multiples of 1, 2 or 5 times a power of ten) between low and high."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns the powers of ten between low and high; if these are fewer than three, also 2 and 5 times powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5)):
        values = [m * 10.0**p for p in powers for m in steps if low <= m * 10.0**p <= high]
        if len(values) >= 3:
            break
    return values or [low]


def short_number(x: float) -> str:
    """Formats a number in few characters: 12k, 1.5M, 0.25, 3e-04."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(x) >= size:
            return f"{x / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{x:.0e}" if 0 < abs(x) < 1e-3 else f"{x:.4g}"


def _dots_between(before: tuple[int, int] | None, here: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """Returns every dot of the straight line from the previous dot to `here`."""
    if before is None:
        return [here]
    across, down = here[0] - before[0], here[1] - before[1]
    most = max(abs(across), abs(down), 1)
    return [(before[0] + round(across * i / most), before[1] + round(down * i / most)) for i in range(1, most + 1)]


def _x_ticks(low: float, high: float, width: int, log_x: bool) -> list[float]:
    return log_ticks(low, high) if log_x and high > low else ticks(low, high, max(2, width // 12))


def _place_labels(labels: dict[int, str], width: int) -> str:
    """Centers labels under their columns, within the row. A label that would touch its left neighbor is left out."""
    text = ""
    for column, label in sorted(labels.items()):
        start = max(0, min(column - len(label) // 2, width - len(label)))
        if not text or start > len(text):
            text = f"{text:{start}}{label}"
    return text
