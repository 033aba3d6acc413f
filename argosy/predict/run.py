"""The server of a repository as a process."""

import socket
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.predict.openai import OpenAIRoutes
from argosy.predict.repository import Repository
from argosy.predict.rest import InferenceRoutes
from argosy.predict.service import PredictService
from argosy.predict.tensorflow_serving import TensorFlowRoutes
from argosy.web.app import guarded_app
from argosy.web.process import DrainingServer, is_for_loopback, server_config

# Probes send no key.
PUBLIC = ("/v2/health/live", "/v2/health/ready")


def predict_app(service: PredictService) -> Starlette:
    """Every protocol of the server."""

    async def metrics(request: Request) -> Response:
        service.metrics.pending.clear()
        for name, state in service.repository.models.items():
            for version in state.versions.values():
                service.metrics.pending.labels(name, str(version.version)).set(len(version.batcher.waiting))
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(request: Request) -> Response:
        return Response(status_code=503 if service.draining else 200)

    routes = [
        *InferenceRoutes(service).routes(),
        *OpenAIRoutes(service).routes(),
        *TensorFlowRoutes(service).routes(),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]
    settings = service.settings
    how: dict[str, Any] = {"key": settings.api_key, "local": is_for_loopback(settings), "headers": settings.limits.headers}
    return guarded_app(routes, **how, public=PUBLIC)


def serve_repository(
    repository: Repository, listener: socket.socket, *, stop: Callable[[], Any], ready: Callable[[], object]
) -> None:
    """Answers until `stop()` is true, then drains. Calls `ready` as soon as the first request can be answered."""
    settings, service = repository.settings, PredictService(repository)
    tls = {"ssl_certfile": settings.tls_certificate, "ssl_keyfile": settings.tls_key}
    if settings.poll is not None:
        repository.poll(settings.poll)
    try:
        config = server_config(predict_app(service), settings, **tls)
        DrainingServer(config, service.drain, stop, ready).run(sockets=[listener])
    finally:
        repository.close()
