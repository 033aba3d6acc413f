"""`argosy hlo RUN`, `argosy hlo A B`: what a compiled program does, and how two differ."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from pydantic import Field

from argosy.cli.output import answer
from argosy.core.settings import Settings, read_settings, words_layer
from argosy.observe.readable import columns, count_text, flops_text, format_bytes

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class HloWords(Settings):
    """The tables."""

    rows: int = Field(12, gt=0)
    """Rows of each table."""


@app.command()
def hlo_words(
    program: Annotated[str, typer.Argument(metavar="RUN-or-DUMP", help="a run, an XLA dump, or a text", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OTHER] [key=value ...]", help="another to compare with; settings: rows", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Shows a compiled program of a CPU, GPU or TPU: operations by kind and layer, biggest values, collectives; or how two differ."""
    rest = list(words or [])
    other = rest.pop(0) if rest and "=" not in rest[0] else None
    settings = read_settings(HloWords, words_layer(rest)).value
    from argosy.jobs.hlo import program_file, read_program
    from argosy.observe.hlo.summary import program_differences, summarize

    path = program_file(program)
    summary = summarize(read_program(path))
    if other is None:
        document = asdict(summary) | {"program": str(path), "flops": summary.flops, "bytes": summary.bytes}
        document["values"] = document["values"][:200]
        answer(_text(str(path), summary, settings.rows), document, as_json)
        return
    other_path = program_file(other)
    other_summary = summarize(read_program(other_path))
    rows = program_differences(summary, other_summary)
    both = summary, other_summary
    document = {"a": str(path), "b": str(other_path), "flops": [s.flops for s in both], "bytes": [s.bytes for s in both]}
    answer(_comparison(document, rows, settings.rows), document | {"differences": [asdict(row) for row in rows]}, as_json)


def _text(path: str, summary: Any, most: int) -> str:
    work = ("", "runs", "FLOP", "bytes")
    parts = [
        f"{path}: {flops_text(summary.flops)} of products, {format_bytes(summary.bytes)} in and out of operations, "
        f"{format_bytes(summary.argument_bytes)} of arguments"
        + (f"; {len(summary.unknown_loops)} loops of unknown length count once" if summary.unknown_loops else "")
    ]
    for title, rows in (("by kind", summary.kinds), ("by layer", summary.layers)):
        table = [
            (row.name, count_text(row.count), count_text(row.flops) if row.flops else "", format_bytes(row.bytes))
            for row in rows[:most]
        ]
        parts.append(f"{title}\n{columns(work, table, figures=(1, 2, 3))}")
    values = [(value.name, format_bytes(value.bytes), value.type, value.kind, value.layer) for value in summary.values[:most]]
    parts.append("biggest values\n" + columns(("", "bytes", "type", "kind", "layer"), values, figures=(1,)))
    transfers = [
        (op.kind, str(op.devices), count_text(op.count), format_bytes(op.bytes), f"{op.asynchronous / op.count:.0%}", op.layer)
        for op in summary.transfers[:most]
    ]
    head = ("", "devices", "runs", "bytes", "asynchronous", "layer")
    parts.append("collectives\n" + columns(head, transfers, figures=(1, 2, 3, 4)) if transfers else "no collectives")
    return "\n\n".join(parts)


def _comparison(document: Mapping[str, Any], rows: Sequence[Any], most: int) -> str:
    def cell(row: Mapping[str, Any] | None) -> str:
        if row is None:
            return "-"
        flops = f", {count_text(row['flops'])} FLOP" if row.get("flops") else ""
        return f"{count_text(row.get('count', 0))} x, {format_bytes(row.get('bytes', 0))}{flops}"

    flops, traffic = document["flops"], document["bytes"]
    moved = f"{format_bytes(traffic[0])} and {format_bytes(traffic[1])} in and out"
    first = f"{flops_text(flops[0])} and {flops_text(flops[1])} of products; {moved}"
    if not rows:
        return f"{first}\nno differences"
    table = [(row.table, row.name, cell(row.before), cell(row.after), _signed(row.bytes)) for row in rows[:most]]
    more = f"\n{len(rows) - most} more; rows={len(rows)} shows all" if len(rows) > most else ""
    return f"{first}\n\n{columns(('', '', 'first', 'second', 'bytes'), table, figures=(4,))}{more}"


def _signed(n_bytes: int) -> str:
    return f"+{format_bytes(n_bytes)}" if n_bytes > 0 else f"-{format_bytes(-n_bytes)}" if n_bytes else ""
