"""Files of a checkpoint from one process of a run to another, over TCP.

A process offers files by name, under a token that the processes of the run tell each other through their coordination service. It
sends nothing else, and what arrives is compared with the hash in the manifest before it has its name. Only the first line of a request
is read before the token is compared.
"""

import hmac
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argosy.checkpoint import manifest
from argosy.core.errors import ArgosyError, Damaged

# How long a peer may say nothing.
PATIENCE_S = 60.0
CHUNK_BYTES = 1 << 20
_LENGTH, _NONE = struct.Struct(">Q"), 2**64 - 1
# A request that asks whether somebody is there.
PING = ""

Address = tuple[str, int, str]  # host, port, token


class Offer:
    """Offers files until it is closed. files: {name: path}, which may grow."""

    def __init__(self, host: str, files: Mapping[str, Path] | None = None):
        self.files = dict(files or {})
        token = secrets.token_hex(16)
        offer = self

        class Answer(socketserver.StreamRequestHandler):
            timeout = PATIENCE_S

            def handle(self) -> None:
                given = self.rfile.readline(100).decode("latin-1").strip()
                if not hmac.compare_digest(given, token):
                    return
                name = self.rfile.readline(5000).decode("utf-8", "replace").rstrip("\n")
                path = offer.files.get(name)
                if path is None:
                    self.wfile.write(_LENGTH.pack(0 if name == PING else _NONE))
                    return
                with path.open("rb") as file:
                    self.wfile.write(_LENGTH.pack(path.stat().st_size))
                    self.connection.sendfile(file)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                """The peer sees that its connection ends, and says so."""

        self._server = Server((host, 0), Answer)
        self.address: Address = (host, self._server.server_address[1], token)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="offer", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def fetch(address: Address, name: str, path: Path, expected: Mapping[str, Any] | None = None) -> None:
    """Writes a file of a peer to a path. expected: its size and hash.

    Raises:
        ArgosyError: the peer cannot be reached, or does not have it.
        Damaged: other bytes arrived.
    """
    pending = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _asked(address, name) as peer, pending.open("wb", buffering=0) as out:
            left = _LENGTH.unpack(_exactly(peer, _LENGTH.size))[0]
            if left == _NONE:
                raise ArgosyError(f"the process at {address[0]} does not have {name}")
            while left:
                chunk = peer.recv(min(left, CHUNK_BYTES))
                if not chunk:
                    raise OSError("the connection ended early")
                out.write(chunk)
                left -= len(chunk)
        if expected is not None and manifest.describe(pending, sync=True) != expected:
            raise Damaged(f"{name} did not arrive as it was written", where=f"from {address[0]}")
        pending.rename(path)
    except OSError as error:
        raise ArgosyError(f"{name} cannot be fetched: {error.strerror or error}", where=f"from {address[0]}") from None
    finally:
        pending.unlink(missing_ok=True)


def is_there(address: Address) -> bool:
    """Whether a peer answers."""
    try:
        with _asked(address, PING) as peer:
            return _LENGTH.unpack(_exactly(peer, _LENGTH.size))[0] == 0
    except OSError:
        return False


def _asked(address: Address, name: str) -> socket.socket:
    host, port, token = address
    peer = socket.create_connection((host, port), timeout=PATIENCE_S)
    peer.sendall(f"{token}\n{name}\n".encode())
    return peer


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise OSError("the connection ended early")
        data += more
    return data
