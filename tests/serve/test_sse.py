"""A stream to a client that does not read, or that leaves, is closed."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from argosy.serve.sse import EventStream


def stream_closes(receive: Any, send: Any, seconds: float) -> bool:
    """Whether the events of an endless stream were closed."""
    closed = []

    async def endless() -> AsyncGenerator[Any]:
        try:
            while True:
                yield {"a": 1}
                await asyncio.sleep(0)
        finally:
            closed.append(True)

    async def go() -> None:
        documents = endless()
        response = EventStream(await anext(documents), documents, seconds)
        await asyncio.wait_for(response({"type": "http"}, receive, send), 20)

    asyncio.run(go())
    return bool(closed)


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


async def at_once(*_: Any) -> Any:
    return {"type": "http.disconnect"}


async def accept_event(_: Any) -> None:
    await asyncio.sleep(0)


def test_a_client_that_does_not_read_loses_its_stream():
    assert stream_closes(never, never, 0.1)


def test_a_client_that_leaves_ends_its_stream():
    assert stream_closes(at_once, accept_event, 60)
    assert stream_closes(at_once, never, 60)


def test_a_stream_is_over_when_its_time_is_up():
    assert stream_closes(never, accept_event, 0.1)
