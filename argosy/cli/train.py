"""`argosy train RECIPE [key=value ...]`."""

from typing import Annotated

import typer

from argosy.cli.output import answer, say
from argosy.jobs import machine

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="a recipe's name, or a YAML file", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="settings over the recipe's", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> int:
    """Trains, or goes on training: the directory (dir=, or runs/RECIPE) goes on from its last good checkpoint."""
    machine.prepare()
    machine.start_jax()
    from argosy.jobs.train import train as job
    from argosy.observe.terminal import Terminal

    with Terminal() as view:
        outcome = job(recipe, words or [], view)
    if outcome.done and outcome.seconds:
        say(
            f"{outcome.dir}: step {outcome.step}. Next: argosy generate {outcome.dir}, or look at {outcome.dir}/report.html"
        )
    if outcome.exit_code:
        kept = (
            f"checkpoint {outcome.saved} is saved, and the same command resumes"
            if outcome.saved
            else "nothing is saved yet"
        )
        say(f"stopped at step {outcome.step} of {outcome.steps}: {kept}")
    document = {"dir": str(outcome.dir), "step": outcome.step, "steps": outcome.steps, "last": dict(outcome.last)}
    if as_json:
        answer("", document, True)
    return outcome.exit_code
