"""`argosy report RUN`: a run as one HTML page."""

from typing import Annotated

import typer

from argosy.cli.output import conclude

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="a run directory, or its address in a store", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Writes report.html into a run directory: one page that needs no network, to keep or to send."""
    from argosy.jobs.history.report import report as job

    path = job(run)
    conclude(str(path), {"report": str(path)}, as_json)
