"""`argosy predict REPOSITORY [key=value ...]`."""

import os
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import Annotated

import typer

from argosy.cli.flags import PREDICT, translate_flags
from argosy.cli.output import Doing, say
from argosy.core.command import install_extra
from argosy.core.errors import BadInput
from argosy.core.process import signals
from argosy.core.settings import read_settings, words_layer
from argosy.jobs import machine
from argosy.launch.cluster import ProcessPlace, detect_place, join
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
    """Serves bundles over HTTP and gRPC: the Open Inference Protocol, TensorFlow Serving's REST, OpenAI embeddings."""
    settings = read_settings(PredictSettings, words_layer(translate_flags(words or [], PREDICT))).value
    settings = settings.model_copy(update={"api_key": settings.api_key or os.environ.get(KEY) or None})
    from argosy.web.process import check_open, server_address

    check_open(settings)
    if settings.grpc is not None and find_spec("grpc") is None:
        problem = "gRPC needs the package `grpcio`, which is not installed"
        raise BadInput(problem, hint=f"{install_extra('grpc')}; or leave `grpc` out")
    place = detect_place(os.environ)
    if place is not None and place.rank:
        raise typer.Exit(follow_leader(place))
    with Doing() as doing:
        doing("loading jax")
        machine.start_jax()
        leader = None
        if place is None:
            listener, reserved = server_sockets(Path(repository), settings)
        else:
            join(place)
            from argosy.jobs.predict_processes import lead

            (listener, reserved), leader = lead(lambda: server_sockets(Path(repository), settings))
        from argosy.ops.programs.store import open_store
        from argosy.predict.metrics import PredictMetrics
        from argosy.predict.repository import Repository
        from argosy.predict.run import serve_repository

        doing(f"loading {repository}")
        store = open_store(machine.programs_folder(), say, sources=False)
        opened = {} if leader is None else {"open_bundle": leader.open}
        bundles = Repository(Path(repository), settings, PredictMetrics(), say, store, **opened)
        bundles.look()
    url = server_address(listener, settings)
    if reserved is not None:
        url += f" and grpc{server_address(reserved, settings).removeprefix('http')}"
    with signals.asked_to_stop("finishing what runs; again to end now") as stop:

        def stop_code() -> int:
            return stop.code or (leader.asked if leader is not None else 0)

        if bundles.models and not any(state.versions for state in bundles.models.values()):
            say("no model is loaded, for the reasons above; the server waits for one, and /v2/health/ready answers 503 until then")
        serve_repository(bundles, listener, reserved, stop=stop_code, ready=lambda: say(f"ready on {url}"))
        if leader is not None:
            leader.end(stop_code())
    raise typer.Exit(stop_code())


def follow_leader(place: ProcessPlace) -> int:
    """Runs this process as one that follows process 0. Returns its exit code."""
    with signals.asked_to_stop("finishing what runs; again to end now") as stop:
        machine.start_jax()
        join(place)
        from argosy.jobs.predict_processes import follow

        return follow(stop, say)


def server_sockets(repository: Path, settings: PredictSettings) -> tuple[socket, socket | None]:
    """The sockets of a server of a repository: of HTTP, and of gRPC if it is wanted.

    Raises:
        BadInput: there is no bundle, or an address is taken.
    """
    from argosy.predict.repository import check_repository
    from argosy.web.process import bound_socket

    check_repository(repository)
    return (
        bound_socket(settings.host, settings.port),
        None if settings.grpc is None else bound_socket(settings.host, settings.grpc, "grpc"),
    )
