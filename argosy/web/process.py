"""A server as a process: its address, its readiness, and its end.

SIGTERM and Ctrl-C drain: new requests get 503, running ones finish within a limit. A second signal ends the process at once.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from argosy.core.errors import BadInput
from argosy.web.guard import HEADER_BYTES, is_local
from argosy.web.settings import WebSettings

# Responses that are being written when the drain is over.
LAST_BYTES_S = 5


def check_open(settings: WebSettings) -> None:
    """Checks that strangers cannot use the server unless they may.

    Raises:
        BadInput: the address is no loopback and there is no key; or a certificate without its key, or files that do not exist.
    """
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


def is_for_loopback(settings: WebSettings) -> bool:
    """Whether only requests for a loopback name are answered, because there is no key."""
    return settings.api_key is None and not settings.open and is_local(settings.host)


def bound_socket(host: str, port: int, setting: str = "port") -> socket.socket:
    """A socket on an address. It does not listen yet: clients are refused until the server is ready.

    Args:
        setting: of the port, for errors.

    Raises:
        BadInput: the address is in use, or not one of this machine.
    """
    with contextlib.ExitStack() as undo:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = addresses[0]
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


def server_address(listener: socket.socket, settings: WebSettings) -> str:
    """The server's URL."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_certificate else 'http'}://{host}:{listener.getsockname()[1]}"


def server_config(app: Any, settings: WebSettings, **tls: Any) -> uvicorn.Config:
    """What uvicorn needs to know. tls: its settings of certificates."""
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


class SecondServer(uvicorn.Server):
    """A second server in the event loop of the first, which ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class DrainingServer(uvicorn.Server):
    """uvicorn with our signals, and a drain during which it still answers.

    Args:
        drain: returns when running requests have ended.
        stop: whether the process was asked to end.
        ready: called once the first request can be answered.
        second: a second server and its socket.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Callable[[], Awaitable[None]],
        stop: Callable[[], Any],
        ready: Callable[[], object],
        second: tuple[SecondServer, socket.socket] | None = None,
    ):
        super().__init__(config)
        self.drain, self.stop, self.ready = drain, stop, ready
        self.second = second

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signals, because the command line has its own handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.second is not None:
            server, listener = self.second
            self._second_task = asyncio.create_task(server.serve(sockets=[listener]))
            while not (server.started or self._second_task.done()):
                await asyncio.sleep(0.01)
        self.ready()
        self._stopping = asyncio.create_task(self._stop())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.second is not None:
            self.second[0].should_exit = True
            await self._second_task
        await super().shutdown(sockets)

    async def _stop(self) -> None:
        # uvicorn looks at its own flag as often.
        while not self.stop():
            await asyncio.sleep(0.1)
        await self.drain()
        self.should_exit = True
