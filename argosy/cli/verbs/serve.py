"""`argosy serve MODEL [key=value ...]`."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from argosy.cli.flags import translate_flags
from argosy.cli.output import Doing, say
from argosy.core.hub.names import model_name
from argosy.core.process import signals
from argosy.core.settings import read_settings, words_layer
from argosy.jobs import machine
from argosy.jobs.image_models import check_one_tower, draws_images
from argosy.serve.images.settings import ImageServeSettings
from argosy.serve.settings import ServeSettings

app = typer.Typer(rich_markup_mode=None, add_completion=False)

KEY, ADMIN_KEY = "ARGOSY_API_KEY", "ARGOSY_ADMIN_KEY"


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turns off garbage collection during the start: nearly all objects stay, and scanning them repeatedly takes 0.9 CPU s. Later
    collections skip these objects.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@app.command(context_settings={"ignore_unknown_options": True})
def serve(
    model: Annotated[
        str, typer.Argument(help="Hub folder, .gguf file, run, checkpoint or hf:OWNER/NAME", show_default=False)
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]",
            help=f"settings: {', '.join(ServeSettings.model_fields)}; flags of `vllm serve` work too. Of models that draw images: "
            + ", ".join(ImageServeSettings.model_fields),
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serves a model over HTTP, with OpenAI's API."""
    if draws_images(model, say):
        _serve_images(model, words or [])
    settings = read_settings(ServeSettings, words_layer(translate_flags(words or []))).value
    admin = settings.admin
    if admin.port is not None or admin.shared:
        admin = admin.model_copy(update={"key": admin.key or os.environ.get(ADMIN_KEY) or None})
    key = settings.api_key or os.environ.get(KEY) or None
    settings = settings.model_copy(update={"api_key": key, "admin": admin})
    with Doing() as doing, without_garbage_collection():
        doing("loading jax")
        machine.start_jax()
        from argosy.jobs.api import draft_of, load
        from argosy.ops.programs.store import open_store
        from argosy.serve import run
        from argosy.web.process import bound_socket, server_address

        run.check_server(settings)
        check_one_tower(model, "serve", doing)
        listener, admin_listener = bound_socket(settings.host, settings.port), run.admin_socket(settings)
        doing(f"loading {model}")
        options: Any = {name: getattr(settings, name) for name in ("dtype", "adapter", "tensor", "quantization")}
        # Copies share the memory of their weights, which packed ones cannot.
        options["blocks"] = "auto" if settings.copies == 1 else False
        lm = load(model, **options, context=settings.engine.context)
        if settings.chat_template is not None:
            run.set_chat_template(lm, settings.chat_template)
        name = settings.name or model_name(model)
        draft = draft_of(settings.engine, settings.dtype, settings.tensor)
        service = run.running_server(lm, name, settings, doing, draft, open_store(machine.programs_folder(), say))
    # A line that replaces itself would stay on the terminal.
    service.front.says(lambda activity: say(f"{activity} ..."))
    for line in service.about:
        say(line)
    if admin_listener is not None:
        say(f"admin routes on http://127.0.0.1:{admin_listener.getsockname()[1]}")
    url = server_address(listener, settings)
    with signals.asked_to_stop("finishing what runs; again to end now") as stop:
        run.serve_until(service, settings, listener, stop=stop, ready=lambda: say(f"ready on {url}"), admin=admin_listener)
    raise typer.Exit(stop.code)


def _serve_images(model: str, words: list[str]) -> NoReturn:
    """Serves a model that draws images."""
    settings = read_settings(ImageServeSettings, words_layer(words)).value
    settings = settings.model_copy(update={"api_key": settings.api_key or os.environ.get(KEY) or None})
    with Doing() as doing, without_garbage_collection():
        doing("loading jax")
        machine.start_jax()
        from argosy.jobs.api import load
        from argosy.serve.images.run import serve_images
        from argosy.serve.images.service import ImageService
        from argosy.web.process import bound_socket, check_open, server_address

        check_open(settings)
        listener = bound_socket(settings.host, settings.port)
        doing(f"loading {model}")
        pipeline = load(model, dtype=settings.dtype)
        pipeline.say = doing
        service = ImageService(pipeline, settings.name or model_name(model), settings)
        if settings.warm_up:
            service.warm_up()
    # A line that replaces itself would stay on the terminal.
    pipeline.say = lambda activity: say(f"{activity} ...")
    for line in service.about:
        say(line)
    url = server_address(listener, settings)
    with signals.asked_to_stop("finishing what runs; again to end now") as stop:
        serve_images(service, listener, stop=stop, ready=lambda: say(f"ready on {url}"))
    raise typer.Exit(stop.code)
