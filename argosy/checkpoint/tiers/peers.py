"""Sends files of a checkpoint from one process of a run to another, over TCP.

A process offers files by name, under a token that the processes of the run exchange through their coordination service. It sends
nothing else. The receiver compares a file with the hash in the manifest before it renames the file to its name. Only the first line of
a request is read before the token is compared.
"""

import hmac
import random
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any, TypeVar

from argosy.core.errors import ArgosyError, Damaged
from argosy.weights import manifest

# The time-outs in seconds for a silent peer, and for a peer that has not sent its token.
PATIENCE_S, TOKEN_S = 60.0, 10.0
# The number of connections that a process answers at a time. Further ones are closed at once.
MOST_AT_ONCE = 256
# A peer whose connection ended tries again. Its wait doubles each time and has a random part, so that peers do not return all at once.
# All tries together take 13 to 26 s.
TRIES, AGAIN_S = 8, 0.1
# The most bytes of a file whose size is not known beforehand, which is a manifest.
MOST_UNKNOWN_BYTES = 1 << 30
CHUNK_BYTES = 1 << 20
_LENGTH, _NONE = struct.Struct(">Q"), 2**64 - 1
# The name in a request that only asks whether the peer answers.
PING = ""

T = TypeVar("T")
Address = tuple[str, int, str]  # host, port, token


class Listener:
    """Answers connections that begin with its token, `MOST_AT_ONCE` at a time, until it is closed.

    Args:
        host: the host name or address to listen on.
        answer: called with the stream of what the peer sends after the token, and the socket to answer on. Its errors end the
            connection.
    """

    def __init__(self, host: str, answer: Callable[[BufferedIOBase, socket.socket], None]):
        token, free = secrets.token_hex(16), threading.Semaphore(MOST_AT_ONCE)

        class Answer(socketserver.StreamRequestHandler):
            timeout = TOKEN_S

            def handle(self) -> None:
                received = self.rfile.readline(100).decode("latin-1").strip()
                if not hmac.compare_digest(received.encode(), token.encode()):
                    return
                self.connection.settimeout(PATIENCE_S)
                answer(self.rfile, self.connection)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            # Many peers connect at the same moment. Those that do not fit into the queue would try again after a second.
            request_queue_size = 128
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                if not free.acquire(blocking=False):
                    self.shutdown_request(request)
                    return
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    free.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                """The peer sees that its connection ends, and says so."""

        self._server = Server((host, 0), Answer)
        self.address: Address = (host, self._server.server_address[1], token)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="offer", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Offer:
    """Offers files to peers until it is closed. Its `files`, {name: path}, may grow."""

    def __init__(self, host: str, files: Mapping[str, Path] | None = None):
        self.files = dict(files or {})
        self._listener = Listener(host, self._answer)
        self.address: Address = self._listener.address

    def _answer(self, connect: BufferedIOBase, peer: socket.socket) -> None:
        name = connect.readline(5000).decode("utf-8", "replace").rstrip("\n")
        path = self.files.get(name)
        if path is None:
            peer.sendall(_LENGTH.pack(0 if name == PING else _NONE))
            return
        with path.open("rb") as file:
            peer.sendall(_LENGTH.pack(path.stat().st_size))
            peer.sendfile(file)

    def close(self) -> None:
        self._listener.close()


def fetch(address: Address, name: str, path: Path, expected: Mapping[str, Any] | None = None) -> None:
    """Fetches a file from a peer and writes it to a path. Tries again if the connection ends.

    Args:
        address: the address of the peer's offer.
        name: the name of the file in the offer.
        path: the path of the new file.
        expected: the size and hash of the file. None accepts any file of up to `MOST_UNKNOWN_BYTES`.

    Raises:
        ArgosyError: the peer cannot be reached, does not have the file, or sends more than `MOST_UNKNOWN_BYTES`.
        Damaged: another size or other bytes arrived.
    """
    pending = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with_retries(lambda: _receive_file(address, name, pending, expected))
        if expected is not None and manifest.hash_file(pending, sync=True) != expected:
            raise Damaged(f"{name} did not arrive as it was written", where=f"from {address[0]}")
        pending.rename(path)
    except OSError as error:
        raise ArgosyError(f"{name} cannot be fetched: {error.strerror or error}", where=f"from {address[0]}") from None
    finally:
        pending.unlink(missing_ok=True)


def _receive_file(address: Address, name: str, pending: Path, expected: Mapping[str, Any] | None) -> None:
    with connect(address, name) as peer:
        remaining = _LENGTH.unpack(receive_exactly(peer, _LENGTH.size))[0]
        if remaining == _NONE:
            raise ArgosyError(f"the process at {address[0]} does not have {name}")
        # The size is checked before anything is written, because a wrong one might fill the disk.
        if expected is not None and remaining != expected["bytes"]:
            problem = f"{name} did not arrive as it was written: {remaining} bytes, not {expected['bytes']}"
            raise Damaged(problem, where=f"from {address[0]}")
        if remaining > MOST_UNKNOWN_BYTES and expected is None:
            raise ArgosyError(f"{name} has {remaining} bytes, more than {MOST_UNKNOWN_BYTES}", where=f"from {address[0]}")
        with pending.open("wb", buffering=0) as out:
            while remaining:
                chunk = peer.recv(min(remaining, CHUNK_BYTES))
                if not chunk:
                    raise ConnectionError("the connection ended early")
                out.write(chunk)
                remaining -= len(chunk)


def with_retries(work: Callable[[], T]) -> T:
    """Does work, and does it again if its connection ends, because the peer was answering `MOST_AT_ONCE` others.

    Raises:
        OSError: the work failed `TRIES` times. Errors that another try would not help (a full disk, a time-out) are raised at once.
    """
    wait = AGAIN_S
    for _ in range(TRIES - 1):
        try:
            return work()
        except ConnectionRefusedError:
            # Nothing listens at this address.
            raise
        except ConnectionError:
            time.sleep(wait * (1 + random.random()))
            wait *= 2
    return work()


def is_there(address: Address) -> bool:
    """Asks whether a peer answers."""

    def ask() -> bool:
        with connect(address, PING) as peer:
            return _LENGTH.unpack(receive_exactly(peer, _LENGTH.size))[0] == 0

    try:
        return with_retries(ask)
    except OSError:
        return False


def connect(address: Address, name: str) -> socket.socket:
    """Connects to a peer, and sends it the token and a name.

    Raises:
        OSError: the peer cannot be reached.
    """
    host, port, token = address
    peer = socket.create_connection((host, port), timeout=PATIENCE_S)
    peer.sendall(f"{token}\n{name}\n".encode())
    return peer


def receive_exactly(peer: socket.socket, size: int) -> bytes:
    """Receives exactly `size` bytes.

    Raises:
        OSError: the connection ends before.
    """
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection ended early")
        data += more
    return data
