"""What every protocol asks of a repository: a call of a version, within the limits, counted."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from argosy.core.errors import ArgosyError
from argosy.predict.batching import CallResult, QueueFull, Unloaded
from argosy.predict.repository import LoadedVersion, Repository, UnknownVersion
from argosy.web.connection import while_connected
from argosy.web.errors import ApiError, service_unavailable


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
        self, request: Request, version: LoadedVersion, inputs: Mapping[str, Any], signature: str | None, seconds: float | None = None
    ) -> CallResult:
        """The outputs of a call, which ends when its client goes away.

        Args:
            seconds: it may take at most, if less than the server's limit.

        Raises:
            ApiError: the inputs do not fit, too many rows wait, or it took too long.
        """
        if self.draining:
            raise service_unavailable("the server is shutting down", "shutting_down")
        begin = time.perf_counter()
        name, number = version.model, version.version
        limit = min(self.settings.limits.seconds, seconds or self.settings.limits.seconds)
        try:
            async with asyncio.timeout(limit):
                found = await while_connected(request.receive, self._called(version, inputs, signature))
        except TimeoutError:
            self.metrics.failed(name, number, "OTHER")
            raise ApiError(f"the request took more than {limit:g} seconds", status=504, code="timeout") from None
        except QueueFull:
            self.metrics.failed(name, number, "REJECTED")
            raise service_unavailable(f"too many requests wait for model `{name}`", "queue_full") from None
        except ArgosyError as error:
            self.metrics.failed(name, number, "OTHER")
            raise ApiError(f"{error.what} ({error.hint})" if error.hint else error.what) from None
        except BaseException:
            self.metrics.failed(name, number, "CANCELED")
            raise
        self.metrics.answered(name, number, time.perf_counter() - begin, found.queued)
        return found

    async def _called(self, version: LoadedVersion, inputs: Mapping[str, Any], signature: str | None) -> CallResult:
        while True:
            try:
                return await version.batcher.call(inputs, signature)
            except Unloaded:
                # Its successor answers; a model that has none is no longer ready.
                newer = self.find(version.model)
                if newer is version:
                    raise service_unavailable(f"model `{version.model}` is being unloaded", "unloaded") from None
                version = newer

    async def drain(self) -> None:
        """Refuses new requests, and returns when what runs has ended, or after `drain` seconds."""
        self.draining = True
        await self.repository.drain(self.settings.drain)
