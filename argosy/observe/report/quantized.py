"""Renders a quantized model as one self-contained HTML page: the format, the size and the error of each weight, and the perplexity.

All contents come from the result of `argosy quantize`, as its `--json` prints it. Facts that the result lacks are left out.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from argosy.core.counts import plural
from argosy.observe.readable import count_text, format_bytes, format_duration, harmless
from argosy.observe.report.charts import WIDTH, bar
from argosy.observe.report.pieces import code_of, html_table, html_text, section_of, swatch_of
from argosy.observe.report.style import page

# Limits of the growth of perplexity. Below the first it is not noticeable; above the last, more bits are better.
UNNOTICED, SMALL, LARGE = 0.01, 0.05, 0.15
BINS = 24
HEIGHT = 150


def render_quantization(result: Mapping[str, Any], command: str = "") -> str:
    """Renders the page of a result of `argosy quantize`."""
    body = "\n".join(filter(None, (_head(result), _sizes(result), _errors(result), _kinds(result), _layers(result))))
    body += section_of("Command", code_of(command)) if command else ""
    return page(harmless(f"{result['target']}: quantized"), f"{body}\n<footer>Made by Argosy</footer>")


def module_kind(name: str) -> str:
    """Returns a module's name without the number of its layer: `layers.attn.q` for `layers.3.attn.q`."""
    return ".".join(part for part in name.split(".") if not part.isdecimal())


def bits_a_weight(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the bits per quantized number, including scales."""
    return 8 * sum(row["bytes"] for row in rows) / max(sum(row["numbers"] for row in rows), 1)


def recommendation(result: Mapping[str, Any]) -> str:
    """Returns a recommendation about the quantized model."""
    rows = result["weights"]
    worst = max(rows, key=lambda row: row["error"])
    kind = module_kind(worst["name"])
    at_worst = f"Rounding changed {kind} most, by {worst['error']:.1%}"
    if not (measured := result.get("perplexity")):
        return f"The cost is not known, because no text was given: measure it with text=FILE before you use the model. {at_worst}."
    growth = measured["after"] / measured["before"] - 1
    if growth < UNNOTICED:
        return "Use it: perplexity grew by less than 1 %."
    if growth < SMALL:
        return f"Use it where size or speed matters: perplexity grew by {growth:.1%}. {at_worst}."
    calibrated = bool(result.get("samples"))
    more = f"more bits for {kind}, in a file of rules" if calibrated else "method=gptq with data.source=FILE"
    if growth < LARGE:
        return f"Perplexity grew by {growth:.1%}: try {more}. {at_worst}."
    return f"Do not use it as it is: perplexity grew by {growth:.0%}. Take more bits (preset=w8), or {more}. {at_worst}."


def _head(result: Mapping[str, Any]) -> str:
    rows = result["weights"]
    facts = [
        ("size", format_bytes(result["bytes"]), f"{format_bytes(before)} before" if (before := result.get("source_bytes")) else ""),
        ("bits a weight", f"{bits_a_weight(rows):.2f}", f"of {plural(len(rows), 'quantized weight')}"),
        ("numbers", count_text(sum(row["numbers"] for row in rows)), "quantized"),
        ("time", format_duration(result["seconds"]), ""),
    ]
    if measured := result.get("perplexity"):
        under = f"{measured['before']:.4g} before, {measured['tokens']:,.0f} tokens"
        facts.insert(0, ("perplexity", f"{measured['after']:.4g}", under))
    cells = "".join(f"<div><dt>{a}</dt><dd>{html_text(b)}<small>{html_text(c)}</small></dd></div>" for a, b, c in facts)
    about = f"{result['source']} to {result['target']}"
    return (
        f"<header><h1>{html_text(str(result['target']))}</h1><p class=lead>{html_text(recommendation(result))}</p>"
        f'<p class="soft">{html_text(about)}</p><dl class=facts>{cells}</dl></header>'
    )


def _sizes(result: Mapping[str, Any]) -> str:
    """Renders the bytes of each format and of the weights that are not quantized."""
    sizes: dict[str, float] = defaultdict(float)
    for row in result["weights"]:
        sizes[row["weights"]] += row["bytes"]
    sizes["not quantized"] += result["kept"]["bytes"]
    parts = [(name, size, i % 8) for i, (name, size) in enumerate(sizes.items()) if size]
    names = "".join(f"<span>{swatch_of(color)}{html_text(f'{name}, {format_bytes(size)}')}</span>" for name, size, color in parts)
    return section_of("Size", bar(parts, "bytes by format") + f'<div class="key">{names}</div>')


def _errors(result: Mapping[str, Any]) -> str:
    """Renders a histogram of the errors of weights."""
    picture = histogram([row["error"] for row in result["weights"]])
    words = "Root mean square of what rounding changed, over that of the weight: how many weights have which error."
    return section_of("Error", f'<p class="soft">{words}</p>{picture}')


def histogram(values: Sequence[float]) -> str:
    """Draws the counts of values in bins of equal width from 0 as bars."""
    top = max(values) or 1.0
    counts = [0] * BINS
    for value in values:
        counts[min(int(value / top * BINS), BINS - 1)] += 1
    each, body = WIDTH / BINS, []
    for i, count in enumerate(counts):
        height = (HEIGHT - 34) * count / max(counts)
        place = f'x="{i * each + 1:.1f}" y="{HEIGHT - 20 - height:.1f}" width="{each - 2:.1f}" height="{height:.1f}"'
        about = f"{plural(count, 'weight')} from {top * i / BINS:.4f} to {top * (i + 1) / BINS:.4f}"
        body.append(f'<rect class="c0" {place}><title>{about}</title></rect>')
        if count:
            body.append(f'<text class="tick x" x="{(i + 0.5) * each:.1f}" y="{HEIGHT - 25 - height:.1f}">{count}</text>')
    body.append(f'<line class="axis" x1="0" x2="{WIDTH}" y1="{HEIGHT - 20}" y2="{HEIGHT - 20}"/>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        text = f'<text class="tick" style="text-anchor:{anchor}" x="{share * WIDTH:.0f}" y="{HEIGHT - 4}">{share * top:.4f}</text>'
        body.append(text)
    label = escape("errors of the quantized weights")
    return f'<svg class="wide" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(body)}</svg>'


def _cells(row: Mapping[str, Any], extra: Sequence[str]) -> list[str]:
    data = str(row.get("activations") or "as it is")
    errors = ["" if row.get(key) is None else f"{row[key]:.4f}" for key in ("error", *extra)]
    figures = [f"{bits_a_weight([row]):.2f}", format_bytes(row["bytes"]), *errors]
    return [html_text(str(row["weights"])), html_text(str(row.get("granularity") or "")), html_text(data), *figures]


def _extra(result: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the keys and the names of the errors that are known only with calibration data."""
    if not result.get("samples"):
        return [], []
    return ["output_error", "nearest_error"], ["error of the output", "by nearest"]


def _kinds(result: Mapping[str, Any]) -> str:
    """Renders a line for each kind of module, with the sum of bytes and the largest errors."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in result["weights"]:
        groups[module_kind(row["name"]), str(row["weights"])].append(row)
    keys, names = _extra(result)
    lines = []
    for (kind, _), rows in groups.items():
        most = {key: max((row[key] for row in rows if row.get(key) is not None), default=None) for key in ("error", *keys)}
        whole = dict(rows[0]) | most | {key: sum(row[key] for row in rows) for key in ("bytes", "numbers")}
        lines.append([html_text(kind), str(len(rows)), *_cells(whole, keys)])
    head = ("module", "layers", "weights", "scales for", "data", "bits", "size", "largest error", *names)
    plain = result["kept"]
    size, largest = format_bytes(plain["bytes"]), ", ".join(plain["largest"])
    rest = f"{plural(plain['tensors'], 'tensor')} kept as they are ({size}), such as {largest}."
    return section_of("What became what", html_table(head, lines, "many", numeric=5) + f'<p class="soft">{html_text(rest)}</p>')


def _layers(result: Mapping[str, Any]) -> str:
    """Renders a line for every weight, the largest error first."""
    keys, names = _extra(result)
    rows = sorted(result["weights"], key=lambda row: -row["error"])
    head = ("weight", "format", "scales for", "data", "bits", "size", "error", *names)
    table = html_table(head, [[html_text(row["name"]), *_cells(row, keys)] for row in rows], "many", numeric=4)
    summary = f"<summary>{plural(len(rows), 'weight')}, largest error first</summary>"
    return section_of("Layers", f"<details>{summary}{table}</details>")
