"""`argosy launch [engine=local processes=N ...] -- VERB ...`."""

import sys
from typing import Annotated, Any

import typer

from argosy.cli.output import say
from argosy.core.command import command
from argosy.core.errors import BadInput
from argosy.core.settings import read_settings, words_layer
from argosy.launch.settings import ENGINES, Local

# The verbs that several processes can run together.
LAUNCHED = ("train",)
app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def launch(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[key=value ...] -- VERB ...",
            help="settings: engine, " + ", ".join(Local.model_fields) + "; then the command that runs",
            show_default=False,
        ),
    ],
) -> int:
    """Runs a command as several processes, and starts them again from the last checkpoint when one ends.

    \b
    Examples:
      argosy launch processes=4 -- train tiny dir=runs/four
      argosy launch processes=2 devices=4 restarts=3 logs=logs -- train my-recipe.yml
    """
    at = next((i for i, word in enumerate(words) if "=" not in word or word.startswith("-")), len(words))
    own, verb = words[:at], words[at + (words[at : at + 1] == ["--"]) :]
    if not verb:
        raise BadInput("launch needs a command", hint=f"`{command()} launch processes=2 -- train tiny`")
    if verb[0] not in LAUNCHED:
        raise BadInput(f"several processes cannot run `{verb[0]}`", hint=f"they run {', '.join(LAUNCHED)}")
    _, settings = engine_of(own)
    from argosy.jobs.launched import check, progress_of
    from argosy.launch import local

    check(verb)
    return local.run([sys.executable, "-m", "argosy", *verb], settings, say, progress_of(verb))


def engine_of(words: list[str]) -> tuple[str, Any]:
    """The engine that the words name, and its settings.

    Raises:
        UserError: there is no such engine, or it has no such setting.
    """
    named = [word.partition("=")[2] for word in words if word.startswith("engine=")]
    name = named[-1] if named else "local"
    return name, read_settings(ENGINES[name], words_layer(word for word in words if not word.startswith("engine="))).value
