"""Ports for coordinators, reserved from the moment they are chosen until the processes that use them have ended.

A coordinator starts to listen seconds after its port was chosen. A port that is only known to be free may meanwhile be taken by another
group, or by any connection of this machine. gRPC would not notice: it listens with SO_REUSEPORT, so two coordinators of one user could
share a port, and the kernel would distribute the processes of both groups between them.

A reserved port is bound with SO_REUSEPORT and not listened on. The kernel does not assign it to others, and a coordinator of the same
user can still listen on it.
"""

import errno
import socket
from contextlib import suppress


class HeldPort:
    """A free port of this machine, reserved until it is closed.

    host: the host; empty: every address.
    number: the port.
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
    """A socket that reserves a port without listening on it; 0 is any port.

    Raises:
        OSError: another program uses it without sharing.
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
        host: the host; empty: every address of this machine.
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
    """Whether a port that cannot be bound alone can be shared, and nobody listens on it."""
    try:
        bound(host, port).close()
        socket.create_connection((host or "127.0.0.1", port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
