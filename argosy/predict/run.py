"""Runs the HTTP and gRPC servers of a repository."""

import socket
from collections.abc import Callable
from importlib import import_module
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.predict.images import BundleImageRoutes
from argosy.predict.openai import OpenAIRoutes
from argosy.predict.page import FOLDER, model_page_routes
from argosy.predict.pooling import PoolingRoutes
from argosy.predict.repository import Repository
from argosy.predict.rest import InferenceRoutes
from argosy.predict.service import PredictService
from argosy.predict.tensorflow_serving import TensorFlowRoutes
from argosy.web.app import guarded_app
from argosy.web.pages import page_files
from argosy.web.process import LAST_BYTES_S, DrainingServer, is_for_loopback, server_config

# Probes send no key.
PUBLIC = ("/v2/health/live", "/v2/health/ready")


def predict_app(service: PredictService) -> Starlette:
    """Returns the HTTP application with every protocol of the server."""

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
        *BundleImageRoutes(service).routes(),
        *PoolingRoutes(service).routes(),
        *TensorFlowRoutes(service).routes(),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]
    settings, public = service.settings, {*PUBLIC}
    if settings.page:
        routes += model_page_routes(service.repository, settings.api_key is not None)
        public |= set(page_files(FOLDER))
    guard_settings: dict[str, Any] = {"key": settings.api_key, "local": is_for_loopback(settings), "headers": settings.limits.headers}
    return guarded_app(routes, **guard_settings, public=tuple(public))


class PredictServer(DrainingServer):
    """The HTTP server, and the gRPC server beside it.

    grpc: the gRPC server, with methods `start` and `stop`. None if there is none.
    """

    grpc: Any = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.grpc is not None:
            await self.grpc.start()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.grpc is not None:
            await self.grpc.stop(LAST_BYTES_S)
        await super().shutdown(sockets)


def serve_repository(
    repository: Repository,
    listener: socket.socket,
    grpc: socket.socket | None = None,
    *,
    stop: Callable[[], Any],
    ready: Callable[[], object],
) -> None:
    """Serves until `stop()` is true, then drains.

    Args:
        listener: a socket that listens for HTTP.
        grpc: a socket that is bound to the address of gRPC. None serves no gRPC.
        stop: whether the server was asked to stop.
        ready: called as soon as the first request can be served.
    """
    settings, service = repository.settings, PredictService(repository)
    tls = {"ssl_certfile": settings.tls_certificate, "ssl_keyfile": settings.tls_key}
    if settings.poll is not None:
        repository.poll(settings.poll)
    try:
        config = server_config(predict_app(service), settings, **tls)
        server = PredictServer(config, service.drain, stop, ready)
        if grpc is not None:
            # Imported late: gRPC is an extra.
            server.grpc = import_module("argosy.predict.grpc.server").GrpcServer(service, grpc)
        server.run(sockets=[listener])
    finally:
        repository.close()
