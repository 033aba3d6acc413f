"""Renders the elements of a run's page. Everything from a run is text: it is escaped, and control characters are replaced."""

from collections.abc import Sequence
from html import escape

from argosy.observe.readable import harmless
from argosy.observe.report.charts import Series


def html_text(text: str) -> str:
    return escape(harmless(text))


def code_of(text: str) -> str:
    """Renders a command with a copy button."""
    return f'<div class="code"><pre>{html_text(text)}</pre></div>'


def section_of(title: str, body: str) -> str:
    return f"<section><h2>{html_text(title)}</h2>{body}</section>"


def swatch_of(color: int) -> str:
    return f'<span class="swatch" style="background:var(--s{color})"></span>'


def legend_of(series: Sequence[Series]) -> str:
    names = {s.name: f"{s.name}, its running mean bold" if s.is_smoothed else s.name for s in series if s.points}
    names = "".join(f"<span>{swatch_of(s.color)}{html_text(names[s.name])}</span>" for s in series if s.points)
    return f'<div class="key">{names}</div>'


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", numeric: int = 1) -> str:
    """Renders a table of HTML cells. Columns from index `numeric` on are right-aligned numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        sides = ['class="n"' if i >= numeric else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag} {side}>{cell}</{tag}>" for cell, side in zip(cells, sides)) + "</tr>"

    top = row(list(map(html_text, head)), "th") if any(head) else ""
    return f'<table class="{kind}">{top}{"".join(row(cells, "td") for cells in rows)}</table>'
