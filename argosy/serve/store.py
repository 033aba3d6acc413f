"""Responses of /v1/responses that are kept in memory."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from argosy.serve.errors import ApiError, unavailable


@dataclass(frozen=True)
class Stored:
    """A response. messages: the conversation up to its end, without the instructions. task: what still works on it."""

    document: dict[str, Any]
    messages: Sequence[dict[str, Any]] = ()
    task: "asyncio.Task[None] | None" = None


class Store:
    """The latest responses by their id. Any thread may use it.

    Args:
        most: responses that are kept.
    """

    def __init__(self, most: int):
        self.most = most
        self._found: OrderedDict[str, Stored] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, stored: Stored) -> None:
        """Keeps a response, in the place of an earlier state of it. The oldest that nothing works on any more makes room.

        Raises:
            ApiError: something works on all that may be kept.
        """
        name = stored.document["id"]
        with self._lock:
            if name not in self._found and len(self._found) >= self.most:
                done = next((old for old, one in self._found.items() if one.task is None), None)
                if done is None:
                    raise unavailable(
                        f"{self.most} responses are under way in the background, try again later", "store_full"
                    )
                del self._found[done]
            self._found[name] = stored

    def get(self, name: str) -> Stored:
        """
        Raises:
            ApiError: it is not here, or no more.
        """
        with self._lock:
            if name not in self._found:
                raise ApiError(f"there is no response `{name[:64]}`", status=404, code="response_not_found")
            return self._found[name]

    def delete(self, name: str) -> Stored:
        """
        Raises:
            ApiError: it is not here, or no more.
        """
        stored = self.get(name)
        with self._lock:
            self._found.pop(name, None)
        return stored
