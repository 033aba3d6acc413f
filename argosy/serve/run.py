"""Starts and ends a server: checks its settings, builds the service of a model, and serves until a signal.

SIGTERM and Ctrl-C drain the server: new requests get 503, and running ones finish within a time limit. A second signal ends the process
at once.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.data.encoding import template_text
from argosy.data.tokenizers.config import DEFAULT
from argosy.infer.embed import SentenceEncoder, embeds
from argosy.infer.engine.replicas import check_device_count
from argosy.infer.lm import LM
from argosy.infer.speculation.tokenizers import check_tokenizers
from argosy.infer.tools.channels import MARKS, channel_marks
from argosy.ops.programs.store import ProgramStore
from argosy.serve.admin import Admin
from argosy.serve.app import App, admin_app
from argosy.serve.engine.encoder import EncoderFront, EncoderService, pass_shapes
from argosy.serve.engine.engines import build_front
from argosy.serve.openai.response_store import ResponseStore
from argosy.serve.response.reasoning import parser_of
from argosy.serve.sampling import default_sampling
from argosy.serve.service import Service
from argosy.serve.settings import REASONING, ServeSettings
from argosy.web.process import DrainingServer, SecondServer, bound_socket, check_open, is_for_loopback, server_config

# Seconds for responses that are still being written after the drain.
LAST_BYTES_S = 5


def check_server(settings: ServeSettings) -> None:
    """Checks, before the model is loaded, that the server is protected by keys where it must be, and that there are enough devices.

    Raises:
        BadInput: the server listens beyond the loopback without an API key, a TLS certificate lacks its key, a file does not exist,
            admin routes have no key or their folder does not exist, or there are more copies than devices.
    """
    admin = settings.admin
    if (admin.port is not None or admin.shared) and not admin.key:
        hint = "set $ARGOSY_ADMIN_KEY, or `admin.key=`"
        raise BadInput("the admin routes change what is served, so they need a key", hint=hint)
    if admin.key and admin.key == settings.api_key:
        raise BadInput("admin.key is the key of the API", hint="another one: clients of the API must not change what is served")
    if admin.root is not None and not Path(admin.root).is_dir():
        raise BadInput(f"admin.root: no folder `{admin.root}`")
    if (admin.key or admin.root) and admin.port is None and not admin.shared:
        raise BadInput("admin.key and admin.root are for admin routes, and there are none", hint="admin.port=8001")
    _check_adapters(settings)
    check_open(settings)
    check_device_count(settings.copies, settings.tensor)


def _check_adapters(settings: ServeSettings) -> None:
    lora, many = settings.engine.lora, len(settings.lora_modules)
    if many and not lora.enabled:
        raise BadInput("lora_modules: this engine takes no adapters", hint="engine.lora.enabled=true")
    if many > lora.adapters:
        problem = f"lora_modules has {plural(many, 'adapter')}, and there is room for {lora.adapters}"
        raise BadInput(problem, hint=f"engine.lora.adapters={many}")


def admin_socket(settings: ServeSettings) -> socket.socket | None:
    """Binds a socket to the admin port; None if the settings have no admin port. Errors are those of `bound_socket`."""
    return None if settings.admin.port is None else bound_socket("127.0.0.1", settings.admin.port, "admin.port")


def set_chat_template(lm: LM, name: str) -> None:
    """Replaces the chat templates of the model's tokenizer, in place.

    Args:
        name: the name of one of the tokenizer's templates or of a published one, or the path of a Jinja file.

    Raises:
        BadInput: there is no such template, the model is an encoder, or it has no tokenizer.
    """
    if embeds(lm):
        raise BadInput("chat_template: the model is an encoder", hint="leave it out")
    if lm.tokenizer is None:
        raise BadInput("chat_template: the model has no tokenizer", hint="leave it out: requests give token ids as `prompt`")
    text = template_text(name, lm.tokenizer.chat_templates)
    lm.tokenizer.chat_template, lm.tokenizer.chat_templates = text, {DEFAULT: text}


def build_service(
    lm: LM, name: str, settings: ServeSettings, say: Say | None, draft: LM | None = None, programs: ProgramStore | None = None
) -> Service:
    """Builds the service of a model that generates text: compiles the programs of its engine, and starts the engine's thread.

    Args:
        name: the model's name in the API.
        say: called with the name of the program that is being compiled.
        draft: the draft model that `engine.speculative` names.
        programs: compiled programs of earlier starts.

    Raises:
        BadInput: the model is an encoder, its cache has no room, or the draft model does not fit.
    """
    lm.check_predicts()
    _check_adapters(settings)
    if name in settings.lora_modules:
        raise BadInput(f"lora_modules: the model itself is called `{name}`", hint="`name=` gives it another")
    reasoning = parser_of(settings.reasoning_parser, lm.tokenizer)
    parsing = REASONING[settings.reasoning_parser]
    marks = channel_marks(lm.tokenizer) if parsing.channels else {}
    if parsing.channels and parsing.needed and not marks:
        lacking = f"{', '.join(MARKS)} as special tokens, and this model's tokenizer lacks some"
        problem = f"reasoning_parser={settings.reasoning_parser} needs {lacking}"
        raise BadInput(problem, hint="leave it out, or set reasoning_parser=none")
    if draft is not None:
        check_tokenizers(lm.tokenizer, draft.tokenizer)
    front = build_front(lm, name, settings, say, draft, programs)
    defaults, templates = default_sampling(lm.generation), settings.request_chat_template
    store = ResponseStore(settings.stored_responses) if settings.stored_responses else None
    more: Any = {"request_templates": templates, "reasoning": reasoning, "marks": marks, "store": store}
    return Service(lm, name, front, settings.limits, defaults, Random(settings.seed), **more)


def build_encoder(lm: LM, name: str, settings: ServeSettings, say: Say | None) -> EncoderService:
    """Builds the service of an encoder: compiles its programs, and starts its thread.

    Raises:
        BadInput: the model embeds no texts, its folder asks for a step that is not built, or settings do not apply to encoders.
    """
    if settings.copies > 1:
        raise BadInput(f"copies = {settings.copies}: copies of an encoder are not built", hint="a server for each device")
    if settings.engine.lora.enabled or settings.admin.port is not None or settings.admin.shared:
        raise BadInput(f"`{name}` is an encoder: adapters by request and admin routes are for models that generate")
    if idle := sorted(settings.engine.model_fields_set - {"budget", "lora"}):
        names = ", ".join(f"engine.{setting}" for setting in idle)
        raise BadInput(f"{names}: `{name}` is an encoder, which computes each text at once", hint="engine.budget alone applies")
    encoder = SentenceEncoder(lm, say=say)
    budget = settings.engine.budget
    for shape in pass_shapes(budget, encoder.context) if settings.warm_up else [(1, encoder.context)]:
        encoder.pooled([[0]], shape)
    front = EncoderFront(encoder, budget, settings.limits, name)
    front.start()
    return EncoderService(lm, name, front, settings.limits)


def running_server(
    lm: LM, name: str, settings: ServeSettings, say: Say | None, draft: LM | None = None, programs: ProgramStore | None = None
) -> Service | EncoderService:
    """Builds the service of an encoder or of a model that generates text. Arguments and errors are those of `build_service` and
    `build_encoder`."""
    if embeds(lm):
        return build_encoder(lm, name, settings, say)
    return build_service(lm, name, settings, say, draft, programs)


def serve_until(
    service: Service | EncoderService,
    settings: ServeSettings,
    listener: socket.socket,
    *,
    stop: Callable[[], Any],
    ready: Callable[[], object],
    admin: socket.socket | None = None,
) -> None:
    """Serves until `stop()` returns true, then drains and returns.

    Args:
        listener: the bound socket of the API.
        ready: called as soon as requests can be served.
        admin: the bound socket of the admin routes; None: there is no admin port.
    """
    local = is_for_loopback(settings)
    routes = Admin(service, settings.admin) if isinstance(service, Service) and settings.admin.key else None
    app = App(
        service, key=settings.api_key, local=local, web=settings.web, admin=routes if settings.admin.shared else None
    )
    tls = {"ssl_certfile": settings.tls_certificate, "ssl_keyfile": settings.tls_key}
    config = server_config(app.asgi, settings, **tls)
    second = None
    if admin is not None and routes is not None:
        second = (SecondServer(server_config(admin_app(routes, app), settings)), admin)
    try:
        DrainingServer(config, lambda: service.front.drain(settings.drain), stop, ready, second).run(sockets=[listener])
    finally:
        service.front.close()
