"""Keeps responses of /v1/responses in memory."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from argosy.web.errors import ApiError, service_unavailable


@dataclass(frozen=True)
class StoredResponse:
    """A stored response.

    document: the response as a JSON object.
    messages: the conversation including the completion, without the instructions.
    task: the task that generates it in the background; None: the response has ended.
    """

    document: dict[str, Any]
    messages: Sequence[dict[str, Any]] = ()
    task: "asyncio.Task[None] | None" = None


class ResponseStore:
    """Keeps the latest responses, by id. Thread-safe.

    Args:
        most: number of responses to keep. While that many are running in the background, one finished response more is kept.
    """

    def __init__(self, most: int):
        self.most = most
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, stored: StoredResponse) -> None:
        """Stores a response, or replaces its earlier state. If the store is full, the oldest finished response is dropped.

        Raises:
            ApiError: the store is full of responses that run in the background, and so does this one.
        """
        name = stored.document["id"]
        with self._lock:
            if name not in self._responses and len(self._responses) >= self.most:
                done = next((old for old, response in self._responses.items() if response.task is None), None)
                if done is not None:
                    del self._responses[done]
                elif stored.task is not None:
                    problem = f"{self.most} responses are running in the background, try again later"
                    raise service_unavailable(problem, "store_full")
            self._responses[name] = stored

    def get(self, name: str) -> StoredResponse:
        """Returns the stored response with this id.

        Raises:
            ApiError: there is none with this id, or it has been dropped.
        """
        with self._lock:
            if name not in self._responses:
                raise ApiError(f"there is no response `{name[:64]}`", status=404, code="response_not_found")
            return self._responses[name]

    def delete(self, name: str) -> StoredResponse:
        """Removes and returns the stored response with this id.

        Raises:
            ApiError: there is none with this id, or it has been dropped.
        """
        stored = self.get(name)
        with self._lock:
            self._responses.pop(name, None)
        return stored
