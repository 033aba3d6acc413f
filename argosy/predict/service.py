"""The calls of all protocols: finds a version, applies the limits, and counts the request."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from argosy.core.errors import ArgosyError, BadInput
from argosy.predict.batching import CallResult, QueueFull, Unloaded
from argosy.predict.ensemble import MemberNotReady
from argosy.predict.repository import LoadedVersion, Repository, UnknownVersion
from argosy.web.connection import while_connected
from argosy.web.errors import ApiError, input_error, service_unavailable


class PredictService:
    """The repository behind a server.

    Args:
        repository: the repository.
        replicated: whether there are other replicas of the server. Requests that change the repository are then refused, because they
            would reach only one replica.
    """

    def __init__(self, repository: Repository, *, replicated: bool = False):
        self.repository, self.replicated = repository, replicated
        self.settings, self.metrics = repository.settings, repository.metrics
        self.draining = False

    def find(self, model: str, version: str | None = None, label: str | None = None) -> LoadedVersion:
        """Returns a version, as `Repository.find` does.

        Raises:
            ApiError: there is no such version, or it is not ready.
        """
        try:
            return self.repository.find(model, version, label)
        except UnknownVersion as error:
            raise ApiError(error.message, status=error.status) from None

    async def call(
        self,
        request: Request | None,
        find: Callable[[], LoadedVersion],
        inputs: Mapping[str, Any],
        signature: str | None,
        seconds: float | None = None,
        priority: int = 0,
    ) -> tuple[LoadedVersion, CallResult]:
        """Calls a version. Returns the version and its result.

        Args:
            request: the HTTP request. The call ends when its client disconnects. With None, it ends when its task is cancelled.
            find: returns the requested version. It is called again if that version is unloaded in the meantime.
            inputs: the inputs by name.
            signature: the name of the signature. None stands for the default one.
            seconds: the time limit, if it is shorter than that of the server.
            priority: the priority level, as in `Batcher.call`.

        Raises:
            ApiError: the inputs do not fit, too many rows wait, or the call took too long.
        """
        if self.draining:
            raise service_unavailable("the server is shutting down", "shutting_down")
        begin, version = time.perf_counter(), find()
        name, number = version.model, version.version
        limit = min(self.settings.limits.seconds, seconds or self.settings.limits.seconds)
        try:
            async with asyncio.timeout(limit):
                work = self._called(version, find, inputs, signature, priority)
                version, result = await (work if request is None else while_connected(request.receive, work))
        except (TimeoutError, QueueFull, ApiError) as error:
            self.metrics.failed(name, number, "OTHER" if isinstance(error, TimeoutError) else "REJECTED")
            if isinstance(error, TimeoutError):
                raise ApiError(f"the request took more than {limit:g} seconds", status=504, code="timeout") from None
            if isinstance(error, QueueFull):
                raise service_unavailable(f"too many requests wait for model `{name}`", "queue_full") from None
            raise
        except ArgosyError as error:
            self.metrics.failed(name, number, "OTHER")
            # Other errors, such as that of a program that was altered after it was loaded, are errors of the server.
            raise ApiError(input_error(error).message, status=400 if isinstance(error, BadInput) else 500) from None
        except (asyncio.CancelledError, ClientDisconnect):
            self.metrics.failed(name, number, "CANCELED")
            raise
        except Exception:
            self.metrics.failed(name, number, "OTHER")
            raise
        self.metrics.answered(name, version.version, time.perf_counter() - begin, result.queued)
        return version, result

    async def _called(
        self,
        version: LoadedVersion,
        find: Callable[[], LoadedVersion],
        inputs: Mapping[str, Any],
        signature: str | None,
        priority: int,
    ) -> tuple[LoadedVersion, CallResult]:
        while True:
            try:
                return version, await version.batcher.call(inputs, signature, priority)
            except MemberNotReady as error:
                raise service_unavailable(f"model `{version.model}` is not ready: {error.message}", "not_ready") from None
            except Unloaded:
                if (newer := find()) is version:
                    raise service_unavailable(f"model `{version.model}` is being unloaded", "unloaded") from None
                version = newer

    async def drain(self) -> None:
        """Refuses new requests. Returns when running ones have ended, or after `drain` seconds."""
        self.draining = True
        await self.repository.drain(self.settings.drain)
