"""The gRPC server, in the event loop of the HTTP server.

Each method is registered as one that takes a stream, which is the same on the wire. So a client that sends half a request is dropped
after `limits.upload_seconds`, and a client that sends something else than a message of the protocol gets INVALID_ARGUMENT.
"""

import asyncio
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from argosy.predict.grpc.messages import health_proto, inference_proto
from argosy.predict.grpc.methods import InferenceMethods
from argosy.predict.grpc.proto_text import ProtoMethod
from argosy.predict.service import PredictService
from argosy.web.errors import ApiError
from argosy.web.guard import HEADER_BYTES, expected_key, has_key

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# Probes send no key.
PUBLIC = ("ServerLive", "ServerReady", "Check", "Watch")
# Error messages are sent as headers, of which clients accept 8 kB.
MOST_DETAILS = 2000
# The number of requests of a stream that are computed at the same time.
STREAM_REQUESTS = 64
KEEPALIVE_MS = 75_000

Unary = Callable[[Any, Any], Awaitable[Any]]


class GrpcServer:
    """Serves the Open Inference Protocol and gRPC's health service.

    Args:
        service: the calls of the protocol.
        reserved: a socket that is bound to the address and reserves it until the server starts.
    """

    def __init__(self, service: PredictService, reserved: socket.socket):
        self.service, self.settings, self.reserved = service, service.settings, reserved
        self._key = None if self.settings.api_key is None else expected_key(self.settings.api_key)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Starts to accept calls."""
        limits = self.settings.limits
        options = {
            "grpc.max_receive_message_length": limits.body,
            "grpc.max_send_message_length": -1,
            "grpc.max_metadata_size": HEADER_BYTES,
            "grpc.absolute_max_metadata_size": HEADER_BYTES,
            "grpc.keepalive_time_ms": KEEPALIVE_MS,
            # Otherwise two servers could share a port, and each would get some of the requests.
            "grpc.so_reuseport": 0,
        }
        server = grpc.aio.server(options=list(options.items()), maximum_concurrent_rpcs=limits.connections)
        server.add_generic_rpc_handlers(self._handlers())
        host, port = self.reserved.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self.settings.tls_certificate is not None and self.settings.tls_key is not None:
            pair = Path(self.settings.tls_key).read_bytes(), Path(self.settings.tls_certificate).read_bytes()
            server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        else:
            server.add_insecure_port(address)
        self.reserved.close()
        await server.start()
        self._server = server

    async def stop(self, seconds: float) -> None:
        """Accepts no more calls, and ends running calls after `seconds`."""
        if self._server is not None:
            await self._server.stop(seconds)

    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        methods = InferenceMethods(self.service)
        handlers = []
        for proto, work in ((inference_proto(), methods.inference()), (health_proto(), methods.health())):
            method_handlers = {name: self._handler(name, proto.methods[name], call) for name, call in work.items()}
            handlers.append(grpc.method_handlers_generic_handler(proto.service, method_handlers))
        return handlers

    def _handler(self, name: str, method: ProtoMethod, work: Any) -> grpc.RpcMethodHandler:
        options = {"response_serializer": lambda message: message.SerializeToString()}
        if method.client_streams:
            return grpc.stream_stream_rpc_method_handler(self._stream(name, method, work), **options)
        if method.server_streams:
            return grpc.stream_stream_rpc_method_handler(self._responses(name, method, work), **options)
        return grpc.stream_unary_rpc_method_handler(self._unary(name, method, work), **options)

    def _unary(self, name: str, method: ProtoMethod, work: Unary) -> Any:
        async def call(requests: AsyncIterator[bytes], context: Any) -> Any:
            try:
                self._check_key(name, context)
                return await work(await self._first(requests, method), context)
            except Exception as error:
                await _abort(context, error)

        return call

    def _responses(self, name: str, method: ProtoMethod, work: Callable[[Any], AsyncIterator[Any]]) -> Any:
        async def call(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            try:
                self._check_key(name, context)
                async for response in work(await self._first(requests, method)):
                    yield response
            except Exception as error:
                await _abort(context, error)

        return call

    def _stream(self, name: str, method: ProtoMethod, work: Unary) -> Any:
        """Returns the handler of a stream, whose requests are computed concurrently and answered in their order."""

        async def call(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            running: asyncio.Queue[asyncio.Task[Any] | Exception | None] = asyncio.Queue(STREAM_REQUESTS)

            async def read() -> None:
                end = None
                try:
                    async for raw in requests:
                        task = asyncio.ensure_future(work(_parsed(raw, method), context))
                        try:
                            await running.put(task)
                        except asyncio.CancelledError:
                            task.cancel()
                            raise
                except Exception as error:
                    end = error
                await running.put(end)

            reader = asyncio.ensure_future(read())
            try:
                self._check_key(name, context)
                while isinstance(task := await running.get(), asyncio.Task):
                    yield await task
                if task is not None:
                    raise task
            except Exception as error:
                await _abort(context, error)
            finally:
                reader.cancel()
                while not running.empty():
                    if isinstance(task := running.get_nowait(), asyncio.Task):
                        task.cancel()

        return call

    def _check_key(self, name: str, context: Any) -> None:
        """Checks the API key.

        Raises:
            ApiError: the metadata of the call do not contain the key.
        """
        if self._key is None or name in PUBLIC:
            return
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        if not has_key(metadata.get("authorization", ""), metadata.get("x-api-key", ""), self._key):
            raise ApiError("wrong or missing API key", status=401)

    async def _first(self, requests: AsyncIterator[bytes], method: ProtoMethod) -> Any:
        """Returns the request of a method that takes a single one."""
        seconds = self.settings.limits.upload_seconds
        try:
            async with asyncio.timeout(seconds):
                async for raw in requests:
                    return _parsed(raw, method)
        except TimeoutError:
            raise ApiError(f"the request took more than {seconds:g} seconds to arrive", status=408) from None
        raise ApiError("there is no request")


def _parsed(raw: bytes, method: ProtoMethod) -> Any:
    try:
        return method.request.FromString(raw)
    except DecodeError:
        raise ApiError(f"the request is no {method.request.DESCRIPTOR.name}") from None


async def _abort(context: Any, error: Exception) -> None:
    """Ends a call with the code of an error. The details of an unexpected error are only written to stderr."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, ApiError):
        with suppress(OSError):
            traceback.print_exception(error, file=sys.stderr)
        error = ApiError("internal error", status=500)
    await context.abort(CODES.get(error.status, grpc.StatusCode.UNKNOWN), error.message[:MOST_DETAILS])
