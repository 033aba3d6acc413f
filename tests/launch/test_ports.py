"""Ports that groups hold: the kernel gives them to nobody else, and a coordinator of jax listens on them all the same."""

import errno
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.core.errors import ArgosyError
from argosy.launch.cluster import ProcessPlace, check_free
from argosy.launch.local import LocalGang
from argosy.launch.ports import HeldPort
from argosy.launch.settings import LocalLaunch

# Linux 6.3: the ports that a socket is given are of this range (ip(7)).
IP_LOCAL_PORT_RANGE = 51


def any_port(port: int, to: tuple[str, int] | None = None) -> int:
    """The port that the kernel gives a socket which may have this one alone: to bind, or to connect from."""
    with socket.socket() as client:
        try:
            client.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", (port << 16) | port))
        except OSError:
            pytest.skip("this kernel has no range of ports for one socket")
        if to is not None:
            client.connect(to)
        else:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            client.bind(("127.0.0.1", 0))
        return client.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_nobody_else_is_given_a_port_that_is_held(host: str):
    port = HeldPort(host)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(OSError) as caught:
            any_port(port.number)
        assert caught.value.errno == errno.EADDRINUSE
        with pytest.raises(OSError) as caught:
            any_port(port.number, server.getsockname())
        assert caught.value.errno == errno.EADDRNOTAVAIL
        port.close()
        assert any_port(port.number) == any_port(port.number, server.getsockname()) == port.number, "what a free port would be"


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_what_is_held_is_free_for_its_coordinator_and_what_is_listened_on_is_not(host: str):
    port = HeldPort(host)
    place = ProcessPlace("argosy", f"127.0.0.1:{port.number}", 2, 0)
    check_free(place, host)
    with socket.socket() as other:
        # As gRPC listens, which would not notice another coordinator.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", port.number))
        other.listen()
        with pytest.raises(ArgosyError, match="cannot listen on"):
            check_free(place, host)
    port.close()
    with socket.create_server(("127.0.0.1", 0)) as alone, pytest.raises(ArgosyError, match="cannot listen on"):
        check_free(ProcessPlace("argosy", f"127.0.0.1:{alone.getsockname()[1]}", 2, 0), host)


JOINED = """
import sys
from argosy.launch.cluster import ProcessPlace, join
import jax
join(ProcessPlace("argosy", sys.argv[1], 1, 0))
assert jax.process_count() == 1
print("joined")
"""


@pytest.mark.slow
def test_a_coordinator_listens_on_a_port_that_is_held():
    port = HeldPort()
    done = subprocess.run(
        [sys.executable, "-c", JOINED, f"127.0.0.1:{port.number}"], capture_output=True, text=True, timeout=120, check=False
    )
    port.close()
    assert (done.returncode, done.stdout) == (0, "joined\n"), done.stderr


def test_a_gang_holds_its_port_until_it_is_closed(tmp_path: Path):
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    gangs = [LocalGang(wait, LocalLaunch(processes=1), 0, {}, tmp_path) for _ in range(2)]
    first, second = (gang.port.number for gang in gangs)
    assert first != second
    with pytest.raises(OSError, match=str(errno.EADDRINUSE)):
        any_port(first)
    for gang in gangs:
        gang.kill()
        gang._settle()
        gang.close()
    assert any_port(first) == first
