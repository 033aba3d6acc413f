"""Arrays between processes, byte by byte: what is damaged, cut off or hostile."""

import pickle
import socket
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedIOBase
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from argosy.checkpoint.tiers import peers
from argosy.checkpoint.tiers.peers import MOST_AT_ONCE, Listener
from argosy.core.errors import ArgosyError, Damaged
from argosy.launch.workers.arrays import transfers as moves
from argosy.launch.workers.arrays.offers import Offers
from argosy.launch.workers.arrays.trees import describe_tree


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not answer are asked again at once."""
    monkeypatch.setattr(peers, "AGAIN_S", 0.002)


VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


def mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"))


@contextmanager
def source(answer: Callable[[BufferedIOBase, socket.socket], None]) -> Iterator[moves.TransferSource]:
    """One process that has the values, and sends what `answer` does."""
    skeleton, leaves = describe_tree({"values": VALUES}, several=False)
    listener = Listener("127.0.0.1", answer)
    try:
        yield moves.TransferSource("far", 1, skeleton, [leaves], [listener.address])
    finally:
        listener.close()


def pull(offer: moves.TransferSource, spec: Any = None) -> tuple[Any, int]:
    return moves.pull(offer, pickle.loads(offer.skeleton), mesh(), spec, 0)


def honest(rfile: BufferedIOBase, peer: socket.socket) -> None:
    moves.answer(lambda number: [VALUES], rfile, peer)


def sends(*parts: bytes) -> Callable[[BufferedIOBase, socket.socket], None]:
    """A process that says this, whatever it is asked."""
    def answer(rfile: BufferedIOBase, peer: socket.socket) -> None:
        rfile.readline(100)
        rfile.read(struct.unpack(">Q", rfile.read(8))[0])
        for part in parts:
            peer.sendall(part)

    return answer


FINE, DATA = struct.pack(">Q", 0), VALUES.tobytes()
SUM = struct.pack(">I", zlib.crc32(DATA))


@pytest.mark.parametrize("spec", [None, P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))])
def test_pieces_of_any_kind(spec: Any):
    with source(honest) as offer:
        value, count = pull(offer, spec)
    assert count == VALUES.nbytes
    assert value["values"].sharding == NamedSharding(mesh(), spec or P())
    for shard in value["values"].addressable_shards:
        assert np.array_equal(shard.data, VALUES[shard.index])


def test_what_the_controller_offers_is_there_until_it_is_withdrawn():
    offers = Offers("127.0.0.1")
    try:
        offer = offers.offer({"values": VALUES, "name": "x"})
        value, count = pull(offer, P("a"))
        assert (value["name"], count) == ("x", VALUES.nbytes)
        assert np.array_equal(value["values"], VALUES)
        offers.withdraw(offer.number)
        with pytest.raises(ArgosyError, match="the controller does not offer value 1 any more"):
            pull(offer)
        host, port, token = offer.addresses[0]
        with pytest.raises(moves.PeerGone, match="of the group `controller`"):
            pull(replace(offer, addresses=[(host, port, token[::-1])]))
    finally:
        offers.close()
    with pytest.raises(moves.PeerGone):
        pull(offer)


def test_the_bytes_are_these():
    """The protocol, by hand: nothing wrong, the data, its CRC-32."""
    with source(sends(FINE, DATA, SUM)) as offer:
        assert np.array_equal(pull(offer)[0]["values"], VALUES)


@pytest.mark.parametrize(
    "parts, error, message",
    [
        ((FINE, DATA[:-1] + b"x", SUM), Damaged, "did not arrive as it was sent"),
        ((FINE, DATA, b"\0\0\0\0"), Damaged, "did not arrive as it was sent"),
        ((FINE, DATA[:50]), moves.PeerGone, "process 0 of the group `far` did not send .* ended early"),
        ((FINE, DATA), moves.PeerGone, "ended early"),
        ((), moves.PeerGone, "ended early"),
        ((struct.pack(">Q", 1 << 60), b"x" * 100), moves.PeerGone, "it answered with 1,152,921,504,606,846,976 bytes"),
        ((struct.pack(">Q", 4), b"gone"), ArgosyError, "gone"),
    ],
)
def test_what_is_damaged_or_cut_off_is_an_error(parts: tuple[bytes, ...], error: type[Exception], message: str):
    with source(sends(*parts)) as offer, pytest.raises(error, match=message):
        pull(offer)


def test_a_value_that_is_gone_is_said():
    def hold(number: int) -> Any:
        raise KeyError("no value 1")

    with source(lambda rfile, peer: moves.answer(hold, rfile, peer)) as offer, pytest.raises(ArgosyError, match="no value 1"):
        pull(offer)


def ask(listener: Listener, *parts: bytes) -> bytes:
    host, port, _ = listener.address
    with socket.create_connection((host, port), timeout=20) as peer:
        try:
            for part in parts:
                peer.sendall(part)
            peer.shutdown(socket.SHUT_WR)
            data = b""
            while more := peer.recv(1000):
                data += more
            return data
        except OSError:
            return b""


def test_garbage_gets_nothing_and_takes_no_memory():
    listener = Listener("127.0.0.1", honest)
    token = listener.address[2].encode()
    try:
        tracemalloc.start()
        for start in (b"", b"\xff\xfe\n", token[:-1] + b"\n", token + b"x\n", token + b"\nnothing\n"):
            assert ask(listener, start, *[b"\0" * (1 << 20)] * 100) == b""
        # With the token, a request that says it is longer than any.
        assert ask(listener, token + b"\npieces\n" + struct.pack(">Q", moves.MOST_ASKED + 1), *[b"[" * (1 << 20)] * 64) == b""
        right = b'{"number": 1, "pieces": [[0, [[0, 4], [0, 6]]]]}'
        request = b"\npieces\n" + struct.pack(">Q", len(right)) + right
        assert DATA in ask(listener, token + request)
        assert ask(listener, b"0" * len(token) + request) == ask(listener, request[1:]) == b""
        for wrong in (b"{", b"[]", b'{"number": 1, "pieces": [[9, [[0, 1]]]]}', b'{"number": 1, "pieces": [[0, [[0, 99]]]]}'):
            assert b"\0" * 100 not in ask(listener, token + b"\npieces\n" + struct.pack(">Q", len(wrong)) + wrong)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        skeleton, leaves = describe_tree(VALUES, several=False)
        value, _ = pull(moves.TransferSource("far", 1, skeleton, [leaves], [listener.address]))
        assert np.array_equal(value, VALUES)
    finally:
        tracemalloc.stop()
        listener.close()


def test_a_process_that_answers_too_many_others_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(peers, "AGAIN_S", 0.02)
    with source(honest) as offer:
        holder = held_place(offer.addresses[0][:2])
        threading.Timer(0.3, holder.close).start()
        value, _ = pull(offer)
        assert np.array_equal(value["values"], VALUES)
        # Nobody gets a place: the tries are bounded.
        monkeypatch.setattr(peers, "AGAIN_S", 0.001)
        with held_place(offer.addresses[0][:2]), pytest.raises(moves.PeerGone, match="process 0 of the group `far`"):
            pull(offer)


def held_place(address: tuple[str, int]) -> socket.socket:
    """A connection that has one of the places of a process: threads of earlier connections may still have it for a moment."""
    for _ in range(100):
        holder = socket.create_connection(address, timeout=0.2)
        try:
            assert holder.recv(1) == b""
        except TimeoutError:
            return holder
        holder.close()
    raise AssertionError("no place became free")


def test_connections_are_counted():
    listener = Listener("127.0.0.1", honest)
    host, port, _ = listener.address
    sockets = [socket.create_connection((host, port)) for _ in range(MOST_AT_ONCE)]
    try:
        # The last of them has been accepted once another is refused.
        with socket.create_connection((host, port), timeout=20) as client:
            assert client.recv(1) == b""
    finally:
        for peer in sockets:
            peer.close()
        listener.close()
