"""Writes the tables of a capture as text, for the terminal and for the report."""

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from argosy.observe.profile.table import DATA, HOST, Profile, Row
from argosy.observe.readable import columns, count_text

MOST = 12
HEAD = ("", "ms a step", "share", "TFLOP/s", "GB/s", "FLOP/B", "runs", "longest")


def profile_text(profile: Profile, most: int = MOST) -> str:
    """Returns the tables as text. `most`: the number of rows of each table."""
    window = profile.window
    where = f"{window.devices} x {window.kind}" if window.platform != "cpu" else "CPU"
    idle = profile.step_s - profile.busy_s
    lines = [
        f"steps {window.first} to {window.last} on {where}: {1e3 * profile.step_s:,.1f} ms a step, "
        f"of which the device is busy {1e3 * profile.busy_s:,.1f} ms and idle {1e3 * idle:,.1f} ms",
        *profile.notes,
        *findings(profile),
    ]
    tables = (("by layer", merged_layers(profile.layers)), ("by kind", profile.kinds), ("by operation", profile.ops))
    parts = ["\n".join(lines), *(f"{title}\n{_table(rows, most)}" for title, rows in tables)]
    return "\n\n".join(parts)


def findings(profile: Profile) -> list[str]:
    """Returns sentences about anomalies: waiting for data, an idle device, a layer that takes longer than layers of its kind."""
    out = []
    shares = {row.name: row.share for row in profile.kinds}
    if shares.get(DATA, 0.0) > 0.05:
        out.append(f"the device waits for data {shares[DATA]:.0%} of the time: data.workers, prepared data, or a cheaper source")
    elif shares.get(HOST, 0.0) > 0.15:
        out.append(f"the device is idle {shares[HOST]:.0%} of the time, while the host does something else")
    alike: dict[str, list[Row]] = defaultdict(list)
    for row in profile.layers:
        if match := re.match(r"layers\.\d+(.*)", row.name):
            alike[match[1]].append(row)
    for rows in alike.values():
        middle = median(row.seconds for row in rows)
        slow = max(rows, key=lambda row: row.seconds)
        if len(rows) > 2 and slow.seconds > 1.5 * middle and (slow.seconds - middle) > 0.01 * profile.step_s:
            out.append(f"{slow.name} takes {slow.seconds / middle:.1f} times as long as other layers, most in `{slow.example}`")
        elif len(rows) == 2 and slow.seconds > 2 * min(row.seconds for row in rows) and slow.share > 0.05:
            out.append(f"{slow.name} takes {slow.seconds / min(row.seconds for row in rows):.1f} times as long as the other layer")
    return out


def merged_layers(rows: Sequence[Row]) -> list[Row]:
    """Merges the rows of all layers to one row per module, such as `layers/attn`."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[re.sub(r"layers\.\d+", "layers", row.name)].append(row)
    out = []
    for name, group in groups.items():
        flops, n_bytes = (sum(getattr(row, key) or 0.0 for row in group) or None for key in ("flops", "bytes"))
        longest = max(group, key=lambda row: row.seconds).example
        total = sum(row.seconds for row in group)
        out.append(Row(name, total, sum(row.share for row in group), flops, n_bytes, sum(row.count for row in group), longest))
    return sorted(out, key=lambda row: -row.seconds)


def cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of a row as text."""
    return (
        row.name,
        f"{1e3 * row.seconds:,.2f}",
        f"{row.share:.1%}",
        f"{row.flops_per_s / 1e12:.3g}" if row.flops_per_s else "",
        f"{row.bytes_per_s / 1e9:.3g}" if row.bytes_per_s else "",
        f"{row.intensity:.3g}" if row.intensity else "",
        count_text(row.count) if row.count else "",
        row.example if row.example != row.name else "",
    )


def _table(rows: Sequence[Row], most: int) -> str:
    lines = [cells(row) for row in rows[:most]]
    if rest := rows[most:]:
        name = f"{len(rest)} more"
        lines.append(cells(Row(name, sum(row.seconds for row in rest), sum(row.share for row in rest))))
    total = Row("total", sum(row.seconds for row in rows), sum(row.share for row in rows))
    return columns(HEAD, [*lines, cells(total)], figures=range(1, 7))
