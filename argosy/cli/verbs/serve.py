"""`argosy serve MODEL [key=value ...]`."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from argosy.cli.flags import translated
from argosy.cli.output import Doing, say
from argosy.core.process import signals
from argosy.core.settings import read_settings, words_layer
from argosy.jobs import machine
from argosy.serve.settings import ServeSettings

app = typer.Typer(rich_markup_mode=None, add_completion=False)

KEY, ADMIN_KEY = "ARGOSY_API_KEY", "ARGOSY_ADMIN_KEY"


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: nearly everything that a start makes stays, and looking at it again and again takes 0.9 CPU s. Later
    collections leave out what was made here."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@app.command(context_settings={"ignore_unknown_options": True})
def serve(
    model: Annotated[
        str, typer.Argument(help="Hub folder, .gguf file, run directory or checkpoint", show_default=False)
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]",
            help="settings: " + ", ".join(ServeSettings.model_fields) + "; flags of `vllm serve` work too",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serves a model over HTTP, with OpenAI's API."""
    settings = read_settings(ServeSettings, words_layer(translated(words or []))).value
    admin = settings.admin
    if admin.port is not None or admin.shared:
        admin = admin.model_copy(update={"key": admin.key or os.environ.get(ADMIN_KEY) or None})
    key = settings.api_key or os.environ.get(KEY) or None
    settings = settings.model_copy(update={"api_key": key, "admin": admin})
    with Doing() as doing, uncollected():
        doing("loading jax")
        machine.start_jax()
        from argosy.infer.programs.store import open_store
        from argosy.jobs.api import draft_of, load
        from argosy.serve import run
        from argosy.web.process import bound_socket, server_address

        run.check_server(settings)
        listener, admin_listener = bound_socket(settings.host, settings.port), run.admin_socket(settings)
        doing(f"loading {model}")
        how: Any = {name: getattr(settings, name) for name in ("dtype", "adapter", "tensor", "quantization")}
        # Copies share the memory of their weights, which packed ones cannot.
        how["blocks"] = "auto" if settings.copies == 1 else False
        lm = load(model, **how, context=settings.engine.context)
        if settings.chat_template is not None:
            run.set_chat_template(lm, settings.chat_template)
        name = settings.name or Path(model).resolve().name
        draft = draft_of(settings.engine, settings.dtype, settings.tensor)
        service = run.running_server(lm, name, settings, doing, draft, open_store(machine.programs_folder(), say))
    # A line that replaces itself would stay on the terminal.
    service.front.says(lambda what: say(f"{what} ..."))
    for line in service.about:
        say(line)
    if admin_listener is not None:
        say(f"admin routes on http://127.0.0.1:{admin_listener.getsockname()[1]}")
    url = server_address(listener, settings)
    with signals.asked_to_stop("finishing what runs; again to end now") as stop:
        run.serve_until(service, settings, listener, stop=stop, ready=lambda: say(f"ready on {url}"), admin=admin_listener)
    raise typer.Exit(stop.code)
