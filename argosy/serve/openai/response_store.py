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
    """A response.

    messages: the conversation including the answer, without the instructions.
    task: generates it in the background; None: it has ended.
    """

    document: dict[str, Any]
    messages: Sequence[dict[str, Any]] = ()
    task: "asyncio.Task[None] | None" = None


class ResponseStore:
    """The latest responses by id. Thread-safe.

    Args:
        most: number of responses to keep. While that many are running in the background, one finished response is kept besides them.
    """

    def __init__(self, most: int):
        self.most = most
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, stored: StoredResponse) -> None:
        """Stores a response, or replaces its earlier state. The oldest finished response makes room.

        Raises:
            ApiError: this response runs in the background, and so do all others.
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
        """A stored response.

        Raises:
            ApiError: there is none with this id, or it has been dropped.
        """
        with self._lock:
            if name not in self._responses:
                raise ApiError(f"there is no response `{name[:64]}`", status=404, code="response_not_found")
            return self._responses[name]

    def delete(self, name: str) -> StoredResponse:
        """Removes a stored response.

        Raises:
            ApiError: there is none with this id, or it has been dropped.
        """
        stored = self.get(name)
        with self._lock:
            self._responses.pop(name, None)
        return stored
