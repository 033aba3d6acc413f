"""Runs a server of images until a signal."""

import socket
from collections.abc import Callable
from typing import Any

from argosy.serve.images.app import ImageRoutes
from argosy.serve.images.service import ImageService
from argosy.web.process import DrainingServer, server_config


def serve_images(
    service: ImageService, listener: socket.socket, *, stop: Callable[[], Any], ready: Callable[[], object]
) -> None:
    """Serves until `stop()` returns true, then drains and returns. Calls `ready` as soon as requests can be served."""
    settings = service.settings
    tls = {"ssl_certfile": settings.tls_certificate, "ssl_keyfile": settings.tls_key}
    service.engine.start()
    try:
        config = server_config(ImageRoutes(service).app(), settings, **tls)
        DrainingServer(config, service.drain, stop, ready).run(sockets=[listener])
    finally:
        service.engine.close()
