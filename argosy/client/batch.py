"""Sends the requests of a batch file to a server, or to a server's application in this process, and writes the responses.

Up to `concurrent` requests are open at a time, which the engine batches. No jax here: a server is a `ClientTransport`.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.client.batch_files import BatchOutput, BatchRow, invalid_row_result, read_batch_rows
from argosy.client.client import AsgiTransport, ClientTransport, ConnectionFailed
from argosy.client.settings import BatchSettings

# Routes whose requests take a seed: on any server, and on those of this project.
SEEDED = ("/v1/completions", "/v1/chat/completions")
SEEDED_HERE = (*SEEDED, "/v1/responses", "/v1/messages")
# Statuses of an overloaded server. They are never written as a response: the request is sent again, or the run stops and can be
# resumed.
NO_TIME = (429, 503)
# How often a request is sent to a server over a network, and the longest wait between attempts.
TRIES, LONGEST_WAIT_S = 6, 30.0

async def complete_batch(
    source: Path,
    out: BatchOutput,
    server: ClientTransport,
    settings: BatchSettings,
    *,
    tries: int = 1,
    stop: Callable[[], Any],
    say: Callable[[], Any] = lambda: None,
) -> None:
    """Sends the requests whose responses `out` lacks, and writes the responses. Returns when all are written, or soon after `stop()`
    returns true.

    Args:
        source: the file of requests.
        tries: how often a request is sent if the server is overloaded or closes the connection.
        say: called ten times a second.

    Raises:
        ConnectionFailed: the server stays overloaded, or cannot be reached. Responses that arrived before are written.
    """
    work = asyncio.create_task(_answer_all(source, out, server, settings, tries))
    while not work.done():
        await asyncio.wait({work}, timeout=0.1)
        say()
        if stop():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            return
    work.result()


async def _answer_all(source: Path, out: BatchOutput, server: ClientTransport, settings: BatchSettings, tries: int) -> None:
    gate = asyncio.Semaphore(settings.concurrent)

    async def answer_row(row: BatchRow) -> None:
        try:
            out.write(await _answered(row, server, row_seed(row, server, settings), tries))
        finally:
            gate.release()

    try:
        async with asyncio.TaskGroup() as group:
            for row in read_batch_rows(source):
                if row.line in out.done:
                    continue
                if row.fault is not None:
                    out.write(invalid_row_result(row))
                    continue
                await gate.acquire()
                group.create_task(answer_row(row))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def row_seed(row: BatchRow, server: ClientTransport, settings: BatchSettings) -> dict[str, int]:
    """The field `seed` to add to a request; empty if it has one already, or if its route has no such field."""
    if row.url not in (SEEDED_HERE if isinstance(server, AsgiTransport) else SEEDED) or row.body.get("seed") is not None:
        return {}
    return {"seed": settings.seed * 2**32 + row.line}


async def _answered(row: BatchRow, server: ClientTransport, more: Mapping[str, Any], tries: int) -> dict[str, Any]:
    body = json.dumps(row.body | more).encode()
    for tries_left in reversed(range(tries)):
        wait = 1.0
        try:
            async with server.send("POST", row.url, body) as reply:
                content = await reply.read()
        except ConnectionFailed:
            if not tries_left:
                raise
        else:
            if reply.status not in NO_TIME:
                return _document(row, reply.status, content)
            if not tries_left:
                raise ConnectionFailed(f"no time for line {row.line}: {content[:200].decode('utf-8', 'replace')}")
            with suppress(ValueError):
                wait = float(reply.headers.get("retry-after", "1"))
        await asyncio.sleep(min(max(wait, 0.0), LONGEST_WAIT_S))
    raise AssertionError("unreachable")


def _document(row: BatchRow, status: int, content: bytes) -> dict[str, Any]:
    try:
        # NaN, which is not valid JSON, becomes null.
        body = json.loads(content, parse_constant=lambda _: None) if content else None
    except ValueError:
        body = {"error": {"message": content[:200].decode("utf-8", "replace")}}
    name = body.get("id") if isinstance(body, dict) else None
    response = {"status_code": status, "request_id": name or f"batch_req_{row.line}", "body": body}
    return {"id": f"batch_req_{row.line}", "custom_id": row.custom_id, "response": response, "error": None}
