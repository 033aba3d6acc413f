"""A process that follows the leader of a server (`predict.processes.leader`).

Programs run in the calling thread, in the order of the leader's messages. Bundles are opened, compiled and closed in another thread, so
that batches of other bundles go on.
"""

import json
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from argosy.core.errors import ArgosyError, complaint
from argosy.core.process.channel import Channel
from argosy.core.progress import Say
from argosy.export.bundle import Bundle
from argosy.export.manifest import bundle_digest
from argosy.predict.processes.messages import packed_message, unpacked_message

LOOK_S = 0.25


class LeaderLost(Exception):
    """The leader ended without sending `end`."""


def leader_connection(address: Mapping[str, Any], rank: int) -> socket.socket:
    """Connects to the leader. `address`: the `ProcessListener.address` of the leader."""
    connection = socket.create_connection((address["host"], address["port"]))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    Channel(connection.fileno()).send(json.dumps({"token": address["token"], "rank": rank}).encode())
    return connection


class ProcessFollower:
    """Follows the leader: opens bundles and runs programs as it says.

    Args:
        connection: a connection to the leader.
        stop: returns the exit code if this process was asked to stop, else 0. The leader is told, and decides.
        say: called with the messages of bundles that are opened.
    """

    def __init__(self, connection: socket.socket, stop: Callable[[], int], say: Say):
        self._connection, self._channel, self.stop, self.say = connection, Channel(connection.fileno()), stop, say
        self._sending = threading.Lock()
        self.bundles: dict[int, Bundle] = {}

    def follow(self) -> int:
        """Follows until the leader ends this process. Returns the exit code.

        Raises:
            LeaderLost: the leader ended without sending `end`.
            Exception: a program failed. This process cannot go on, because the others wait for the program.
        """
        reported = False
        with ThreadPoolExecutor(1, "loads models") as loader, self._connection:
            while True:
                if (code := self.stop()) and not reported:
                    reported = True
                    self._say({"asked": code})
                try:
                    head, arrays = unpacked_message(self._channel.receive(LOOK_S))
                except TimeoutError:
                    continue
                except EOFError:
                    raise LeaderLost from None
                match head["do"]:
                    case "end":
                        return head["code"]
                    case "run":
                        self._run(head, arrays)
                    case _:
                        loader.submit(self._load, head)

    def _run(self, head: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Takes part in a batch. The outputs stay on the devices, because the leader reads them."""
        bundle = self.bundles[head["bundle"]]
        of = bundle.manifest.signature(head["signature"])
        program = next(program for program in of.programs if program.file == head["program"])
        jax.block_until_ready(bundle.computed(of, program, arrays))

    def _load(self, head: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"number": head["number"]}
        try:
            match head["do"]:
                case "open":
                    bundle = Bundle.open(head["path"], key=head["key"], say=self.say)
                    self.bundles[head["bundle"]] = bundle
                    answer["digest"] = bundle_digest(bundle.manifest)
                case "load":
                    self.bundles[head["bundle"]].load()
                case "compile":
                    self.bundles[head["bundle"]].compile(head["sizes"])
                case "close" if (bundle := self.bundles.pop(head["bundle"], None)) is not None:
                    bundle.close()
        except Exception as error:
            # The leader reports why a version is not loaded, and other versions go on.
            answer["failed"] = error.what if isinstance(error, ArgosyError) else f"{type(error).__name__}: {complaint(error)}"
        self._say(answer)

    def _say(self, head: Mapping[str, Any]) -> None:
        # The main thread notices if the leader has ended.
        with self._sending, suppress(OSError):
            self._channel.send(packed_message(head))
