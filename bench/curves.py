"""Curves of several runs as an SVG that stands alone, for the pages of docs/: a mean with the 95 % interval of each series."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from seeds import half

from argosy.observe.report.charts import Series, chart

COLORS = ("#0b66c3", "#d9730d", "#14805e", "#8250b8", "#b8374a", "#7a6a12", "#4d6b8a", "#a3acb5")
STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#667079}.tick{font-size:11.5px}
.grid{stroke:#e3e5e8;fill:none}.axis,.mark{stroke:#667079;stroke-opacity:.6;fill:none}
.tick.y,.name.x,text.level{text-anchor:end}.tick.x{text-anchor:middle}
path.level{stroke:#667079;stroke-dasharray:5 4;fill:none}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.band{fill-opacity:.16;stroke:none}
""" + "".join(f".s{i}{{stroke:{color}}}.c{i}{{fill:{color}}}" for i, color in enumerate(COLORS))


def draw(
    path: Path, runs: Mapping[str, Sequence[Mapping[int, float]]], label: str, y: str, level: tuple[float, str] | None = None
) -> None:
    """Writes the curves.

    Args:
        runs: by name, the values by step of each run; all runs of a name have the same steps.
        label: what the chart shows, for screen readers.
        y: name of the y axis.
        level: y of a dashed line, and its meaning.
    """
    series = []
    for color, (name, of_name) in enumerate(runs.items()):
        at = {step: [float(run[step]) for run in of_name] for step in sorted(of_name[0])}
        means = [(float(step), float(np.mean(values))) for step, values in at.items()]
        band = [(x, mean - half(values), mean + half(values)) for (x, mean), values in zip(means, at.values())]
        series.append(Series(name, means, color=color, is_exact=True, band=band if len(of_name) > 1 else ()))
    picture(path, series, label, y=y, level=level)


def picture(path: Path, series: Sequence[Series], label: str, **options: Any) -> None:
    """Writes series as an SVG with their names above.

    Args:
        options: of `argosy.observe.report.charts.chart`.
    """
    svg = chart(series, label, height=300, **options)
    key, x = "", 90.0 if len(series) > 3 else 200.0
    for line in series:
        key += f'<rect class="c{line.color}" x="{x:.0f}" y="4" width="10" height="10"/>'
        key += f'<text x="{x + 15:.0f}" y="13">{escape(line.name)}</text>'
        x += 34 + 6.6 * len(line.name)
    head, body = svg.split(">", 1)
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    paper = '<rect width="100%" height="100%" fill="#fdfdfc"/>'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}><style>{STYLE}</style>{paper}{key}{body}\n", encoding="utf-8")


def averaged(values: Mapping[int, float], window: int) -> dict[int, float]:
    """The means of `window` steps at a time, at their last step."""
    steps = sorted(values)
    parts = [steps[i : i + window] for i in range(0, len(steps) - window + 1, window)]
    return {part[-1]: float(np.mean([values[step] for step in part])) for part in parts}


def picture_of(words: list[str]) -> tuple[Path | None, list[str]]:
    """Where `svg=PATH` says that the curves go, and the other words."""
    paths = [word.removeprefix("svg=") for word in words if word.startswith("svg=")]
    return Path(paths[-1]) if paths else None, [word for word in words if not word.startswith("svg=")]
