"""The leader of the processes of a server, which sends messages to the followers and notices when one of them ends.

    message    what a follower does                                       its answer
    open       opens a bundle                                             the digest of the bundle, or an error
    load       reads the programs and its shards of the weights           done, or an error
    compile    compiles programs of these sizes                           done, or an error
    run        calls a program, in the order of these messages            none, because the program itself waits for all processes
    close      releases a bundle                                          done
    end        ends with this exit code                                   none

Batches are computed one at a time, each from its message to its outputs. At the same time, bundles may be opened and compiled.

`open` and `load` find everything that may be wrong with the files of a bundle, and all processes agree on the result before the next
message. Batches read no files. If one process alone failed in a batch, the others would wait for ever, and all would have to end.
"""

import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np

from argosy.core.errors import ArgosyError, FailedElsewhere
from argosy.core.process.channel import Channel
from argosy.core.progress import Say
from argosy.export.bundle import Bundle
from argosy.export.manifest import BundleProgram, BundleSignature, bundle_digest
from argosy.ops.programs.store import ProgramStore
from argosy.predict.processes.messages import packed_message, unpacked_message

# The seconds that followers have to connect, and that a new connection has to send the token.
CONNECT_S, HELLO_S = 300.0, 5.0
WATCH_S = 0.5


class ProcessListener:
    """The socket on which the leader waits for its followers.

    Args:
        host: the address at which the other processes reach this one.
    """

    def __init__(self, host: str):
        self.token = secrets.token_hex(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.create_server((host, 0), family=family)
        self.host, self.port = host, self.socket.getsockname()[1]

    @property
    def address(self) -> dict[str, Any]:
        """The JSON object with which a follower connects: host, port and token."""
        return {"host": self.host, "port": self.port, "token": self.token}

    def accept(self, followers: int) -> dict[int, socket.socket]:
        """Waits for all followers. Returns their connections by rank. Connections without the token are closed.

        Raises:
            ArgosyError: not all followers connect in time.
        """
        connections, until = dict[int, socket.socket](), time.monotonic() + CONNECT_S
        with self.socket as listener:
            while len(connections) < followers:
                listener.settimeout(max(0.01, until - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    missing = [str(rank) for rank in range(1, followers + 1) if rank not in connections]
                    raise ArgosyError(f"process {', '.join(missing)} of this server did not connect in {CONNECT_S:.0f} s") from None
                try:
                    hello = json.loads(Channel(connection.fileno()).receive(HELLO_S))
                    is_known = hmac.compare_digest(hello["token"], self.token)
                    rank = int(hello["rank"]) if is_known else 0
                except Exception:
                    # An unknown peer may send anything.
                    is_known, rank = False, 0
                if not is_known or rank in connections or not 1 <= rank <= followers:
                    connection.close()
                    continue
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections[rank] = connection
        return connections


class ProcessLeader:
    """Sends messages to the followers of this process.

    Args:
        connections: the connection to each follower, by rank.
        lost: called in another thread with the rank of a follower that ended, or with 0 if this process alone failed in a batch.

    asked: the exit code with which a follower was asked to stop, 0 if none was.
    """

    def __init__(self, connections: Mapping[int, socket.socket], lost: Callable[[int], object]):
        self._connections, self.lost, self.asked = connections, lost, 0
        self._channels = {rank: Channel(connection.fileno()) for rank, connection in connections.items()}
        self._running, self._sending, self._ended = threading.Lock(), threading.Lock(), threading.Event()
        self._numbers = count(1)
        self._answers: dict[tuple[int, int], Future[dict[str, Any]]] = {}
        self._watcher = threading.Thread(target=self._watch, name="watches the processes", daemon=True)
        self._watcher.start()

    # ---------------------------------------------------------------- bundles

    def open(self, path: Path, *, key: str | None, say: Say) -> "FollowedBundle":
        """Opens a bundle in all processes, with its weights on their devices. Other arguments and errors are those of `Bundle.open` and
        `Bundle.load`. After an error no process has the bundle open.

        Raises:
            FailedElsewhere: another process cannot open the bundle, or finds another bundle at its path. It may see the files later.
            ArgosyError: another process cannot load the bundle.
        """
        number, bundle = next(self._numbers), None
        answers = self._tell({"do": "open", "bundle": number, "path": str(path.absolute()), "key": key})
        try:
            bundle = FollowedBundle.open(path, key=key, say=say)
            bundle.number, bundle.leader = number, self
            digest = bundle_digest(bundle.manifest)
            if other := [rank for rank, reply in self._waited(answers).items() if reply["digest"] != digest]:
                raise FailedElsewhere(f"process {other[0]} has another bundle at {path}: all have to read one file system")
            answers = self._tell({"do": "load", "bundle": number})
            bundle.load()
            self._waited(answers, ArgosyError)
        except BaseException:
            self._tell({"do": "close", "bundle": number})
            if bundle is not None:
                Bundle.close(bundle)
            raise
        return bundle

    def compile(self, bundle: int, sizes: Mapping[str, Iterable[Mapping[str, int]]], work: Callable[[], int]) -> int:
        """Compiles in all processes. `work`: compiles in this process, and returns the number of programs."""
        answers = self._tell({"do": "compile", "bundle": bundle, "sizes": sizes})
        done = work()
        self._waited(answers, ArgosyError)
        return done

    def run(self, head: Mapping[str, Any], arrays: Mapping[str, np.ndarray], work: Callable[[], Any]) -> Any:
        """Runs a batch in all processes. If the leader alone fails, all processes end, because the others would take its next batch for
        this one.

        Args:
            head: the number of the bundle, the signature and the program.
            arrays: the inputs of the program.
            work: runs the program in this process.
        """
        with self._running:
            self._send(packed_message({"do": "run", **head}, arrays))
            try:
                return jax.block_until_ready(work())
            except BaseException:
                self.lost(0)
                raise

    def close(self, bundle: int) -> None:
        """Releases a bundle in the followers."""
        self._waited(self._tell({"do": "close", "bundle": bundle}))

    def end(self, code: int) -> None:
        """Ends all followers with this exit code."""
        self._ended.set()
        with suppress(OSError):
            self._send(packed_message({"do": "end", "code": code}))
        self._watcher.join()
        for connection in self._connections.values():
            connection.close()

    # ---------------------------------------------------------------- messages

    def _tell(self, head: dict[str, Any]) -> dict[int, "Future[dict[str, Any]]"]:
        """Sends a message that each follower answers. Returns the futures of the answers by rank."""
        number = next(self._numbers)
        answers = {rank: Future[dict[str, Any]]() for rank in self._channels}
        self._answers |= {(rank, number): answer for rank, answer in answers.items()}
        self._send(packed_message(head | {"number": number}))
        return answers

    def _send(self, message: bytes) -> None:
        with self._sending:
            for channel in self._channels.values():
                channel.send(message)

    def _waited(
        self, answers: Mapping[int, "Future[dict[str, Any]]"], error: type[ArgosyError] = FailedElsewhere
    ) -> dict[int, dict[str, Any]]:
        """Waits for the answers of all followers. Returns them by rank.

        Raises:
            ArgosyError: a follower failed. The error is of the class `error`.
        """
        replies = {rank: answer.result() for rank, answer in answers.items()}
        for rank, reply in replies.items():
            if "failed" in reply:
                raise error(f"{reply['failed']} (in process {rank})")
        return replies

    def _watch(self) -> None:
        """Reads the messages of followers, until they or this server end."""
        channels = dict(self._channels)
        while channels and not (self._ended.is_set()):
            readable, _, _ = select.select([*channels.values()], [], [], WATCH_S)
            for rank, channel in list(channels.items()):
                if channel not in readable:
                    continue
                try:
                    while (data := channel.arrived()) is not None:
                        self._receive(rank, unpacked_message(data).head)
                except EOFError:
                    del channels[rank]
                    if not self._ended.is_set():
                        self.lost(rank)

    def _receive(self, rank: int, message: dict[str, Any]) -> None:
        if "asked" in message:
            self.asked = message["asked"]
        elif (answer := self._answers.pop((rank, message["number"]), None)) is not None:
            answer.set_result(message)


class FollowedBundle(Bundle):
    """A bundle that is open in all processes of a server, which all take part in its computations."""

    number: int
    leader: ProcessLeader

    def computed(
        self, signature: BundleSignature, program: BundleProgram, arrays: Mapping[str, np.ndarray]
    ) -> dict[str, jax.Array]:
        name = next(name for name, of in self.manifest.signatures.items() if of is signature)
        head = {"bundle": self.number, "signature": name, "program": program.file}
        return self.leader.run(head, arrays, lambda: super(FollowedBundle, self).computed(signature, program, arrays))

    def compile(
        self, sizes: Mapping[str, Iterable[Mapping[str, int]]], store: ProgramStore | None = None, say: Say | None = None
    ) -> int:
        listed = {name: list(every) for name, every in sizes.items()}
        return self.leader.compile(self.number, listed, lambda: super(FollowedBundle, self).compile(listed, store, say))

    def close(self) -> None:
        super().close()
        self.leader.close(self.number)
