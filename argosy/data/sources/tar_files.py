"""Reads tar files of examples in the format of WebDataset. Members whose names are equal up to the first dot form one record.

    0001.txt  0001.json            the column `txt` (also read as `text`), and the columns of the JSON object
    0001.jpg                       no text: the column is not read, and is listed as ignored

The file is read once from its beginning, so it may be compressed (`.tar.gz`) or remote.
"""

import json
import tarfile
from collections.abc import Iterator
from typing import Any, ClassVar, cast

from argosy.core.errors import BadInput, Damaged
from argosy.data.sources.opening import open_bytes
from argosy.data.sources.record_files import RecordFile, RowAt
from argosy.data.sources.records import line_fields

TEXT_ENDINGS = ("txt", "text", "md", "cls", "json", "jsonl")
MEMBER_BYTES = 64 << 20
# An archive ends with at least one block of zeros.
BLOCK_BYTES = 512


class TarFile(RecordFile):
    """A tar file of examples: texts, or records to fine-tune on."""

    kind: ClassVar[str] = "tar"

    def rows(self) -> Iterator[RowAt]:
        key, fields, where = None, dict[str, Any](), str(self.path)
        for name, data in self.members():
            folder, _, base = name.rpartition("/")
            stem, _, ending = base.partition(".")
            member = f"{self.path}, {name}"
            if (folder, stem) != key:
                if fields:
                    yield fields, where
                key, fields, where = (folder, stem), {}, member
            if (last := ending.rpartition(".")[2].lower()) not in TEXT_ENDINGS:
                self.reader.ignored |= {ending: None}
            else:
                fields |= member_columns(ending.lower(), last, data, member)
        if fields:
            yield fields, where

    def members(self) -> Iterator[tuple[str, bytes]]:
        """Yields the name and the content of each member. The content is empty if the member is no text.

        Raises:
            BadInput: a text is larger than MEMBER_BYTES.
            Damaged: the archive is truncated or damaged.
        """
        name = ""
        try:
            with open_bytes(self.path, text=False) as raw, tarfile.open(fileobj=cast(Any, stream := Tail(raw)), mode="r|") as archive:
                for member in archive:
                    if not member.isfile() or member.name.rpartition("/")[2].startswith("."):
                        continue
                    name = member.name
                    if member.size > MEMBER_BYTES and name.lower().endswith(TEXT_ENDINGS):
                        raise BadInput(f"a file of more than {MEMBER_BYTES >> 20} MiB", where=f"{self.path}, {name}")
                    file = archive.extractfile(member)
                    yield name, b"" if file is None or not name.lower().endswith(TEXT_ENDINGS) else file.read()
                # tarfile does not notice if an archive is truncated between two members.
                while stream.read(1 << 20):
                    pass
                if stream.tail.strip(b"\0") or len(stream.tail) < BLOCK_BYTES:
                    raise tarfile.ReadError("it has no end")
        except tarfile.TarError as error:
            where = f"{self.path}, after {name}" if name else str(self.path)
            raise Damaged(f"a damaged tar file: {error}", where=where) from None


class Tail:
    """Wraps a stream, and keeps the last BLOCK_BYTES that were read from it in `tail`."""

    def __init__(self, inner: Any):
        self.inner, self.tail = inner, b""

    def read(self, size: int = -1) -> bytes:
        data = self.inner.read(size)
        self.tail = (self.tail + data)[-BLOCK_BYTES:]
        return data


def member_columns(ending: str, last: str, data: bytes, where: str) -> dict[str, Any]:
    """The columns that one member adds to its record.

    Args:
        ending: the name of the member after its first dot, in lower case.
        last: the ending after the last dot, which tells the type.

    Raises:
        BadInput: the content is no UTF-8 text, or no JSON.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}", where=where) from None
    if last == "json":
        fields = line_fields(text, where) if text.lstrip().startswith("{") else None
        return fields if fields is not None else {ending: parse_member(text, where)}
    if last == "cls":
        return {ending: int(text) if text.strip().isdecimal() else text.strip()}
    return {"text": text, ending: text} if ending in ("txt", "text") else {ending: text}


def parse_member(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}"[:200], where=where) from None
