"""`argosy predict REPOSITORY [key=value ...]`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.flags import PREDICT, translated
from argosy.cli.output import Doing, say
from argosy.core.process import signals
from argosy.core.settings import read_settings, words_layer
from argosy.jobs import machine
from argosy.predict.settings import PredictSettings

app = typer.Typer(rich_markup_mode=None, add_completion=False)

KEY = "ARGOSY_API_KEY"


@app.command(context_settings={"ignore_unknown_options": True})
def predict(
    repository: Annotated[str, typer.Argument(help="a folder of bundles: REPOSITORY/NAME/1/", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]", help="settings: " + ", ".join(PredictSettings.model_fields), show_default=False
        ),
    ] = None,
) -> None:
    """Serves bundles over HTTP: the Open Inference Protocol, TensorFlow Serving's REST, OpenAI embeddings."""
    settings = read_settings(PredictSettings, words_layer(translated(words or [], PREDICT))).value
    settings = settings.model_copy(update={"api_key": settings.api_key or os.environ.get(KEY) or None})
    from argosy.web.process import bound_socket, check_open, server_address

    check_open(settings)
    with Doing() as doing:
        doing("loading jax")
        machine.start_jax()
        from argosy.predict.metrics import PredictMetrics
        from argosy.predict.repository import Repository, check_repository
        from argosy.predict.run import serve_repository

        check_repository(Path(repository))
        listener = bound_socket(settings.host, settings.port)
        doing(f"loading {repository}")
        found = Repository(Path(repository), settings, PredictMetrics(), say)
        found.look()
    url = server_address(listener, settings)
    with signals.asked_to_stop("finishing what runs; again to end now") as stop:
        serve_repository(found, listener, stop=stop, ready=lambda: say(f"ready on {url}"))
    raise typer.Exit(stop.code)
