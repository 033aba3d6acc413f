"""Renders the section of a run's page about its newest capture by the profiler."""

from collections.abc import Sequence

from argosy.observe.profile.table import Profile, Row
from argosy.observe.profile.text import HEAD, cells, findings, merged_layers
from argosy.observe.report.pieces import html_table, html_text, section_of

MOST = 14


def profile_section(profile: Profile) -> str:
    """Renders the tables by layer and by kind, and sentences about anomalies."""
    window = profile.window
    first = (
        f"Steps {window.first} to {window.last}: {1e3 * profile.step_s:,.1f} ms a step, "
        f"of which the device is busy {1e3 * profile.busy_s:,.1f} ms."
    )
    paragraphs = "".join(f"<p>{html_text(text)}</p>" for text in (first, *findings(profile), *profile.notes))
    return section_of("Time of a step", paragraphs + _table(merged_layers(profile.layers)) + _table(profile.kinds))


def _table(rows: Sequence[Row]) -> str:
    return html_table(HEAD, [tuple(map(html_text, cells(row))) for row in rows[:MOST]])
