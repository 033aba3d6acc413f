"""Draws the charts of the report as inline SVG. They need no script and no fonts, and the CSS of the page colors them.

A series is colored by its number (`s0`, `s1`, ...), so light and dark mode are two sets of CSS variables. The page's script reads
hover values from `data-points`: [[x, y, left, top], ...] in the coordinates of the picture.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from argosy.observe.readable import harmless
from argosy.observe.terminal.curve import Point, bin_points, short_number, ticks, value_range

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 66, 14, 26, 46
# The most points of a line, about one per pixel. Points in the same column are averaged.
COLUMNS = 640
# A line with at least this many points is drawn faintly, under its running mean.
SMOOTH_FROM = 100


@dataclass(frozen=True)
class Series:
    """A named series of points.

    points: the points (x, y), sorted by x, with finite values.
    is_dots: whether single points are drawn, and not a line.
    color: the number of the color.
    is_exact: whether the values have no noise and are not smoothed.
    band: an interval around the line, as (x, lowest, highest).
    """

    name: str
    points: Sequence[Point]
    is_dots: bool = False
    color: int = 0
    is_exact: bool = False
    band: Sequence[tuple[float, float, float]] = ()

    @property
    def is_smoothed(self) -> bool:
        """Whether the line is drawn faintly, under its running mean."""
        return len(self.points) >= SMOOTH_FROM and not self.is_dots and not self.is_exact


@dataclass(frozen=True)
class Frame:
    """Maps values to coordinates of the picture."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: int
    height: int

    def left(self, x: float) -> float:
        low, high = self.x
        return LEFT + (x - low) / (high - low or 1.0) * (self.width - LEFT - RIGHT)

    def top(self, y: float) -> float:
        low, high = self.y
        return TOP + (high - y) / (high - low) * (self.height - TOP - BOTTOM)


def chart(
    series: Sequence[Series],
    label: str,
    *,
    x: str = "step",
    y: str = "",
    height: int = 280,
    width: int = WIDTH,
    zero: bool = False,
    level: tuple[float, str] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draws lines over steps, with named axes, a grid and hover values.

    Args:
        label: the subject of the chart, for screen readers.
        x, y: the names of the axes.
        zero: whether the y axis starts at 0.
        level: the y of a dashed line, and its label.
        marks: the positions and labels of ticks on the x axis. By default ticks are at round numbers.
    """
    series = [s for s in series if s.points]
    frame = _frame(series, width, height, zero, [level[0]] if level else [])
    body = [_grid(frame, x, y, marks), *(_band(s, frame) for s in series if s.band), *(_series_svg(s, frame) for s in series)]
    if level is not None:
        body.append(_level(*level, frame))
    body.append('<g class="at" visibility="hidden"><line/><rect/><text></text></g>')
    box = f'viewBox="0 0 {width} {height}" data-bottom="{height - BOTTOM}"'
    kind = "chart wide" if width >= WIDTH else "chart"
    return f'<svg class="{kind}" {box} role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def bar(parts: Sequence[tuple[str, float, int]], label: str) -> str:
    """Draws one horizontal bar of parts (name, amount, color number), whose widths are proportional to the amounts."""
    total, left, out = sum(amount for _, amount, _ in parts), 0.0, []
    for name, amount, color in parts:
        width = amount / total * WIDTH
        title = f"<title>{escape(harmless(name))}: {amount / total:.1%}</title>"
        place = f'x="{left:.2f}" y="0" width="{max(width, 0.4):.2f}" height="26"'
        out.append(f'<rect class="c{color}" {place}>{title}</rect>')
        left += width
    return f'<svg class="bar" viewBox="0 0 {WIDTH} 26" role="img" aria-label="{escape(label)}">{"".join(out)}</svg>'


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Averages the y of each point with its neighbors, over `window` points or, at the ends, fewer."""
    sums, total = [0.0], 0.0
    for _, y in points:
        total += y
        sums.append(total)
    out = []
    for i, (x, _) in enumerate(points):
        # As many neighbors on both sides, because otherwise the ends would be biased.
        half = min(window // 2, i, len(points) - 1 - i)
        low, high = i - half, i + half + 1
        out.append((x, (sums[high] - sums[low]) / (high - low)))
    return out


def _frame(series: Sequence[Series], width: int, height: int, zero: bool, levels: Sequence[float] = ()) -> Frame:
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, *values in (*s.points, *s.band) for y in values]
    low, high = value_range([*ys, *levels])
    margin = (high - low) * 0.04
    low = 0.0 if zero and low >= 0 else low - margin
    return Frame((min(xs), max(xs)), (low, high + margin), width, height)


def _grid(frame: Frame, x_name: str, y_name: str, marks: Sequence[tuple[float, str]] = ()) -> str:
    bottom, right = frame.height - BOTTOM, frame.width - RIGHT
    out = []
    for y in ticks(*frame.y, 5):
        top = frame.top(y)
        out.append(f'<path class="grid" d="M{LEFT} {top:.1f}H{right}"/>')
        out.append(f'<text class="tick y" x="{LEFT - 8}" y="{top + 4:.1f}">{short_number(y)}</text>')
    for x, text in marks or [(x, short_number(x)) for x in ticks(*frame.x, max(2, frame.width // 110))]:
        left = frame.left(x)
        out.append(f'<path class="mark" d="M{left:.1f} {bottom}v5"/>')
        out.append(f'<text class="tick x" x="{left:.1f}" y="{bottom + 20}">{escape(text)}</text>')
    out.append(f'<text class="name x" x="{right}" y="{frame.height - 6}">{escape(x_name)}</text>')
    out.append(f'<text class="name" x="4" y="13">{escape(y_name)}</text>')
    return "".join(out) + f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>'


def _level(y: float, name: str, frame: Frame) -> str:
    """Draws a dashed horizontal line with its name above the right end."""
    top, right = frame.top(y), frame.width - RIGHT
    text = f'<text class="level" x="{right}" y="{top - 6:.1f}">{escape(name)}</text>'
    return f'<path class="level" d="M{LEFT} {top:.1f}H{right}"/>{text}'


def _series_svg(series: Series, frame: Frame) -> str:
    if series.is_dots:
        return _dots(series, frame)
    points = thin_points(series.points)
    if not series.is_smoothed:
        return _line(series, points, frame, "line") if len(points) > 1 else _dots(series, frame)
    smooth = running_mean(points, max(5, len(points) // 40))
    return _line(series, points, frame, "line faint") + _line(series, smooth, frame, "line", hover=False)


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Reduces a line to at most `COLUMNS` points by averaging the x and the y of points in the same column."""
    if len(points) <= COLUMNS:
        return list(points)
    low, high = points[0][0], points[-1][0]
    ys = bin_points(points, COLUMNS, low, high, log_x=False)
    xs = bin_points([(x, x) for x, _ in points], COLUMNS, low, high, log_x=False)
    return [(x, y) for (_, x), (_, y) in zip(xs, ys)]


def _line(series: Series, points: Sequence[Point], frame: Frame, kind: str, hover: bool = True) -> str:
    path = "L".join(f"{frame.left(x):.1f} {frame.top(y):.1f}" for x, y in points)
    return f'<path class="{kind} s{series.color}" d="M{path}"{_hover(series, points, frame) if hover else ""}/>'


def _band(series: Series, frame: Frame) -> str:
    """Draws an interval around a line as an area between its lower and upper ends."""
    outline = [(x, low) for x, low, _ in series.band] + [(x, high) for x, _, high in reversed(series.band)]
    path = "L".join(f"{frame.left(x):.1f} {frame.top(y):.1f}" for x, y in outline)
    return f'<path class="band c{series.color}" d="M{path}Z"/>'


def _dots(series: Series, frame: Frame) -> str:
    join = "L".join(f"{frame.left(x):.1f} {frame.top(y):.1f}" for x, y in series.points)
    line = f'<path class="line thin s{series.color}" d="M{join}"/>' if len(series.points) > 1 else ""
    dots = "".join(f'<circle cx="{frame.left(x):.1f}" cy="{frame.top(y):.1f}" r="3"/>' for x, y in series.points)
    return f'{line}<g class="dots s{series.color}"{_hover(series, series.points, frame)}>{dots}</g>'


def _hover(series: Series, points: Sequence[Point], frame: Frame) -> str:
    numbers = [[round(x), float(f"{y:.6g}"), round(frame.left(x), 1), round(frame.top(y), 1)] for x, y in points]
    return f' data-name="{escape(series.name)}" data-points="{escape(json.dumps(numbers, separators=(",", ":")))}"'
