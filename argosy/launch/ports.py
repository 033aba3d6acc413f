"""Reserves ports for coordinators, from the moment a port is chosen until the processes that use it have ended.

A coordinator starts to listen seconds after its port was chosen. Without a reservation, another group or any connection of this machine
may take the port meanwhile. gRPC would not notice, because it listens with SO_REUSEPORT. So two coordinators of one user could share a
port, and the kernel would distribute the processes of both groups between them.

A reserved port is bound with SO_REUSEPORT, but nobody listens on it. The kernel does not assign it to others, and a coordinator of the
same user can still listen on it.
"""

import errno
import socket
from contextlib import suppress


class HeldPort:
    """A free port of this machine, reserved until it is closed.

    host: the host; empty: all addresses of this machine.
    number: the number of the port.
    """

    def __init__(self, host: str = "127.0.0.1"):
        self._socket = bound(host, 0)
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self.close()


def bound(host: str, port: int) -> socket.socket:
    """Makes a socket that reserves a port without listening on it. Port 0 reserves any free port.

    Raises:
        OSError: another program uses the port without sharing it.
    """
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def is_taken(host: str, port: int) -> bool:
    """Whether another program listens on a port. A reserved port counts as free.

    Args:
        host: the host; empty: all addresses of this machine.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE and not _is_held(host, port):
                    return True
    return False


def _is_held(host: str, port: int) -> bool:
    """Whether a port that cannot be bound exclusively is only reserved: it can be shared, and nobody listens on it."""
    try:
        bound(host, port).close()
        socket.create_connection((host or "127.0.0.1", port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
