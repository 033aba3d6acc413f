"""Transfers arrays from the processes of one group to those of another, over TCP, shard by shard.

A piece is the intersection of a shard of the source and a shard of the target, so any two shardings can be combined. Each process of
the target requests the pieces that its devices lack, each once, from the processes of the source. Every process listens at its own port
and demands a token, which the controller passes on (`checkpoint.tiers.peers`). Each piece is followed by its CRC-32. The receiver knows
the size of a piece and reads exactly that many bytes, so a sender cannot make the receiver's memory grow.
"""

import json
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from argosy.checkpoint.tiers.peers import Address, connect, receive_exactly, with_retries
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.launch.workers.arrays.trees import (
    Box,
    Leaf,
    as_bytes,
    box_of,
    bytes_of,
    overlap,
    shards_of,
    together,
    volume,
    within,
)

CHUNK_BYTES = 1 << 20
# A request names its pieces in at most so many bytes, and an error is as long at most.
MOST_ASKED, MOST_SAID = 64 << 20, 4000
_LENGTH, _SUM = struct.Struct(">Q"), struct.Struct(">I")
ASK = "pieces"


class PeerGone(ArgosyError):
    """A process of the source cannot be reached, or ended before it had sent all pieces."""


@dataclass(frozen=True)
class TransferSource:
    """The description of a value of a group, from which another group fetches it.

    group: the name of the group that holds the value.
    number: the number of the value.
    skeleton: the pickled structure of the value (`trees`).
    leaves: for each process, the shards of each array that it holds.
    addresses: the address at which each process listens.
    """

    group: str
    number: int
    skeleton: bytes
    leaves: Sequence[Sequence[Leaf]]
    addresses: Sequence[Address]


def check_alike(group: str, leaves: Sequence[Sequence[Leaf]]) -> None:
    """Checks that the processes of a group agree on the arrays of a value, and on the bytes of process-local arrays.

    Raises:
        BadInput: they do not agree.
    """
    for rank, others in enumerate(leaves[1:], 1):
        for leaf, other in zip(leaves[0], others):
            same = (leaf.path, leaf.shape, leaf.dtype) == (other.path, other.shape, other.dtype)
            if not same or (leaf.crc != other.crc and None not in (leaf.crc, other.crc)):
                problem = f"{leaf.path} of process {rank} of the group `{group}` is another than that of process 0"
                hint = "Ref.values() brings that of each; an array over here().mesh is one of all processes"
                raise BadInput(problem, hint=hint)
        if len(leaves[0]) != len(others):
            raise BadInput(f"process {rank} of the group `{group}` returned {len(others)} arrays, process 0 {len(leaves[0])}")


# ---------------------------------------------------------------- the source


def answer(arrays_of: Callable[[int], Sequence[Any]], rfile: BufferedIOBase, peer: socket.socket) -> None:
    """Sends the pieces that a peer requests, after the peer has sent the token.

    Args:
        arrays_of: (number of a value) -> the arrays of the value.
        rfile: the stream of the peer's requests.
        peer: the connection to the peer.
    """
    if rfile.readline(100).decode("latin-1").strip() != ASK:
        return
    size = _LENGTH.unpack(rfile.read(_LENGTH.size))[0]
    if size > MOST_ASKED:
        return
    request = json.loads(rfile.read(size))
    try:
        arrays = arrays_of(request["number"])
        pieces = [(arrays[index], tuple(map(tuple, box))) for index, box in request["pieces"]]
    except Exception as error:
        _say(peer, str(error))
        return
    _say(peer, "")
    copies: dict[tuple[int, Box], np.ndarray] = {}
    for array, box in pieces:
        outer, shard = next((place, data) for place, data in shards_of(array).items() if overlap(place, box) == box)
        if (id(array), outer) not in copies:
            copies = {(id(array), outer): np.asarray(shard)}
        data, crc = as_bytes(copies[id(array), outer][within(box, outer)]), 0
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            crc = zlib.crc32(chunk, crc)
            peer.sendall(chunk)
        peer.sendall(_SUM.pack(crc))


def _say(peer: socket.socket, error: str) -> None:
    data = error.encode()[:MOST_SAID]
    peer.sendall(_LENGTH.pack(len(data)) + data)


# ---------------------------------------------------------------- the target


@dataclass
class ShardPiece:
    """A piece of an array that is transferred from a process of the source to a buffer of this process.

    leaf: the index of the array.
    box: the slices of the piece in the array.
    into: the buffer.
    """

    leaf: int
    box: Box
    into: np.ndarray

    def receive(self, peer: socket.socket) -> int:
        """Receives the piece into the buffer. Returns the number of bytes.

        Raises:
            Damaged: the checksum of the piece is wrong.
            OSError: the connection ended.
        """
        buffer = self.into if self.into.flags.c_contiguous else np.empty(self.into.shape, self.into.dtype)
        view, crc, got = bytes_of(buffer), 0, 0
        while got < len(view):
            size = peer.recv_into(view[got : got + CHUNK_BYTES])
            if not size:
                raise OSError("the connection ended early")
            crc, got = zlib.crc32(view[got : got + size], crc), got + size
        if _SUM.unpack(receive_exactly(peer, _SUM.size))[0] != crc:
            raise Damaged("an array did not arrive as it was sent")
        if buffer is not self.into:
            self.into[...] = buffer
        return got


def pull(source: TransferSource, skeleton: Any, mesh: Mesh, sharding: Any, rank: int) -> tuple[Any, int]:
    """Fetches a value as arrays over a mesh. Returns the value, and the number of bytes that this process received.

    Args:
        source: the description of the value.
        skeleton: the structure of the value.
        mesh: the mesh of this group.
        sharding: a PartitionSpec, or a pytree of PartitionSpecs that is a prefix of the value; None: replicated.
        rank: the rank of this process.

    Raises:
        BadInput: the sharding does not fit the value.
        PeerGone: a process of the source ended.
        Damaged: bytes arrived changed.
    """
    first = source.leaves[0]
    shardings = placements(skeleton, first, mesh, sharding)
    buffers: list[dict[Box, np.ndarray]] = []
    pieces: dict[int, list[ShardPiece]] = {}
    for index, (leaf, place) in enumerate(zip(first, shardings)):
        dtype = jax.numpy.dtype(leaf.dtype)
        boxes = {box_of(slices, leaf.shape) for slices in place.addressable_devices_indices_map(leaf.shape).values()}
        local_buffers = {box: np.empty(tuple(stop - start for start, stop in box), dtype) for box in sorted(boxes)}
        buffers.append(local_buffers)
        if leaf.shape and 0 in leaf.shape:
            continue
        have: dict[Box, list[int]] = {}
        for owner, leaves in enumerate(source.leaves):
            for box in leaves[index].boxes:
                have.setdefault(box, []).append(owner)
        for box, buffer in local_buffers.items():
            coverage = 0
            for other, owners in have.items():
                if (common := overlap(box, other)) is not None:
                    piece = ShardPiece(index, common, buffer[within(common, box)] if common else buffer)
                    pieces.setdefault(owners[(rank + index) % len(owners)], []).append(piece)
                    coverage += volume(common)
            if coverage < volume(box):
                raise BadInput(f"no process of the group `{source.group}` has all of {leaf.path}")
    total = fetch_pieces(source, pieces)
    return together(skeleton, [_on_devices(*arguments) for arguments in zip(first, shardings, buffers)]), total


def placements(skeleton: Any, leaves: Sequence[Leaf], mesh: Mesh, sharding: Any) -> list[NamedSharding]:
    """Returns the sharding of each array of a value.

    Raises:
        BadInput: the sharding is no prefix of the value, names an axis that the mesh lacks, or does not divide an array; or jax would
            store an array in a type of lower precision (such as float64 as float32).
    """
    def is_spec(leaf: Any) -> bool:
        return leaf is None or isinstance(leaf, PartitionSpec)

    specs: list[Any] = [None] * len(leaves)
    try:
        # A slot is a leaf of its own; plain values have no place.
        numbers = jax.tree.map(lambda leaf: getattr(leaf, "index", -1) if type(leaf).__name__ == "Slot" else -1, skeleton)
        jax.tree.map(
            lambda spec, below: [specs.__setitem__(i, spec) for i in jax.tree.leaves(below) if i >= 0],
            sharding, numbers, is_leaf=is_spec,
        )  # fmt: skip
    except ValueError as error:
        message = str(error).splitlines()[0][:200]
        raise BadInput(f"sharding= does not fit what is moved: {message}", hint="a PartitionSpec, or a tree of them") from None
    out = []
    for leaf, spec in zip(leaves, specs):
        if (narrow := jax.dtypes.canonicalize_dtype(jax.numpy.dtype(leaf.dtype))) != jax.numpy.dtype(leaf.dtype):
            problem = f"{leaf.path} is {leaf.dtype}, which would become {narrow} in a jax array"
            raise BadInput(problem, hint="make it that before, or set JAX_ENABLE_X64=1 in the group's environment")
        if not is_spec(spec):
            raise BadInput(f"sharding= has a {type(spec).__name__} for {leaf.path}", hint="a PartitionSpec, or a tree of them")
        try:
            placement = NamedSharding(mesh, spec or PartitionSpec())
            placement.shard_shape(leaf.shape)
        # IndexError: it has more axes than the array.
        except (ValueError, IndexError) as error:
            mesh_text = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
            problem = f"{leaf.path} {leaf.shape} cannot be sharded as {spec} over the mesh {mesh_text}"
            raise BadInput(problem, where=str(error).splitlines()[0][:200]) from None
        out.append(placement)
    return out


def fetch_pieces(source: TransferSource, pieces: Mapping[int, list[ShardPiece]]) -> int:
    """Fetches pieces from all processes of the source at the same time, over one connection to each. Returns the number of bytes.

    Args:
        pieces: the pieces to fetch, by the rank of the process that sends them.
    """
    done: dict[int, int | Exception] = {}

    def ask(rank: int) -> None:
        try:
            done[rank] = _from_one(source.addresses[rank], source.number, pieces[rank])
        except Exception as error:
            done[rank] = error

    threads = [threading.Thread(target=ask, args=(rank,), daemon=True) for rank in pieces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = 0
    for rank, outcome in sorted(done.items()):
        if isinstance(outcome, OSError):
            problem = f"process {rank} of the group `{source.group}` did not send what it was asked for: {outcome.strerror or outcome}"
            raise PeerGone(problem) from None
        if isinstance(outcome, Exception):
            raise outcome
        total += outcome
    return total


def _from_one(address: Address, number: int, pieces: Sequence[ShardPiece]) -> int:
    request = json.dumps({"number": number, "pieces": [(piece.leaf, piece.box) for piece in pieces]}).encode()
    if len(request) > MOST_ASKED:
        raise BadInput(f"{len(pieces):,} pieces are more than one request names", hint="move fewer arrays at a time")

    def begin() -> tuple[socket.socket, int]:
        peer = connect(address, ASK)
        try:
            peer.sendall(_LENGTH.pack(len(request)) + request)
            return peer, _LENGTH.unpack(receive_exactly(peer, _LENGTH.size))[0]
        except BaseException:
            peer.close()
            raise

    # Until it answers, it may have too many others to answer. After that, what ends the connection ended the process.
    peer, size = with_retries(begin)
    with peer:
        if size > MOST_SAID:
            raise OSError(f"it answered with {size:,} bytes")
        if size:
            raise ArgosyError(receive_exactly(peer, size).decode("utf-8", "replace"))
        return sum(piece.receive(peer) for piece in pieces)


def _on_devices(leaf: Leaf, place: NamedSharding, buffers: Mapping[Box, np.ndarray]) -> jax.Array:
    where = place.addressable_devices_indices_map(leaf.shape)
    parts = [jax.device_put(buffers[box_of(index, leaf.shape)], device) for device, index in where.items()]
    dtype = jax.numpy.dtype(leaf.dtype)
    return jax.make_array_from_single_device_arrays(leaf.shape, place, parts, dtype=dtype)
