"""Server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from argosy.web.connection import while_connected
from argosy.web.errors import ApiError, json_bytes

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """A stream of JSON objects, each sent as one server-sent event. An error after the first event is sent as an event too, because the
    HTTP status has been sent already.

    Args:
        first: the first object. The caller takes it from `events`, so that errors before it get their own HTTP status.
        events: yields the other objects. It is closed when the client disconnects, or when time runs out.
        seconds: time limit of the stream.
        named: whether each event is named by the `type` of its object. If not, events have no name, and `[DONE]` follows the last.
        failure: makes the object for an error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Any,
        events: AsyncGenerator[Any],
        seconds: float,
        named: bool = False,
        failure: Callable[[ApiError], Any] = ApiError.body,
    ):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.first, self.events, self.seconds, self.named, self.failure = first, events, seconds, named, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pump() -> None:
            async with asyncio.timeout(self.seconds):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await part(self._event(self.first))
                try:
                    async for document in self.events:
                        await part(self._event(document))
                except ApiError as error:
                    await part(self._event(self.failure(error)))
                if not self.named:
                    await part(DONE)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        def part(body: bytes) -> Any:
            return send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            # A client that does not read gets no error when time runs out.
            with suppress(ClientDisconnect, TimeoutError):
                await while_connected(receive, pump())
        finally:
            await self.events.aclose()

    def _event(self, document: Any) -> bytes:
        name = f"event: {document['type']}\n".encode() if self.named else b""
        return name + b"data: " + json_bytes(document) + b"\n\n"
