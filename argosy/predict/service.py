"""What every protocol asks of a repository: a call of a version, within the limits, counted."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from argosy.core.errors import ArgosyError, BadInput
from argosy.predict.batching import CallResult, QueueFull, Unloaded
from argosy.predict.repository import LoadedVersion, Repository, UnknownVersion
from argosy.web.connection import while_connected
from argosy.web.errors import ApiError, input_error, service_unavailable


class PredictService:
    """The repository behind a server."""

    def __init__(self, repository: Repository):
        self.repository = repository
        self.settings, self.metrics = repository.settings, repository.metrics
        self.draining = False

    def find(self, model: str, version: str | None = None, label: str | None = None) -> LoadedVersion:
        """Raises: ApiError: there is no such version, or it is not ready."""
        try:
            return self.repository.find(model, version, label)
        except UnknownVersion as error:
            raise ApiError(error.message, status=error.status) from None

    async def call(
        self,
        request: Request,
        find: Callable[[], LoadedVersion],
        inputs: Mapping[str, Any],
        signature: str | None,
        seconds: float | None = None,
    ) -> tuple[LoadedVersion, CallResult]:
        """The version that answered a call, and the outputs. The call ends when its client goes away.

        Args:
            find: gives the version that the request asks for. It is asked again if that version is let go meanwhile.
            seconds: it may take at most, if less than the server's limit.

        Raises:
            ApiError: the inputs do not fit, too many rows wait, or it took too long.
        """
        if self.draining:
            raise service_unavailable("the server is shutting down", "shutting_down")
        begin, version = time.perf_counter(), find()
        name, number = version.model, version.version
        limit = min(self.settings.limits.seconds, seconds or self.settings.limits.seconds)
        try:
            async with asyncio.timeout(limit):
                version, found = await while_connected(request.receive, self._called(version, find, inputs, signature))
        except (TimeoutError, QueueFull, ApiError) as error:
            self.metrics.failed(name, number, "OTHER" if isinstance(error, TimeoutError) else "REJECTED")
            if isinstance(error, TimeoutError):
                raise ApiError(f"the request took more than {limit:g} seconds", status=504, code="timeout") from None
            if isinstance(error, QueueFull):
                raise service_unavailable(f"too many requests wait for model `{name}`", "queue_full") from None
            raise
        except ArgosyError as error:
            self.metrics.failed(name, number, "OTHER")
            # What is no fault of the request, such as a program that was altered after it was loaded, is the server's.
            raise ApiError(input_error(error).message, status=400 if isinstance(error, BadInput) else 500) from None
        except (asyncio.CancelledError, ClientDisconnect):
            self.metrics.failed(name, number, "CANCELED")
            raise
        except Exception:
            self.metrics.failed(name, number, "OTHER")
            raise
        self.metrics.answered(name, version.version, time.perf_counter() - begin, found.queued)
        return version, found

    async def _called(
        self, version: LoadedVersion, find: Callable[[], LoadedVersion], inputs: Mapping[str, Any], signature: str | None
    ) -> tuple[LoadedVersion, CallResult]:
        while True:
            try:
                return version, await version.batcher.call(inputs, signature)
            except Unloaded:
                if (newer := find()) is version:
                    raise service_unavailable(f"model `{version.model}` is being unloaded", "unloaded") from None
                version = newer

    async def drain(self) -> None:
        """Refuses new requests, and returns when what runs has ended, or after `drain` seconds."""
        self.draining = True
        await self.repository.drain(self.settings.drain)
