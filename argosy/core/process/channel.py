"""Sends messages between two processes over a file descriptor for reading and writing, such as one end of a socket pair.

A message is 8 bytes of length, and then its content, which this file does not interpret. The file needs only the standard library,
because scripts that are run by path import it directly.
"""

import os
import select
import struct
import time

LENGTH = struct.Struct("<Q")
PART_BYTES = 1 << 20


class Channel:
    """One end of a connection. One thread may send while another one receives.

    descriptor: the file descriptor of this end. It is made non-blocking. `poll` is used to wait, because it accepts descriptors above
        1,023.
    """

    def __init__(self, descriptor: int):
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._received = bytearray()

    def fileno(self) -> int:
        return self.descriptor

    def send(self, content: bytes, timeout: float | None = None) -> None:
        """Sends a message.

        Args:
            timeout: the number of seconds within which the other end must take the message; None: no limit.

        Raises:
            TimeoutError: the other end did not take the message in time.
            OSError: the other end is closed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        parts = [memoryview(LENGTH.pack(len(content))), memoryview(content)]
        while parts:
            try:
                count = os.writev(self.descriptor, parts)
            except BlockingIOError:
                if not ready(self.descriptor, select.POLLOUT, until):
                    raise TimeoutError("the message was not taken") from None
                continue
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][count:]

    def arrived(self) -> bytes | None:
        """Returns the next message if it has arrived completely, else None. Does not wait.

        Raises:
            EOFError: the other end is closed.
        """
        while (message := self._take_message()) is None:
            try:
                part = os.read(self.descriptor, PART_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                part = b""
            if not part:
                raise EOFError("the other end is closed")
            self._received += part
        return message

    def receive(self, timeout: float | None = None) -> bytes:
        """Waits for the next message.

        Args:
            timeout: the number of seconds within which the message must arrive completely; None: no limit.

        Raises:
            TimeoutError: the message did not arrive in time.
            EOFError: the other end is closed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (message := self.arrived()) is None:
            if not ready(self.descriptor, select.POLLIN, until):
                raise TimeoutError("no message arrived")
        return message

    def _take_message(self) -> bytes | None:
        if len(self._received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        with memoryview(self._received) as view:
            message = bytes(view[LENGTH.size : end])
        del self._received[:end]
        return message


def ready(descriptor: int, event: int, until: float | None) -> bool:
    """Waits until a descriptor is ready, or its other end is closed. Returns False if the time is over first.

    Args:
        event: `select.POLLIN` or `select.POLLOUT`.
        until: the end of the waiting time, as in `time.monotonic`; None: no limit.
    """
    timeout = None if until is None else max(0.0, until - time.monotonic())
    waiting = select.poll()
    waiting.register(descriptor, event)
    try:
        return bool(waiting.poll(None if timeout is None else timeout * 1000))
    except OSError:
        # A process that may open no file may not poll one either (RLIMIT_NOFILE is 0).
        sides = ([descriptor], [], []) if event == select.POLLIN else ([], [descriptor], [])
        return any(select.select(*sides, timeout))
