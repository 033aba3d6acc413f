"""The server as a process: its address, its readiness, and its end.

SIGTERM and Ctrl-C drain: new requests get 503, running ones finish within a limit. A second signal ends the process at once.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import uvicorn

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.data.encoding import template_text
from argosy.data.tokenizers.config import DEFAULT
from argosy.infer.embed import SentenceEncoder
from argosy.infer.engine.replicas import check_device_count
from argosy.infer.lm import LM, check_draft
from argosy.infer.programs.store import ProgramStore
from argosy.infer.tools.channels import MARKS, channel_marks
from argosy.serve.admin import Admin
from argosy.serve.app import App, admin_app
from argosy.serve.engine.admission import Admission
from argosy.serve.engine.encoder import EncoderFront, EncoderService, pass_shapes
from argosy.serve.engine.engines import build_front
from argosy.serve.guard import HEADER_BYTES, is_local
from argosy.serve.openai.response_store import ResponseStore
from argosy.serve.response.reasoning import parser_of
from argosy.serve.sampling import default_sampling
from argosy.serve.service import Service
from argosy.serve.settings import REASONING, ServeSettings

# Responses that are being written when the drain is over.
LAST_BYTES_S = 5


def check_server(settings: ServeSettings) -> None:
    """Checks that strangers cannot use the server, and that there are devices for it, before the model is loaded.

    Raises:
        BadInput: the address is no loopback and there is no key; or a certificate without its key, or files that do not exist; or admin
            routes without a key or a folder that exists; or more copies than devices.
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
    if not settings.api_key and not settings.open and not is_local(settings.host):
        raise BadInput(
            f"host={settings.host} lets everybody on the network use this server",
            hint="set `api_key=` or $ARGOSY_API_KEY, or say `open=true`",
        )
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise BadInput("TLS needs both `tls_certificate` and `tls_key`")
    for name in ("tls_certificate", "tls_key"):
        if (path := getattr(settings, name)) is not None and not Path(path).is_file():
            raise BadInput(f"{name}: no file `{path}`")
    check_device_count(settings.copies, settings.tensor)


def _check_adapters(settings: ServeSettings) -> None:
    lora, many = settings.engine.lora, len(settings.lora_modules)
    if many and not lora.enabled:
        raise BadInput("lora_modules: this engine takes no adapters", hint="engine.lora.enabled=true")
    if many > lora.adapters:
        what = f"lora_modules has {plural(many, 'adapter')}, and there is room for {lora.adapters}"
        raise BadInput(what, hint=f"engine.lora.adapters={many}")


def bound_socket(settings: ServeSettings) -> socket.socket:
    """A socket on the address. It does not listen yet: clients are refused until the server is ready.

    Raises:
        BadInput: the address is in use, or not one of this machine.
    """
    return _bound(settings.host, settings.port, "port")


def admin_socket(settings: ServeSettings) -> socket.socket | None:
    """As `bound_socket`, for the admin port; None if there is none."""
    return None if settings.admin.port is None else _bound("127.0.0.1", settings.admin.port, "admin.port")


def _bound(host: str, port: int, setting: str) -> socket.socket:
    with contextlib.ExitStack() as undo:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            # With the protocol left out, asyncio does not set TCP_NODELAY: each answer on a connection that is kept waits 40 ms.
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            # Connections of a server that has just ended do not keep the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            hint = f"another `{setting}=`; {setting}=0 takes a free one"
            raise BadInput(f"cannot listen on {host} port {port}: {why}", hint=hint) from None
        undo.pop_all()
        return listener


def set_chat_template(lm: LM, name: str) -> None:
    """Renders all conversations by this template, in place of those of the tokenizer.

    Raises:
        BadInput: there is no such template, or nothing that it could render for.
    """
    if not lm.config.causal:
        raise BadInput("chat_template: the model is an encoder", hint="leave it out")
    if lm.tokenizer is None:
        raise BadInput("chat_template: the model has no tokenizer", hint="leave it out: requests give token ids as `prompt`")
    text = template_text(name, lm.tokenizer.chat_templates)
    lm.tokenizer.chat_template, lm.tokenizer.chat_templates = text, {DEFAULT: text}


def build_service(
    lm: LM, name: str, settings: ServeSettings, say: Say | None, draft: LM | None = None, programs: ProgramStore | None = None
) -> Service:
    """The model with an engine whose programs are compiled, and its thread started.

    Args:
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
    how = REASONING[settings.reasoning_parser]
    marks = channel_marks(lm.tokenizer) if how.channels else {}
    if how.channels and how.needed and not marks:
        lacking = f"{', '.join(MARKS)} as special tokens, and this model's tokenizer lacks some"
        what = f"reasoning_parser={settings.reasoning_parser} needs {lacking}"
        raise BadInput(what, hint="leave it out, or set reasoning_parser=none")
    if draft is not None:
        check_draft(lm, draft)
    front = build_front(lm, name, settings, say, draft, programs)
    defaults, templates = default_sampling(lm.generation), settings.request_chat_template
    store = ResponseStore(settings.stored_responses) if settings.stored_responses else None
    more: Any = {"request_templates": templates, "reasoning": reasoning, "marks": marks, "store": store}
    return Service(lm, name, front, settings.limits, defaults, Random(settings.seed), **more)


def build_encoder(lm: LM, name: str, settings: ServeSettings, say: Say | None) -> EncoderService:
    """The encoder, its programs compiled, and its thread started.

    Raises:
        BadInput: the model predicts tokens, or its folder asks for a step that is not built.
    """
    if settings.copies > 1:
        raise BadInput(f"copies = {settings.copies}: copies of an encoder are not built", hint="a server for each device")
    if settings.engine.lora.enabled or settings.admin.port is not None or settings.admin.shared:
        raise BadInput(f"`{name}` is an encoder: adapters by request and admin routes are for models that generate")
    if idle := sorted(settings.engine.model_fields_set - {"budget", "lora"}):
        names = ", ".join(f"engine.{one}" for one in idle)
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
    """The model as a service of its kind. Arguments and errors are those of `build_service` and `build_encoder`."""
    if not lm.config.causal:
        return build_encoder(lm, name, settings, say)
    return build_service(lm, name, settings, say, draft, programs)


def server_address(listener: socket.socket, settings: ServeSettings) -> str:
    """The server's URL."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_certificate else 'http'}://{host}:{listener.getsockname()[1]}"


def serve_until(
    service: Service | EncoderService,
    settings: ServeSettings,
    listener: socket.socket,
    *,
    stop: Callable[[], Any],
    ready: Callable[[], object],
    admin: socket.socket | None = None,
) -> None:
    """Answers until `stop()` is true, then drains. Calls `ready` as soon as the first request can be answered.

    Args:
        admin: the socket of the admin routes.
    """
    local = settings.api_key is None and not settings.open and is_local(settings.host)
    routes = Admin(service, settings.admin) if isinstance(service, Service) and settings.admin.key else None
    app = App(
        service, key=settings.api_key, local=local, web=settings.web, admin=routes if settings.admin.shared else None
    )
    tls = {"ssl_certfile": settings.tls_certificate, "ssl_keyfile": settings.tls_key}
    config = _config(app.asgi, settings, **tls)
    beside = None
    if admin is not None and routes is not None:
        beside = (_Beside(_config(admin_app(routes, app), settings)), admin)
    try:
        _Server(config, service.front, settings.drain, stop, ready, beside).run(sockets=[listener])
    finally:
        service.front.close()


def _config(app: Any, settings: ServeSettings, **tls: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        # uvloop takes the process's one wake-up descriptor for signals from `core.process.signals`: SIGTERM would do nothing.
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="info" if settings.log_requests else "warning",
        access_log=settings.log_requests,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=settings.limits.connections,
        # A client that keeps its connections longer than the server does loses a request now and then.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=LAST_BYTES_S,
        h11_max_incomplete_event_size=HEADER_BYTES,
        **tls,
    )


class _Beside(uvicorn.Server):
    """A second server in the event loop of the first, which ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server(uvicorn.Server):
    """uvicorn with our signals, and a drain during which it still answers."""

    def __init__(
        self,
        config: uvicorn.Config,
        front: Admission[Any, Any],
        drain: float,
        stop: Callable[[], Any],
        ready: Callable[[], object],
        beside: tuple[_Beside, socket.socket] | None = None,
    ):
        super().__init__(config)
        self.front, self.drain, self.stop, self.ready = front, drain, stop, ready
        self.beside = beside

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The command line has its own handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.beside is not None:
            server, listener = self.beside
            self._beside = asyncio.create_task(server.serve(sockets=[listener]))
            while not (server.started or self._beside.done()):
                await asyncio.sleep(0.01)
        self.ready()
        self._stopping = asyncio.create_task(self._stop())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.beside is not None:
            self.beside[0].should_exit = True
            await self._beside
        await super().shutdown(sockets)

    async def _stop(self) -> None:
        # uvicorn looks at its own flag as often.
        while not self.stop():
            await asyncio.sleep(0.1)
        await self.front.drain(self.drain)
        self.should_exit = True
