"""`argosy completion SHELL`: the script that lets a shell complete verbs, recipes, settings and their values."""

from importlib import import_module
from typing import Annotated, Literal

import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False)

OWN_SETTINGS = {  # verb -> the settings that are its own
    "generate": "argosy.cli.verbs.generate:Generate",
    "eval": "argosy.evals.settings:EvalSettings",
    "convert": "argosy.cli.verbs.convert:Convert",
    "quickstart": "argosy.cli.verbs.quickstart:Quickstart",
    "data": "argosy.data.settings:DataSettings",
    "serve": "argosy.serve.settings:ServeSettings",
    "chat": "argosy.client.settings:ChatSettings",
    "run-batch": "argosy.client.settings:BatchSettings",
    "bench": "argosy.client.settings:BenchSettings",
}


@app.command()
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish", "words"], typer.Argument(help="whose script", show_default=False)],
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Prints the completion script of a shell: eval "$(argosy completion bash)" in ~/.bashrc turns it on. `words`, used by the
    scripts, prints the possible next words."""
    from argosy.cli.verbs import VERBS
    from argosy.jobs.complete import SCRIPTS, complete

    if shell != "words":
        print(SCRIPTS[shell], end="")
        return
    verb = (words or [""])[0]
    settings = dict.fromkeys(VERBS)
    if verb in OWN_SETTINGS and len(words or []) > 1:
        module, _, name = OWN_SETTINGS[verb].partition(":")
        settings[verb] = getattr(import_module(module), name)
    print("\n".join(complete(words or [""], settings)))
