"""Formats numbers for people (parameters, bytes, seconds), and makes text harmless for a terminal."""

import math
from collections.abc import Sequence


def count_text(n: float) -> str:
    """Formats a large number with three digits: 135M, 8.03B, 0.52T."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size * 0.9995:
            return f"{_three_digits(n / size)}{letter}"
    return f"{n:.0f}"


def flops_text(n: float) -> str:
    """Formats FLOPs with a unit prefix: 24.1 GFLOP."""
    for size, prefix in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if n >= size * 0.9995:
            return f"{_three_digits(n / size)} {prefix}FLOP"
    return f"{n:,.0f} FLOP"


def format_bytes(n_bytes: float) -> str:
    """Formats bytes in binary units: 1.31 GiB."""
    size, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000 or unit == "TiB":
            break
        size /= 1024
    return f"{n_bytes:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"


def format_duration(seconds: float) -> str:
    """Formats a duration: 0.8 s, 47 s, 3 min 05 s, 2 h 03 min, 4 d 03 h. There are no colons, which would read as a time of day."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02} h"


def ago(seconds: float) -> str:
    """Formats an elapsed time in one unit: 12 s ago, 15 min ago, 3 h ago, 2 d ago."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def decimals(x: float) -> str:
    """Formats a loss with four decimals, or a small one with three digits: 2.3456, 0.00123."""
    return f"{x:.4f}" if not abs(x) < 0.01 or not x else f"{x:.3g}"


def change(before: float, after: float) -> str:
    """Formats a change as `4.24 to 2.34`, with two decimals, or with more if both numbers or their difference would not be visible."""
    for digits in range(2, 7):
        first, second = f"{before:.{digits}f}", f"{after:.{digits}f}"
        if (first != second or before == after) and all(not x or abs(x) >= 10 ** (1 - digits) for x in (before, after)):
            return f"{first} to {second}"
    return f"{before:.3g} to {after:.3g}"


def harmless(text: str, keep: str = "\n") -> str:
    """Removes control characters from a text, because a model's output may contain escape sequences. Tabs become four spaces, and
    unprintable characters become `·`, except those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else "    " if c == "\t" else "·" for c in text)


def one_line(text: str) -> str:
    """Returns a harmless text on one line, with line breaks shown as `\\n`."""
    return harmless(text.replace("\n", "\\n"), keep="")


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[int] = ()) -> str:
    """Formats a table as text, with two spaces between columns. The columns whose indices are in `figures` are right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [f"{cell:>{w}}" if i in figures else f"{cell:<{w}}" for i, (cell, w) in enumerate(zip(row, widths))]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, (head, *rows)))


def _three_digits(x: float) -> str:
    return f"{x:.{2 if abs(x) < 9.995 else 1 if abs(x) < 99.95 else 0}f}"
