"""Reads TFRecord files of tf.Example records, without TensorFlow.

    record    uint64 length, uint32 masked crc32c of the length, the data, uint32 masked crc32c of the data; little-endian
    masked    rotate right by 15 bits, plus 0xa282ead8
    Example   { 1: Features { 1: { 1: name, 2: Feature { 1: BytesList | 2: FloatList | 3: Int64List } } ... } }, each list { 1: values }

See tensorflow/core/lib/io/record_writer.h and tensorflow/core/example/feature.proto. A feature of one value becomes that value, and any
other feature a list. Bytes are read as UTF-8 text. Both checksums of every record are checked. TFDS writes such files too.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from argosy.core.errors import BadInput, Damaged
from argosy.core.formats.crc32c import masked_crc32c
from argosy.data.sources.opening import open_bytes
from argosy.data.sources.record_files import RecordFile, RowAt, plain
from argosy.data.tokenizers.proto import fields

HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
# Larger records are refused. Otherwise a damaged length would allocate too much memory.
RECORD_BYTES = 1 << 30
# Bytes of records whose checksums are computed together.
GROUP_BYTES = 1 << 20
# The parser of protocol buffers names a file in its errors; these are replaced.
NAMELESS = Path("record")


class TfRecords(RecordFile):
    """A TFRecord file of tf.Examples: texts, or records to fine-tune on."""

    kind: ClassVar[str] = "tfrecord"

    def rows(self) -> Iterator[RowAt]:
        with open_bytes(self.path, text=False) as stream:
            number = 0
            for group in self.groups(cast(BinaryIO, stream)):
                for data in group:
                    where = f"{self.path}, record {number}"
                    yield tf_example(data, where), where
                    number += 1

    def groups(self, stream: BinaryIO) -> Iterator[list[bytes]]:
        """Yields the data of records in groups of about GROUP_BYTES, after their checksums were checked.

        Raises:
            Damaged: the file is truncated, or a checksum is wrong.
        """
        group: list[bytes] = []
        sums: list[int] = []
        done = size = 0
        while header := stream.read(HEADER.size):
            where = f"{self.path}, record {done + len(group)}"
            length, check = HEADER.unpack(header) if len(header) == HEADER.size else (0, None)
            if check is None:
                raise Damaged("a TFRecord file that is cut off", where=where)
            if masked_crc32c([header[:8]])[0] != check or length > RECORD_BYTES:
                raise Damaged("a damaged TFRecord file: the checksum of a record's length differs", where=where)
            data, footer = stream.read(length), stream.read(FOOTER.size)
            if len(data) < length or len(footer) < FOOTER.size:
                raise Damaged("a TFRecord file that is cut off", where=where)
            group.append(data)
            sums.append(FOOTER.unpack(footer)[0])
            size += length
            if size >= GROUP_BYTES:
                yield self.checked(group, sums, done)
                done, group, sums, size = done + len(group), [], [], 0
        if group:
            yield self.checked(group, sums, done)

    def checked(self, group: list[bytes], sums: list[int], first: int) -> list[bytes]:
        for number, (checksum, expected) in enumerate(zip(masked_crc32c(group), sums), first):
            if checksum != expected:
                where = f"{self.path}, record {number}"
                raise Damaged("a damaged TFRecord file: the checksum of a record differs", where=where)
        return group


def tf_example(data: bytes, where: str) -> dict[str, Any]:
    """Parses a tf.Example, and returns its features by name.

    Raises:
        BadInput: the data is no tf.Example, or a feature holds bytes that are no text.
    """
    columns: dict[str, Any] = {}
    try:
        for number, features in fields(data, NAMELESS):
            for _, entry in fields(_message(features), NAMELESS) if number == 1 else ():
                entry_fields = dict(fields(_message(entry), NAMELESS))
                name = _message(entry_fields.get(1, b"")).decode()
                values = feature(_message(entry_fields.get(2, b"")))
                value = plain(values[0] if len(values) == 1 else values, where, name) if values else None
                columns[name] = value
    except (Damaged, TypeError, struct.error, UnicodeDecodeError):
        columns = {}
    if not columns:
        problem = "a record that is no tf.Example"
        raise BadInput(problem, where=where, hint="records of other kinds are not read: write tf.Example, Parquet or JSON lines")
    return columns


def feature(data: bytes) -> list[Any]:
    """Decodes a feature, and returns its values."""
    values: list[Any] = []
    for kind, content in fields(data, NAMELESS):
        for _, value in fields(_message(content), NAMELESS):
            if kind == 1:
                values.append(_message(value))
            elif kind == 2:
                packed = _message(value)
                values += struct.unpack(f"<{len(packed) // 4}f", packed)
            else:
                values += [value] if isinstance(value, int) else integers(value)
    return [_signed(value) if isinstance(value, int) else value for value in values]


def integers(data: bytes) -> list[int]:
    """Decodes packed varints, which have seven bits per byte."""
    numbers, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(value)
            value = shift = 0
    return numbers


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _message(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where a message belongs")
    return value
