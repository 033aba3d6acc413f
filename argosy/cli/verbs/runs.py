"""`argosy runs [ROOT]`, `argosy runs show DIR`, `argosy runs compare A B ...`."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from argosy.cli.output import answer
from argosy.observe.readable import ago, columns, count_text, format_bytes, format_duration

JSON = typer.Option("--json", help="one JSON document on stdout")
VERIFY = typer.Option("--verify", help="read every byte of every checkpoint")


class Listing(TyperGroup):
    """Lists, unless the first word names another command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=Listing, rich_markup_mode=None, add_completion=False, help="Lists, shows and compares runs.")


@app.command("list")
def list_runs(
    root: Annotated[str, typer.Argument(help="a folder of runs, or an address in a store")] = "runs",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Lists the runs under a folder, the last written first. `list` may be left out."""
    from argosy.jobs.history import listing as runs

    summaries = [runs.summary(path) for path in runs.find(root)]
    numbers = {"loss": "loss", "reward": "reward", "eval_loss": "eval"}
    if not any("reward" in s.numbers for s in summaries):
        del numbers["reward"]
    head = ("run", "state", "step", *numbers.values(), "tokens", "last write")
    table = columns(head, [_row(s, numbers) for s in summaries], figures=range(2, len(head)))
    problems = "".join(f"\n{s.path}: {s.problem}" for s in summaries if s.problem)
    answer(table + problems if summaries else f"no run under {root}", [s.document() for s in summaries], as_json)


@app.command("show")
def show(
    run: Annotated[str, typer.Argument(metavar="DIR", help="a run directory, or its address in a store", show_default=False)],
    verify: Annotated[bool, VERIFY] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Shows one run: state, checkpoints, last numbers, and the settings that are not defaults."""
    from argosy.jobs.history import listing as runs

    summary = runs.summary(run, verify=verify)
    settings = runs.settings(summary.path) if summary.steps else []
    document = summary.document() | {"settings": {key: {"value": value, "set_by": who} for key, value, who in settings}}
    facts = {"state": summary.state, "step": _steps(summary), "last write": _ago(summary.written_s)}
    facts |= {"problem": summary.problem} if summary.problem else {}
    facts |= {"time": f"{format_duration(summary.life.wall)}: {summary.life.words()}"} if summary.life else {}
    checkpoints = [f"{step} ({_size(summary.path, step)})" for step in summary.checkpoints]
    facts |= {"checkpoints": ", ".join(checkpoints) or "none"} | {k: runs.table_text(v) for k, v in summary.numbers.items()}
    lines = [str(summary.path), *(f"  {name:<20}{value}" for name, value in facts.items()), ""]
    overrides = [(key, runs.table_text(value), who) for key, value, who in settings if who != "default"]
    answer("\n".join([*lines, columns(("setting", "value", "set by"), overrides)] if overrides else lines), document, as_json)


@app.command("compare")
def compare(
    dirs: Annotated[list[str], typer.Argument(metavar="A B ...", help="run directories, or their addresses", show_default=False)],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Puts runs side by side: the settings that differ, and the last numbers of each."""
    from argosy.jobs.history import listing as runs

    document = runs.compare(dirs)
    answer(comparison(document), document, as_json)


def comparison(result: dict[str, Any]) -> str:
    """The result of `runs.compare` as two tables: a column per run, or a row per run if that is too wide."""
    from argosy.jobs.history import listing as runs

    rows = {name: ["-" if v is None else _end(v) for v in values] for name, values in result["numbers"].items()}
    differ = {key: list(map(runs.table_text, values)) for key, values in result["settings"].items()}
    numbers = by_run("", result["runs"], rows)
    return f"{numbers}\n\n{by_run('setting', result['runs'], differ) if differ else 'no setting differs'}"


# Characters of a line of a table of runs.
WIDEST = 120


def by_run(corner: str, names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table of values by run. rows: one value for each run, by name."""
    text = columns([corner, *names], [[name, *values] for name, values in rows.items()], figures=range(1, len(names) + 1))
    if max(map(len, text.splitlines())) <= WIDEST:
        return text
    turned = [[name, *(values[i] for values in rows.values())] for i, name in enumerate(names)]
    return columns(["run", *rows], turned, figures=range(1, len(rows) + 1))


def _row(summary: Any, names: Iterable[str]) -> list[str]:
    # A number that rounds to zero has no sign.
    numbers = [f"{x:z.4f}" if (x := summary.numbers.get(name)) is not None else "-" for name in names]
    tokens = "-" if (count := summary.numbers.get("tokens")) is None else count_text(count)
    return [str(summary.path), summary.state, _steps(summary), *numbers, tokens, _ago(summary.written_s)]


def _steps(summary: Any) -> str:
    return f"{summary.step or 0}/{summary.steps}" if summary.steps else "-"


def _ago(written_s: float | None) -> str:
    return "-" if written_s is None else ago(time.time() - written_s)


def _end(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.5g}"


def _size(path: Any, step: int) -> str:
    from argosy.core.errors import Damaged
    from argosy.jobs.history import listing as runs

    try:
        return format_bytes(runs.size_bytes(path, step))
    except Damaged:
        return "damaged"
