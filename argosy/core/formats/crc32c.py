"""Computes CRC-32C (Castagnoli, RFC 3720) of many byte strings at once, for TFRecord files.

The checksum is linear: that of a string is the exclusive or of the checksums of its blocks, each shifted by the number of bytes after
it. So all blocks of all strings are computed in parallel, one byte of each at a time. This reaches about 60 MB/s on a core, while a
loop over bytes reaches 5 MB/s.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

POLYNOMIAL = 0x82F63B78  # reflected
BLOCK_BYTES = 128
# Strings up to this length are computed one by one, which takes 2 us. The arrays of blocks would take 500 us.
SHORT_BYTES = 16
MASK = 0xA282EAD8


@cache
def byte_table() -> "np.ndarray":
    """The table of the change of the checksum by one byte, uint32 [256]."""
    import numpy as np

    return np.array(byte_list(), np.uint32)


@cache
def block_shift() -> list[list[int]]:
    """The tables [4][256] that shift a checksum by a block of zeros: for each of its four bytes, the contribution of each value."""
    import numpy as np

    tables = []
    for place in range(4):
        sums = np.arange(256, dtype=np.uint32) << np.uint32(8 * place)
        for _ in range(BLOCK_BYTES):
            sums = byte_table()[sums & 255] ^ (sums >> np.uint32(8))
        tables.append(sums.tolist())
    return tables


@cache
def byte_list() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ POLYNOMIAL if value & 1 else value >> 1 for value in table]
    return table


def crc32c(strings: Sequence[bytes]) -> list[int]:
    """The CRC-32C of each string."""
    if all(len(data) <= SHORT_BYTES for data in strings):
        return [_short(data) for data in strings]
    # Imported here, because checking the beginning of a file needs no arrays.
    import numpy as np

    counts = [-(-max(len(data), 4) // BLOCK_BYTES) for data in strings]
    blocks = np.zeros((sum(counts), BLOCK_BYTES), np.uint8)
    flat, end = blocks.reshape(-1), 0
    for data, count in zip(strings, counts):
        end += count * BLOCK_BYTES
        # Zeros in front change nothing, because blocks begin with the checksum 0.
        flat[end - len(data) : end] = np.frombuffer(data, np.uint8)
        # The checksum of a string begins with ones, which is the same as its first four bytes inverted.
        flat[end - len(data) : min(end - len(data) + 4, end)] ^= 255
    table, sums = byte_table(), np.zeros(len(blocks), np.uint32)
    for column in np.ascontiguousarray(blocks.T):
        sums = table[(sums ^ column) & 255] ^ (sums >> np.uint32(8))
    a, b, c, d = block_shift()
    checksums, at, each = [], 0, sums.tolist()
    for data, count in zip(strings, counts):
        value = 0
        for block in each[at : at + count]:
            value = a[value & 255] ^ b[value >> 8 & 255] ^ c[value >> 16 & 255] ^ d[value >> 24] ^ block
        at += count
        checksums.append(value ^ 0xFFFFFFFF if len(data) >= 4 else _short(data))
    return checksums


def _short(data: bytes) -> int:
    """The checksum of a short string, computed byte by byte."""
    table, value = byte_list(), 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 255] ^ value >> 8
    return value ^ 0xFFFFFFFF


def masked_crc32c(strings: Sequence[bytes]) -> list[int]:
    """The masked checksum of each string, which TFRecord files store."""
    return [((value >> 15 | value << 17) + MASK) & 0xFFFFFFFF for value in crc32c(strings)]
