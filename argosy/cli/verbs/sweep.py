"""`argosy sweep RECIPE key=a,b key2=c,d`."""

from typing import Annotated

import typer

from argosy.cli.output import conclude, say
from argosy.jobs import machine

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(help="a recipe's name, or a YAML file", show_default=False)],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="key=a,b [key=value ...]", help="settings; several values of one make runs", show_default=False
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> int:
    """Trains with every combination of the listed values, then compares the runs. They are written under dir=, by default
    runs/RECIPE-sweep. The same command skips finished runs and resumes unfinished ones."""
    from argosy.jobs.sweep import Combination, combinations
    from argosy.jobs.sweep import sweep as job

    grid = combinations(recipe, words)
    say(f"{len(grid)} runs of {recipe}; loading jax ...")
    machine.start_jax()
    from argosy.jobs.train import train
    from argosy.observe.terminal.live import Terminal

    def run(combination: Combination) -> int:
        with Terminal() as view:
            return train(recipe, list(combination.words), view).exit_code

    code = job(grid, run, say)
    if code > 1:
        say("stopped; the same command resumes the sweep")
        return code
    from argosy.cli.verbs.runs import comparison
    from argosy.jobs.history import listing as runs

    done = [combination.dir for combination in grid if runs.is_run(combination.dir)]
    if len(done) > 1:
        compared = runs.compare(done)
        conclude(comparison(compared), compared, as_json)
    return code
